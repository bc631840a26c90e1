"""The indexer on a GPU: `select_tokens`, scores of a context's keys and their top-k in one op, versus vLLM's two steps.

Those are DeepGEMM's scores and the top-k that vLLM picks. Queries are e4m3, keys FP8 or MXFP4. The baseline takes FP8
keys, and requests of one size. What vLLM does besides is not timed: gathering keys out of pages in prefill, schedules,
filling the result.

With --candidates a token chooses among the keys of random blocks. In DeepSeek-V4.1's later layers they are the blocks
that an earlier one kept: 16384 keys, with 32 heads and top 512. vLLM masks all other scores between its two steps.
"""

import argparse
import importlib
import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import mla_backend
from mla_backend import reference
from mla_backend.index import MAX_HEADS
from mla_backend.keys import KEY_FORMATS, write_keys
from mla_backend.vllm_plugin.selection import order
from serving_benchmarks import options as opt
from serving_benchmarks.ops import kernels, timing
from serving_benchmarks.ops.batches import BLOCK, SETS, SMALLEST_CACHE, RequestBatch, positions

BATCHES = "1q1s32k,16q1s32k,64q1s32k,1q1s128k,16q1s128k,64q1s128k,4q1s512k,16q4s32k"
BATCHES += ",q4ks32k,q4ks128k,q2ks512k,6q700s20k"
CHECKED = 8  # tokens that are compared with the reference
MOST_DIFFER = 0.02  # share of positions that may differ: scores near the last one chosen round differently
CANDIDATE_BLOCK = 8  # keys, as in DeepSeek-V4.1
DEEP_GEMM, VLLM_OPS = "vllm.third_party.deep_gemm", "vllm._C_stable_libtorch"
MASK = "vllm.model_executor.kernels.attention.dsa.candidate_blocks"
COOPERATIVE_ROWS, TOPK_BYTES = 64, 2**20  # of vLLM's top-k: most rows of the cooperative one, and its workspace
LOGITS = 512 * 2**18  # fp32 scores that vLLM makes at once in prefill

Inputs = tuple[Any, ...]
"""One set: the arguments of `select_tokens` in their order, its candidates, and where it writes."""


@dataclass(frozen=True)
class Case(kernels.Case):
    candidates: int = 0  # keys that a token chooses from. 0: all that it sees


