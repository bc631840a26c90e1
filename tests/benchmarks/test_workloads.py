"""Prompts of benchmarks: of the lengths that were asked for, sharing what they should, the same ones each time."""

import itertools
import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving_benchmarks.run import workloads
from serving_benchmarks.run.workloads import Share

TINY = Path(__file__).parents[2] / "examples" / "recall" / "checkpoint"
TOKENS = list(range(2, 50))


@st.composite
def histograms(draw) -> list[Share]:
    """Rows whose ranges don't overlap, so that each request says which one it is of."""
    rows, low = [], draw(st.integers(20, 40))
    for _ in range(draw(st.integers(1, 5))):
        high = low + draw(st.integers(0, 10))
        out = draw(st.integers(1, 20))
        outputs = (out, out + draw(st.integers(0, 5)))
        rows.append(Share((low, high), outputs, draw(st.floats(0.01, 100, allow_nan=False))))
        low = high + 1
    return rows


@given(histograms(), st.integers(1, 200), st.integers(0, 19), st.integers(0, 5))
def test_prompts_obey_the_histogram_and_share_the_prefix_and_nothing_else(rows, count, shared, seed):
    made = workloads.from_histogram(rows, count, TOKENS, shared=shared, seed=seed)
    assert len(made) == count
    of_row = Counter()
    for prompt, output in zip(made.prompts, made.output_lens, strict=True):
        (row,) = [i for i, row in enumerate(rows) if row.inputs[0] <= len(prompt) <= row.inputs[1]]
        assert rows[row].outputs[0] <= output <= rows[row].outputs[1]
        of_row[row] += 1
        assert set(prompt) <= set(TOKENS)
    for i, row in enumerate(rows):
        assert abs(of_row[i] - count * row.weight / sum(r.weight for r in rows)) < 1
    assert len({tuple(prompt[:shared]) for prompt in made.prompts}) == 1
    if count > 20:
        assert len({prompt[shared] for prompt in made.prompts}) > 1


@given(st.integers(0, 1000), st.integers(0, 9))
def test_the_same_seed_gives_the_same_prompts_and_another_one_others(seed, shared):
    made = [workloads.fixed(5, 10, 3, TOKENS, shared=shared, seed=s) for s in (seed, seed, seed + 1)]
    assert made[0] == made[1] != made[2]
    assert {len(prompt) for prompt in made[0].prompts} == {10} and made[0].output_lens == [3] * 5
    assert made[0].longest == 13


@given(st.lists(st.floats(0.001, 1000), min_size=1, max_size=20), st.integers(0, 1000))
def test_shares_are_rounded_and_add_up(weights, count):
    shares = workloads.apportion(weights, count)
    assert sum(shares) == count
    assert all(abs(share - count * w / sum(weights)) < 1 for share, w in zip(shares, weights, strict=True))


def test_a_warm_up_is_the_beginning_with_shorter_outputs():
    made = workloads.fixed(5, 10, 30, TOKENS, shared=0, seed=0)
    first = made.first(2, 8)
    assert first.prompts == made.prompts[:2] and first.output_lens == [8, 8]


@given(st.integers(1, 40000))
def test_sizes_of_steps_are_the_round_numbers_up_to_the_most_and_those_beside_them(most):
    sizes = workloads.step_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == most
    round_ones = {n << power for n in (1, 3) for power in range(16)}
    for less in (0, 1, 4, 12):
        assert {n - less for n in round_ones if 1 <= n - less <= most} <= set(sizes)
    assert len(sizes) <= 8 * most.bit_length()


