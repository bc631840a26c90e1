"""From logits to tokens.

Each sampled token takes one random number, which follows from its request's seed and its place after the prompt. So it
depends neither on the rest of the batch, nor on whether the request was preempted or resumed in between.
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
    """What the sampler is told about a row of logits."""

    params: SamplingParams
    seed: int
    """Of the sample."""
    place: int
    """How many tokens were sampled before."""
    seen: Sequence[int] = ()
    """Different tokens that were there before; asked for only where there is a repetition penalty."""


@dataclass(frozen=True)
class TokenLogprobs:
    """Of a sampled token and, the likeliest first, of as many others as were asked for."""

    logprob: float
    top: tuple[tuple[int, float], ...]


class Picked:
    """Tokens that were sampled, on their way to the host.

    Attributes:
        tokens: int64 `[N]`, on the device; the next pass can begin with them before anybody has read them. They are
            tokens of the vocabulary even where the logits were not finite; `read` tells those apart.
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
        """Some of them."""
        ids = _on(self.tokens, kept)
        return Picked(self.tokens[ids], self._logits[ids], [self._draws[row] for row in kept])

    @torch.inference_mode()
    def read(self) -> tuple[list[int], list[TokenLogprobs | None]]:
        """Waits for the tokens, but not for what was launched after them. A token for each row of the logits, NO_TOKEN
        where these have a NaN or no finite largest one, and its logprobs where they are wanted."""
        if self._arrived is not None:
            self._arrived.synchronize()
        tokens = self._on_host.tolist()
        counts = [draw.params.logprobs for draw in self._draws]
        return tokens, [
            None if count is None or tokens[row] == NO_TOKEN else _logprobs(self._logits[row], tokens[row], count)
            for row, count in enumerate(counts)
        ]


def sample(
    logits: Tensor, draws: Sequence[Draw], batch_invariant: bool = False
) -> tuple[list[int], list[TokenLogprobs | None]]:
    """A token for each row, and its logprobs where they are wanted; as `pick`, and then waits for them."""
    return pick(logits, draws, batch_invariant).read()


@torch.inference_mode()
def pick(logits: Tensor, draws: Sequence[Draw], batch_invariant: bool = False) -> Picked:
    """A token for each row. Waits for nothing.

    Args:
        logits: fp32 `[N, vocab_size]`; they have to stay as they are until the tokens are read.
        draws: N of them.
        batch_invariant: one row after the other, so that a row's bits don't depend on how many there are.
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
    """fp64, so that the sums below are as good as exact; the largest logit is taken off first, lest a small temperature
    overflow."""
    temperatures = _on(logits, [draw.params.temperature for draw in draws], torch.float64).unsqueeze(1)
    return ((logits.double() - logits.max(-1, keepdim=True).values) / temperatures).softmax(-1)


def _draw(probabilities: Tensor, draws: Sequence[Draw]) -> Tensor:
    """int64 `[rows]`: where a random part of each row's sum lies."""
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
    places = _draw(likeliest.masked_fill(~keep, 0.0), draws)
    return order.gather(1, places.unsqueeze(1)).squeeze(1)


def _uniform(draw: Draw) -> float:
    """In [0, 1), of 32 bits: times a sum in fp64 it stays below the sum."""
    seed = draw.seed % (LARGEST_SEED + 1)
    digest = blake2b(seed.to_bytes(8, "little") + draw.place.to_bytes(8, "little"), digest_size=4).digest()
    return int.from_bytes(digest, "little") / 2**32


def _logprobs(row: Tensor, token: int, count: int) -> TokenLogprobs:
    of_all = row.log_softmax(-1)
    best = of_all.topk(min(count, len(of_all)))
    return TokenLogprobs(of_all[token].item(), tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True)))


def _on(like: Tensor, values: Sequence[float], dtype: torch.dtype | None = None) -> Tensor:
    """On the device of a tensor, without waiting for it."""
    tensor = torch.tensor(values, dtype=dtype)
    return tensor.pin_memory().to(like.device, non_blocking=True) if like.is_cuda else tensor