def new_inputs(case: kernels.Case, cache: Tensor, table: Tensor, candidates: int = 0) -> Inputs:
    batch, device = case.requests, cache.device
    queries = torch.randn(batch.tokens, case.heads, 128, device=device).to(torch.float8_e4m3fn)
    weights = torch.randn(batch.tokens, case.heads, device=device)
    of_tokens = batch.token_requests().to(device), batch.visible().to(device)
    out, kept = torch.empty(batch.tokens, case.topk, dtype=torch.int32, device=device), None
    if candidates:
        seen = (of_tokens[1] + CANDIDATE_BLOCK - 1) // CANDIDATE_BLOCK
        kept = positions(seen, candidates // CANDIDATE_BLOCK), CANDIDATE_BLOCK
        order(kept[0])
    return queries, weights, cache, table.clamp(min=0), *of_tokens, kept, out


def of_some(kept: tuple[Tensor, int] | None, tokens: slice) -> tuple[Tensor, int] | None:
    return kept and (kept[0][tokens], kept[1])


def new_cache(tokens: int, keys: str = "fp8") -> Tensor:
    """Random keys in every slot."""
    cache = torch.zeros(-(-tokens // BLOCK), BLOCK, KEY_FORMATS[keys].width, dtype=torch.uint8, device=kernels.DEVICE)
    for slots in torch.arange(tokens, device=cache.device).split(2**18):
        write_keys(torch.randn(len(slots), 128, device=cache.device), cache, slots)
    return cache


def check(inputs: Inputs) -> dict[str, float]:
    """Compares some tokens, the last one among them, with the reference."""
    queries, weights, cache, table, requests, lengths, kept, chosen = inputs
    some, found = torch.linspace(0, len(queries) - 1, CHECKED).long().tolist(), []
    for own in (slice(token, token + 1) for token in some):
        keys = cache[table[requests[own].long()[0]].long()]  # this request's: all would be too large in float
        local = torch.arange(len(keys), dtype=torch.int32, device=keys.device).unsqueeze(0)
        given = queries[own].float(), weights[own], keys, local, torch.zeros_like(requests[own]), lengths[own]
        found.append(reference.select_tokens(*given, chosen.shape[1], candidates=of_some(kept, own))[0])
    return compare(chosen[some], torch.cat(found))


def compare(got: Tensor, want: Tensor) -> dict[str, float]:
    """How many of the wanted positions were not got. Raises WrongResult if they are many."""
    got = torch.where(got < 0, 2**31 - 1, got).sort(1).values
    at = torch.searchsorted(got, want).clamp(max=got.shape[1] - 1)
    differ, count = int((got.gather(1, at) != want)[want >= 0].sum()), int((want >= 0).sum())
    if int((got < 2**31 - 1).sum()) != count or differ > MOST_DIFFER * count:
        raise kernels.WrongResult(f"wrong result: {differ} of {count} positions differ")
    return {"positions": count, "different": differ}


def decode_steps(case: Case, inputs: Inputs, out: Tensor, deep_gemm: Any, mask: Any) -> timing.Call:
    """As vLLM decodes: 1, 2 or 4 tokens are rows of a request, other numbers requests of their own."""
    queries, weights, cache, table, requests, lengths, kept, _ = inputs
    rows = case.requests.queries if case.requests.queries in (1, 2, 4) else 1
    table = table if rows == case.requests.queries else table[requests.long()]
    lengths, longest = lengths.view(-1, rows), case.requests.longest
    slots = torch.cuda.get_device_properties(kernels.DEVICE).multi_processor_count // (2 if rows == 4 else 1)
    schedule = deep_gemm.get_paged_mqa_logits_metadata(lengths, BLOCK, slots)
    workspace = torch.empty(TOPK_BYTES, dtype=torch.uint8, device=kernels.DEVICE)
    top = torch.ops._C.cooperative_topk if len(weights) <= COOPERATIVE_ROWS else torch.ops._C.persistent_topk

    def call() -> None:
        q, keys = (queries.view(-1, rows, case.heads, 128), None), cache.unsqueeze(-2)
        scores = deep_gemm.fp8_fp4_paged_mqa_logits(q, keys, weights, lengths, table, schedule, longest)
        if kept:
            mask(scores, None, lengths.flatten(), *kept)
        top(scores, lengths, out, workspace, case.topk, longest)

    return call


def prefill_steps(case: Case, inputs: Inputs, out: Tensor, deep_gemm: Any, mask: Any) -> timing.Call:
    """As vLLM prefills: from gathered keys, so many requests at once, or so many tokens of one, that scores fit."""
    queries, weights, cache, table, requests, lengths, kept, _ = inputs
    (count, length), made = case.requests.requests[0], []
    for first, rows in enumerate(table.split(most := max(1, math.isqrt(LOGITS // (count * length))))):
        first, starts = first * most, torch.arange(0, len(rows) * length + 1, length, dtype=torch.int32).to(rows.device)
        values = rows.new_empty(len(rows) * length, 128, dtype=torch.float8_e4m3fn)
        scales = rows.new_empty(len(rows) * length, 4, dtype=torch.uint8)
        torch.ops._C_cache_ops.cp_gather_indexer_k_quant_cache(cache, values, scales, rows, starts)
        keys, stop = (values, scales.view(torch.float32).squeeze(-1)), (first + len(rows)) * count
        for token in range(first * count, stop, step := max(1, LOGITS // len(values))):
            own = slice(token, min(token + step, stop))
            begin = starts[requests[own].long() - first]
            given = (queries[own], None), keys, weights[own], begin, begin + lengths[own], length
            made.append((given, torch.zeros_like(begin), lengths[own], of_some(kept, own), out[own]))

    def call() -> None:
        for given, begin, end, some, best in made:
            scores = deep_gemm.fp8_fp4_mqa_logits(*given)
            if some:
                mask(scores, None, end, *some)
            torch.ops._C.top_k_per_row_prefill(scores, begin, end, best, len(best), *scores.stride(), case.topk)

    return call


def two_steps(case: Case, sets: list[Inputs]) -> timing.Candidate:
    """vLLM's, loaded as vLLM loads it."""
    _, deep_gemm = map(importlib.import_module, (VLLM_OPS, DEEP_GEMM))
    deep_gemm.set_pdl(True)
    mask = importlib.import_module(MASK).apply_candidate_mask if case.candidates else None
    steps, outs = decode_steps if case.decode else prefill_steps, [torch.full_like(one[-1], -1) for one in sets]
    calls = [steps(case, inputs, out, deep_gemm, mask) for inputs, out in zip(sets, outs, strict=True)]
    return timing.Candidate(calls, outs[-1:], lambda: compare(outs[-1], sets[-1][-1]))


def measure(case: Case, cache: Tensor, loaded: set[str], rounds: int) -> dict[str, Any]:
    """Checks and times one case."""
    batch = case.requests
    tables = kernels.new_table(batch.blocks(BLOCK) * SETS, len(cache)).chunk(SETS)  # no set finds another's keys in L2
    sets = [new_inputs(case, cache, table, case.candidates) for table in tables]
    calls = [partial(mla_backend.select_tokens, *given, candidates=kept, out=out) for *given, kept, out in sets]
    ours = {"ours": timing.Candidate(calls, sets[-1][-1:], lambda: check(sets[-1]))}
    comparable = case.format == "fp8" and len({*batch.requests}) == 1
    found = timing.measure(ours, {name: partial(two_steps, case, sets) for name in loaded if comparable}, rounds)
    scored = int(batch.visible().clamp(max=case.candidates or batch.longest).sum())
    moved = min(batch.cached, scored) * cache.shape[-1] + sum(sets[-1][i].nbytes for i in (0, 1, -1))
    return {"useful_flops": 2 * 128 * case.heads * scored, "bytes": moved, **found}


def add_options(parser: argparse.ArgumentParser) -> None:
    opt.add_list(parser, "--batches", RequestBatch.parse, "as those of `kernels`", BATCHES)
    opt.add_list(parser, "--heads", opt.whole(1, MAX_HEADS), "of the indexer", "64")
    parser.add_argument("--keys", choices=("fp8", "mxfp4_68"), default="fp8", help="default: %(default)s")
    opt.add(parser, "--topk", opt.count, "keys that are chosen", 2048)
    keys = opt.checked(int, lambda keys: keys > 0 and keys % CANDIDATE_BLOCK == 0, f"a multiple of {CANDIDATE_BLOCK}")
    told = f"that a token chooses from, in random blocks of {CANDIDATE_BLOCK}, as in DeepSeek-V4.1; default: all"
    opt.add(parser, "--candidates", keys, told, 0, "KEYS")
    kernels.add_ends(parser, 21)


def run(options: argparse.Namespace) -> int:
    opt.require_gpu()
    torch.manual_seed(0)
    shapes = [(one.spec, heads, options.topk) for one in options.batches for heads in options.heads]
    cases = [Case(*shape, options.keys, options.candidates) for shape in shapes]
    tokens = max(SMALLEST_CACHE, *(SETS * BLOCK * sum(batch.blocks(BLOCK)) for batch in options.batches))
    found = {"deepgemm": timing.version_of(DEEP_GEMM, "vllm")}
    measured = partial(measure, cache=new_cache(tokens, options.keys))
    return kernels.measure_cases(options, "index", cases, measured, found)
