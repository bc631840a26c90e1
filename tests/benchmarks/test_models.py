"""Models of real width: of the right shape, and the same ones each time."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from commands import status_of
from mla_backend import engine
from serving_benchmarks.models import models

NARROW = dict(hidden_size=128, intermediate_size=192, moe_intermediate_size=64, q_lora_rank=96, qk_nope_head_dim=32)
NARROW |= dict(v_head_dim=48, index_n_heads=32, vocab_size=320, max_position_embeddings=512)


def narrow(like: str, **changes) -> dict:
    return models.config(like, layers=2, heads=4, **{**NARROW, **changes})


@pytest.fixture(scope="module", params=("deepseek-v3.2", "glm-5"))
def folder(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("narrow") / "model"
    models.write(folder, narrow(request.param), shard_bytes=300_000)
    return folder


WIDTHS = [
    ("deepseek-v3.2", 16, (16 * 192, 1536), (16 * 256, 512), (8192, 1536)),
    ("glm-5", 64, (64 * 256, 2048), (64 * 448, 512), (4096, 2048)),
]


@pytest.mark.parametrize(("like", "heads", "q_b", "kv_b", "wq_b"), WIDTHS)
def test_widths_are_those_of_the_real_models(like, heads, q_b, kv_b, wq_b):
    config = models.config(like, layers=3, heads=heads, experts=16)
    shapes = {plan.name: plan.shape for plan in models.tensors(config)}
    for name, shape in (("q_b_proj", q_b), ("kv_b_proj", kv_b), ("indexer.wq_b", wq_b)):
        assert [shapes[f"model.layers.{i}.self_attn.{name}.weight"] for i in range(3)] == [shape] * 3
    assert shapes["lm_head.weight"] == (config["vocab_size"], config["hidden_size"])
    assert sum(name.startswith("model.layers.2.mlp.experts.") for name in shapes) == 16 * 3
    dense = models.tensors(models.config("deepseek-v3", layers=3, heads=heads))
    assert not any(".indexer." in plan.name for plan in dense)


def test_a_checkpoint_is_written_file_by_file_and_loads(folder):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 3 and {file.name for file in files} == set(index["weight_map"].values())
    found = {}
    for file in files:
        tensors = load_file(file)
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= 300_000
        found |= tensors
    assert sum(t.nbytes for t in found.values()) == index["metadata"]["total_size"]
    assert found["model.layers.0.self_attn.indexer.k_norm.weight"].dtype == torch.float32
    assert engine.load_model(folder).config.layers == 2


def test_weights_keep_activations_where_they_are(folder):
    model = engine.load_model(folder)
    for name, value in model.named_parameters():
        if value.dim() == 2:
            assert value.float().std() * value.shape[1] ** 0.5 == pytest.approx(1, abs=0.1), name


def test_the_same_seed_gives_the_same_weights_in_files_of_any_size(tmp_path):
    def drawn(name: str, **options) -> dict[str, torch.Tensor]:
        models.write(tmp_path / name, narrow("glm-5"), **options)
        return {k: v for file in (tmp_path / name).glob("*.safetensors") for k, v in load_file(file).items()}

    one, same, other = drawn("a"), drawn("b", shard_bytes=100_000), drawn("c", seed=1)
    assert all(torch.equal(one[name], same[name]) for name in one) and one.keys() == same.keys()
    assert not torch.equal(one["lm_head.weight"], other["lm_head.weight"])
    assert not torch.equal(one["lm_head.weight"], one["model.embed_tokens.weight"])


def test_without_weights_there_is_a_full_model_for_dummy_ones(tmp_path):
    told = "models --like deepseek-v3.2 --layers 61 --dense-layers 3 --experts 256 --vocab-size 320 --no-weights"
    assert status_of(*told.split(), "--output", tmp_path / "model") == 0
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert (config["num_hidden_layers"], config["n_routed_experts"], config["num_attention_heads"]) == (61, 256, 128)
    assert config["quantization_config"]["weight_block_size"] == [128, 128] and "random_weights_seed" not in config
    assert not [*(tmp_path / "model").glob("*.safetensors*")]


def test_the_command_makes_a_model_once(tmp_path, monkeypatch):
    monkeypatch.setitem(models.LIKE, "glm-5", {**models.LIKE["glm-5"], **NARROW})
    shape = ("--layers", 3, "--heads", 4, "--experts", 4, "--dense-layers", 2, "--vocab-size", 64, "--seed", 7)
    words = ("models", "--like", "glm-5", *shape, "--output", tmp_path / "made")
    assert status_of(*words) == 0 and status_of(*words) == 2, "it is there already"
    wanted = models.config("glm-5", layers=3, heads=4, experts=4, dense_layers=2, vocab_size=64)
    assert status_of("models", "--like", "glm-5", "--layers", 99999, "--output", tmp_path / "other") == 2
    assert models.read(tmp_path / "made") == {**wanted, "random_weights_seed": 7}


def test_its_tokenizer_gives_back_the_tokens_of_a_text(folder):
    tokenizer = engine.Tokenizer(folder)
    tokens = [5, 319, 7, *range(2, 320)]  # among them t10 to t199, whose words begin with that of a special token
    assert tokenizer.encode(tokenizer.decode(tokens)) == tokens and tokenizer.eos_token == 1
    written = json.loads((folder / "tokenizer_config.json").read_text())
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast"  # which transformers 4 knows, too
