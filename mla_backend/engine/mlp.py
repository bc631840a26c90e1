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
    """Each token through a few of the experts, and through what they share.

    A checkpoint has a tensor for each projection of each expert. `stack` lays them together, so that all experts are
    one grouped product and nobody asks the device how many tokens went to which.

    Args:
        batch_invariant: give a token bits that don't depend on what the others are sent to, by computing every expert
            for every token. For batches of a few tokens, all of the same size.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, batch_invariant: bool = False):
        super().__init__()
        self.batch_invariant = batch_invariant
        self.gate = Router(config)
        self.experts = nn.ModuleList(MLP(config.hidden_size, config.expert_size, dtype) for _ in range(config.experts))
        self.shared_experts = MLP(config.hidden_size, config.expert_size * config.shared_experts, dtype)
        self.gate_up: Tensor | None = None
        self.down: Tensor | None = None

    def stack(self) -> None:
        """Takes the loaded weights of the experts together: `gate_up` `[experts, 2 * size, hidden_size]` and `down`
        `[experts, hidden_size, size]`. Has to be called once, before the first forward pass."""
        self.gate_up = torch.stack([torch.cat([e.gate_proj.weight, e.up_proj.weight]) for e in self.experts])
        self.down = torch.stack([e.down_proj.weight for e in self.experts])
        self.experts = None

    def forward(self, x: Tensor) -> Tensor:
        experts, weights = self.gate(x)
        chosen = (self._all if self.batch_invariant else self._grouped)(x, experts)  # [T, experts_per_token, hidden]
        return (chosen.float() * weights.unsqueeze(-1)).sum(1).to(x.dtype) + self.shared_experts(x)

    def _grouped(self, x: Tensor, experts: Tensor) -> Tensor:
        """Each expert's tokens together: sorted by expert, a stretch for each."""
        flat = experts.flatten()
        order = flat.argsort(stable=True)
        ids = torch.arange(len(self.down), device=x.device)
        ends = torch.searchsorted(flat[order], ids, right=True).int()
        halves = functional.grouped_mm(x[order // experts.shape[1]], self.gate_up.transpose(1, 2), offs=ends)
        out = functional.grouped_mm(_gated(halves), self.down.transpose(1, 2), offs=ends)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
        return out[back].unflatten(0, experts.shape)

    def _all(self, x: Tensor, experts: Tensor) -> Tensor:
        halves = x.expand(len(self.down), *x.shape) @ self.gate_up.transpose(1, 2)
        out = _gated(halves) @ self.down.transpose(1, 2)  # [experts, T, hidden_size]
        return out[experts, torch.arange(len(x), device=x.device).unsqueeze(1)]


def _gated(halves: Tensor) -> Tensor:
    gate, up = halves.chunk(2, dim=-1)
    return functional.silu(gate) * up
