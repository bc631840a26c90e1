"""Serves a few layers of DeepSeek-V3.2's width with two of vLLM's attention backends on a GPU, and compares them.

    python tests/vllm/compare_backends.py --heads 16 --kv-cache-dtype fp8

The weights are random and of the magnitude of trained ones, so that attention matters (those that vLLM makes up by
itself don't do). The same prompts run greedily with each backend, and with the first one a second time in the opposite
order: what differs then is noise, and the other backend may differ by as much. Prints tokens and log probabilities that
agree, times, and the kernels that took longest; --json writes the same to a file. Each run has a process of its own.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BACKENDS = ("FLASHMLA_SPARSE", "SPARSE_MLA")
VOCABULARY = 32768
LAYERS = 4
KERNELS_SHOWN = 25


def write_checkpoint(folder: Path, heads: int, max_positions: int) -> None:
    """DeepSeek-V3.2 with fewer layers, no experts and a smaller vocabulary."""
    sys.path.insert(0, str(ROOT))
    from serving_benchmarks import models

    smaller = dict(vocab_size=VOCABULARY, intermediate_size=4096, max_position_embeddings=max_positions)
    models.write(folder, models.config("deepseek-v3.2", layers=LAYERS, dense_layers=LAYERS, heads=heads, **smaller))


def prompts(options: argparse.Namespace) -> list[list[int]]:
    """Of unequal lengths around the one that was asked for."""
    import random

    rng = random.Random(0)
    lengths = [max(1, int(options.context * rng.uniform(0.75, 1.0))) for _ in range(options.prompts)]
    return [[rng.randrange(2, VOCABULARY) for _ in range(length)] for length in lengths]


def run(options: argparse.Namespace) -> dict[str, Any]:
    """One backend, in this process."""
    if options.tp == 1:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # so that the profiler sees the kernels
    import torch
    from vllm import LLM, SamplingParams

    started = time.perf_counter()
    llm = LLM(
        options.checkpoint,
        skip_tokenizer_init=True,
        attention_backend=options.run,
        kv_cache_dtype=options.kv_cache_dtype,
        tensor_parallel_size=options.tp,
        max_model_len=options.context + options.new_tokens,
        max_num_seqs=options.prompts,
        max_num_batched_tokens=options.batched_tokens,
        gpu_memory_utilization=0.7,
        enable_prefix_caching=False,
        enforce_eager=options.eager,
        # CUDA graphs without compiling the model first, which takes minutes and is no matter of attention
        compilation_config={"mode": 0} if options.eager else {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    )
    start_seconds = time.perf_counter() - started
    texts = [{"prompt_token_ids": p} for p in prompts(options)]
    order = list(reversed(range(len(texts)))) if options.reversed else list(range(len(texts)))

    def generate(new_tokens: int) -> list[Any]:
        sampling = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, logprobs=0, detokenize=False)
        outputs = llm.generate([texts[i] for i in order], sampling, use_tqdm=False)
        return [outputs[order.index(i)].outputs[0] for i in range(len(texts))]

    def seconds(new_tokens: int) -> float:
        begin = time.perf_counter()
        generate(new_tokens)
        return time.perf_counter() - begin

    outputs = generate(options.new_tokens)
    prefill = min(seconds(1) for _ in range(options.repeats))
    both = min(seconds(options.new_tokens) for _ in range(options.repeats))
    kernels: list[tuple[str, float]] = []
    if options.tp == 1:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            generate(8)
            torch.cuda.synchronize()
        total = Counter()
        for event in profile.key_averages():
            total[event.key] += event.self_device_time_total
        kernels = [(name, time_us / 1e3) for name, time_us in total.most_common(KERNELS_SHOWN)]
    return {
        "backend": options.run,
        "reversed": options.reversed,
        "start_s": start_seconds,
        "prefill_s": prefill,
        "decode_s": both - prefill,
        "decode_ms_a_step": (both - prefill) * 1e3 / max(1, options.new_tokens - 1),
        "tokens": [list(o.token_ids) for o in outputs],
        "logprobs": [
            [step[token].logprob for step, token in zip(o.logprobs, o.token_ids, strict=True)] for o in outputs
        ],
        "kernels_ms": kernels,
    }


def compare(a: dict[str, Any], b: dict[str, Any]) -> dict[str, float]:
    """How far two runs agree. Up to the first token that differs they saw the same; from then on they don't."""
    same, differences, first = 0, [], []
    for tokens_a, tokens_b, logprobs_a, logprobs_b in zip(
        a["tokens"], b["tokens"], a["logprobs"], b["logprobs"], strict=True
    ):
        until = next((i for i, pair in enumerate(zip(tokens_a, tokens_b, strict=True)) if pair[0] != pair[1]), None)
        count = len(tokens_a) if until is None else until
        same += count == len(tokens_a)
        differences += [abs(x - y) for x, y in zip(logprobs_a[:count], logprobs_b[:count], strict=True)]
        first.append(count)
    finite = all(math.isfinite(x) for run in (a, b) for row in run["logprobs"] for x in row)
    return {
        "prompts_equal": same / len(a["tokens"]),
        "tokens_until_first_difference": sum(first) / len(first),
        "logprob_difference_mean": sum(differences) / max(1, len(differences)),
        "logprob_difference_max": max(differences, default=math.nan),
        "finite": float(finite),
    }


