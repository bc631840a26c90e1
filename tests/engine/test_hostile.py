"""Hostile files and lines: nothing is lost, nothing is executed, and no line ends the batch."""

import json
import math
import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
import torch

import engine_models  # noqa: F401  (skips without transformers' models)
import hostile
from commands import status_of
from mla_backend.cli import main
from mla_backend.engine import Engine, ModelConfig, SamplingParams
from mla_backend.engine.rope import attention_scale, inverse_frequencies, rotation_scale
from mla_backend.engine.tokenizer import end_tokens
from mla_backend.engine.weights import Checkpoint
from mla_backend.generate.prompts import read
from mla_backend.generate.results import ResultFile

CHECKPOINT = Path(__file__).parents[2] / "examples" / "recall" / "checkpoint"
DEFAULTS = SamplingParams(max_tokens=3)
RECORD = b'{"id": "1", "prompt": "x", "completions": [], "usage": {}, "digest": "0123456789abcdef"}\n'


@pytest.mark.parametrize(
    "content",
    [b"my notes", b"a text\nof two lines", b"\x00\xff" * 1000, b'{"prompt": "of an input file"}', RECORD + b"notes"],
    ids=["text", "lines", "binary", "input", "after a record"],
)
def test_what_is_no_record_of_ours_is_refused_and_untouched(tmp_path, content):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="--output"):
        ResultFile(path, resume=True)
    assert path.read_bytes() == content


def test_the_input_is_not_taken_for_the_output(tmp_path):
    path, link = tmp_path / "prompts", tmp_path / "link"
    path.write_text("one prompt")
    link.symlink_to(path)
    for name in (path, link):
        with pytest.raises(ValueError, match="--output"):
            ResultFile(name, resume=True, source=path)
    assert path.read_text() == "one prompt"


def test_a_pipe_and_a_device_are_written_and_never_read(tmp_path):
    pipe, found = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: found.append(pipe.read_bytes()))
    reader.start()
    results = ResultFile(pipe, resume=False)
    results.write({"id": "1"})
    results.close()
    reader.join(timeout=30)
    assert found == [b'{"id": "1"}\n']
    ResultFile(Path("/dev/null"), resume=False).close()
    for path in (Path("/dev/null"), Path("/dev/full")):
        with pytest.raises(ValueError, match="--resume"):
            ResultFile(path, resume=True)


def test_a_byte_order_mark_is_no_part_of_a_prompt():
    (item,), bad = read([b'\xef\xbb\xbf{"prompt": "x"}\n'], DEFAULTS)
    assert item.prompt == "x" and not bad
    assert read([b"\xef\xbb\xbfx\n"], DEFAULTS)[0][0].prompt == "x"


def test_a_tokenizers_own_code_does_not_run(tmp_path):
    """Not even where standard input would say yes to it."""
    (tmp_path / "evil.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\nfrom transformers import PreTrainedTokenizerFast\n"
        "class Evil(PreTrainedTokenizerFast): pass\n"
    )
    (tmp_path / "tokenizer.json").write_bytes((CHECKPOINT / "tokenizer.json").read_bytes())
    config = {"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}, "tokenizer_class": "Evil"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    program = "import sys; from mla_backend.engine.tokenizer import Tokenizer; Tokenizer(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", program, tmp_path], input="y\n" * 9, capture_output=True, text=True)
    assert not (tmp_path / "ran").exists() and done.stdout == ""


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/outside.safetensors", "", "..", "a/b", 5, None, "x" * 5000, "\ud800", "a\0b"]
)
def test_an_index_names_files_of_its_own_folder_alone(tmp_path, name):
    folder = tmp_path / "model"
    folder.mkdir()
    for place in (tmp_path, folder):
        (place / "outside.safetensors").write_bytes((CHECKPOINT / "model.safetensors").read_bytes())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises((ValueError, FileNotFoundError), match="weight_map|names .*, not in ") as refused:
        Checkpoint(folder)
    assert len(str(refused.value)) < 1000


WEIGHTS = (CHECKPOINT / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    "content",
    [b"", WEIGHTS[:4], WEIGHTS[:100], WEIGHTS[:-1], b"\xff" * 8 + WEIGHTS[8:], b"\x00" * 100, WEIGHTS[:8] + b"[" * 9],
    ids=["empty", "length", "header", "end", "longest", "zeros", "brackets"],
)
def test_weights_that_are_cut_or_spoilt_are_named(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="model.safetensors"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("model.safetensors.index.json", text) for text in ("[]", "{}", "null", '{"weight_map": 5}', "[" * 100_000)),
        *(("model.safetensors.index.json", text) for text in ('{"weight_map": {}}', "{")),
        *(("generation_config.json", text) for text in ("[]", "null", "5", '{"eos_token_id": "x"}', "{")),
        ("generation_config.json", '{"eos_token_id": [1.5]}'),
    ],
)
def test_json_that_is_none_is_named(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=name):
        end_tokens(tmp_path, None) if name.startswith("generation") else Checkpoint(tmp_path)


