"""`LLM(...)` of HY V4 on a CPU, against transformers' model: sinks, gates, and layers that share an indexer."""

import re
from pathlib import Path

import pytest
import torch

import vllm_installed  # noqa: F401
from vllm_models import errors_of, generate, running

hy_v4 = pytest.importorskip("transformers.models.hy_v4.modeling_hy_v4")


def rotate_pairs(q, k, cos, sin, unsqueeze_dim=1):
    """vLLM rotates neighbours, as the released checkpoint has them; transformers halves."""
    cos, sin = (x[..., : x.shape[-1] // 2].repeat_interleave(2, -1).unsqueeze(unsqueeze_dim) for x in (cos, sin))
    turned = [torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) for x in (q, k)]
    return q * cos + turned[0] * sin, k * cos + turned[1] * sin


def named_as_released(name: str) -> str:
    name = re.sub(r"hc_pre\.hc_(attn|mlp)_layer", r"hc_\1_layer.hc_pre", name).replace("hc_pre.hc_head", "hc_head")
    return re.sub(r"mlp\.(shared_experts\.)?linear_gate", r"mlp.\1gate_proj", name)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[torch.nn.Module, Path]:
    """A random model and its folder. All positions are selected, as transformers' keys are not in FP8."""
    from safetensors.torch import load_file, save_file

    import engine_models

    folder, none = tmp_path_factory.mktemp("hy_v4"), ("first_k_dense_replace", "topk_group")
    shape = {name: value for name, value in engine_models.SHAPE.items() if name not in none}
    shape |= dict(indexer_types=["full", "shared", "full", "shared"], rope_parameters=engine_models.PLAIN)
    shape |= dict(n_group=1, topk_group=1, num_experts_per_tok=8, index_topk=512)
    torch.manual_seed(0)
    model = engine_models.random_model("HYV4", **shape, pad_token_id=None, bos_token_id=0, eos_token_id=None)
    for layer in model.model.layers:
        layer.self_attn.sinks.data = torch.linspace(-2, 4, 4)
    engine_models.save(model, folder)
    (folder / "model.safetensors.index.json").unlink()
    parts = [(file, load_file(file)) for file in folder.glob("*.safetensors")]
    for file, part in parts:
        save_file({named_as_released(name): value for name, value in part.items()}, file, metadata={"format": "pt"})
    return model, folder


@pytest.mark.parametrize(("cache_dtype", "tolerance"), [("auto", 0.05), ("fp8", 0.2)])
def test_vllms_model_gives_the_probabilities_of_transformers(made, prompts, monkeypatch, cache_dtype, tolerance):
    model, folder = made
    monkeypatch.setattr(hy_v4, "apply_rotary_pos_emb", rotate_pairs)
    with running(folder, kv_cache_dtype=cache_dtype) as llm:
        behind, off = errors_of(model, prompts, generate(llm, prompts, logprobs=0))
    assert behind < tolerance and off < tolerance
