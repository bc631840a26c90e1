"""vLLM's CPU platform, plus sparse attention, which vLLM's own refuses, and our backend of dense MLA."""

from typing import TYPE_CHECKING, Any

from vllm.platforms import cpu_platform_plugin
from vllm.utils.import_utils import resolve_obj_by_qualname

from mla_backend.vllm_plugin import versions
from mla_backend.vllm_plugin.models import has_sparse_mla, is_draft, is_served

if TYPE_CHECKING:
    from vllm.config import VllmConfig

CpuPlatform: Any = resolve_obj_by_qualname(cpu_platform_plugin())
"""What vLLM would use: there is more than one CPU platform."""
VLLM_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"
WORKER = "mla_backend.vllm_plugin.cpu_worker.SparseMLACpuWorker"
BLOCK_SIZE = 64


class SparseMLACpuPlatform(CpuPlatform):
    @classmethod
    def get_attn_backend_cls(cls, selected_backend: Any, attn_selector_config: Any, *args: Any, **kwargs: Any) -> str:
        wanted = versions.SPARSE if attn_selector_config.use_sparse else versions.DENSE
        if attn_selector_config.use_mla and versions.ours(selected_backend) == wanted:
            return versions.CLASS_PATHS[wanted]
        return super().get_attn_backend_cls(selected_backend, attn_selector_config, *args, **kwargs)

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        drafts = is_draft(vllm_config)
        model_config = vllm_config.speculative_config.target_model_config if drafts else vllm_config.model_config
        if model_config is None or not has_sparse_mla(model_config):
            cls._check_without_sparse_attention(vllm_config)
            return
        _refuse_batch_invariance()
        attention_config = vllm_config.attention_config
        if attention_config.backend is None:
            attention_config.backend = versions.add_backend(versions.SPARSE)
        elif versions.ours(attention_config.backend) != versions.SPARSE and not _names_it_for_drafts(vllm_config):
            raise ValueError(
                f"{attention_config.backend.name} does not run sparse attention on a CPU. "
                f"Leave out --attention-backend, or name {versions.SPARSE}."
            )
        cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
        block_size = cache.block_size if cache.user_specified_block_size else BLOCK_SIZE
        # vLLM switches these off because its own MLA kernels for CPUs can't do them; ours can. A draft model's
        # configuration shares cache and scheduler with that of the model it drafts for.
        asked = cache.enable_prefix_caching, scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens
        super().check_and_update_config(vllm_config)
        cache.enable_prefix_caching, scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens = asked
        cache.block_size = block_size
        if vllm_config.parallel_config.worker_cls == VLLM_WORKER:
            vllm_config.parallel_config.worker_cls = WORKER
        _run_eagerly(vllm_config)
        if not drafts:
            versions.logger().info_once(
                "%s runs sparse attention on this CPU, with blocks of %d tokens, chunked prefill %s and the prefix "
                "cache %s, whatever vLLM says of that before.",
                versions.SPARSE,
                block_size,
                "on" if scheduler.enable_chunked_prefill else "off",
                "on" if cache.enable_prefix_caching else "off",
            )

    @classmethod
    def _check_without_sparse_attention(cls, vllm_config: "VllmConfig") -> None:
        attention_config, asked = vllm_config.attention_config, vllm_config.attention_config.backend
        model_config = vllm_config.model_config
        dense = versions.ours(asked) == versions.DENSE and model_config is not None
        dense = dense and is_served(versions.DENSE, model_config)
        if dense:
            _refuse_batch_invariance()
            # prefill is that of CPU_MLA, so its limits hold: no chunked prefill, no prefix cache
            attention_config.backend = type(asked).CPU_MLA
        super().check_and_update_config(vllm_config)
        if dense:
            attention_config.backend = asked
            _use_torchs_rope(vllm_config)
            versions.logger().info_once("%s runs decode on this CPU; prefill is vLLM's own.", versions.DENSE)


def _names_it_for_drafts(vllm_config: "VllmConfig") -> bool:
    """Whether the backend is the one that the user names for a draft model. vLLM first puts it into a copy of the main
    model's configuration, and then the draft model."""
    speculative = vllm_config.speculative_config
    return speculative is not None and speculative.attention_backend == vllm_config.attention_config.backend


def _refuse_batch_invariance() -> None:
    from vllm import envs

    if envs.VLLM_BATCH_INVARIANT:  # vLLM itself fails later, in its search for a MoE kernel, or ignores it
        raise ValueError(
            "VLLM_BATCH_INVARIANT=1 is not supported on a CPU: vLLM has batch-invariant products for GPUs alone. "
            "Unset it, or use mla_backend.engine with batch_invariant=True."
        )


def _run_eagerly(vllm_config: "VllmConfig") -> None:
    from vllm.config import CompilationMode

    # The indexer hands its selection to attention in a buffer. On a GPU vLLM splits the compiled graph at both. On a
    # CPU it compiles a model as a whole, and nothing would keep their order.
    vllm_config.compilation_config.mode = CompilationMode.NONE
    _use_torchs_rope(vllm_config)


def _use_torchs_rope(vllm_config: "VllmConfig") -> None:
    compilation = vllm_config.compilation_config
    # vLLM's CPU op for rotary embedding gives wrong results for queries with several heads, and for keys that are part
    # of a wider tensor. MLA has both. PyTorch's own ops are right.
    if "+rotary_embedding" in compilation.custom_ops:
        raise ValueError(
            "mla-backend: vLLM's op for rotary embedding is wrong for these models on a CPU. "
            "Leave +rotary_embedding out of custom_ops."
        )
    if "-rotary_embedding" not in compilation.custom_ops:
        compilation.custom_ops.append("-rotary_embedding")
