"""Models of real width: of the right shape, the same ones each time, and such that attention means something."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import engine_models
from mla_backend import engine
from serving_benchmarks.models import model_config, models

NARROW = dict(
    hidden_size=128,
    intermediate_size=192,
    moe_intermediate_size=64,
    q_lora_rank=96,
    qk_nope_head_dim=32,
    v_head_dim=48,
    index_n_heads=32,
    vocab_size=320,
    max_position_embeddings=512,
)


def narrow(like: str, **changes) -> dict:
    return models.config(like, layers=2, heads=4, **{**NARROW, **changes})


@pytest.fixture(scope="module", params=models.LIKE)
def folder(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("narrow") / "model"
    models.write(folder, narrow(request.param), shard_bytes=300_000)
    return folder


@pytest.mark.parametrize(
    ("like", "heads", "wide"),
    [
        (
            "deepseek-v3.2",
            16,
            {"q_b_proj": (16 * 192, 1536), "kv_b_proj": (16 * 256, 512), "indexer.wq_b": (8192, 1536)},
        ),
        ("glm-5", None, {"q_b_proj": (64 * 256, 2048), "kv_b_proj": (64 * 448, 512), "indexer.wq_b": (4096, 2048)}),
    ],
)
def test_widths_are_those_of_the_real_models(like, heads, wide):
    config = models.config(like, layers=3, heads=heads, experts=16)
    assert config["index_topk"] == 2048 and config["kv_lora_rank"] == 512
    shapes = {plan.name: plan.shape for plan in models.tensors(config)}
    for name, shape in wide.items():
        assert [shapes[f"model.layers.{i}.self_attn.{name}.weight"] for i in range(3)] == [shape] * 3
    hidden = config["hidden_size"]
    assert shapes["lm_head.weight"] == (config["vocab_size"], hidden)
    assert shapes["model.layers.0.mlp.down_proj.weight"] == (hidden, config["intermediate_size"])
    assert shapes["model.layers.2.mlp.experts.15.down_proj.weight"] == (hidden, 2048)
    assert "model.layers.2.mlp.experts.16.down_proj.weight" not in shapes


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


def test_a_layer_that_drafts_is_written_beside_the_others(tmp_path):
    config = narrow("deepseek-v3.2", num_nextn_predict_layers=1)
    models.write(tmp_path, config)
    assert engine.load_model(tmp_path).config.layers == 2, "the engine leaves it out"
    shapes = {plan.name: plan.shape for plan in models.tensors(config)}
    drafting = {name.removeprefix("model.layers.2."): shape for name, shape in shapes.items() if ".layers.2." in name}
    last = {name.removeprefix("model.layers.1."): shape for name, shape in shapes.items() if ".layers.1." in name}
    assert last.items() < drafting.items()
    assert {name: drafting[name] for name in drafting.keys() - last.keys()} == {
        "eh_proj.weight": (128, 256),
        "enorm.weight": (128,),
        "hnorm.weight": (128,),
        "shared_head.norm.weight": (128,),
        "shared_head.head.weight": (320, 128),
        "embed_tokens.weight": (320, 128),
    }


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


def test_a_result_file_has_what_makes_it_again(tmp_path, monkeypatch):
    for like in models.LIKE:
        monkeypatch.setitem(models.LIKE, like, {**models.LIKE[like], **NARROW})
    wanted = models.config("glm-5", layers=3, heads=4, experts=4, dense_layers=2, vocab_size=64)
    models.write(tmp_path / "m", wanted, seed=7)
    described = model_config.describe(str(tmp_path / "m"), model_config.read(tmp_path / "m"), None)
    python, dash_m, module, *arguments = models.command_for(described, str(tmp_path / "again")).split()
    assert (python, dash_m, module) == ("python", "-m", "serving_benchmarks.models.models")
    assert models.main(arguments) == 0
    for file in ("config.json", "model-00001-of-00001.safetensors"):
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "m" / file).read_bytes()


@pytest.mark.parametrize(
    ("content", "text"),
    [(b"[1]", "a vocab_size"), (b"{", "must be JSON: "), (b"\xff", "must be JSON: "), (b"{}", "a vocab_size")],
)
def test_a_config_that_is_none_is_named(tmp_path, content, text):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=text) as raised:
        model_config.read(tmp_path)
    assert str(raised.value).startswith(f"{tmp_path}/config.json ") and "\n" not in str(raised.value)


def test_its_tokenizer_gives_back_the_tokens_of_a_text(folder):
    tokenizer = engine.Tokenizer(folder)
    tokens = [5, 319, 7, *range(2, 320)]  # among them t10 to t199, whose words begin with that of a special token
    assert tokenizer.encode(tokenizer.decode(tokens)) == tokens and tokenizer.eos_token == 1
    written = json.loads((folder / "tokenizer_config.json").read_text())
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast"  # which transformers 4 knows, too


@pytest.mark.parametrize("topk", [32, 2048])
@pytest.mark.parametrize("like", models.LIKE)
def test_attention_matters(tmp_path, like, topk):
    """Whether contexts are longer than what the indexer selects, or not."""
    models.write(tmp_path / "model", narrow(like, index_topk=topk))
    with engine_models.one_thread():
        found = models.check(tmp_path / "model", length=100)
    assert found.repeated == found.prompts == 8
    assert found.attention_matters, found


def test_the_check_finds_models_that_attention_means_nothing_to(tmp_path, monkeypatch):
    """With small weights, as vLLM makes them up."""
    draw = models.TensorPlan.draw

    def small(plan: models.TensorPlan, seed: int) -> torch.Tensor:
        drawn = draw(plan, seed)
        return drawn.uniform_(-1e-3, 1e-3) if drawn.dim() > 1 else drawn

    monkeypatch.setattr(models.TensorPlan, "draw", small)
    models.write(tmp_path / "model", narrow("deepseek-v3.2"))
    with engine_models.one_thread():
        found = models.check(tmp_path / "model", length=100)
        assert found.repeated == 8 and not found.attention_matters
        assert models.main(["--check", "--output", str(tmp_path / "model"), "--length", "100", "--device", "cpu"]) == 1


def test_the_program_writes_and_checks(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(models.LIKE, "glm-5", {**models.LIKE["glm-5"], **NARROW})
    arguments = ["--like", "glm-5", "--layers", "2", "--heads", "4", "--experts", "4", "--output", str(tmp_path / "m")]
    with engine_models.one_thread():
        assert models.main([*arguments, "--check", "--length", "100", "--prompts", "5", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "2 layers, 4 heads, 4 experts" in printed and "of 5 prompts" in printed
    assert models.main(arguments) == 2
    assert "folder must not have a checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "--like says what to write"),
        (["--like", "glm-5", "--layers", "0"], "--layers must be 1 or more; got 0"),
        (["--like", "glm-5", "--dense-layers", "-1"], "--dense-layers must be 0 or more; got -1"),
        (["--like", "glm-5", "--vocab-size", "2", "--check"], "--vocab-size must be 3 or more"),
        (["--check", "--device", "gpu"], "--device must be cpu, cuda or cuda:N; got gpu"),
        (["--check", "--device", "meta"], "--device must be cpu, cuda or cuda:N; got meta"),
        (["--check", "--device", "cuda"], "--device must be here; got cuda, and there are 0 GPUs"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path, arguments, text, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SystemExit) as stopped:
        models.main([*arguments, "--output", str(tmp_path)])
    assert stopped.value.code == 2 and text in capsys.readouterr().err
