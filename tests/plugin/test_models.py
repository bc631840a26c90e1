"""The table of models in docs/serving.md, the plugin's own, and vLLM's registry say the same."""

import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

import vllm_installed  # noqa: F401
from mla_backend import FORMATS
from mla_backend.vllm_plugin import model_check, models

GUIDE, VLLM = Path(__file__).parents[2] / "docs/serving.md", Path(importlib.util.find_spec("vllm").origin).parent
OTHERS = {
    *("DeepseekForCausalLM", "PanguEmbeddedForCausalLM", "PanguProMoEV2ForCausalLM", "SarvamMoEForCausalLM"),
    *("UnlimitedOCRForCausalLM", "DeepseekV3BidirectionalModel"),
}
"""Without MLA, in a file or a folder of one with it."""
IN_OTHERS = {
    *("DeepseekVLV2ForCausalLM", "KimiK25ForConditionalGeneration", "KimiVLForConditionalGeneration"),
    *("BailingMoeV3VLForConditionalGeneration", "LongcatFlashNgramForCausalLM", "MistralLarge3ForCausalLM"),
}
"""With the language model of another."""
NOT_MLA = models.FAMILIES[-2:]
MLA = re.compile(r"\bMLAAttention\b|MultiHeadLatentAttentionWrapper|DeepseekV2MLAAttention|SparseAttnIndexer")


def sources(module: str) -> str:
    """The text of a model's file, or of all files of its folder."""
    path = VLLM.parent.joinpath(*(module if "." in module else f"vllm.model_executor.models.{module}").split("."))
    return "".join(file.read_text() for file in (path.rglob("*.py") if path.is_dir() else [path.with_suffix(".py")]))


def test_every_model_of_vllm_with_mla_is_in_the_table():
    from vllm.model_executor.models import registry

    listed = {**registry._TEXT_GENERATION_MODELS, **registry._MULTIMODAL_MODELS, **registry._EMBEDDING_MODELS}
    modules = {module: sources(module) for module in {module for module, _ in listed.values()}}
    found = {architecture for architecture, (module, _) in listed.items() if MLA.search(modules[module])}
    known = {name for family in models.FAMILIES for name in family.architectures}
    of_none = {name for family in NOT_MLA for name in family.architectures}
    assert found - OTHERS == known - IN_OTHERS - of_none
    assert all(name.startswith("Step5") for name in known - {*listed}), "new in 0.33"
    assert OTHERS <= {*listed}
    assert {*models.V4_DRAFTS} <= {*registry._SPECULATIVE_DECODING_MODELS}


@pytest.mark.skipif(not GUIDE.is_file(), reason="needs the source tree")
def test_the_guide_has_the_same_table():
    section = GUIDE.read_text().split("## Models")[1].split("\n##")[0]
    for family in models.FAMILIES:
        row = f"{family.why_not} |"
        if family.backend is not None:
            rows = model_check.ROWS[family.backend, family.models != "GLM-5.3-Flash"].values()
            rows = model_check.V4_ROWS.get(family, rows)
            widths = [FORMATS[name].token_bytes for name in rows]
            row = f"`{family.backend}` | {', '.join(map(str, widths))} |"
        assert f"\n| {family.models} | {row}" in section
    assert section.count("\n| ") == len(models.FAMILIES) + 2, "and two lines of headings"


@pytest.mark.parametrize("family", [family for family in models.FAMILIES if family.backend is None])
def test_the_error_for_a_model_that_is_not_served_says_what_the_table_says(family):
    for architecture in family.architectures:
        config = SimpleNamespace(architectures=[architecture], hf_text_config=SimpleNamespace(), use_mla=True)
        for backend in models.SERVED:
            assert f"{family.models}: {family.why_not}. Leave out" in models.why_not(backend, config)
