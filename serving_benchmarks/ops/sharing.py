"""One layer's selection shared by GPUs, versus each GPU selecting for all tokens, with vLLM's kernels in both cases.

Every GPU has a process and all keys. What is timed is what a layer adds in vLLM with our plugin: DeepGEMM's scores and
vLLM's top-k for a share of the tokens, and the exchange of positions. It is timed as a CUDA graph on the first GPU.
Each case is shared, also one that the plugin would not share.
Metadata is vLLM's; making it, once a step, is not timed.
"""

import argparse
import os
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from serving_benchmarks import options as opt
from serving_benchmarks.ops import index, kernels, timing
from serving_benchmarks.ops.batches import BLOCK, RequestBatch

BATCHES = "64q1s32k,64q1s128k,16q1s128k,q8ks32k,q8ks128k"
LAYER = "indexer.k_cache"
DECODE_PASSES = 10  # calls in a graph. All processes make as many, as each call waits for the others.
GATHERED = 2**20  # keys that vLLM's prefill may gather at once


@dataclass(frozen=True)
class Case(kernels.Case):
    gpus: int


def join(rank: int, ranks: int, meeting: str, custom: bool = True) -> Any:
    """vLLM's tensor-parallel group of this process, whose GPU it takes; `custom`: with its kernels over NVLink."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.v1.worker import workspace

    torch.cuda.set_device(rank)
    parallel_state.set_custom_all_reduce(custom)
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(ranks, rank, f"file://{meeting}", rank)
        parallel_state.initialize_model_parallel(ranks)
    workspace.init_workspace_manager(torch.device("cuda", rank))
    return parallel_state.get_tp_group()


def leave() -> None:
    from vllm.distributed import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


def new_builder(kind: type, tokens: int, longest: int, drafts: int, device: torch.device) -> Any:
    """vLLM's builder of an indexer's metadata, for as many tokens a step, and contexts."""
    sizes = dict(decode_context_parallel_size=1, prefill_context_parallel_size=1, tensor_parallel_size=1)
    names = dict(resolve_indexer_kv_dtype=lambda default: default, sparse_mla_prefill_workspace_factor=5)
    names |= dict(indexer_tp_shard_min_rows=2**30)
    speculative = SimpleNamespace(num_speculative_tokens=drafts, enable_adaptive_verification=False)
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=tokens, max_num_seqs=tokens),
        parallel_config=SimpleNamespace(**sizes, cp_kv_cache_interleave_size=1),
        model_config=SimpleNamespace(max_model_len=longest, architectures=[]),
        attention_config=SimpleNamespace(**names),
        compilation_config=SimpleNamespace(cudagraph_mode=None),
        speculative_config=speculative if drafts else None,
        num_speculative_tokens=drafts,
    )
    spec = SimpleNamespace(num_states=BLOCK, block_size=BLOCK)
    return kind(spec, [LAYER], config, device, block_table_width=-(-longest // BLOCK))


def new_step(query_lens: Tensor, seq_lens: Tensor, table: Tensor) -> Any:
    """vLLM's metadata of a step, before an indexer's. Requests of no tokens pad a CUDA graph."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    most = int(query_lens.max())
    counts = query_lens, query_lens.where(query_lens > 0, most)
    starts, on_host = (torch.nn.functional.pad(one.cumsum(0).int(), (1, 0)) for one in counts)
    tokens, device = int(on_host[-1]), table.device
    return CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=on_host,
        seq_lens=seq_lens.int().to(device),
        seq_lens_cpu_upper_bound=seq_lens.int(),
        max_seq_len=int(seq_lens.max()),
        num_reqs=len(seq_lens),
        num_actual_tokens=tokens,
        max_query_len=most,
        block_table_tensor=table,
        slot_mapping=torch.zeros(tokens, dtype=torch.int64, device=device),
    )