NOT_OF_THE_RUN = ("checkpoint", "json", "run", "reversed")
"""Options that say where files are, and those that a run of several gives its parts."""


def in_a_process(options: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        subprocess.run([sys.executable, __file__, *options, "--json", str(result)], check=True)
        return json.loads(result.read_text())


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=128, help="attention heads of the whole model")
    parser.add_argument("--kv-cache-dtype", default="fp8")
    parser.add_argument("--context", type=int, default=4096, help="length of the longest prompt")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--batched-tokens", type=int, default=8192, help="tokens in a step at most")
    parser.add_argument("--repeats", type=int, default=3, help="of each timing; the fastest counts")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS), help="the first is what others are held to")
    parser.add_argument("--checkpoint", default="", help="a folder; made where it doesn't exist")
    parser.add_argument("--json", default="", help="where to write what was found")
    parser.add_argument("--run", default="", help=argparse.SUPPRESS)
    parser.add_argument("--reversed", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.run:
        found = run(options)
    else:
        options.checkpoint = options.checkpoint or str(
            Path(tempfile.gettempdir()) / f"v32-{LAYERS}-layers-{options.heads}-heads-{options.context}"
        )
        if not (Path(options.checkpoint) / "config.json").is_file():
            write_checkpoint(Path(options.checkpoint), options.heads, options.context + options.new_tokens)
        names = ("heads", "kv_cache_dtype", "context", "prompts", "new_tokens", "batched_tokens", "repeats", "tp")
        passed = [part for n in names for part in (f"--{n.replace('_', '-')}", str(getattr(options, n)))]
        passed += ["--checkpoint", options.checkpoint, *(["--eager"] if options.eager else [])]
        runs = {name: in_a_process([*passed, "--run", name]) for name in options.backends}
        first = runs[options.backends[0]]
        again = in_a_process([*passed, "--run", options.backends[0], "--reversed"])
        found = {
            "options": {name: value for name, value in vars(options).items() if name not in NOT_OF_THE_RUN},
            "noise": compare(first, again),
            "against_first": {name: compare(first, runs[name]) for name in options.backends[1:]},
            "runs": runs,
        }
        report(found)
    if options.json:
        Path(options.json).write_text(json.dumps(found))
    return found


def report(found: dict[str, Any]) -> None:
    for name, one in found["runs"].items():
        print(
            f"{name}: start {one['start_s']:.0f} s, prefill {one['prefill_s']:.3f} s, decode {one['decode_s']:.3f} s "
            f"({one['decode_ms_a_step']:.3f} ms a step)"
        )
        for kernel, time_ms in one["kernels_ms"]:
            print(f"    {time_ms:9.3f} ms  {kernel[:140]}")
    print(f"noise of {found['options']['backends'][0]} in another order: {found['noise']}")
    for name, difference in found["against_first"].items():
        print(f"{name} against it: {difference}")


if __name__ == "__main__":
    main()
