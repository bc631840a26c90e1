"""From logits to tokens.

Each sampled token uses one random number, which follows from its request's seed and its position after the prompt. So
it depends neither on the rest of the batch, nor on whether the request was preempted or resumed in between.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor

from mla_backend.engine.params import LARGEST_SEED, SamplingParams

NO_TOKEN = -1
"""In place of a token where logits are not finite, so that nothing can be sampled."""


@dataclass(frozen=True)
class Draw:
    """How to sample from a row of logits."""

    params: SamplingParams
    seed: int
    """The sample's seed."""
    position: int
    """How many tokens were sampled before."""
    seen: Sequence[int] = ()
    """The distinct tokens before this one; needed only with a repetition penalty."""


@dataclass(frozen=True)
class TokenLogprobs:
    """Logprobs of a sampled token and of as many of the likeliest tokens as were asked for."""

    logprob: float
    top: tuple[tuple[int, float], ...]


class Picked:
    """Tokens that were sampled, on their way to the host.

    Attributes:
        tokens: int64 `[N]`, on the device; the next pass can start with them before the host has read them. They are
            in the vocabulary even where the logits are not finite; `read` tells those apart.
    """

    def __init__(self, tokens: Tensor, logits: Tensor, draws: Sequence[Draw]):
        self.tokens, self._logits, self._draws = tokens, logits, draws
        tokens = tokens.masked_fill(~logits.amax(-1).isfinite(), NO_TOKEN)
        self._on_host, self._arrived = tokens, None
        if tokens.is_cuda:
            self._on_host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            self._on_host.copy_(tokens, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    @torch.inference_mode()
    def rows(self, kept: Sequence[int]) -> "Picked":
        """Some of the rows."""
        ids = _on(self.tokens, kept)
        return Picked(self.tokens[ids], self._logits[ids], [self._draws[row] for row in kept])

    @torch.inference_mode()
    def read(self) -> tuple[list[int], list[TokenLogprobs | None]]:
        """A token for each row of the logits, and its logprobs where they are wanted. The token is NO_TOKEN where the
        largest logit is not finite. Waits for the tokens, but not for what was launched after them."""
        if self._arrived is not None:
            self._arrived.synchronize()
        tokens = self._on_host.tolist()
        counts = [draw.params.logprobs for draw in self._draws]
        return tokens, [
            None if count is None or tokens[row] == NO_TOKEN else _logprobs(self._logits[row], tokens[row], count)
            for row, count in enumerate(counts)
        ]


@torch.inference_mode()
def pick(logits: Tensor, draws: Sequence[Draw], batch_invariant: bool = False) -> Picked:
    """A token for each row. Waits for nothing.

    Args:
        logits: fp32 `[N, vocab_size]`; must not change until the tokens are read.
        draws: one for each row.
        batch_invariant: compute one row after the other, so that a row's bits don't depend on how many there are.
    """
    if len(logits) != len(draws):
        raise ValueError(f"draws must be {len(logits)}, one a row of logits; got {len(draws)}")
    if batch_invariant and len(draws) > 1:
        tokens = torch.cat([_tokens(logits[i : i + 1], draws[i : i + 1]) for i in range(len(draws))])
    else:
        tokens = _tokens(logits, draws)
    return Picked(tokens, logits, draws)


def _tokens(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    penalised = _penalised(logits, draws)
    tokens = penalised.argmax(-1)
    for filtered in (False, True):
        rows = [i for i, draw in enumerate(draws) if draw.params.temperature > 0 and draw.params.filters == filtered]
        if rows:
            mine = [draws[i] for i in rows]
            ids = _on(logits, rows)
            tokens[ids] = (_draw_filtered if filtered else _draw)(_probabilities(penalised[ids], mine), mine)
    return tokens


def _penalised(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    rows = [i for i, draw in enumerate(draws) if draw.params.repetition_penalty != 1]
    if not rows:
        return logits
    logits = logits.clone()
    for i in rows:
        seen, penalty = _on(logits, sorted(draws[i].seen)), draws[i].params.repetition_penalty
        before = logits[i, seen]
        logits[i, seen] = torch.where(before > 0, before / penalty, before * penalty)
    return logits


def _probabilities(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """In fp64, so that the sums below are practically exact. The max logit is subtracted first, as a small temperature
    would overflow otherwise."""
    temperatures = _on(logits, [draw.params.temperature for draw in draws], torch.float64).unsqueeze(1)
    return ((logits.double() - logits.max(-1, keepdim=True).values) / temperatures).softmax(-1)


def _draw(probabilities: Tensor, draws: Sequence[Draw]) -> Tensor:
    """A random index of each row, int64 `[rows]`: where the cumulative sum exceeds a uniform part of the total."""
    sums = probabilities.cumsum(-1)
    targets = _on(sums, [_uniform(draw) for draw in draws], torch.float64).unsqueeze(1) * sums[:, -1:]
    # a row of NaN is past the end; `Picked` tells
    return torch.searchsorted(sums, targets, right=True).squeeze(1).clamp_(max=sums.shape[1] - 1)


def _draw_filtered(probabilities: Tensor, draws: Sequence[Draw]) -> Tensor:
    likeliest, order = probabilities.sort(dim=-1, descending=True, stable=True)
    top_k, top_p, min_p = (
        _on(probabilities, [value(draw.params) for draw in draws], torch.float64).unsqueeze(1)
        for value in (lambda p: p.top_k or probabilities.shape[1], lambda p: p.top_p, lambda p: p.min_p)
    )
    before = likeliest.cumsum(-1) - likeliest
    ranks = torch.arange(probabilities.shape[1], device=probabilities.device)
    keep = (ranks < top_k) & (before < top_p) & (likeliest >= min_p * likeliest[:, :1])
    keep[:, 0] = True
    ranks = _draw(likeliest.masked_fill(~keep, 0.0), draws)
    return order.gather(1, ranks.unsqueeze(1)).squeeze(1)


def _uniform(draw: Draw) -> float:
    """A number in [0, 1) of 32 bits, so that its product with a sum in fp64 stays below the sum."""
    seed = draw.seed % (LARGEST_SEED + 1)
    digest = blake2b(seed.to_bytes(8, "little") + draw.position.to_bytes(8, "little"), digest_size=4).digest()
    return int.from_bytes(digest, "little") / 2**32


def _logprobs(row: Tensor, token: int, count: int) -> TokenLogprobs:
    of_all = row.log_softmax(-1)
    best = of_all.topk(min(count, len(of_all)))
    return TokenLogprobs(of_all[token].item(), tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True)))


def _on(like: Tensor, values: Sequence[float], dtype: torch.dtype | None = None) -> Tensor:
    """Values as a tensor on the device of another, without waiting for it."""
    tensor = torch.tensor(values, dtype=dtype)
    return tensor.pin_memory().to(like.device, non_blocking=True) if like.is_cuda else tensor
