"""What the engine promises about requests: how they end, what comes of them, and what is refused."""

from pathlib import Path

import pytest
import torch

import engine_models
from mla_backend.engine import Collector, Engine, SamplingParams, Tokenizer, engine

ENDLESS = SamplingParams(max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return engine_models.save_small(tmp_path_factory.mktemp("small"))


def new_engine(folder: Path, **options) -> Engine:
    return Engine(folder, **{"device": "cpu", "memory": 2**21, "block_size": 16, **options})


@pytest.fixture(scope="module")
def shared(folder) -> Engine:
    return new_engine(folder)


def result_of(engine: Engine, prompt="abc", **changes):
    return engine.generate([prompt], SamplingParams(**{"max_tokens": 20, "ignore_eos": True, **changes}))[0]


def tokens_of(engine: Engine, **changes) -> list[int]:
    return result_of(engine, **changes).tokens


def test_a_text_is_continued_with_the_text_of_its_tokens(shared):
    result = shared.generate(["Grüße"], ENDLESS)[0]
    assert len(result.tokens) == 20 and result.prompt_tokens == len("Grüße".encode())
    assert result.text == shared.tokenizer.decode(result.tokens)
    assert result.completions[0].finish_reason == "length"
    assert shared.generate([list("Grüße".encode())], ENDLESS)[0].tokens != []


def test_text_tokens_and_conversations_are_prompts(shared):
    text = shared.tokenizer.encode("abc")
    assert shared.encode("abc") == text == shared.encode(text)
    chat = shared.encode([{"role": "user", "content": "abc"}])
    assert chat == [shared.tokenizer.encode("<|user|>")[0], *text, shared.tokenizer.encode("<|assistant|>")[0]]


def test_updates_add_up_to_the_result(shared):
    params = SamplingParams(max_tokens=9, temperature=1.0, seed=3, n=2, logprobs=1, ignore_eos=True)
    id = shared.add("abc", params)
    collector, results, seen = Collector(), [], []
    while shared.has_work:
        for update in shared.step():
            seen.append(update)
            if result := collector.add(update):
                results.append(result)
    assert [result.id for result in results] == [id]
    for completion in results[0].completions:
        mine = [update for update in seen if update.index == completion.index]
        assert [update.finish_reason for update in mine] == [None] * 8 + ["length"]
        assert [token for update in mine for token in update.tokens] == completion.tokens
        assert "".join(update.text for update in mine) == completion.text
        assert len(completion.logprobs) == 9
    assert shared.generate(["abc"], params)[0].completions == results[0].completions


def test_a_stop_token_ends_a_sample(shared):
    tokens = tokens_of(shared)
    stop = tokens[4]
    result = result_of(shared, stop_tokens=(stop,))
    assert result.tokens == tokens[: tokens.index(stop) + 1]
    assert result.completions[0].finish_reason == "stop"
    assert result.text == shared.tokenizer.decode(result.tokens[:-1])


def test_the_models_own_end_ends_a_sample_unless_ignored(folder, shared):
    tokens = tokens_of(shared)
    own = new_engine(folder)
    own._end_tokens = frozenset([tokens[2]])
    ended = own.generate(["abc"], SamplingParams(max_tokens=20))[0]
    assert ended.tokens == tokens[: tokens.index(tokens[2]) + 1] and ended.completions[0].finish_reason == "stop"
    assert tokens_of(own) == tokens


def test_a_stop_text_ends_a_sample_and_is_not_shown(shared):
    for seed in range(20):  # until a text has a plain letter in its middle
        params = dict(temperature=1.0, seed=seed)
        text = result_of(shared, **params).text
        if letters := [i for i, letter in enumerate(text) if letter.isascii() and i > 3]:
            break
    stop = text[letters[0] - 1 : letters[0] + 1]
    result = result_of(shared, stop=(stop,), **params)
    assert result.text == text[: text.index(stop)] and result.completions[0].finish_reason == "stop"
    assert len(result.tokens) < 20


def test_a_request_ends_with_the_models_length(folder):
    short = new_engine(folder, max_model_len=24)
    result = short.generate(["x" * 20], SamplingParams(max_tokens=100, ignore_eos=True))[0]
    assert len(result.tokens) == 4 and result.completions[0].finish_reason == "length"
    assert len(short.generate(["x" * 23], ENDLESS)[0].tokens) == 1
    with pytest.raises(ValueError, match="prompt must be 23 tokens or fewer, one less than max_model_len; got 24"):
        short.add("x" * 24)


def test_a_repetition_penalty_sees_prompt_and_answer(shared):
    tokens = tokens_of(shared, repetition_penalty=1e9, max_tokens=50)
    assert len(set(tokens)) == 50 and not set(tokens) & set(shared.encode("abc"))


def test_an_aborted_request_leaves_nothing_behind(folder):
    own = new_engine(folder, most_running=2, tokens_a_step=40)
    running = own.add("a" * 50, SamplingParams(n=2))
    waiting = own.add("b")
    own.step()
    own.step()
    own.abort(running)
    with pytest.raises(ValueError, match="id must be that of an unfinished request; got"):
        own.abort(running)
    own.abort(waiting)
    assert not own.has_work and own.step() == []
    cache = own.status.cache
    assert cache.free == cache.blocks and cache.sequences == 0


def test_generate_gives_everything_up_if_it_fails(folder):
    own = new_engine(folder, max_model_len=24)
    with pytest.raises(ValueError, match="prompt must be 23 tokens"):
        own.generate(["fine", "x" * 30])
    assert not own.has_work
    own.add("unfinished")
    with pytest.raises(RuntimeError, match="generate needs an engine without unfinished requests"):
        own.generate(["x"])


def test_a_checkpoint_without_tokenizer_takes_and_gives_tokens(tmp_path):
    torch.manual_seed(0)
    engine_models.save(engine_models.theirs("deepseek_v32", num_hidden_layers=2), tmp_path)
    own = new_engine(tmp_path)
    result = own.generate([[1, 2, 3]], SamplingParams(max_tokens=5))[0]
    assert len(result.tokens) == 5 and result.text == ""
    with pytest.raises(ValueError, match="a prompt that is a text needs a tokenizer; the checkpoint has none"):
        own.add("abc")
    with pytest.raises(ValueError, match="stop needs a tokenizer; the checkpoint has none"):
        own.add([1], SamplingParams(stop=("x",)))


def test_a_missing_chat_template_is_named(folder, tmp_path):
    engine_models.save_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="messages need a chat template; the tokenizer in .* has none"):
        Tokenizer(tmp_path).encode_chat([{"role": "user", "content": "x"}])