CONFIG = json.loads((CHECKPOINT / "config.json").read_text())
ODD = [None, True, -1, 0, 1.5, 10**12, 10**400, "x", "", [], [1], [[]], {}, {"a": 1}, math.nan, math.inf, -1e300]


@pytest.mark.parametrize("key", sorted(CONFIG))
def test_a_config_with_any_value_in_any_key_is_read_or_refused_by_its_name(key):
    """Nothing is allocated for it, and every refusal is a ValueError."""
    for value in ODD:
        try:
            ModelConfig.from_dict({**CONFIG, key: value})
        except ValueError as error:
            assert str(error)


YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=4096, rope_theta=10000.0)


@pytest.mark.parametrize("key", [*YARN, "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor"])
@pytest.mark.parametrize("value", [v for v in ODD if v is not None])
def test_yarn_with_any_value_gives_finite_numbers_or_is_refused(key, value):
    raw = {k: v for k, v in CONFIG.items() if not k.startswith("rope")} | {"rope_parameters": {**YARN, key: value}}
    try:
        config = ModelConfig.from_dict(raw)
    except ValueError as error:
        assert str(error)
    else:
        assert inverse_frequencies(config).isfinite().all()
        assert math.isfinite(rotation_scale(config.yarn)) and math.isfinite(attention_scale(config))


@pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta", "n_routed_experts", "num_hidden_layers", "vocab_size"])
@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), 10**16, "x", None])
def test_what_would_be_computed_wrongly_is_refused(key, value):
    raw = {k: v for k, v in CONFIG.items() if k != "rope_parameters"} | {"rope_theta": 10000.0, key: value}
    with pytest.raises(ValueError, match=key):
        ModelConfig.from_dict(raw)


@pytest.mark.parametrize("params", [{}, {"temperature": 0.7}, {"temperature": 0.7, "top_k": 5}, {"logprobs": 3}])
def test_logits_that_are_not_finite_end_their_request_alone(params):
    """Token 5's embedding is NaN, so only requests that have it are without logits."""
    engine = Engine(CHECKPOINT, device="cpu", dtype=torch.float32, kv_cache="bf16", memory=1 << 24)
    embedding = engine.model.model.embed_tokens
    embedding.weight = torch.nn.Parameter(embedding.weight.clone(), requires_grad=False)
    embedding.weight[5] = torch.nan
    wanted = SamplingParams(max_tokens=4, ignore_eos=True, seed=1, **params)
    bad, good = engine.generate([[1, 2, 5, 3], [1, 2, 4, 3]], wanted)
    assert bad.completions[0].finish_reason == "error" and bad.completions[0].error and bad.tokens == []
    assert good.completions[0].finish_reason == "length" and len(good.tokens) == 4
    assert not engine.has_work and engine.status.cache.usage == 0


status = partial(status_of, program=main)
QUESTION = ("generate", CHECKPOINT, "Josef lives in Luanda. Where does Josef live?", "--device", "cpu")


def sentence(capfd):
    """What was said last. It is no traceback."""
    said = capfd.readouterr().err
    assert "Traceback" not in said
    return said.strip().splitlines()[-1]


@pytest.mark.parametrize("words", [("doctor",), (*QUESTION, "--output", "/dev/full"), QUESTION])
def test_a_full_disk_is_a_sentence(words, monkeypatch, capfd):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        assert status(*words) == 1
        monkeypatch.undo()
    assert "No space left on device" in sentence(capfd)


@pytest.mark.parametrize(
    ("stream", "words", "said"),
    [
        *(("stdout", words, "standard output is closed") for words in (("doctor",), QUESTION)),
        *(("stdin", ("generate", CHECKPOINT, *more), "PROMPT or --input must be") for more in ((), ("--input", "-"))),
    ],
)
def test_a_closed_stream_is_refused(stream, words, said, monkeypatch, capfd):
    monkeypatch.setattr(sys, stream, None)
    assert status(*words) == 2
    monkeypatch.undo()
    assert said in sentence(capfd)


def test_with_an_output_file_standard_output_may_be_closed(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdout", None)
    assert status(*QUESTION, "--output", tmp_path / "results") == 0
    assert json.loads((tmp_path / "results").read_text())["completions"]


@pytest.mark.parametrize(
    ("option", "size"),
    [(option, size) for option in ("--memory", "--host-memory") for size in ("9999T", "9" * 400 + "T")]
    + [("--block-size", 10**11)],
)
def test_more_memory_than_there_is_is_refused(option, size, capfd):
    assert status(*QUESTION, option, size) == 2
    assert f"{option} must be" in sentence(capfd)


def test_ctrl_c_while_the_model_is_loaded_is_no_traceback(monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("mla_backend.engine.engine.load_model", interrupted)
    assert status(*QUESTION) == 130


SEEDS = {"lines": range(300), "files": range(150), "checkpoints": [*range(50), 10023], "requests": range(50)}


@pytest.mark.parametrize("attack", SEEDS)
def test_hostile_input_is_refused_or_dealt_with(attack):
    hostile.run(attack, SEEDS[attack])
