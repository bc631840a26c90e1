"""The attention of DeepSeek-V4, and what V4.1's shares with it. vLLM's models have a layer class of their own for each
backend, and no list that a plugin could add one to: ours takes the place of FlashMLA's where SPARSE_MLA is asked for.

A layer attends to a window of tokens and most layers to compressed ones in a second cache. Rows of both are fp8_model1,
and vLLM's metadata have the window's slots. FlashMLA needs 64 or 128 heads, and for prefill a bf16 copy of what it
reads. Our op takes the heads and the caches as they are.
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
    """Makes vLLM's model of DeepSeek-V4 choose this layer where the backend is asked for."""
    choose_in(replacements.V4_MODEL, SparseMLAV4Attention)


def choose_in(module: str, layer: type) -> None:
    """Makes a model of vLLM choose a layer of ours where the backend is asked for. Each process that builds a model
    calls it, some more than once."""
    model = importlib.import_module(module)
    theirs = model._select_dsv4_attn_cls
    if replacements.is_ours(theirs):
        return

    def choose(vllm_config: Any) -> type:
        ours = versions.ours(vllm_config.attention_config.backend) == versions.SPARSE
        return layer if ours else theirs(vllm_config)

    model._select_dsv4_attn_cls = replacements.instead_of(theirs, choose)


class Compressed(NamedTuple):
    """The compressed tokens that each token attends to."""

    slots: Tensor
    """int32 `[T, most]`, valid ones first."""
    counts: Tensor
    """int32 `[T]`."""
    selection: int | None = None
    """Which selection they are of, as in `V4Attention.selection`."""


class Kind(NamedTuple):
    """What layers have to agree in to share a plan."""

    decode: bool
    ratio: int


@dataclass
class V4Step:
    """What the layers of a step share. A captured CUDA graph has the launches that fill it."""

    plans: dict[Kind, Plan] = field(default_factory=dict)
    compressed: dict[Kind, Compressed] = field(default_factory=dict)
    """Those of the last layer of each kind. Other selections have other slots, but as many."""
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


class V4Attention:
    """The attention of one layer, in front of vLLM's class."""

    row_format = FORMAT

    @property
    def selection(self) -> int | None:
        """Layers of one ratio with the same number attend to the same compressed tokens. None: to this layer's own."""
        return None if self.compress_ratio == 4 else 0

    def second_cache(self, batches: dict[str, Any]) -> tuple[Tensor, Any] | None:
        """The cache of compressed tokens and its metadata; None where the layer attends to the window alone."""
        return (self.kv_cache, batches[self.prefix]) if self.compress_ratio > 1 else None

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
        window, second = metadata[self.swa_cache_layer.prefix], self.second_cache(metadata)
        q, output = q[:, : self.n_local_heads], output[:, : self.n_local_heads]
        decodes, prefills = window.num_decode_tokens, window.num_prefill_tokens
        if decodes:
            slots, lengths = window.decode_swa_indices, window.decode_swa_lens
            self._attend(q, output, slice(0, decodes), slots, lengths, window, second, decode=True)
        if prefills:
            slots, lengths = window.prefill_swa_indices, window.prefill_swa_lens
            tokens = slice(decodes, decodes + prefills)
            self._attend(q, output, tokens, slots, lengths, window, second, decode=False)

    def _attend(
        self,
        q: Tensor,
        out: Tensor,
        tokens: slice,
        slots: Tensor,
        lengths: Tensor,
        window: Any,
        second: tuple[Tensor, Any] | None,
        *,
        decode: bool,
    ) -> None:
        """Attends with some of the step's tokens. `slots`, int32 `[T, 1, most]`, and `lengths` are the window's."""
        step, kind = V4Step.of(window), Kind(decode, self.compress_ratio)
        slots, q, extra = slots.squeeze(1), q[tokens], {}
        if second is not None:
            picked = step.compressed.get(kind)
            if picked is None or self.selection is None or picked.selection != self.selection:
                found = self._compressed(tokens, window, second[1], decode)
                counts = found.counts if picked is None else picked.counts
                picked = step.compressed[kind] = Compressed(found.slots, counts, self.selection)
            extra = dict(extra_indices=picked.slots, extra_topk_length=picked.counts)
        if kind not in step.plans:
            step.plans[kind] = mla_backend.plan(
                *slots.shape,
                topk_length=lengths,
                extra_topk=picked.slots.shape[1] if extra else 0,
                extra_topk_length=extra.get("extra_topk_length"),
                batch_invariant=bool(envs.VLLM_BATCH_INVARIANT),
                num_heads=q.shape[1],
                cache_format=self.row_format,
                products=self.products,
            )
        if second is not None:
            extra.update(extra_cache=second[0], extra_cache_format=self.row_format)
        plan = step.plans[kind]
        mla_backend.sparse_attention(
            q,
            self.swa_cache_layer.kv_cache,
            slots,
            scale=self.scale,
            topk_length=lengths,
            sink=self.attn_sink[: q.shape[1]],
            cache_format=self.row_format,
            products=self.products,
            plan=plan,
            workspace=step.workspace_for(plan, q.shape[1]),
            out=out[tokens],
            **extra,
        )

    def _compressed(self, tokens: slice, window: Any, compressed: Any, decode: bool) -> Compressed:
        if self.compress_ratio != 128:
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


class SparseMLAV4Attention(V4Attention, DeepseekV4FlashMLAAttention):
    """A layer of DeepSeek-V4."""
