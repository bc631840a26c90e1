"""Which models the backends serve."""

from typing import TYPE_CHECKING

from mla_backend.vllm_plugin import versions

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

LATENT, ROPE = 512, 64
"""Dims of what is cached for a token. Models without rope cache the former alone."""
MOST_HEADS = 256
SERVED = {versions.SPARSE: ("sparse", "DeepSeek-V3.2 and GLM-5"), versions.DENSE: ("dense", "DeepSeek-V3 and Kimi-K2")}
V4 = {"DeepseekV4ForCausalLM", "DeepseekV4ForConditionalGeneration", "DeepSeekV4MTPModel", "DSparkDraftModel"}
"""Architectures whose layers are DeepSeek-V4's."""


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


def has_v4_attention(model_config: "ModelConfig") -> bool:
    """Whether a model's layers are DeepSeek-V4's, which have a window of tokens and compressed ones."""
    return not V4.isdisjoint(model_config.architectures)


def is_served(backend: str, model_config: "ModelConfig") -> bool:
    """Whether a backend serves a model."""
    return (backend == versions.SPARSE and has_v4_attention(model_config)) or why_not(backend, model_config) is None


def why_not(backend: str, model_config: "ModelConfig") -> str | None:
    """Why a backend can't serve a model, DeepSeek-V4 apart, and what to use instead; None if it can."""
    text_config = model_config.hf_text_config
    instead = "Leave out --attention-backend, and vLLM picks another for it."
    kind = getattr(text_config, "model_type", "this model")
    is_sparse = bool(getattr(text_config, "index_topk", None))
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
