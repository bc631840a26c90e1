"""Samples follow the distribution that was asked for, and nothing but their own request."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mla_backend.engine import SamplingParams
from mla_backend.engine.sampler import Draw, pick

VOCABULARY = 50
DRAWS = 4000


def sample(logits, draws, batch_invariant=False):
    return pick(logits, draws, batch_invariant).read()


def draws(params: SamplingParams, count: int = DRAWS, seed: int = 1, **more) -> list[Draw]:
    return [Draw(params, seed, position, **more) for position in range(count)]


def frequencies(logits: torch.Tensor, params: SamplingParams, **more) -> torch.Tensor:
    tokens, _ = sample(logits.expand(DRAWS, -1), draws(params, **more))
    return torch.tensor(tokens).bincount(minlength=len(logits)) / DRAWS


def assert_distributed(logits: torch.Tensor, params: SamplingParams, want: torch.Tensor, **more) -> None:
    got = frequencies(logits, params, **more)
    assert (got[want == 0] == 0).all()
    # six standard deviations of a frequency
    assert ((got - want).abs() <= 6 * (want * (1 - want) / DRAWS).sqrt() + 1e-9).all()


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(VOCABULARY) * 2


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_temperature_shapes_the_distribution(logits, temperature):
    want = (logits.double() / temperature).softmax(-1).float()
    assert_distributed(logits, SamplingParams(temperature=temperature), want)


def fewest_that_reach(p, share):
    values, order = p.sort(descending=True)
    return torch.isin(torch.arange(VOCABULARY), order[: int((values.cumsum(0) < share).sum()) + 1])


def likeliest(p, k):
    return torch.isin(torch.arange(VOCABULARY), p.topk(k).indices)


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        (dict(top_k=5), lambda p: likeliest(p, 5)),
        (dict(top_p=0.7), lambda p: fewest_that_reach(p, 0.7)),
        (dict(min_p=0.05), lambda p: p >= 0.05 * p.max()),
        (dict(top_k=4, min_p=0.1, top_p=0.9999), lambda p: likeliest(p, 4) & (p >= 0.1 * p.max())),
    ],
    ids=["top_k", "top_p", "min_p", "all"],
)
def test_filters_leave_what_they_say_and_have_to_agree(logits, filters, kept):
    p = logits.softmax(-1)
    keep = kept(p)
    assert 1 < keep.sum() < VOCABULARY
    assert_distributed(logits, SamplingParams(temperature=1, **filters), p * keep / (p * keep).sum())


@pytest.mark.parametrize("filters", [{}, *({"temperature": t} for t in (1e-3, 1e-45)), {"top_p": 1e-9}, {"min_p": 1.0}])
def test_greedy_tiny_temperatures_and_narrow_filters_give_the_likeliest(logits, filters):
    logits[3] = -torch.inf
    params = SamplingParams(**({"temperature": 1, **filters} if filters else {}))
    assert sample(logits.expand(3, -1), draws(params, 3)) == ([int(logits.argmax())] * 3, [None] * 3)


def test_a_repetition_penalty_makes_what_was_there_less_likely(logits):
    seen = [int(logits.argmax()), int(logits.argmin())]
    penalised = logits.clone()
    for token in seen:
        penalised[token] = logits[token] / 1.5 if logits[token] > 0 else logits[token] * 1.5
    params = SamplingParams(temperature=1, repetition_penalty=1.5)
    assert_distributed(logits, params, penalised.softmax(-1), seen=seen)
    strong = SamplingParams(repetition_penalty=1e6)
    assert sample(logits[None], draws(strong, 1, seen=seen))[0] != [seen[0]]


def test_logprobs_are_the_models_own(logits):
    params = SamplingParams(temperature=0.5, top_k=3, repetition_penalty=2.0, logprobs=4)
    tokens, logprobs = sample(logits[None], draws(params, 1, seen=[1, 2, 3]))
    want = logits.log_softmax(-1)
    best = want.topk(4)
    assert logprobs[0].logprob == want[tokens[0]].item()
    assert logprobs[0].top == tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    assert sample(logits[None], draws(SamplingParams(logprobs=0), 1))[1][0].top == ()


CHOICES = dict(temperature=[0.0, 0.5, 1.0], top_k=[0, 3], top_p=[1.0, 0.8], min_p=[0.0, 0.1], logprobs=[None, 2])
CHOICES |= dict(repetition_penalty=[1.0, 1.3])
PARAMS = st.builds(SamplingParams, **{name: st.sampled_from(some) for name, some in CHOICES.items()})


@given(st.lists(st.tuples(PARAMS, st.integers(0, 2**63 - 1), st.integers(0, 1000)), min_size=1, max_size=8))
def test_a_sample_depends_on_its_own_row_alone(rows):
    logits = torch.randn(len(rows), VOCABULARY)
    wanted = [Draw(params, seed, position, seen=[1, 5]) for params, seed, position in rows]
    together = sample(logits, wanted)
    one_by_one = [sample(logits[i : i + 1], wanted[i : i + 1]) for i in range(len(rows))]
    assert together == ([t[0] for t, _ in one_by_one], [p[0] for _, p in one_by_one])
    assert sample(logits, wanted, batch_invariant=True) == together


def test_other_seeds_and_other_positions_give_other_samples():
    flat, params = torch.zeros(1, 100_000), SamplingParams(temperature=1.0)
    found = {sample(flat, [Draw(params, seed, position)])[0][0] for seed in range(8) for position in range(8)}
    assert len(found) > 60


@pytest.mark.parametrize(
    "field, value, error",
    [
        ("max_tokens", 0, "max_tokens must be 1 or more; got 0"),
        ("temperature", -0.1, "temperature must be 0 or more; got -0.1"),
        ("temperature", math.nan, "temperature must be 0 or more; got nan"),
        ("temperature", math.inf, "temperature must be 0 or more; got inf"),
        ("temperature", "hot", "temperature must be a number; got 'hot'"),
        ("top_k", -1, "top_k must be 0 or more; got -1"),
        ("top_k", 1.5, "top_k must be an int; got float"),
        ("top_p", 0, "top_p must be more than 0 and at most 1; got 0"),
        ("min_p", 1.1, "min_p must be 0 or more and at most 1; got 1.1"),
        ("repetition_penalty", 0.0, r"repetition_penalty must be 1e-09 or more and at most 1e\+09; got 0.0"),
        ("seed", -1, "seed must be 0 or more; got -1"),
        ("seed", 2**63, "seed must be 9223372036854775807 or less"),
        ("stop", "x", "stop must be texts that aren't empty, in a tuple; got 'x'"),
        ("stop", ("",), "stop must be texts that aren't empty, in a tuple"),
        ("stop_tokens", [1], "stop_tokens must be a tuple of ints"),
        ("stop_tokens", (1.0,), "stop_tokens must be an int; got float"),
        ("ignore_eos", 1, "ignore_eos must be a bool; got 1"),
        ("logprobs", 21, "logprobs must be 20 or less; got 21"),
        ("n", 0, "n must be 1 or more; got 0"),
    ],
)
def test_wrong_parameters_are_named(field, value, error):
    with pytest.raises((TypeError, ValueError), match=error):
        SamplingParams(**{field: value})


def test_as_many_draws_as_rows_are_needed(logits):
    with pytest.raises(ValueError, match="draws must be 1, one a row of logits; got 2"):
        sample(logits[None], draws(SamplingParams(), 2))