BLOCKS_END = (15, 32, 64, 96, 128, 512, 1031, 8192)
"""The most tokens for which vLLM tunes its kernel of experts alike, where it has no table of its own for a GPU. 8
experts get another order of blocks from 1032 on. Fewer than 16 tokens are less than any block and go another way."""
TABLE = (8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096)
"""The numbers of tokens for which vLLM's tables, such as that of 8 experts on an H200, have something. The nearest
counts, of two the smaller one."""
TABLES_END = (*((one + other) // 2 for one, other in itertools.pairwise(TABLE)), 8192)


@pytest.mark.parametrize(
    ("ends", "experts", "taken"),
    [
        *((BLOCKS_END, *of) for of in [(4, 1), (8, 2), (16, 4), (64, 6), (160, 8), (256, 8)]),
        *((TABLES_END, *of) for of in [(8, 2), (16, 4), (64, 6), (160, 8), (256, 8)]),
    ],
)
def test_what_is_compiled_for_any_size_of_a_step_is_compiled_for_one_of_these(ends, experts, taken):
    def kind(tokens: int) -> tuple[bool, bool]:  # whole arguments that are multiples of 16 are compiled as such
        rows = taken * tokens
        return rows % 16 == 0, (rows - experts) % 16 == 0  # blocks are multiples of 16

    for fewest, most in itertools.pairwise(ends):
        tuned_alike = range(fewest + 1, most + 1)
        assert {kind(size) for size in tuned_alike} == {kind(n) for n in workloads.step_sizes(8192) if n in tuned_alike}


@given(st.data(), st.integers(2, 700), st.integers(1, 70))
def test_requests_for_sizes_of_steps_have_these_sizes_and_keep_to_the_limits(data, longest_request, in_flight):
    most = data.draw(st.integers(1, min(5000, in_flight * (longest_request - 1))))
    made = workloads.of_step_sizes(most, in_flight, longest_request, TOKENS, seed=3)
    for requests in made:
        assert requests.longest <= longest_request and min(requests.output_lens) >= 1
        assert min(map(len, requests.prompts)) >= 1 and set().union(*requests.prompts) <= set(TOKENS)
    # where there are several, the first one is there for the others to come in meanwhile
    steps = [requests.prompts[len(requests) > 1 :] for requests in made]
    assert max(map(len, steps)) <= in_flight
    decode = steps.pop() if in_flight > 1 else None
    assert [sum(map(len, prompts)) for prompts in steps] == workloads.step_sizes(most)
    assert all((len(prompts) == 1) == (sum(map(len, prompts)) < longest_request) for prompts in steps)
    if decode:
        assert len(decode) == in_flight
    long = [tuple(prompt[:64]) for requests in made for prompt in requests.prompts if len(prompt) >= 64]
    assert len(set(long)) == len(long), "nothing is found in the prefix cache"
    assert workloads.of_step_sizes(most, in_flight, longest_request, TOKENS, seed=3) == made


@pytest.mark.parametrize("in_flight", [2, 6, 64, 100])
def test_the_last_of_them_decode_in_batches_of_all_sizes(in_flight):
    last = workloads.of_step_sizes(100, in_flight, 1000, TOKENS, seed=0)[-1]
    left = last.output_lens[1:]
    batches = [sum(new > step for new in left) for step in range(1, max(left))]
    assert list(dict.fromkeys(batches)) == workloads.step_sizes(in_flight)[::-1]


@pytest.mark.parametrize(
    ("concurrency", "waves", "used"), [(1, 4, 4), (3, 2, 6), (16, 4, 50), (None, 4, 50), (1, None, 50)]
)
def test_few_in_flight_get_as_few_prompts_as_waves_say(concurrency, waves, used):
    assert workloads.prompts_in_waves(50, concurrency, waves) == used


def test_random_tokens_are_of_the_vocabulary_and_end_nothing():
    config = {"vocab_size": 10, "bos_token_id": 0, "eos_token_id": [1, 5], "pad_token_id": None}
    assert workloads.usable_tokens(config) == [2, 3, 4, 6, 7, 8, 9]


def test_a_histogram_is_read(tmp_path):
    path = tmp_path / "lengths.csv"
    path.write_text("input_len,output_len,weight\n128-512, 16 ,3\n4096,1 - 64,0.5\n")
    assert workloads.read_histogram(path) == [Share((128, 512), (16, 16), 3.0), Share((4096, 4096), (1, 64), 0.5)]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("input_len,weight\n1,1\n", "lacks output_len"),
        ("", "lacks input_len, output_len, weight"),
        ("input_len,output_len,weight\n", "a row or more"),
        ("input_len,output_len,weight\n10,10,0\n", "line 2: weight must be more than 0"),
        ("input_len,output_len,weight\n10,10,inf\n", "weight must be more than 0"),
        ("input_len,output_len,weight\n10,10,1\nfew,10,1\n", "line 3: a length is a number or a range"),
        ("input_len,output_len,weight\n20-10,10,1\n", "must rise"),
        ("input_len,output_len,weight\n0,10,1\n", "1 or more"),
        ("input_len,output_len,weight\n10\n", "line 2"),
    ],
)
def test_a_wrong_histogram_is_refused(tmp_path, text, why):
    path = tmp_path / "lengths.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=why):
        workloads.read_histogram(path)


def test_a_prefix_as_long_as_a_prompt_is_refused():
    with pytest.raises(ValueError, match="shared prefix must be shorter than the shortest prompt, 10 tokens; got 10"):
        workloads.fixed(2, 10, 1, TOKENS, shared=10, seed=0)


@pytest.mark.skipif(not TINY.is_dir(), reason="needs the source tree")
def test_lines_of_json_are_texts_conversations_or_tokens(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": "Eva likes yellow."},
        {"messages": [{"role": "user", "content": "What colour does Eva like?"}], "max_tokens": 7},
        {"tokens": [3, 4, 5]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    made = workloads.from_jsonl(path, TINY, 20, 512, None)
    assert len(made) == 3 and made.prompts[2] == [3, 4, 5] and made.output_lens == [20, 7, 20]
    assert all(prompt and max(prompt) < 512 for prompt in made.prompts)
    assert len(workloads.from_jsonl(path, TINY, 20, 512, 2)) == 2
    with pytest.raises(ValueError, match="line 3: tokens must be 0 to 4; got 5"):
        path.write_text('\n\n{"tokens": [3, 4, 5]}')
        workloads.from_jsonl(path, TINY, 20, 5, None)
    path.write_text('{"tokens": [3]}\n{"prompt": 3}')
    with pytest.raises(ValueError, match="line 2: prompt must be"):
        workloads.from_jsonl(path, TINY, 20, 5, None)
