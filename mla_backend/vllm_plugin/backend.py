"""The attention backend of models with sparse MLA. All tokens of a step, prefill and decode, attend in one call of our
op, but for those at the beginning of a prompt, which attend densely."""

import inspect
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm import envs
from vllm.config import VllmConfig, get_current_vllm_config, set_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport

import mla_backend
from mla_backend.vllm_plugin import host_tier, products, replacements, versions
from mla_backend.vllm_plugin.beginnings import (
    Masked,
    attend_to_picked,
    beginnings,
    between,
    dense_tokens,
    longest_masked,
    masked,
)
from mla_backend.vllm_plugin.config import CACHE_DTYPES, ONE_SCALE
from mla_backend.vllm_plugin.host_tier import HostTier, Place
from mla_backend.vllm_plugin.models import LATENT, ROPE
from mla_backend.vllm_plugin.staging import VISITS, StagedRequests, requests_to_stage, room_for_rows
from mla_backend.vllm_plugin.step import Room, SparseStep, StepBatch, StepBuffers, bytes_for_rows

MetadataBase, BuilderBase, LayerBase = versions.bases()
SHORT_EXTEND = 128
"""A request with up to this many tokens in a step counts as decode. Of longer ones a prompt's first top-k tokens run as
dense attention, which is cheaper, but has to expand keys and values for every head first."""

PACKED_ROWS = {"fp8_ds_mla": "fp8_ds_mla", versions.NVFP4: "nvfp4_352"}
"""--kv-cache-dtype and format where it alone says how wide rows are."""


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return current_platform.is_cpu()


class Backend:
    """What vLLM asks our backends before it uses one, as far as their answers are alike."""

    name: ClassVar[str]
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]

    @classmethod
    def get_name(cls) -> str:
        return cls.name

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return capability.major >= 8


class SparseMLABackend(Backend, AttentionBackend):
    name = versions.SPARSE
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(CACHE_DTYPES[versions.SPARSE])

    @staticmethod
    def get_impl_cls() -> type["SparseMLALayer"]:
        return SparseMLALayer

    @staticmethod
    def get_builder_cls() -> type["SparseMLAMetadataBuilder"]:
        return SparseMLAMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return versions.block_sizes(_on_cpu())

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        rows = PACKED_ROWS.get(cache_dtype_str)
        return num_blocks, block_size, mla_backend.FORMATS[rows].width if rows else head_size

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [LATENT + ROPE, LATENT]

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True


@dataclass(kw_only=True)
class SparseMLAMetadata(MetadataBase):
    """The metadata of one batch."""

    step: SparseStep | None = None
    dense: Sequence[tuple[slice, "SparseMLAMetadata"]] = ()
    """Where longer prompts begin: tokens that attend densely, and their metadata."""
    masked: Sequence[Masked] = ()
    """Tokens after those that attend with a mask."""


