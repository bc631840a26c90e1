"""Random problems for the indexer's ops, and what scores are held to."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

import mla_backend
from mla_backend import reference
from mla_backend.keys import KEY_FORMATS, write_keys
from problems import Arguments

POISON = 12345.0
DTYPES = torch.float32, torch.bfloat16
QUERY_DTYPES = *DTYPES, torch.float8_e4m3fn
KINDS = tuple(KEY_FORMATS)
TOPKS = st.one_of(st.integers(1, 5), st.integers(1, 300), st.just(4096))


NAN, INF = torch.nan, torch.inf
LAST_BIT = 2.0**-23


def orders(positions: int) -> dict[str, Tensor]:
    """Scores that break thresholds, or selections by them."""
    n = torch.arange(positions)
    special = torch.tensor([-INF, -3.5, -1e-40, -0.0, 0.0, 1e-40, 1.0, 1.0 + LAST_BIT, 7.0, INF, NAN, -NAN])
    random = torch.randn(positions)
    return {
        "random": random,
        "rising": n / 7,
        "falling": -n / 7,
        "rising in the last bit": 1 + n % 2**22 * LAST_BIT,
        "falling in the last bit": 2 - (1 + n) * LAST_BIT,
        "near": 1 + torch.randint(0, 50, (positions,)) * LAST_BIT,
        "equal": torch.full((positions,), 2.0),
        "zeros": torch.where(n % 2 == 0, -0.0, 0.0),
        "negative": -random.abs() - 1,
        "special": special[torch.randint(0, len(special), (positions,))],
        "mostly nothing": random.masked_fill(torch.rand(positions) < 0.99, -INF),
        "nothing": torch.full((positions,), -INF),
        "nothing but NaN": torch.full((positions,), NAN),
        "infinite": torch.where(n % 3 == 0, INF, -INF),
        "late": torch.where(n < positions - 300, -1.0, random),
        "early": torch.where(n < 300, random, -4.0),
        "waves": (n / 300).sin(),
    }


ORDERS = tuple(orders(1))


@dataclass
class IndexProblem(Arguments):
    """The arguments of index_scores and, without `positions`, of select_tokens."""

    queries: Tensor
    weights: Tensor
    cache: Tensor
    block_table: Tensor
    requests: Tensor
    lengths: Tensor
    positions: int

    def arguments(self) -> tuple[Tensor, ...]:
        return self.queries, self.weights, self.cache, self.block_table, self.requests, self.lengths

    def seen(self) -> Tensor:
        """bool `[T, N]`: which columns are written."""
        return torch.arange(self.positions, device=self.lengths.device) < self.lengths.unsqueeze(1)

    def solve(self) -> Tensor:
        """Scores, written into a part of poisoned memory; what is around it has to keep its poison."""
        memory = torch.full((len(self.queries), self.positions + 5), POISON, device=self.queries.device)
        scores = memory[:, 2:-3]
        assert mla_backend.index_scores(*self.arguments(), scores=scores) is scores
        assert (memory[:, :2] == POISON).all() and (memory[:, -3:] == POISON).all(), "written beside the scores"
        return scores

    def check(self) -> None:
        """The contract's tolerance: a GPU rounds fp32 queries."""
        got, seen = self.solve(), self.seen()
        want = reference.index_scores(**vars(self))
        assert (got[~seen] == POISON).all(), "written where a token sees nothing"
        scores, infinite = torch.where(seen, got, -torch.inf), want.isinf()
        assert torch.equal(scores[infinite], want[infinite]), "a score where there is no key"
        off, allowed = (scores.double() - want.double()).abs(), self.tolerance(want)
        assert not scores[~infinite].isnan().any(), "NaN"
        assert (off <= allowed)[~infinite].all(), f"off by {(off / allowed)[~infinite].max():.3g} of what is allowed"

    def tolerance(self, want: Tensor) -> Tensor:
        """float64 `[T, N]`: how far a score may be from the reference's, which is rounded."""
        rounds = self.queries.is_cuda and self.queries.dtype != torch.bfloat16
        return self.norms() * (2.0**-11 if rounds else 2.0**-16) + want.double().abs() * 2.0**-23

    def select(self, topk: int, **options) -> tuple[Tensor, Tensor]:
        """Positions and their scores, written into parts of poisoned memory; what is around them has to keep its
        poison. Without scores the positions are the same."""
        memory = torch.full((2, len(self.queries), topk + 5), POISON, device=self.queries.device)
        memory = memory[0].int(), memory[1]
        out, scores = (x[:, 2:-3] for x in memory)
        found = mla_backend.select_tokens(*self.arguments(), out=out, scores=scores, **options)
        assert found[0] is out and found[1] is scores
        for x in memory:
            assert (x[:, :2] == POISON).all() and (x[:, -3:] == POISON).all(), "written beside the results"
        assert torch.equal(mla_backend.select_tokens(*self.arguments(), topk, **options), out)
        return out, scores

    def check_selection(self, topk: int) -> tuple[Tensor, Tensor]:
        """The contract's promises, whatever a device's scores round like: which positions, in which order, with which
        scores. What it returns is what it checked."""
        chosen, scores = self.select(topk)
        lengths, whole = self.lengths.clamp(min=0), (self.lengths <= topk).unsqueeze(1)
        listed = self.block_table.shape[1] * self.cache.shape[1]
        longest = self.but(positions=max(1, min(int(lengths.max()), max(listed, topk) + 1)))
        want = reference.index_scores(**vars(longest)).double()
        there, columns = chosen >= 0, torch.arange(topk, device=chosen.device)
        counts = torch.minimum((want > -torch.inf).sum(1), torch.tensor(topk, device=chosen.device))
        counts = torch.where(whole.squeeze(1), lengths, counts)
        assert torch.equal(there, columns < counts.unsqueeze(1)), "not as many as there are, and then -1"
        assert (chosen[:, 1:] > chosen[:, :-1])[there[:, 1:]].all(), "not rising"
        assert torch.equal(chosen[there & whole], columns.expand_as(chosen)[there & whole].int()), "not all"
        assert (scores[~there] == -torch.inf).all()

        known = chosen.clamp(0, want.shape[1] - 1).long()
        tolerance = longest.tolerance(want)
        exact = torch.where(there, want.gather(1, known), -torch.inf)
        infinite = exact == -torch.inf  # where the context is taken as a whole
        assert torch.equal(scores == -torch.inf, infinite), "another position's score"
        off = (scores.double() - exact).abs()
        assert (off <= tolerance.gather(1, known))[~infinite].all(), "another position's score"

        taken = torch.zeros_like(want, dtype=torch.int32).scatter_add_(1, known, there.int()) > 0
        least = torch.where(taken, want + tolerance, torch.inf).amin(1)
        best = torch.where(~taken & (want > -torch.inf), want - tolerance, -torch.inf).amax(1)
        assert ((best <= least) | whole.squeeze(1)).all(), "a better position is left out"
        return chosen, scores

    def norms(self) -> Tensor:
        """float64 `[T, N]`: what scores could be, the sum over heads of |weight| |query| |key|."""
        keys = reference.dequantise_keys(self.cache).double().norm(dim=-1)
        size, columns = self.cache.shape[1], torch.arange(self.positions, device=self.queries.device)
        table = self.block_table.long().clamp(0, len(keys) - 1)
        place = (columns // size).clamp(max=table.shape[1] - 1)
        norms = keys[table[self.requests.long().clamp(0, len(table) - 1)][:, place], columns % size]
        return (self.weights.double().abs() * self.queries.double().norm(dim=-1)).sum(1, keepdim=True) * norms

    def only(self, tokens: Tensor) -> "IndexProblem":
        """The same for some of the tokens, in another order."""
        return self.but(**{name: getattr(self, name)[tokens] for name in ("queries", "weights", "requests", "lengths")})

    def of_prompts(self, chunks: list[int]) -> "IndexProblem":
        """The same as chunks of prompts: neighbours are of one request, and each sees one key more than the one before
        it."""
        requests = torch.repeat_interleave(torch.tensor(chunks))
        lengths = torch.cat([torch.arange(self.positions - n, self.positions) + 1 for n in chunks])
        device = self.queries.device
        return self.but(
            requests=requests.to(device, torch.int32) % len(self.block_table),
            lengths=lengths.clamp(min=0).to(device, torch.int32),
        )


def random_keys(kind: str, blocks: int, block_size: int, gap: int = 0, device: str = "cpu") -> Tensor:
    """Keys of unequal size in every slot; `gap` bytes between blocks."""
    fmt = KEY_FORMATS[kind]
    memory = torch.zeros(blocks, block_size * fmt.token_bytes + gap, dtype=torch.uint8, device=device)
    cache = memory[:, : block_size * fmt.token_bytes].view(fmt.dtype).unflatten(1, (block_size, fmt.width))
    keys = torch.randn(blocks * block_size, 128, device=device)
    keys *= torch.randn(blocks * block_size, 1, device=device).exp()
    whole = torch.zeros(blocks, block_size, fmt.width, dtype=fmt.dtype, device=device)
    write_keys(keys, whole, torch.arange(blocks * block_size, device=device))
    return cache.copy_(whole)


def random_index(
    kind: str = "fp8",
    tokens: int = 8,
    heads: int = 64,
    positions: int = 300,
    requests: int = 3,
    block_size: int = 64,
    blocks: int = 40,
    gap: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> IndexProblem:
    """Decoding requests of random lengths and blocks."""
    width = -(-positions // block_size)
    return IndexProblem(
        torch.randn(tokens, heads, 128, device=device).to(dtype),
        torch.randn(tokens, heads, device=device),
        random_keys(kind, blocks, block_size, gap, device),
        torch.randint(0, blocks, (requests, width), dtype=torch.int32, device=device),
        torch.randint(0, requests, (tokens,), dtype=torch.int32, device=device),
        torch.randint(0, positions + 1, (tokens,), dtype=torch.int32, device=device),
        positions,
    )


def random_candidates(problem: IndexProblem, size: int, share: float) -> tuple[Tensor, int]:
    """Blocks of so many positions that each token may choose from, rising, -1 behind the last: about this share of all,
    and of one that lies behind all positions."""
    every = torch.arange(-(-problem.positions // size) + 1, dtype=torch.int32, device=problem.queries.device)
    kept = torch.rand(len(problem.queries), len(every), device=every.device) < share
    lists = torch.where(kept, every, 2**31 - 1).sort(1).values
    return torch.where(lists == 2**31 - 1, -1, lists), size


def among(candidates: tuple[Tensor, int], scores: Tensor, lengths: Tensor, topk: int) -> Tensor:
    """The scores `[T, N]`, -inf where a token that sees more than topk positions may not choose."""
    blocks, size = candidates[0].to(scores.device), candidates[1]
    positions = (blocks.unsqueeze(2) * size + torch.arange(size, device=scores.device)).flatten(1).long()
    kept = torch.zeros(len(scores), scores.shape[1] + 1, dtype=torch.bool, device=scores.device)
    kept.scatter_(1, torch.where(positions < 0, scores.shape[1], positions.clamp(max=scores.shape[1])), True)
    kept = kept[:, :-1]
    return scores.masked_fill(~kept & (lengths > topk).unsqueeze(1), -torch.inf)


def problem_of_scores(scores: Tensor, block_size: int = 64, device: str = "cpu") -> IndexProblem:
    """A problem with just these fp32 scores `[T, N]`, on every device: token t is alone in request t.

    Its first head sees a key's first value of 1, times the scale; its second head, which weighs -1, the opposite.
    """
    tokens, positions = scores.shape
    width = -(-positions // block_size)
    cache = torch.zeros(tokens * width, block_size * 132, dtype=torch.uint8)
    values, scales = cache.split([block_size * 128, block_size * 4], dim=1)
    values[:, ::128] = torch.ones(1).to(torch.float8_e4m3fn).view(torch.uint8)
    padded = torch.nn.functional.pad(scores.cpu(), (0, width * block_size - positions))
    scales.copy_(padded.view(tokens * width, block_size).view(torch.uint8))
    queries = torch.zeros(tokens, 2, 128)
    queries[:, 0, 0], queries[:, 1, 0] = 1, -1
    return IndexProblem(
        queries,
        torch.tensor([1.0, -1.0]).repeat(tokens, 1),
        cache.view(-1, block_size, 132),
        torch.arange(tokens * width, dtype=torch.int32).view(tokens, width),
        torch.arange(tokens, dtype=torch.int32),
        torch.full((tokens,), positions, dtype=torch.int32),
        positions,
    ).to(device)


@st.composite
def index_problems(draw, kinds=KINDS, heads=range(1, 129), device="cpu", dtypes=QUERY_DTYPES):
    torch.manual_seed(draw(st.integers(0, 2**31)))
    problem = random_index(
        draw(st.sampled_from(kinds)),
        tokens=draw(st.integers(1, 20)),
        heads=draw(st.sampled_from(heads)),
        positions=draw(st.sampled_from([1, 63, 64, 65, 300, 1000])),
        requests=draw(st.integers(1, 4)),
        block_size=draw(st.sampled_from([1, 7, 16, 61, 64, 1000])),
        blocks=draw(st.integers(1, 50)),
        gap=draw(st.sampled_from([0, 4, 16, 64])),
        dtype=draw(st.sampled_from(dtypes)),
        device=device,
    )
    if draw(st.booleans()):  # neighbours of one request
        problem.requests = problem.requests.sort().values
    if draw(st.booleans()):  # blocks that are none, a table that is too short, requests and lengths out of range
        table, random = problem.block_table, {"dtype": torch.int32, "device": device}
        table[torch.rand(table.shape, device=device) < 0.2] = -1
        table[torch.rand(table.shape, device=device) < 0.1] = len(problem.cache)
        problem.block_table = table[:, : max(1, table.shape[1] - 1)]
        problem.requests += torch.randint(-1, 2, problem.requests.shape, **random)
        problem.lengths += torch.randint(-9, 10, problem.lengths.shape, **random)
    return problem
