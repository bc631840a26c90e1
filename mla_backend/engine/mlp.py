"""The feed-forward half of a layer: one MLP for all tokens, or experts of which each token is sent to a few."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from mla_backend.engine.config import ModelConfig


class MLP(nn.Module):
    """Gated by SiLU: `[T, hidden_size]` to the same."""

    def __init__(self, hidden_size: int, size: int, dtype: torch.dtype):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, size, bias=False, dtype=dtype)
        self.up_proj = nn.Linear(hidden_size, size, bias=False, dtype=dtype)
        self.down_proj = nn.Linear(size, hidden_size, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Module):
    """Which experts a token goes to, and how much each counts.

    Experts come in groups. The groups with the best two experts are kept, and the best experts of those. A bias that
    training used to balance the experts' load takes part in the choice, not in the weights.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.groups, self.groups_kept = config.expert_groups, config.groups_per_token
        self.experts_kept = config.experts_per_token
        self.normalise, self.scale = config.normalise_expert_weights, config.expert_scale
        self.weight = nn.Parameter(torch.empty(config.experts, config.hidden_size, dtype=torch.float32))
        self.e_score_correction_bias = nn.Parameter(torch.empty(config.experts, dtype=torch.float32))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`[T, hidden_size]` to experts int64 `[T, experts_per_token]` and their weights, fp32."""
        scores = functional.linear(x.float(), self.weight).sigmoid()
        choice = (scores + self.e_score_correction_bias).unflatten(-1, (self.groups, -1))
        best_two = choice.topk(min(2, choice.shape[-1])).values.sum(-1)
        dropped = torch.ones_like(best_two, dtype=torch.bool).scatter(1, best_two.topk(self.groups_kept).indices, False)
        experts = choice.masked_fill(dropped.unsqueeze(-1), -torch.inf).flatten(1).topk(self.experts_kept).indices
        weights = scores.gather(1, experts)
        if self.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return experts, weights * self.scale


class MoE(nn.Module):
    """Each token through a few of the experts, and through what they share."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype):
        super().__init__()
        self.gate = Router(config)
        self.experts = nn.ModuleList(MLP(config.hidden_size, config.expert_size, dtype) for _ in range(config.experts))
        self.shared_experts = MLP(config.hidden_size, config.expert_size * config.shared_experts, dtype)

    def forward(self, x: Tensor) -> Tensor:
        experts, weights = self.gate(x)
        # each expert's tokens together: sorted by expert, a stretch for each
        order = experts.flatten().argsort(stable=True)
        tokens, weights = order // experts.shape[1], weights.flatten()[order].unsqueeze(1)
        counts = experts.flatten().bincount(minlength=len(self.experts)).tolist()
        out = torch.zeros_like(x, dtype=torch.float32)
        start = 0
        for expert, count in zip(self.experts, counts, strict=True):
            if count:
                part = slice(start, start + count)
                out.index_add_(0, tokens[part], expert(x[tokens[part]]) * weights[part])
            start += count
        return out.to(x.dtype) + self.shared_experts(x)
