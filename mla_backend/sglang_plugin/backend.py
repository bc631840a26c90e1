"""The attention backend. SGLang's own backend for sparse MLA (it calls it DSA) does everything but attention itself:
metadata, CUDA graphs, the indexer, writing the cache, short prompts as dense attention. Its indexer can select with our
op, too."""

from typing import Any

import torch
from sglang.srt.configs.model_config import is_deepseek_dsa
from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend, DeepseekSparseAttnMultiStepBackend
from sglang.srt.runtime_context import attention_backends, get_parallel
from torch import Tensor

import mla_backend
from mla_backend import library
from mla_backend.arguments import dtype_name
from mla_backend.attention import VALUE_DIM
from mla_backend.plan import Plan
from mla_backend.sglang_plugin import NAME, PRODUCTS_VARIABLE, products, selection

FORMATS = {torch.bfloat16: ("bf16", "bf16_512"), torch.float8_e4m3fn: ("fp8_ds_mla",)}
"""Rows of SGLang's caches that our op reads, by our names. Those of 512 values are of models without rope."""


class SparseMLABackend(DeepseekSparseAttnBackend):
    """SGLang's backend, with our op where it calls FA3.

    SGLang hands FA3 what our op takes: queries in two parts, a list of slots for each token, and its length. So this
    backend asks for FA3 in prefill and decode, whatever the cache's format, and overrides the call.
    """

    def __init__(self, model_runner: Any, *args: Any, **kwargs: Any) -> None:
        if (reason := why_not(model_runner)) is not None:
            raise ValueError(f"{NAME}: {reason}")
        super().__init__(model_runner, *args, **kwargs)
        self.dsa_prefill_impl = self.dsa_decode_impl = "fa3"
        self.enable_auto_select_prefill_impl = False
        self._plan: tuple[tuple[Any, ...], Plan] | None = None
        self.cache_format, self.products = fitting_formats(model_runner.token_to_kv_pool)[0], products()
        floats = Plan.bounds(self.num_q_heads, self.device).workspace_floats
        self.workspace = torch.zeros(floats, device=self.device) if floats else None  # before graphs are captured
        on = selection.is_on(model_runner)
        self.selector = selection.Selector(self.token_to_kv_pool, self.device) if on else None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self._begin_pass()
        super().init_forward_metadata(forward_batch)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        # SGLang calls this at the start of each pass that it captures: the plan becomes a part of the graph.
        self._begin_pass()
        super().init_forward_metadata_in_graph(forward_batch)

    def _begin_pass(self) -> None:
        self._plan = None
        if self.selector is not None:
            self.selector.begin()

    def get_indexer_metadata(self, layer_id: int, forward_batch: Any) -> Any:
        metadata = super().get_indexer_metadata(layer_id, forward_batch)
        if self.selector is not None:
            object.__setattr__(metadata, "selector", self.selector)  # it is frozen
        return metadata

    def _forward_fa3(
        self,
        *,
        q_nope: Tensor,
        q_rope: Tensor,
        kv_cache: Tensor,
        page_table: Tensor,
        cache_seqlens: Tensor,
        sm_scale: float,
        **unused: Any,
    ) -> Tensor:
        """Attends to the slots that the indexer picked.

        Args:
            q_nope, q_rope: `[T, H, 512]` and `[T, H, 64]`, or `[T, H, 0]` of models without rope.
            kv_cache: `[slots, 1, width]`.
            page_table: int32 `[T, topk]`, slots, valid ones first.
            cache_seqlens: int32 `[T or more]`, how many of them are valid. Fewer than T where SGLang padded the
                queries only; then -1 marks what is not valid.

        Returns:
            `[T, H, 512]`.
        """
        tokens, topk = page_table.shape
        lengths = cache_seqlens[:tokens] if len(cache_seqlens) >= tokens else None
        out, _ = mla_backend.sparse_attention(
            (q_nope, q_rope) if q_rope.shape[-1] else q_nope,
            kv_cache,
            page_table,
            scale=sm_scale,
            topk_length=lengths,
            products=self.products,
            plan=self._plan_for(tokens, topk, lengths, q_nope),
            workspace=self.workspace,
        )
        return out

    def _plan_for(self, tokens: int, topk: int, lengths: Tensor | None, q: Tensor) -> Plan:
        """The plan that all layers of a pass share. The first of them makes it."""
        key = tokens, topk, None if lengths is None else lengths.data_ptr()
        if self._plan is None or self._plan[0] != key:
            of_problem = {"num_heads": q.shape[1], "cache_format": self.cache_format, "products": self.products}
            self._plan = key, mla_backend.plan(tokens, topk, topk_length=lengths, device=q.device, **of_problem)
        return self._plan[1]


class SparseMLADraftBackend(DeepseekSparseAttnMultiStepBackend):
    """What a draft model decodes with: a backend for each step but the last."""

    def __init__(self, model_runner: Any, topk: int, speculative_num_steps: int, **kwargs: Any) -> None:
        super().__init__(model_runner, topk, speculative_num_steps, **kwargs)
        steps = {"topk": topk, "speculative_num_steps": speculative_num_steps, **kwargs}
        self.attn_backends = [
            SparseMLABackend(model_runner, speculative_step_id=step, **steps)
            for step in range(speculative_num_steps - 1)
        ]
        for later in self.attn_backends[1:]:
            # Steps come one after the other.
            later.workspace, later.selector = self.attn_backends[0].workspace, self.attn_backends[0].selector


def fitting_formats(pool: Any) -> list[str]:
    """The format of the pool's rows; none if our op does not read them."""
    return [name for name in FORMATS.get(pool.dtype, ()) if mla_backend.FORMATS[name].width == pool.kv_cache_dim]


def why_not(model_runner: Any) -> str | None:
    """Why the backend can't serve a model with these settings on this machine, and what to do; None if it can."""
    config, pool = model_runner.model_config, model_runner.token_to_kv_pool
    if not is_deepseek_dsa(config.hf_config):
        return "serves models with sparse MLA, such as DeepSeek-V3.2 and GLM-5. Leave out --attention-backend."
    if config.kv_lora_rank != VALUE_DIM:
        return f"needs {VALUE_DIM} latent values per token; this model has {config.kv_lora_rank}."
    if model_runner.dtype != torch.bfloat16:
        return f"computes in bfloat16; got {dtype_name(model_runner.dtype)}. Use --dtype bfloat16."
    if not fitting_formats(pool):
        return (
            f"does not read rows of {pool.kv_cache_dim} {dtype_name(pool.dtype)} values. "
            "Use --kv-cache-dtype bfloat16, or leave out --dsa-prefill-backend and --dsa-decode-backend."
        )
    if products() == "fp8" and not mla_backend.FORMATS[fitting_formats(pool)[0]].fp8:
        return f"{PRODUCTS_VARIABLE}=fp8 is for FP8 rows. Use --kv-cache-dtype fp8_e4m3, or unset it."
    if getattr(config.hf_config, "learnable_sink", False):
        return "SGLang takes no other backend for models with learnable sinks. Leave out --attention-backend."
    if set(attention_backends()) != {NAME}:
        return "serves prefill and decode. Name it with --attention-backend alone."
    if get_parallel().attn_dcp_size > 1:
        return "has no decode context parallelism. Leave out --dcp-size."
    if torch.device(model_runner.device).type == "cuda" and not library.about()["cuda_archs"]:
        return (
            "mla-backend was built without CUDA. Install it again where nvcc is found, with MLA_BACKEND_CUDA=1; "
            "or leave out --attention-backend."
        )
    return selection.why_refused(model_runner)