def measure(case: Case, cache: Tensor, group: Any, loaded: set[str], rounds: int) -> dict[str, Any]:
    """Checks and times one case."""
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import override_forward_context
    from vllm.model_executor.layers.sparse_attn_indexer import sparse_attn_indexer
    from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerMetadataBuilder as Builder

    from mla_backend import rank_shares
    from mla_backend.vllm_plugin import shared_indexer

    batch, longest = case.requests, case.requests.longest
    room = shared_indexer.Room(group, rank_shares.PIECE, case.heads, case.topk, forced=True)
    sharing_builder = type("SharingBuilder", (Builder,), {})
    shared_indexer.add_shares_to_metadata_of(sharing_builder, room)
    table = kernels.new_table(batch.blocks(BLOCK), len(cache)).clamp(min=0)
    queries, weights, *_, out = index.new_inputs(case, cache, table)
    query_lens, seq_lens = torch.tensor(batch.requests).T.contiguous()
    mode = CUDAGraphMode.FULL if case.decode else CUDAGraphMode.NONE

    def candidate(builder: type, function: Any, out: Tensor, check: Any = lambda: None) -> timing.Candidate:
        builder = new_builder(builder, max(256, batch.tokens), longest, 0, queries.device)
        metadata = builder.build(0, new_step(query_lens, seq_lens, table))
        context = SimpleNamespace(attn_metadata={LAYER: metadata}, cudagraph_runtime_mode=mode)
        given = queries, LAYER, cache, queries, None, None, weights, 128, "ue8m0", case.topk, 128, longest, GATHERED
        more = out, True, False, False, ""

        def call() -> None:
            with override_forward_context(context):
                function(*given, *more)

        return timing.Candidate([call], [out], check)

    def burst(calls: list[timing.Call]) -> timing.Burst:
        calls[0]()  # loads kernels
        return timing.captured(calls, DECODE_PASSES if case.decode else 1)

    unshared = candidate(Builder, sparse_attn_indexer, torch.empty_like(out))
    unshared.calls[0]()
    (want,), shared = unshared.results, shared_indexer.shared(sparse_attn_indexer, room)
    ours = candidate(sharing_builder, shared, out, lambda: index.compare(out, want))
    found = timing.measure({"ours": ours}, {"unshared": lambda: unshared}, rounds, burst)
    flops = 2 * 128 * case.heads * int(batch.visible().sum())
    return {"useful_flops": flops, "bytes": batch.cached * cache.shape[-1] + queries.nbytes + out.nbytes, **found}


def run_rank(rank: int, options: argparse.Namespace, meeting: str) -> None:
    if rank:  # the first one tells
        sys.stdout = sys.stderr = open(os.devnull, "w")
        options.output = None
    group = join(rank, options.gpus, meeting, not options.nccl)
    torch.manual_seed(0)
    cases = [Case(one.spec, options.heads, options.topk, "fp8", options.gpus) for one in options.batches]
    cache = index.new_cache(max(BLOCK * sum(batch.blocks(BLOCK)) for batch in options.batches))
    with torch.inference_mode():
        found = {"unshared": timing.version_of("vllm", "vllm")}
        status = kernels.measure_cases(options, "sharing", cases, partial(measure, cache=cache, group=group), found)
    leave()
    sys.exit(status)


def add_options(parser: argparse.ArgumentParser) -> None:
    opt.add_list(parser, "--batches", RequestBatch.parse, "as those of `kernels`", BATCHES)
    opt.add(parser, "--gpus", opt.whole(2, 8), "of one host", 2)
    opt.add(parser, "--heads", opt.whole(1, index.MAX_HEADS), "of the indexer", 64)
    opt.add(parser, "--topk", opt.count, "keys that are chosen", 2048)
    parser.add_argument("--nccl", action="store_true", help="exchange by NCCL alone, without vLLM's own kernel")
    kernels.add_ends(parser, 21)


def run(options: argparse.Namespace) -> int:
    opt.require_gpu()
    if torch.cuda.device_count() < options.gpus:
        raise opt.Refused(f"--gpus {options.gpus}: there are {torch.cuda.device_count()}")
    with tempfile.TemporaryDirectory() as folder:
        try:
            torch.multiprocessing.spawn(run_rank, (options, f"{folder}/meeting"), nprocs=options.gpus)
        except torch.multiprocessing.ProcessExitedException as ended:
            return ended.exit_code
    return 0