def test_the_end_of_an_answer_is_what_the_checkpoint_says(tmp_path):
    engine_models.save_tokenizer(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": 3}')
    assert engine.end_tokens(tmp_path, None) == {3}
    assert engine.end_tokens(tmp_path, tokenizer) == {3, tokenizer.eos_token}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert engine.end_tokens(tmp_path, None) == {5, 6}


@pytest.mark.parametrize(
    "options, error",
    [
        (dict(kv_cache="fp4"), "kv_cache must be one of fp8, bf16; got 'fp4'"),
        (dict(device="tpu"), "device must be cpu, cuda or cuda:N; got 'tpu'"),
        (dict(memory=0), r"memory must be 25216 bytes \(24.62 KiB\), a block, or more; got 0 bytes"),
        (dict(max_model_len=513), "max_model_len must be at most 512, the model's max_position_embeddings; got 513"),
        (dict(max_model_len=512, memory=2**18), r"memory must be 806912 bytes .* or more for a max_model_len of 512"),
        (dict(block_size=0), "block_size must be 1 or more; got 0"),
        (dict(cuda_graphs=True), "cuda_graphs must be False on cpu; got True"),
        (dict(tokens_a_step=128), "tokens_a_step must be more than the 128 of most_running"),
        (dict(host_memory=1), "host_memory must be 25216 bytes .* or more; got 1 bytes"),
    ],
)
def test_wrong_options_are_named(folder, options, error):
    with pytest.raises((TypeError, ValueError), match=error):
        new_engine(folder, **options)


@pytest.mark.parametrize(
    "arguments, error",
    [
        *((dict(prompt=none), "prompt must be one token or more; got none") for none in ("", [])),
        *((dict(prompt=[token]), f"prompt must have tokens of 0 to 258; got {token}") for token in (259, -1, 1.5)),
        *((dict(prompt=prompt), "^prompt ") for prompt in (None, 5, {}, b"x", [None], [1.5], [[1]], [True], "\ud800")),
        *((dict(prompt=[wrong]), "^messages ") for wrong in ({}, {"role": 5, "content": []})),
        *((dict(prompt=[1], params=wrong), "^params ") for wrong in ("x", {}, 5)),
        *((dict(prompt=[1], id=wrong), "^id ") for wrong in (5, [], b"x")),
    ],
)
def test_wrong_requests_are_named(shared, arguments, error):
    with pytest.raises((TypeError, ValueError), match=error):
        shared.add(**arguments)
    assert not shared.has_work


def test_ids_are_those_of_one_request(folder):
    own = new_engine(folder)
    assert own.add("x", id="1") == "1" and own.add("x") == "2"
    with pytest.raises(ValueError, match="id must be one that no unfinished request has; got '2'"):
        own.add("x", id="2")
    with pytest.raises(ValueError, match="n must be at most 128, the samples that may run; got 129"):
        own.add("x", SamplingParams(n=129), id="3")
    assert own.status.waiting == 2
