"""Selection of vLLM's indexer, or of ours, in shares: each tensor-parallel rank selects for some tokens of a step.

vLLM's metadata of a step becomes that of pieces of it, once per step, in which this rank has its tokens alone. In each
layer a piece's queries are taken, the indexer runs on them as it is, and ranks exchange what it selected:

    take (one kernel) -> the indexer -> all-gather -> place (one kernel)

A step's prefill is cut into pieces, and its decode is one more. Pieces of decode stay where they are, for CUDA graphs.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.config import CUDAGraphMode
from vllm.distributed import get_tp_group
from vllm.forward_context import get_forward_context
from vllm.models.deepseek_v32 import attention as deepseek_v32
from vllm.platforms import current_platform
from vllm.triton_utils import tl, triton
from vllm.utils.deep_gemm import get_paged_mqa_logits_metadata, has_deep_gemm
from vllm.utils.torch_utils import _resolve_layer_name, vllm_lib
from vllm.v1.attention.backends.mla import indexer

from mla_backend import rank_shares
from mla_backend.vllm_plugin import gpu_indexer, selection, versions
from mla_backend.vllm_plugin.replacements import by_name, instead_of, is_ours

HEAD_WORDS = 32
"""Of 4 bytes, in a query's head of 128 e4m3 values."""
REQUEST_ROWS = 4
"""Tokens of a request that vLLM's kernel for decode takes together, at most. Shares are of whole requests, so they may
be as much larger than a part of the tokens."""
BLOCK = 1024
"""Words that a program of the two kernels moves."""
FIELDS = {
    indexer.DeepseekV32IndexerPrefillMetadata: {"chunks", "row_shard_sizes"},
    indexer.DeepseekV32IndexerPrefillChunkMetadata: {
        *("token_start", "token_end", "skip_kv_gather", "cu_seqlen_ks", "cu_seqlen_ke"),
    },
    indexer.DeepSeekV32IndexerDecodeMetadata: {
        *("block_table", "seq_lens", "decode_lens", "schedule_metadata", "requires_padding"),
    },
}
"""Of vLLM's metadata, what a piece's is made of."""


def install(vllm_config: Any, forced: bool = False) -> None:
    """Makes vLLM's models share, or says in the log why not. Each process that builds a model calls it, some more than
    once.

    Args:
        forced: share each step, whatever it gains, over any connection.
    """
    if is_ours(deepseek_v32.sparse_attn_indexer):
        return
    group, config = get_tp_group(), vllm_config.model_config.hf_text_config
    tokens = min(rank_shares.PIECE, vllm_config.scheduler_config.max_num_batched_tokens)
    room = Room(group, tokens, config.index_n_heads, config.index_topk, forced)
    if (reason := why_not(room)) is not None:
        versions.logger().warning("mla-backend: each GPU selects for all tokens, as %s.", reason)
        if selection.is_on(vllm_config):
            gpu_indexer.install()
        return
    if selection.is_on(vllm_config):
        gpu_indexer.install(partial(shared, room=room))
    else:
        theirs = deepseek_v32.sparse_attn_indexer
        deepseek_v32.sparse_attn_indexer = shared(theirs, room)  # called by its name there
        vllm_lib.impl("sparse_attn_indexer", shared(theirs, room), current_platform.dispatch_key, allow_override=True)
    add_shares_to_metadata_of(indexer.DeepseekV32IndexerMetadataBuilder, room)


def why_not(room: "Room") -> str | None:
    """Why ranks don't share after all, the same on each; None if they do."""
    for kind, known in FIELDS.items():
        if missing := known - {one.name for one in fields(kind)}:
            return f"{kind.__name__} of this vLLM has no {', '.join(sorted(missing))}"
    if room.near is None and not room.forced:
        return "sharing needs GPUs of one host that NVLink connects, and vLLM's custom all-reduce"
    return None


# --- memory and the exchange ------------------------------------------------------------------------------------------


