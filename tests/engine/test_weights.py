"""Checkpoints are read as they are, FP8 ones too, and what is wrong with them is named."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import engine_models
from mla_backend.engine import Checkpoint, ExactAttention, load_model
from mla_backend.engine.weights import dequantise_blocks

BLOCK = 128
E4M3_MAX = 448.0
WIDE = (".gate.weight", "embed_tokens.weight", "lm_head.weight", "weights_proj.weight")
"""Matrices that released FP8 checkpoints don't quantise."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return engine_models.save(engine_models.theirs("deepseek_v32"), tmp_path_factory.mktemp("saved"))


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def write(folder: Path, tensors: dict[str, torch.Tensor], source: Path, **more) -> Path:
    """As a checkpoint of one file, with the config of another one."""
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**json.loads((source / "config.json").read_text()), **more}))
    return folder


def quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales, and what they stand for."""
    values, scales, meant = [], [], []
    for rows in weight.split(BLOCK):
        row = [(block, block.abs().max() / E4M3_MAX) for block in rows.split(BLOCK, dim=1)]
        values.append(torch.cat([(block / scale).to(torch.float8_e4m3fn).float() for block, scale in row], 1))
        meant.append(torch.cat([(block / scale).to(torch.float8_e4m3fn).float() * scale for block, scale in row], 1))
        scales.append(torch.stack([scale for _, scale in row]))
    return torch.cat(values).to(torch.float8_e4m3fn), torch.stack(scales), torch.cat(meant)


def test_fp8_checkpoints_are_dequantised(saved, tmp_path):
    small, wide = {}, {}
    for name, tensor in tensors_of(saved).items():
        wide[name] = small[name] = tensor
        if tensor.dim() == 2 and not name.endswith(WIDE):
            small[name], small[f"{name}_scale_inv"], wide[name] = quantised(tensor)
    # a layer for speculation, of which the model makes no use
    small["model.layers.4.eh_proj.weight"] = torch.zeros(2, 2)
    block = dict(quantization_config=dict(quant_method="fp8", weight_block_size=[BLOCK, BLOCK]))
    small_folder = write(tmp_path / "small", small, saved, **block)
    wide_folder = write(tmp_path / "wide", wide, saved)
    assert sum(t.dtype == torch.float8_e4m3fn for t in small.values()) > 60

    prompt = engine_models.prompt_of(100)
    model = load_model(small_folder, dtype=torch.float32, sparse=ExactAttention())
    ours = engine_models.Engine(model, "fp32", "fp32").generate([prompt], 5)[0]
    family, how = engine_models.transformers.DeepseekV32ForCausalLM, dict(attn_implementation="eager")
    theirs = family.from_pretrained(wide_folder, dtype=torch.float32, **how)
    tokens, logits = engine_models.their_generation(theirs.eval(), prompt, 5)
    assert ours.generated == tokens
    torch.testing.assert_close(ours.logits, logits, atol=1e-4, rtol=0)


def test_blocks_may_be_cut_at_the_edges():
    weight = torch.randn(300, 130)
    values, scales, meant = quantised(weight)
    assert scales.shape == (3, 2)
    assert torch.equal(dequantise_blocks(values, scales, (BLOCK, BLOCK)), meant)
    with pytest.raises(ValueError, match=r"weight_scale_inv must be \[3, 2\].*got \[2, 2\]"):
        dequantise_blocks(values, scales[:2], (BLOCK, BLOCK))


def test_tensors_come_in_the_dtype_that_the_model_declares(saved):
    model = load_model(saved)
    assert model.lm_head.weight.dtype == model.model.norm.weight.dtype == torch.bfloat16
    layer = model.model.layers[1]
    for tensor in (layer.mlp.gate.weight, layer.mlp.gate.e_score_correction_bias):
        assert tensor.dtype == torch.float32
    assert layer.self_attn.indexer.weights_proj.weight.dtype == torch.float32
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_missing_unexpected_and_wrong_tensors_are_named(saved, tmp_path):
    tensors, name, norm = tensors_of(saved), "model.layers.0.self_attn.indexer.wk.weight", "model.norm.weight"
    lacking = {key: tensor for key, tensor in tensors.items() if key != norm}
    bare = {**tensors, name: tensors[name].to(torch.float8_e4m3fn)}
    for number, (says, given) in enumerate(
        {
            r"must have the tensors of the model; it lacks model\.norm\.weight$": lacking,
            r"lacks .*norm\.weight and has .*norm\.bias, which": {**lacking, "model.norm.bias": torch.zeros(2)},
            r"lacks lm_head\.weight, .* and \d+ more$": {norm: torch.zeros(128)},
            r"model\.norm\.weight must be \[128\]; .* has \[5\]": {**tensors, norm: torch.zeros(5)},
            f"{name} is torch.float8_e4m3fn and must have {name}_scale_inv": bare,
            "config.json must have a quantization_config": {**bare, f"{name}_scale_inv": torch.ones(1, 1)},
        }.items()
    ):
        with pytest.raises(ValueError, match=says):
            load_model(write(tmp_path / str(number), given, saved))


def test_missing_files_are_named(saved, tmp_path):
    with pytest.raises(FileNotFoundError, match="folder must be a checkpoint with a config.json"):
        load_model(tmp_path)
    with pytest.raises(FileNotFoundError, match="folder must have model.safetensors.index.json or model.safetensors"):
        Checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "1.safetensors"}}))
    with pytest.raises(FileNotFoundError, match=r"names 1\.safetensors, not in"):
        Checkpoint(tmp_path)
    save_file({"b": torch.zeros(1)}, tmp_path / "1.safetensors")
    with pytest.raises(ValueError, match=r"a can't be read from .*1\.safetensors"):
        Checkpoint(tmp_path).load("a", torch.float32)
