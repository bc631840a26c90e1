"""Which models the backends serve."""

from typing import TYPE_CHECKING, NamedTuple

from mla_backend.vllm_plugin import versions

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

LATENT, ROPE = 512, 64
"""Dims of what is cached for a token. Models without rope cache the former alone."""
MOST_HEADS = 256
SERVED = {versions.SPARSE: ("sparse", "DeepSeek-V3.2 and GLM-5"), versions.DENSE: ("dense", "DeepSeek-V3 and Kimi-K2")}


class Family(NamedTuple):
    """Models of vLLM 0.32 and 0.33 that are alike for our backends."""

    models: str
    """As docs/serving.md names them."""
    architectures: frozenset[str]
    """As vLLM's registry names them, without drafts."""
    backend: str | None
    why_not: str | None = None
    has_equal_layers: bool = True
    """Whether all layers cache one row per token."""


V4 = Family(
    "DeepSeek-V4",
    frozenset({"DeepseekV4ForCausalLM", "DeepseekV4ForConditionalGeneration"}),
    versions.SPARSE,
    has_equal_layers=False,
)
V41 = Family("DeepSeek-V4.1", frozenset({"DeepseekV41ForCausalLM"}), versions.SPARSE, has_equal_layers=False)
FAMILIES = (
    Family("DeepSeek-V3.2, GLM-5", frozenset({"DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"}), versions.SPARSE),
    Family("HY V4", frozenset({"HYV4ForCausalLM"}), versions.SPARSE),
    Family(
        "GLM-5.3-Flash",
        frozenset({"Glm5NextForCausalLM", "Glm5NextForConditionalGeneration"}),
        versions.SPARSE,
        has_equal_layers=False,
    ),
    V4,
    V41,
    Family(
        "DeepSeek-V2, V3, VL2; Kimi-K2, K2.5, VL; GLM-4.7-Flash; Mistral Large 3; LongCat-Flash; Pangu Ultra; A.X K1",
        frozenset(
            {
                *("AXK1ForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekVLV2ForCausalLM"),
                *("Glm4MoeLiteForCausalLM", "KimiK25ForConditionalGeneration", "KimiVLForConditionalGeneration"),
                *("LongcatFlashForCausalLM", "LongcatFlashNgramForCausalLM", "MistralLarge3ForCausalLM"),
                "PanguUltraMoEForCausalLM",
            }
        ),
        versions.DENSE,
    ),
    Family(
        "Kimi-Linear, Kimi-K3, Ling 2.5 and 3",
        frozenset(
            {
                *("BailingMoeV2_5ForCausalLM", "BailingMoeV3ForCausalLM", "BailingMoeV3VLForConditionalGeneration"),
                *("KimiLinearForCausalLM", "KimiK3ForConditionalGeneration"),
            }
        ),
        versions.DENSE,
        has_equal_layers=False,
    ),
    Family("dots3.note", frozenset({"Dots3NoteForCausalLM"}), None, "vLLM's model names its backend itself"),
    Family("Sarvam", frozenset({"SarvamMLAForCausalLM"}), None, "vLLM's configuration does not call it MLA"),
    Family("MiniCPM3", frozenset({"MiniCPM3ForCausalLM"}), None, "vLLM caches expanded keys and values for it"),
    Family(
        "Step5, MiniMax-M3, Qwen4",
        frozenset(
            {
                *("Step5ForCausalLM", "Step5ForConditionalGeneration", "Qwen4ExpForCausalLM"),
                *("Qwen4ExpForConditionalGeneration", "MiniMaxM3SparseForCausalLM"),
                "MiniMaxM3SparseForConditionalGeneration",
            }
        ),
        None,
        "their sparse attention is not multi-head latent attention",
    ),
)
V4_DRAFTS = {"DeepSeekV4MTPModel": V4, "DSparkDraftModel": V4, "DSparkV41DraftModel": V41}


def family_of(model_config: "ModelConfig") -> Family | None:
    """The family of a model whose architecture we know."""
    named = getattr(model_config, "architectures", None) or ()
    return next((family for family in FAMILIES if not family.architectures.isdisjoint(named)), None)


def is_draft(vllm_config: "VllmConfig") -> bool:
    """Whether this is a draft model's configuration, which vLLM makes from that of the model it drafts for."""
    speculative = vllm_config.speculative_config
    return (
        speculative is not None
        and vllm_config.model_config is speculative.draft_model_config
        and vllm_config.model_config is not speculative.target_model_config
    )


def has_sparse_mla(model_config: "ModelConfig") -> bool:
    """Whether a model's attention is that of DeepSeek-V3.2, GLM-5 and GLM-5.3-Flash."""
    return why_not(versions.SPARSE, model_config) is None


def v4_family(model_config: "ModelConfig") -> Family | None:
    """DeepSeek-V4 or V4.1 if a model is one or drafts for it: layers have a window of tokens and compressed ones."""
    drafted = (V4_DRAFTS[name] for name in model_config.architectures if name in V4_DRAFTS)
    family = next(drafted, None) or family_of(model_config)
    return family if family in (V4, V41) else None


def has_v4_attention(model_config: "ModelConfig") -> bool:
    return v4_family(model_config) is not None


def is_served(backend: str, model_config: "ModelConfig") -> bool:
    """Whether a backend serves a model."""
    return (backend == versions.SPARSE and has_v4_attention(model_config)) or why_not(backend, model_config) is None


def why_not(backend: str, model_config: "ModelConfig") -> str | None:
    """Why a backend can't serve a model, DeepSeek-V4 apart, and what to use instead; None if it can."""
    text_config = model_config.hf_text_config
    instead = "Leave out --attention-backend, and vLLM picks another for it."
    kind = getattr(text_config, "model_type", "this model")
    is_sparse = bool(getattr(text_config, "index_topk", None))
    family = family_of(model_config)
    if family is not None and family.why_not is not None:
        return f"does not serve {family.models}: {family.why_not}. {instead}"
    if not model_config.use_mla or is_sparse != (backend == versions.SPARSE):
        if model_config.use_mla:
            instead = f"Use --attention-backend {versions.SPARSE if is_sparse else versions.DENSE}."
        which, examples = SERVED[backend]
        return (
            f"serves models with {which} multi-head latent attention, such as {examples}, and {kind} is none. {instead}"
        )
    sizes = tuple(getattr(text_config, name, None) for name in ("kv_lora_rank", "qk_rope_head_dim"))
    ropes = (ROPE, 0) if is_sparse else (ROPE,)
    if sizes not in [(LATENT, rope) for rope in ropes] or getattr(text_config, "compress_ratios", None):
        return (
            f"caches {LATENT} latent and {' or '.join(map(str, ropes))} rope values a token; {kind} has a kv_lora_rank "
            f"and a qk_rope_head_dim of {sizes[0]} and {sizes[1]}, or compresses its cache. {instead}"
        )
    heads = model_config.model_arch_config.total_num_attention_heads
    if heads > MOST_HEADS:
        return f"takes up to {MOST_HEADS} attention heads; {kind} has {heads}. {instead}"
    return None