class SparseMLAMetadataBuilder(BuilderBase):
    """Makes a batch's metadata from tensors on the device, without waiting for it."""

    metadata_cls = SparseMLAMetadata
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    supports_draft_decode_metadata_update: bool = True
    host_tier: bool = False

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(
            SHORT_EXTEND if getattr(self, "_prefill_backend", None) is not None else 1,
            supports_spec_as_decode=True,
            supports_dcp_with_varlen=True,  # each token has its own index list, so requests may have any number
        )
        impl = vllm_config.compilation_config.static_forward_context[layer_names[0]].impl
        # may be more than `index_topk`: GLM-5.3-Flash adds the tokens that no pool of its indexer holds yet
        topk, heads = impl.topk_indices_buffer.shape[1], attending_heads(vllm_config, impl)
        cache_dtype = impl.kv_cache_dtype  # --kv-cache-dtype-skip-layers gives some layers another
        formats = PACKED_ROWS | dict.fromkeys(ONE_SCALE, "fp8_tensor_512")
        cache_format = formats.get(cache_dtype, "bf16")
        self.buffers = StepBuffers(
            max_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
            captured_tokens=versions.captured_tokens(vllm_config),
            topk=topk,
            heads=heads,
            device=device,
            batch_invariant=bool(envs.VLLM_BATCH_INVARIANT),
            cache_format=cache_format,
            products=products.of_rows(vllm_config, cache_format),
            staged_rows=room_for_rows(vllm_config, heads, topk, cache_dtype, _on_cpu() or host_tier.is_on(vllm_config)),
        )
        self.leaders = leading_layers(layer_names, vllm_config.model_config.hf_text_config.num_hidden_layers)
        self.first_batch: StepBatch | None = None
        self.splits_prompts = getattr(self, "_prefill_backend", None) is not None and impl.splits_prompts
        self.dense_backends: list[Any] = []
        self.longest_masked = impl.longest_masked if self.splits_prompts else 0
        self.host_tier = host_tier.is_on(vllm_config)
        if self.host_tier and getattr(self, "_prefill_backend", None) is None:
            raise ValueError(
                f"{versions.SPARSE}: HiSparse needs one of vLLM's backends for MLA prefill, and none serves this model."
                " Leave out HiSparseConnector."
            )

    def _build_req_id_per_token(self, common_attn_metadata: Any) -> Tensor:
        if self.host_tier:  # vLLM reads them before a layer attends, and has its own for a graph's padding
            return super()._build_req_id_per_token(common_attn_metadata)
        return self.buffers.request_ids[: common_attn_metadata.num_actual_tokens]  # filled by the step

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> SparseMLAMetadata:
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        common, tokens = common_attn_metadata, metadata.num_actual_tokens
        staged, spans = None, None
        if metadata.prefill is not None and metadata.prefill.use_dense_mha:
            tokens = metadata.num_decode_tokens
        else:
            staged, spans = self._parts_of(metadata, common)
            if self.host_tier:
                spans = host_tier.keep_plans(spans, metadata)
        batch = StepBatch(common.query_start_loc, common.seq_lens, common.num_actual_tokens, common.max_query_len)
        # vLLM keeps the main model's tensors at the same addresses from step to step. Those of drafts and of divided
        # batches may be new each time, and a captured graph must not read them.
        self.first_batch = self.first_batch or batch
        leaders = self.leaders if spans is None and batch.is_where(self.first_batch) else None
        metadata.step = SparseStep(self.buffers, batch, tokens, leaders, staged, spans)
        return metadata

    def _parts_of(self, metadata: SparseMLAMetadata, common: Any) -> tuple[StagedRequests | None, list[slice] | None]:
        """Which requests attend to staged rows, and which tokens attend sparsely; None for all. Notes in the metadata
        those that attend densely."""
        stages = self.buffers.staged_rows > 0 and common.max_query_len >= VISITS
        splits = metadata.prefill is not None and self.splits_prompts
        lengths = versions.lengths_on_host(common) if stages or splits else None
        if lengths is None:
            return None, None
        starts, seq_lens, spans = common.query_start_loc_cpu.tolist(), lengths.tolist(), None
        reading = [end - start for start, end in pairwise(starts)]
        if splits:
            first = metadata.num_decodes
            dense = dense_tokens(reading, seq_lens, first, metadata.topk_tokens)
            if any(dense):
                found = beginnings(starts, dense)
                metadata.dense = [
                    (one.tokens, one.metadata_for(metadata, self._dense_backend(i))) for i, one in enumerate(found)
                ]
                metadata.masked = masked(starts, reading, dense, metadata.topk_tokens, self.longest_masked)
                apart = sorted((one.tokens for one in (*found, *metadata.masked)), key=lambda part: part.start)
                spans = between(apart, 0, metadata.num_actual_tokens)
                reading = [0] * first + [n - less for n, less in zip(reading[first:], dense[first:], strict=True)]
        rows, topk, block_size = self.buffers.staged_rows, self.buffers.topk, self.kv_cache_spec.block_size
        return requests_to_stage(starts, seq_lens, reading, topk, rows, block_size), spans

    def _dense_backend(self, number: int) -> Any:
        """A copy of what vLLM has for dense prefill. Each keeps the metadata of its tokens."""
        while len(self.dense_backends) <= number:
            with set_current_vllm_config(self.vllm_config):
                self.dense_backends.append(self._prefill_backend.clone())
        return self.dense_backends[number]

    def update_draft_decode_metadata(self, metadata: SparseMLAMetadata) -> None:
        """Called before each pass of a captured loop that drafts. Layers that draft lead, so they prepare the step
        themselves unless its tensors are elsewhere."""
        if self.host_tier:
            tokens = metadata.num_decode_tokens
            versions.find_requests(metadata.query_start_loc, metadata.req_id_per_token, tokens)
        metadata.step.follow()


def attending_heads(vllm_config: VllmConfig, impl: Any) -> int:
    """Of a layer, which may be a draft's, on a device: with decode context parallelism all heads of its group, to a
    part of the tokens."""
    return impl.num_heads * vllm_config.parallel_config.decode_context_parallel_size


