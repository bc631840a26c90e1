"""The feed-forward half of a layer: one MLP for all tokens, or experts, of which each token is sent to a few."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from mla_backend.engine.config import ModelConfig

DENSE_ROWS = {"cuda": 128, "cpu": 32}
"""Up to this many tokens a device computes all experts in the time that it takes to read their weights. The CPU's
number is for matrix units (AMX), whose tiles have 16 rows however few tokens there are."""


class MLP(nn.Module):
    """Gated by SiLU: adds its result `[T, hidden_size]` to a residual."""

    def __init__(self, hidden_size: int, size: int, dtype: torch.dtype):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, size, bias=False, dtype=dtype)
        self.up_proj = nn.Linear(hidden_size, size, bias=False, dtype=dtype)
        self.down_proj = nn.Linear(size, hidden_size, bias=False, dtype=dtype)
        self.gate_up: Tensor | None = None

    def merge(self) -> None:
        """Joins the loaded weights of both projections as `gate_up` `[2, size, hidden_size]`. Has to be called once,
        before the first forward pass."""
        self.gate_up = torch.stack([self.gate_proj.weight, self.up_proj.weight])
        self.gate_proj = self.up_proj = None

    def forward(self, x: Tensor, residual: Tensor) -> None:
        """Adds the MLP of x `[T, hidden_size]` to the residual in place, within the last product."""
        residual.addmm_(_gated(x, self.gate_up), self.down_proj.weight.t())


class Router(nn.Module):
    """Decides which experts a token goes to, and how much each counts.

    Experts are in groups. The groups with the best two experts are kept, and the best experts of those. The bias that
    training used to balance the experts' load counts in the choice, but not in the weights.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.groups, self.groups_kept = config.expert_groups, config.groups_per_token
        self.experts_kept = config.experts_per_token
        self.normalise, self.scale = config.normalise_expert_weights, config.expert_scale
        self.weight = nn.Parameter(torch.empty(config.experts, config.hidden_size, dtype=torch.float32))
        self.e_score_correction_bias = nn.Parameter(torch.empty(config.experts, dtype=torch.float32))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`[T, hidden_size]` to experts int64 `[T, experts_per_token]`, in any order, and their weights, fp32."""
        scores = functional.linear(x.float(), self.weight).sigmoid()
        choice = scores + self.e_score_correction_bias
        if self.groups_kept < self.groups:
            choice = self._in_kept_groups(choice.unflatten(-1, (self.groups, -1)))
        experts = choice.topk(self.experts_kept, sorted=False).indices
        weights = scores.gather(1, experts)
        if self.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return experts, weights * self.scale

    def _in_kept_groups(self, choice: Tensor) -> Tensor:
        """`[T, groups, experts of a group]` to `[T, experts]`, -inf where a group is dropped."""
        best_two = choice.topk(min(2, choice.shape[-1])).values.sum(-1)
        dropped = torch.ones_like(best_two, dtype=torch.bool).scatter(1, best_two.topk(self.groups_kept).indices, False)
        return choice.masked_fill(dropped.unsqueeze(-1), -torch.inf).flatten(1)


class MoE(nn.Module):
    """Sends each token through a few of the experts, and through the shared ones; adds the result to a residual.

    A checkpoint has a tensor for each projection of each expert. `merge` joins them, with the shared experts last, as
    experts that every token is sent to. They are computed in one of two ways. Neither asks the device how many tokens
    went to which expert.

    - grouped: only a token's own experts, as products over tokens sorted by expert;
    - dense: two plain products over all experts, as if they were one wide MLP. Its activations are weighted by what
      each expert counts for a token, mostly 0. Every weight is read, once. That is faster for few tokens if together
      they need most experts anyway: then reading takes longer than computing, and nothing has to be sorted.

    Args:
        batch_invariant: give a token the same bits wherever the others are sent: always dense. For batches of a few
            tokens, all of the same size.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, batch_invariant: bool = False):
        super().__init__()
        self.batch_invariant = batch_invariant
        self.routed, self.shared = config.experts, config.shared_experts
        self.gate = Router(config)
        self.experts = nn.ModuleList(MLP(config.hidden_size, config.expert_size, dtype) for _ in range(self.routed))
        self.shared_experts = MLP(config.hidden_size, config.expert_size * self.shared, dtype)
        self.gate_up: Tensor | None = None
        self.down: Tensor | None = None
        self.base_weights: Tensor | None = None

    def merge(self) -> None:
        """Joins the loaded weights of the experts, shared ones last: `gate_up` `[experts, 2, size, hidden_size]` and
        `down` `[hidden_size, experts, size]`. `base_weights` `[experts]` is 1 for shared experts and 0 for the others.
        Has to be called once, before the first forward pass."""
        own, shared = self.routed, self.shared_experts
        size, hidden_size = self.experts[0].gate_proj.weight.shape
        like = shared.down_proj.weight
        self.gate_up = like.new_empty(own + self.shared, 2, size, hidden_size)
        self.down = like.new_empty(hidden_size, own + self.shared, size)
        for i, expert in enumerate(self.experts):
            self.gate_up[i, 0], self.gate_up[i, 1] = expert.gate_proj.weight, expert.up_proj.weight
            self.down[:, i] = expert.down_proj.weight
        for half, weight in enumerate((shared.gate_proj.weight, shared.up_proj.weight)):
            self.gate_up[own:, half] = weight.unflatten(0, (self.shared, size))
        self.down[:, own:] = shared.down_proj.weight.unflatten(1, (self.shared, size))
        self.base_weights = (torch.arange(own + self.shared, device=like.device) >= own).float()
        self.experts = self.shared_experts = None

    def forward(self, x: Tensor, residual: Tensor) -> None:
        """Adds the experts of x `[T, hidden_size]` to the residual in place."""
        experts, weights = self.gate(x)
        if self.batch_invariant or self._dense_pays(x):
            self._dense(x, experts, weights, residual)
        else:
            residual.add_(self._grouped(x, experts, weights))
            activations = _gated(x, self.gate_up[self.routed :])
            residual.addmm_(activations, self.down[:, self.routed :].flatten(1).t())

    def _dense_pays(self, x: Tensor) -> bool:
        # with twice as many choices as experts, about 1 expert in 7 is not chosen
        sent = len(x) * self.gate.experts_kept
        return len(x) <= DENSE_ROWS.get(x.device.type, 0) and sent >= 2 * self.routed

    def _dense(self, x: Tensor, experts: Tensor, weights: Tensor, residual: Tensor) -> None:
        counts = self.base_weights.expand(len(x), -1).clone().scatter_(1, experts, weights)
        activations = _gated(x, self.gate_up).unflatten(1, (len(self.base_weights), -1)).mul_(counts.unsqueeze(-1))
        residual.addmm_(activations.flatten(1), self.down.flatten(1).t())

    def _grouped(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """The routed experts' sum, `[T, hidden_size]`. Tokens are sorted by expert, a contiguous range for each."""
        gate_up, down = self.gate_up[: self.routed].flatten(1, 2), self.down[:, : self.routed]
        flat = experts.flatten()
        order = flat.argsort(stable=True)
        ids = torch.arange(self.routed, device=x.device)
        ends = torch.searchsorted(flat[order], ids, right=True).int()
        sorted_x = x.index_select(0, order // experts.shape[1])
        halves = functional.grouped_mm(sorted_x, gate_up.transpose(1, 2), offs=ends)
        out = functional.grouped_mm(_silu_times(halves.unflatten(1, (2, -1))), down.permute(1, 2, 0), offs=ends)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
        # weighted and summed in one product with 16-bit factors, so that nothing as large is made in fp32
        each = out.index_select(0, back).unflatten(0, experts.shape)
        return torch.bmm(weights.to(out.dtype).unsqueeze(1), each).squeeze(1)


def _gated(x: Tensor, gate_up: Tensor) -> Tensor:
    """Activations of x `[T, hidden_size]` in several MLPs `[..., 2, size, hidden_size]`: `[T, all their sizes]`."""
    halves = functional.linear(x, gate_up.flatten(0, -2)).unflatten(1, gate_up.shape[:-1])
    return _silu_times(halves).flatten(1)


def _silu_times(halves: Tensor) -> Tensor:
    """`[..., 2, size]`, gate and up, to `[..., size]`."""
    gate, up = halves.unbind(-2)
    return functional.silu(gate).mul_(up)
