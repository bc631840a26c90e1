"""Requests of benchmarks: of the lengths that were asked for, and the same ones each time."""

from hypothesis import given
from hypothesis import strategies as st

from serving_benchmarks.run import workloads

TOKENS = list(range(2, 50))


def test_random_prompts_are_the_same_each_time_and_have_nothing_in_common():
    config = {"vocab_size": 10, "bos_token_id": 0, "eos_token_id": [1, 5], "pad_token_id": None}
    assert workloads.usable_tokens(config) == [2, 3, 4, 6, 7, 8, 9]
    one, same, other = (workloads.fixed(5, 40, 3, TOKENS, seed=seed) for seed in (1, 1, 2))
    assert one == same != other and one.output_lens == [3] * 5 and one.longest == 43
    assert {len(prompt) for prompt in one.prompts} == {40} and set().union(*one.prompts) <= set(TOKENS)
    assert len({tuple(prompt[:20]) for prompt in one.prompts}) == 5
    assert one.first(2).prompts == one.prompts[:2] and len(one.first(2)) == 2


@given(st.integers(1, 40000))
def test_sizes_of_steps_are_the_round_numbers_up_to_the_most_and_those_beside_them(most):
    sizes = workloads.step_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == most
    round_ones = {n << power for n in (1, 3) for power in range(16)}
    for less in (0, 1, 4, 12):
        assert {n - less for n in round_ones if 1 <= n - less <= most} <= set(sizes)
    assert len(sizes) <= 8 * most.bit_length()


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