def near_of(group: Any) -> Any:
    """vLLM's kernels over NVLink, where all ranks have them, else None. All ranks call it, and get the same answer."""
    found = getattr(group.device_communicator, "ca_comm", None)
    usable = found is not None and not (found.disabled or found.mnnvl_only) and found.fully_connected
    everywhere = torch.tensor(int(usable and group.world_size <= 8), device="cpu")
    torch.distributed.all_reduce(everywhere, torch.distributed.ReduceOp.MIN, group.cpu_group)
    return found if everywhere else None


class Room:
    """What all layers of a rank share. It is made before vLLM sizes the cache, by all ranks at once."""

    def __init__(self, group: Any, tokens: int, heads: int, topk: int, forced: bool = False):
        self.group, self.rank, self.ranks, self.forced = group, group.rank_in_group, group.world_size, forced
        self.near, self.heads, self.topk = near_of(group), heads, topk
        each = -(-tokens // self.ranks) + REQUEST_ROWS
        self.tokens, self.decode_tokens = each * self.ranks, tokens
        self.snake = rank_shares.snake(self.tokens, self.ranks, group.device)
        new = partial(torch.empty, device=group.device)
        self.received = new(self.tokens, topk, dtype=torch.int32)
        self.queries = new(each, heads * HEAD_WORDS, dtype=torch.int32)
        self.weights = new(each, heads, dtype=torch.float32)
        for count in (1, each):  # compiles both kernels, and connects ranks in both ways: a capture could do neither
            rows, words = torch.zeros(count, dtype=torch.int64, device=group.device), torch.zeros_like(self.queries)
            own = self.take(words, torch.zeros_like(self.weights), rows)[2]
            self.place(rows, self.exchange(own), torch.empty_like(own))

    def fits(self, queries: Tensor, topk: int) -> bool:
        head = self.heads, HEAD_WORDS * 4 // queries.element_size()
        return tuple(queries.shape[1:]) == head and topk == self.topk

    def take(self, words: Tensor, weights: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and weights of these tokens, and where to write the positions: among those of all ranks."""
        n = len(rows)
        queries, own_weights = self.queries[:n], self.weights[:n]
        own = self.received[self.rank * n : (self.rank + 1) * n]
        if words.is_cuda:
            widths = words.shape[1], weights.shape[1], own.shape[1]
            given = words, words.stride(0), weights, weights.stride(0), rows, queries, own_weights, own
            _take_kernel[n, triton.cdiv(max(widths), BLOCK)](*given, *widths, BLOCK)
        else:
            torch.index_select(words, 0, rows, out=queries)
            torch.index_select(weights, 0, rows, out=own_weights)
            own.fill_(-1)
        return queries, own_weights, own

    def exchange(self, own: Tensor) -> Tensor:
        """The positions of all ranks, in their order. What is asked here is the same on each of them."""
        found, near = self.received[: len(own) * self.ranks], self.near
        nccl = getattr(self.group.device_communicator, "pynccl_comm", None)
        if near is not None and own.nbytes <= near.max_all_gather_size and own.nbytes % 16 == 0:
            # which copies floats as they are, and leaves NVLink's multicast alone, that a rank may lack
            memory = near.buffer_ptrs[near.rank], near.max_all_gather_size
            _custom_ops.custom_all_gather(near._ptr, own.view(torch.float32), found.view(torch.float32), *memory)
        elif nccl is not None and not nccl.disabled:
            nccl.all_gather(found, own)
        else:
            found.copy_(self.group.all_gather(own, 0))
        return found

    def place(self, places: Tensor, found: Tensor, out: Tensor) -> None:
        """Writes the positions of tokens, whose places among all ranks' are given, into the rows of out."""
        if out.is_cuda:
            width = found.shape[1]
            _place_kernel[len(places), triton.cdiv(width, BLOCK)](found, places, out, out.stride(0), width, BLOCK)
        else:
            out[:, : found.shape[1]] = found[places]


@triton.jit
def _take_kernel(
    words,
    words_stride,
    weights,
    weights_stride,
    rows,
    own_words,
    own_weights,
    own,
    WORDS: tl.constexpr,
    HEADS: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token, at = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + token)
    tl.store(own_words + token * WORDS + at, tl.load(words + row * words_stride + at, at < WORDS), at < WORDS)
    tl.store(own_weights + token * HEADS + at, tl.load(weights + row * weights_stride + at, at < HEADS), at < HEADS)
    tl.store(own + token * TOPK + at, tl.full((BLOCK,), -1, tl.int32), at < TOPK)


@triton.jit
def _place_kernel(found, places, out, out_stride, TOPK: tl.constexpr, BLOCK: tl.constexpr):
    token, at = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(places + token)
    tl.store(out + token * out_stride + at, tl.load(found + place * TOPK + at, at < TOPK), at < TOPK)


# --- a step -----------------------------------------------------------------------------------------------------------


@dataclass
class Piece:
    """Consecutive tokens of a step."""

    first: int
    rows: Tensor
    """int64 `[n]`: for which tokens of the step this rank selects. One may be there twice."""
    places: Tensor
    """int64 `[tokens]`: where each token's positions are among those of all ranks."""
    step: Any
    """vLLM's metadata, of this rank's tokens alone."""


@dataclass
class Shares:
    prefill: list[Piece] = field(default_factory=list)
    decode: Piece | None = None
    pays: bool = False
    pays_in_graphs: bool = False

    def of_call(self, step: Any, in_graph: bool) -> list[Piece]:
        """The pieces of a step; none where it is not shared."""
        if in_graph:  # of decode, as long as any step that replays it
            return [self.decode] if self.pays_in_graphs and self.decode and step.prefill is None else []
        padded = step.decode is not None and step.decode.requires_padding
        if not self.pays or padded or (step.decode is not None and self.decode is None):
            return []
        return self.prefill + ([self.decode] if self.decode else [])


def add_shares_to_metadata_of(builder: type, room: Room) -> None:
    """Has the metadata that it builds say what the pieces are."""
    build_theirs, update_theirs = builder.build, builder.update_draft_decode_metadata
    split_theirs = builder._split_indexer_prefill_chunks

    def build(self: Any, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        shares = Shares(**weigh(self, common_attn_metadata, room))
        self.ranks_of_chunks = room.ranks if shares.pays else 1
        metadata = build_theirs(self, common_prefix_len, common_attn_metadata, fast_build)
        if metadata.prefill is not None and shares.pays:
            shares.prefill = prefill_pieces(self, metadata, room)
        some = shares.pays or shares.pays_in_graphs
        if some and metadata.decode is not None and metadata.decode.seq_lens.numel() <= most_decoded(self, room):
            shares.decode = decode_piece(self, metadata, room)
            deal_decode(self, metadata, shares.decode, room)
        metadata.shares = shares
        return metadata

    def split(
        self: Any,
        compressed_seq_lens_cpu: Tensor,
        prefill_query_lens_cpu: Tensor,
        workspace_size: int,
        max_logits_bytes: int,
        request_offset: int = 0,
    ) -> Any:
        """A rank makes scores for its share of a chunk, so chunks may be as much larger."""
        lengths, budget = (compressed_seq_lens_cpu, prefill_query_lens_cpu), max_logits_bytes * self.ranks_of_chunks
        return split_theirs(*lengths, workspace_size, budget, request_offset=request_offset)

    def update_draft_decode_metadata(self: Any, metadata: Any) -> None:
        update_theirs(self, metadata)
        shares = getattr(metadata, "shares", None)
        if metadata.decode is not None and shares is not None and shares.decode is not None:
            deal_decode(self, metadata, shares.decode, room)

    builder.build = instead_of(build_theirs, build)
    builder._split_indexer_prefill_chunks = instead_of(split_theirs, split)
    builder.update_draft_decode_metadata = instead_of(update_theirs, update_draft_decode_metadata)


def most_decoded(builder: Any, room: Room) -> int:
    """Tokens of decode that there is room for, with a graph's padding."""
    return min(room.decode_tokens, builder.vllm_config.scheduler_config.max_num_seqs * builder.decode_threshold)


def weigh(builder: Any, common: Any, room: Room) -> dict[str, bool]:
    """Whether sharing pays in this step, by its lengths; and in a CUDA graph of so many tokens, which runs with any
    lengths: as if contexts were an eighth of the longest one that may be. A graph's step has always as many tokens,
    with padding, so what was right when it was captured stays so."""
    lengths, counts = versions.lengths_on_host(common), common.query_start_loc_cpu.diff()
    if lengths is None:
        lengths = torch.full_like(counts, common.max_seq_len)
    tokens, ratio = common.num_actual_tokens, builder.compress_ratio
    keys, decodes = counts.long() * (lengths[: len(counts)] - counts // 2), counts <= builder.decode_threshold
    prefill_tokens = int(counts[~decodes].sum())
    now = float(keys[decodes].sum()) / ratio, float(keys[~decodes].sum()) / ratio, tokens, prefill_tokens
    in_graph = tokens * builder.vllm_config.model_config.max_model_len / 8 / ratio, 0.0, tokens, 0
    can, sizes = tokens - prefill_tokens <= most_decoded(builder, room), (room.ranks, room.heads, room.topk)
    both = {"pays": now, "pays_in_graphs": in_graph}
    return {name: can and (room.forced or rank_shares.pays(*given, *sizes)) for name, given in both.items()}


def prefill_pieces(builder: Any, metadata: Any, room: Room) -> list[Piece]:
    """Each chunk of vLLM's, in pieces that there is room for."""
    pieces = []
    none = dict(num_decodes=0, num_decode_tokens=0, decode=None, num_prefills=1)
    for chunk in metadata.prefill.chunks:
        for first in range(chunk.token_start, chunk.token_end, room.tokens):
            index = builder.arange_buffer[: min(room.tokens, chunk.token_end - first)].long()
            rows, places = rank_shares.deal_in_turn(index, room.rank, room.ranks)
            rows, before = rows + first, first - chunk.token_start
            own = dict(token_start=0, token_end=len(rows), skip_kv_gather=chunk.skip_kv_gather or before > 0)
            own |= {name: getattr(chunk, name)[rows - chunk.token_start] for name in ("cu_seqlen_ks", "cu_seqlen_ke")}
            prefill = replace(metadata.prefill, chunks=[replace(chunk, **own)], row_shard_sizes=None)
            step = replace(metadata, **none, num_prefill_tokens=len(rows), prefill=prefill)
            if hasattr(metadata, "requests"):  # our op selects
                step.requests, step.lengths = metadata.requests[rows], metadata.lengths[rows]
            pieces.append(Piece(first, rows, places, step))
    return pieces


def decode_piece(builder: Any, metadata: Any, room: Room) -> Piece:
    """That of decode, whose tensors are parts of buffers that the builder keeps."""
    decode, each = metadata.decode, room.tokens // room.ranks
    if not hasattr(builder, "share"):
        new = partial(torch.zeros, device=decode.seq_lens.device)
        with torch.inference_mode(False):  # else they could be written in that mode alone
            builder.share = dict(
                ints=new(3, each, dtype=torch.int32),
                rows=new(each, dtype=torch.int64),
                places=new(room.tokens, dtype=torch.int64),
                table=new(
                    -(-most_decoded(builder, room) // room.ranks), decode.block_table.shape[1], dtype=torch.int32
                ),
                schedule=torch.zeros_like(builder.scheduler_metadata_buffer),  # of steps of any width
            )
    buffers, (requests, width) = builder.share, decode.seq_lens.shape
    own = -(-requests // room.ranks)
    tokens = own * width
    lengths, of_tokens = buffers["ints"][0, :tokens].view(own, width), buffers["ints"][1:, :tokens]
    given = dict(block_table=buffers["table"][:own], seq_lens=lengths, decode_lens=decode.decode_lens[:own])
    given |= dict(schedule_metadata=buffers["schedule"][: len(decode.schedule_metadata)])
    step = replace(
        metadata,
        **dict(num_decodes=own, num_decode_tokens=tokens, num_prefills=0, num_prefill_tokens=0, prefill=None),
        decode=replace(decode, **given),
    )
    if hasattr(metadata, "requests"):  # our op selects
        step.requests, step.lengths = of_tokens
    return Piece(0, buffers["rows"][:tokens], buffers["places"][: requests * width], step)


def deal_decode(builder: Any, metadata: Any, piece: Piece, room: Room) -> None:
    """Writes into the piece which requests are this rank's, and what they see."""
    theirs, own = metadata.decode, piece.step.decode
    dealt, places = rank_shares.deal(theirs.seq_lens[:, -1], room.snake)
    requests, width = dealt[room.rank], theirs.seq_lens.shape[1]
    piece.rows.copy_(rank_shares.rows_of(requests, width))
    piece.places.copy_(rank_shares.rows_of(places, width))
    torch.index_select(theirs.seq_lens, 0, requests, out=own.seq_lens)
    torch.index_select(theirs.block_table, 0, requests, out=own.block_table)
    if hasattr(metadata, "requests"):
        torch.index_select(metadata.requests, 0, piece.rows, out=piece.step.requests)
        torch.index_select(metadata.lengths, 0, piece.rows, out=piece.step.lengths)
    elif current_platform.is_cuda() and has_deep_gemm():
        states = builder.kv_cache_spec.num_states, builder.num_sms
        own.schedule_metadata.copy_(get_paged_mqa_logits_metadata(own.seq_lens, *states))


# --- a layer ----------------------------------------------------------------------------------------------------------


def shared(function: Callable[..., Any], room: Room) -> Callable[..., Any]:
    """A function of an indexer, vLLM's or ours, that runs on the pieces of a step."""
    arguments = by_name(function)

    @eager_break_during_capture
    def select(*args: Any, **kwargs: Any) -> Any:
        given, context = arguments(*args, **kwargs), get_forward_context()
        steps, name = context.attn_metadata, _resolve_layer_name(given["k_cache_prefix"])
        shares, pieces = getattr(steps[name], "shares", None) if isinstance(steps, dict) else None, []
        if shares is not None and room.fits(given["q_quant"], given["topk_tokens"]):
            pieces = shares.of_call(steps[name], context.cudagraph_runtime_mode == CUDAGraphMode.FULL)
        dense = _resolve_layer_name(given["dense_mha_metadata_layer_name"])
        if not pieces or gpu_indexer.is_dense(context, dense):
            return function(**given)
        step, buffer, keys = steps[name], given["topk_indices_buffer"], given["k"]
        if keys is not None and not given.get("skip_k_cache_insert"):
            gpu_indexer.insert(
                keys, given["kv_cache"], step.slot_mapping, given["quant_block_size"], given["scale_fmt"]
            )
        if not given.get("skip_topk_buffer_clear"):
            buffer[: len(given["hidden_states"])] = -1
        words, changed = given["q_quant"].view(torch.int32).flatten(1), dict(k=None)
        changed |= {key: True for key in ("skip_k_cache_insert", "skip_topk_buffer_clear") if key in given}
        try:
            for piece in pieces:
                queries, weights, own = room.take(words, given["weights"], piece.rows)
                queries = queries.view(given["q_quant"].dtype).view(len(own), *given["q_quant"].shape[1:])
                steps[name] = piece.step
                own_call = dict(hidden_states=own, q_quant=queries, weights=weights, topk_indices_buffer=own)
                function(**given | changed | own_call)
                room.place(piece.places, room.exchange(own), buffer[piece.first : piece.first + len(piece.places)])
        finally:
            steps[name] = step
        return buffer if "skip_topk_buffer_clear" in given else None

    return instead_of(function, select)
