"""DeepSeek-V4's attention. vLLM's model has a layer class of its own for each backend, and no list that a plugin could
add one to: this one takes the place of FlashMLA's where SPARSE_MLA is asked for.

A layer attends to a window of tokens and, with a compress ratio of 4 or 128, to compressed ones in a second cache. Both
caches are fp8_model1, and vLLM's metadata have the window's slots. FlashMLA needs 64 or 128 heads, and for prefill a
bf16 copy of what it reads. Our op takes the heads and the caches as they are.
"""

import importlib
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm import envs
from vllm.forward_context import get_forward_context
from vllm.models.deepseek_v4.nvidia.flashmla import DeepseekV4FlashMLAAttention

import mla_backend
from mla_backend.plan import Plan, workspace_floats
from mla_backend.vllm_plugin import products, replacements, versions

FORMAT = "fp8_model1"
HEADS = (8, 16, 32, 64, 128)
"""vLLM's kernel that prepares queries is compiled for these."""


def install() -> None:
    """Makes vLLM's model choose this layer where the backend is asked for. Each process that builds a model calls it,
    some more than once."""
    model = importlib.import_module(replacements.V4_MODEL)
    theirs = model._select_dsv4_attn_cls
    if replacements.is_ours(theirs):
        return

    def choose(vllm_config: Any) -> type:
        ours = versions.ours(vllm_config.attention_config.backend) == versions.SPARSE
        return SparseMLAV4Attention if ours else theirs(vllm_config)

    model._select_dsv4_attn_cls = replacements.instead_of(theirs, choose)


class Compressed(NamedTuple):
    """The compressed tokens that each token attends to."""

    slots: Tensor
    """int32 `[T, most]`, valid ones first."""
    counts: Tensor
    """int32 `[T]`."""


class Kind(NamedTuple):
    """What layers have to agree in to share a plan."""

    decode: bool
    ratio: int


@dataclass
class V4Step:
    """What the layers of a step share. A captured CUDA graph has the launches that fill it."""

    plans: dict[Kind, Plan] = field(default_factory=dict)
    compressed: dict[Kind, Compressed] = field(default_factory=dict)
    """Those of the first layer of each kind. With a ratio of 4 other layers pick other slots, but as many."""
    workspace: Tensor | None = None

    @classmethod
    def of(cls, window: Any) -> "V4Step":
        # a dict that vLLM empties wherever a step's lengths change
        return window.flashinfer_sparse_index_cache.setdefault(versions.SPARSE, cls())

    def workspace_for(self, plan: Plan, heads: int) -> Tensor | None:
        floats = workspace_floats(plan.launch.ctas, heads)
        if plan.table.is_cuda and (self.workspace is None or len(self.workspace) < floats):
            self.workspace = torch.zeros(floats, device=plan.table.device, dtype=torch.float32)
        return self.workspace


class SparseMLAV4Attention(DeepseekV4FlashMLAAttention):
    """The attention of one layer."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        self.products = products.asked(vllm_config)

    @classmethod
    def get_padded_num_q_heads(cls, num_heads: int) -> int:
        if num_heads > HEADS[-1]:
            raise ValueError(
                f"{versions.SPARSE}: DeepSeek-V4 has up to {HEADS[-1]} heads a GPU in vLLM; got {num_heads}"
            )
        return next(heads for heads in HEADS if heads >= num_heads)

    def forward_mqa(self, q: Tensor, kv: Tensor, positions: Tensor, output: Tensor) -> None:
        """Attends with q `[T, padded heads, 512]` and writes into output, of the same shape. What is there for padding
        heads stays, as nobody reads it."""
        metadata = get_forward_context().attn_metadata
        if metadata is None:  # a run that measures memory
            output.zero_()
            return
        window, compressed = metadata[self.swa_cache_layer.prefix], metadata.get(self.prefix)
        q, output = q[:, : self.n_local_heads], output[:, : self.n_local_heads]
        decodes, prefills = window.num_decode_tokens, window.num_prefill_tokens
        if decodes:
            slots, lengths = window.decode_swa_indices, window.decode_swa_lens
            self._attend(q, output, slice(0, decodes), slots, lengths, window, compressed, decode=True)
        if prefills:
            slots, lengths = window.prefill_swa_indices, window.prefill_swa_lens
            tokens = slice(decodes, decodes + prefills)
            self._attend(q, output, tokens, slots, lengths, window, compressed, decode=False)

    def _attend(
        self,
        q: Tensor,
        out: Tensor,
        tokens: slice,
        slots: Tensor,
        lengths: Tensor,
        window: Any,
        compressed: Any,
        *,
        decode: bool,
    ) -> None:
        """Attends with some of the step's tokens. `slots`, int32 `[T, 1, most]`, and `lengths` are the window's."""
        step, kind = V4Step.of(window), Kind(decode, self.compress_ratio)
        slots, q, second = slots.squeeze(1), q[tokens], {}
        if self.compress_ratio > 1:
            picked = step.compressed.get(kind)
            if picked is None or self.compress_ratio == 4:
                picked = self._compressed(tokens, window, compressed, decode)
                picked = Compressed(picked.slots, step.compressed.setdefault(kind, picked).counts)
            second = dict(extra_indices=picked.slots, extra_topk_length=picked.counts)
        if kind not in step.plans:
            step.plans[kind] = mla_backend.plan(
                *slots.shape,
                topk_length=lengths,
                extra_topk=picked.slots.shape[1] if second else 0,
                extra_topk_length=second.get("extra_topk_length"),
                batch_invariant=bool(envs.VLLM_BATCH_INVARIANT),
                num_heads=q.shape[1],
                cache_format=FORMAT,
                products=self.products,
            )
        if second:
            second.update(extra_cache=self.kv_cache, extra_cache_format=FORMAT)
        plan = step.plans[kind]
        mla_backend.sparse_attention(
            q,
            self.swa_cache_layer.kv_cache,
            slots,
            scale=self.scale,
            topk_length=lengths,
            sink=self.attn_sink[: q.shape[1]],
            cache_format=FORMAT,
            products=self.products,
            plan=plan,
            workspace=step.workspace_for(plan, q.shape[1]),
            out=out[tokens],
            **second,
        )

    def _compressed(self, tokens: slice, window: Any, compressed: Any, decode: bool) -> Compressed:
        if self.compress_ratio == 4:
            positions = self.topk_indices_buffer[tokens]
        elif decode:
            slots, counts = compressed.c128a_global_decode_topk_indices, compressed.c128a_decode_topk_lens
            return Compressed(slots.squeeze(1), counts)
        else:
            positions = compressed.c128a_prefill_topk_indices
        # padding belongs to no request
        requests = torch.where(window.is_valid_token[tokens], window.token_to_req_indices[tokens], -1)
        block_size = compressed.block_size // self.compress_ratio
        return Compressed(
            *mla_backend.convert_indices(positions, compressed.block_table, requests, block_size, compact=True)
        )