def leading_layers(names: Collection[str], layers: int) -> frozenset[str]:
    """The layers that are the first of a pass: the model's first one, and each draft layer, as those run by themselves.
    vLLM may give a draft the metadata of the main model's step.

    Args:
        names: such as model.layers.3.self_attn.attn.
        layers: how many the main model has; layers with higher numbers are for drafts.
    """
    numbers = {name: int(found[1]) for name in names if (found := re.search(r"\blayers\.(\d+)\.", name))}
    if len(numbers) < len(names):
        return frozenset(names)  # then each prepares the step anew, which is slower but also right
    first = min(numbers.values())
    return frozenset(name for name, number in numbers.items() if number == first or number >= layers)


def refuse_features(backend: str, init: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Refuses arguments of a layer's `__init__` that ask for what the backend doesn't have."""
    given = inspect.signature(init).bind(*args, **kwargs).arguments
    for name in ("alibi_slopes", "sliding_window", "logits_soft_cap"):
        if given.get(name):
            raise NotImplementedError(f"{backend}: {name} must be unset; got {given[name]}")


class NoIndexGroup:
    """Takes the place of vLLM's groups of layers that share a selection, which would allocate room for slots for each
    layer with an indexer. Ours is in the step's buffers, one for all. HiSparse needs vLLM's."""

    def register_layer(self, *args: Any, **kwargs: Any) -> tuple[None, int]:
        return None, 0


class SparseMLALayer(LayerBase):
    """The attention of one layer."""

    can_return_lse_for_decode: bool = True
    lse_base_on_e: bool = True
    supports_dcp: bool = True
    supports_mtp_with_cp_non_trivial_interleave_size: bool = True
    supports_pcp: bool = False
    supports_quant_query_input: bool = False

    host_tier: HostTier | None = None
    """Where rows are, with HiSparse."""
    selections: ClassVar[int] = 0
    """How many layers with an indexer there are so far, in this process."""

    def __init__(self, *args: Any, indexer: Any = None, sinks: Tensor | None = None, **kwargs: Any) -> None:
        """Takes what the base takes, and sinks fp32 `[heads]`."""
        config = get_current_vllm_config()
        has_host_tier = host_tier.is_on(config)
        if not has_host_tier:
            kwargs["index_group_builder"] = NoIndexGroup()
        refuse_features(versions.SPARSE, super().__init__, *args, indexer=indexer, **kwargs)
        super().__init__(*args, indexer=indexer, **kwargs)
        # Layers are made in their order. Those without an indexer use the selection of the last one with.
        SparseMLALayer.selections += indexer is not None
        self.selects, self.selection = indexer is not None, SparseMLALayer.selections
        if sinks is not None and (sinks.dtype, len(sinks)) != (torch.float32, self.num_heads):
            raise ValueError(
                f"{versions.SPARSE}: sinks must be float32 [{self.num_heads}]; got {sinks.dtype} {[*sinks.shape]}"
            )
        self.sinks = sinks  # a parameter, not a copy: its values are loaded later
        self._vllm_layer: Any = None
        # Dense attention for short prefills needs one of vLLM's GPU kernels. It gathers rows into rows of the model's
        # width, which those of fp8_ds_mla have only in models with rope, and knows no sinks and no nvfp4_ds_mla rows.
        # Whether vLLM uses it depends on the longest prefill of a step.
        no_rows = self.kv_cache_dtype == versions.NVFP4 or (
            self.kv_cache_dtype == "fp8_ds_mla" and self.head_size == LATENT
        )
        no_dense = _on_cpu() or no_rows or sinks is not None or envs.VLLM_BATCH_INVARIANT
        # With HiSparse vLLM plans how rows come from the host only where it might, but then never does.
        self.supports_dense_mha_prefill = has_host_tier or not no_dense
        # vLLM measures memory after this, without a step's metadata. What its longest step needs has to be there then.
        (tokens, topk), device = self.topk_indices_buffer.shape, self.topk_indices_buffer.device
        heads = self.num_heads * self.dcp_world_size
        staged = room_for_rows(config, heads, topk, self.kv_cache_dtype, _on_cpu() or has_host_tier)
        Room.shared(tokens, heads, topk, bytes_for_rows(staged), device)
        self.splits_prompts = (
            not no_dense and self.dcp_world_size == 1 and replacements.split_prompts_if_possible(config)
        )
        if has_host_tier:
            gaps = topk != config.model_config.hf_text_config.index_topk
            self.host_tier = HostTier(self.index_group, self.index_group_index, gaps)
            host_tier.widen_table(self.index_group.cache(self.index_group_index).runtime)
        # cuDNN keeps its plans for each thread, and microbatches run in new ones
        masks = self.splits_prompts and not getattr(config.parallel_config, "use_ubatching", False)
        self.longest_masked = 0
        if masks:
            self.longest_masked = longest_masked(self.num_heads, (self.qk_head_dim, self.v_head_dim), topk, device)
        if not _on_cpu():
            versions.register_warmup()
            replacements.rotate_queries_if_possible()
            if self.kv_cache_dtype == versions.NVFP4:
                replacements.write_nvfp4_rows()

    def do_kv_cache_update(
        self,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str,
        k_scale: Tensor,
        *more: Any,
        **kwargs: Any,
    ) -> None:
        """Writes tokens, kv_c_normed `[N or more, 512]` and k_pe `[N or more, 1, 64]` (or 0), into slots `[N]`. From
        vLLM 0.33 comes one argument more: whether the scale is known to be 1. On a GPU vLLM's own op writes rows with
        one scale, which it reads there."""
        if kv_cache.numel() == 0:
            return
        if kv_cache_dtype in ONE_SCALE and not _on_cpu():
            given = kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale, *more
            super().do_kv_cache_update(*given, **kwargs)
            return
        slots, scale = slot_mapping.flatten(), k_scale.item() if kv_cache_dtype in ONE_SCALE else 1.0
        latent, rope = kv_c_normed[: len(slots)], k_pe[: len(slots)]
        if k_pe.shape[-1] == 0:
            rope = None if kv_cache.shape[-1] == LATENT else latent.new_zeros(len(slots), ROPE)
        mla_backend.cache_write(latent, rope, kv_cache, slots, scale=scale)

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: SparseMLAMetadata,
        layer: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attends to the slots that the indexer picked.

        Args:
            q: `[T, H, 576]` or `([T, H, 512], [T, H, 64])`; of models without rope `[T, H, 512]` or
                `([T, H, 512], [T, H, 0])`.

        Returns:
            `[T, H, 512]`, and with decode context parallelism the lse, fp32 `[T, H]`.
        """
        tokens, heads = (q[0] if isinstance(q, tuple) else q).shape[:2]
        step, cache = attn_metadata.step, kv_c_and_k_pe_cache
        assert not attn_metadata.dense or tokens == attn_metadata.num_decode_tokens, "forward_mha has the others"
        step.begin(getattr(layer, "layer_name", None))
        room, queries = step.room_for(tokens, heads), _queries(q, cache, step.buffers.no_rope)

        def of_part(part: slice) -> Tensor | tuple[Tensor, Tensor]:
            return tuple(one[part] for one in queries) if isinstance(queries, tuple) else queries[part]

        self._attend(room, slice(0, tokens), of_part, cache, attn_metadata, layer)
        return room.out.to(q[0].dtype), room.lse if self.dcp_world_size > 1 else None

    def forward_mha(
        self,
        q: Tensor,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: SparseMLAMetadata,
        k_scale: Tensor,
        output: Tensor,
        output_scale: Tensor | None = None,
    ) -> None:
        """Prefill: beginnings of prompts attend densely, as short prompts do, what follows them with a mask if that is
        cheaper, and all else to the slots that the indexer picked.

        Args:
            q: `[T, H, 192]`, before its product with the latent's matrix.
            output: `[T, H * 128]`, after it.
        """
        if not attn_metadata.dense:
            super().forward_mha(q, kv_c_normed, k_pe, kv_c_and_k_pe_cache, attn_metadata, k_scale, output, output_scale)
            return
        first, step, cache = attn_metadata.num_decode_tokens, attn_metadata.step, kv_c_and_k_pe_cache

        def here(part: slice) -> slice:
            return slice(part.start - first, part.stop - first)

        for tokens, metadata in attn_metadata.dense:
            of = here(tokens)
            super().forward_mha(q[of], kv_c_normed[of], k_pe[of], cache, metadata, k_scale, output[of])
        for one in attn_metadata.masked:
            prompt = here(slice(one.prompt, one.tokens.stop))
            picked = self.topk_indices_buffer[one.prompt : one.tokens.stop]
            self._attend_masked(one.blocks, q[prompt], kv_c_normed[prompt], k_pe[prompt], picked, output[prompt])
        layer = self._layer()

        def of_part(part: slice) -> Tensor | tuple[Tensor, Tensor]:
            nope, rope = q[here(part)].split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
            latent = q.new_empty(*nope.shape[:2], LATENT)
            torch.bmm(nope.transpose(0, 1), layer.W_UK_T, out=latent.transpose(0, 1))
            return _queries((latent, rope), cache, step.buffers.no_rope)

        room = step.room_for(step.tokens, self.num_heads)
        for part in self._attend(room, slice(first, step.tokens), of_part, cache, attn_metadata, layer):
            layer._v_up_proj(room.out[part].to(q.dtype), out=output[here(part)])

    def _attend_masked(
        self, blocks: range, q: Tensor, latent: Tensor, rope: Tensor, picked: Tensor, output: Tensor
    ) -> None:
        """Attends from the blocks of a prompt's tokens to what the indexer picked."""
        keys, values = self._project_kv(latent, rope)
        for first in blocks:
            end = first + blocks.step
            out = attend_to_picked(q[first:end], keys[:end], values[:end], picked[first:end], self.scale)
            output[first:end].copy_(out.flatten(1))

    def _layer(self) -> Any:
        """vLLM's layer around this, which it gives `forward_mqa` only."""
        if self._vllm_layer is None:
            layers = get_forward_context().no_compile_layers.values()
            self._vllm_layer = next(layer for layer in layers if getattr(layer, "impl", None) is self)
        return self._vllm_layer

    def _attend(
        self,
        room: Room,
        tokens: slice,
        queries: Callable[[slice], Tensor | tuple[Tensor, Tensor]],
        cache: Tensor,
        metadata: SparseMLAMetadata,
        layer: Any,
    ) -> list[slice]:
        """Attends from a step's tokens and writes to the room. `queries` says those of some tokens. Returns which
        tokens, without those that attend densely."""
        step, buffers = metadata.step, metadata.step.buffers
        has_one_scale = cache.element_size() == 1 and cache.shape[-1] == LATENT
        places = self._places(room, tokens, cache, metadata)
        for part, slots, rows in places:
            lengths, plan = step.work_for(part)
            mla_backend.sparse_attention(
                queries(part),
                rows,
                slots,
                scale=self.scale,
                topk_length=lengths,
                sink=self.sinks,
                products=buffers.products,
                cache_scale=layer._k_scale_float if has_one_scale else 1.0,
                plan=plan,
                workspace=buffers.workspace if room.out.shape[1] == buffers.heads else None,
                batch_invariant=buffers.batch_invariant,
                out=room.out[part],
                lse=room.lse[part],
            )
        return [place.tokens for place in places]

    def _places(self, room: Room, tokens: slice, cache: Tensor, metadata: SparseMLAMetadata) -> list[Place]:
        """Where tokens attend."""
        step = metadata.step
        if self.host_tier is not None:
            known, picked = not self.selects and step.selected == self._selection_of(room), self.topk_indices_buffer
            places = list(self.host_tier.places(picked, cache, metadata, tokens, room, known))
            step.selected = self._selection_of(room) if step.keeps_slots(*room.lse.shape) else None
            return places
        parts = step.parts(tokens.stop, tokens.start)
        self._select(room, parts, cache.shape[1], metadata)
        rows = {False: cache}
        if any(staged for _, staged in parts):
            rows[True] = step.stage(cache, metadata.block_table, room.staged)
        return [Place(part, room.slots[part], rows[staged]) for part, staged in parts]

    def _selection_of(self, room: Room) -> tuple[int, int]:
        return self.selection, len(room.lse)

    def _select(
        self, room: Room, parts: Sequence[tuple[slice, bool]], block_size: int, metadata: SparseMLAMetadata
    ) -> None:
        """Writes the slots that each token attends to, valid ones first, unless they are there. With context
        parallelism those that this rank keeps: then lists are shorter than the step knew, and each layer's have other
        lengths."""
        step = metadata.step
        if not self.selects and step.selected == self._selection_of(room):
            return
        for part, staged in parts:
            table = metadata.block_table
            mla_backend.convert_indices(
                self.topk_indices_buffer[part],
                step.table(table, block_size) if staged else table,
                metadata.req_id_per_token[part],
                block_size,
                compact=True,
                ranks=self.dcp_world_size,
                rank=self.dcp_rank,
                interleave=metadata.cp_kv_cache_interleave_size,
                slots=room.slots[part],
                counts=room.counts[part],
            )
        if self.dcp_world_size > 1:
            step.use_lengths(room.counts)
        step.selected = self._selection_of(room) if step.keeps_slots(*room.lse.shape) else None


def _queries(q: Tensor | tuple[Tensor, Tensor], cache: Tensor, no_rope: Tensor) -> Tensor | tuple[Tensor, Tensor]:
    """Queries as the op takes them: bf16, and with rope where the cache's rows have it. Those of fp8_ds_mla always do;
    in models without rope it is zero."""
    if isinstance(q, tuple) and q[1].shape[-1]:
        return tuple(part.bfloat16() for part in q)
    q = (q[0] if isinstance(q, tuple) else q).bfloat16()
    if q.shape[-1] == LATENT and cache.shape[-1] != LATENT:
        return q, no_rope.expand(*q.shape[:2], ROPE)
    return q
