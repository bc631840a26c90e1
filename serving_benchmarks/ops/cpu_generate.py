"""The engine on the CPU, beside transformers generating the same prompts from the same checkpoint.

    python -m serving_benchmarks.ops.cpu_generate --output cpu_generate.json

The checkpoint is made here, with random weights: a DeepSeek-V3.2 of few layers and experts, whose attention has real
widths (latent 512, rope 64, heads of 128, 32 indexer heads of 128). transformers gets the prompts as one batch, padded
on the left, with its cache, and generates greedily; the engine gets them as requests, with its defaults. Both compute
in bf16 and generate the same number of tokens. Prompts are random, of half a length to the whole, and others in each
call, so that no prefix is in the engine's cache.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from mla_backend.engine import Engine, SamplingParams
from serving_benchmarks.models import models
from serving_benchmarks.ops.timing import Timing, interleaved
from serving_benchmarks.results import result_file

SHAPE = dict(
    vocab_size=16384,
    hidden_size=1024,
    intermediate_size=2816,
    moe_intermediate_size=512,
    num_hidden_layers=4,
    first_k_dense_replace=1,
    n_routed_experts=16,
    num_experts_per_tok=4,
    n_shared_experts=1,
    n_group=4,
    topk_group=2,
    q_lora_rank=512,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    index_n_heads=32,
    index_topk=256,
    rope_parameters=dict(rope_type="default", rope_theta=10000.0),
    eos_token_id=None,
)
PEER = "transformers"


def make_checkpoint(folder: Path, heads: int, positions: int) -> None:
    """Random weights, of a size that keeps activations where they are in trained models."""
    shape = {**SHAPE, "max_position_embeddings": positions}
    models.write(folder, models.config("deepseek-v3.2", heads=heads, **shape), tokenizer=False)


class Prompts:
    """A batch of prompts for each call, the same ones for everybody's n-th call."""

    def __init__(self, batch: int, context: int):
        self.batch, self.context = batch, context

    def of(self, call: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(call)
        lengths = torch.randint(self.context // 2, self.context + 1, (self.batch,), generator=generator)
        return [
            torch.randint(0, SHAPE["vocab_size"], (length,), generator=generator).tolist()
            for length in lengths.tolist()
        ]


class Candidate:
    """Generates for the prompts of its n-th call."""

    def __init__(self, prompts: Prompts, new_tokens: int):
        self.prompts, self.new_tokens, self.calls = prompts, new_tokens, 0
        self.last: list[list[int]] = []
        """What was generated, prompt by prompt."""

    def __call__(self, _: int) -> None:
        self.last = self.generate(self.prompts.of(self.calls))
        self.calls += 1

    def generate(self, prompts: list[list[int]]) -> list[list[int]]:
        raise NotImplementedError


class Ours(Candidate):
    def __init__(self, folder: Path, kv_cache: str, *common):
        super().__init__(*common)
        self.engine = Engine(folder, device="cpu", kv_cache=kv_cache)

    def generate(self, prompts: list[list[int]]) -> list[list[int]]:
        params = SamplingParams(max_tokens=self.new_tokens, ignore_eos=True)
        return [result.tokens for result in self.engine.generate(prompts, params)]


class Theirs(Candidate):
    def __init__(self, folder: Path, attention: str, *common):
        from transformers import DeepseekV32ForCausalLM

        super().__init__(*common)
        self.model = DeepseekV32ForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, attn_implementation=attention
        ).eval()

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]]) -> list[list[int]]:
        longest = max(map(len, prompts))
        out = self.model.generate(
            torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts]),
            attention_mask=torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]),
            max_new_tokens=self.new_tokens,
            min_new_tokens=self.new_tokens,
            do_sample=False,
            use_cache=True,
            pad_token_id=0,
        )
        return out[:, longest:].tolist()


def measure(
    folder: Path, batch: int, context: int, options: argparse.Namespace, on_round: Callable[[], None]
) -> dict[str, Any]:
    common = Prompts(batch, context), options.new_tokens
    candidates: dict[str, Candidate] = {
        "ours": Ours(folder, options.kv_cache, *common),
        PEER: Theirs(folder, options.peer_attention, *common),
    }
    timings = interleaved(candidates, rounds=options.rounds, burst_seconds=0, on_round=on_round)
    ours, theirs = (candidate.last for candidate in candidates.values())
    if {len(tokens) for tokens in ours + theirs} != {options.new_tokens}:
        raise RuntimeError(f"both must generate {options.new_tokens} tokens for each prompt")
    seconds = {name: timing.median for name, timing in timings.items()}
    return {
        "case": {"batch": batch, "context": context, "new_tokens": options.new_tokens, "kv_cache": options.kv_cache},
        "seconds": {name: timing.as_dict() for name, timing in timings.items()},
        "tokens_a_second": {name: batch * options.new_tokens / value for name, value in seconds.items()},
        "speed_up": seconds[PEER] / seconds["ours"],
        "same_first_tokens": sum(a[0] == b[0] for a, b in zip(ours, theirs, strict=True)) / batch,
    }


HEADINGS = ["requests", "prompt tokens", "new tokens", "mla-backend, tokens a second", "transformers", "ratio"]


def rows(results: list[dict[str, Any]]) -> list[list[str]]:
    """A line for each case, of what HEADINGS says."""
    lines = []
    for result in results:
        case, speed = result["case"], result["tokens_a_second"]
        timing, new = Timing(**result["seconds"]["ours"]), case["batch"] * case["new_tokens"]
        spread = f"({new / timing.upper_quartile:.0f} to {new / timing.lower_quartile:.0f})"
        lines.append(
            [
                f"{case['batch']}",
                f"{case['context'] // 2} to {case['context']}",
                f"{case['new_tokens']}",
                f"{speed['ours']:.0f} {spread}",
                f"{speed[PEER]:.1f}",
                f"{result['speed_up']:.1f}",
            ]
        )
    return lines


def markdown(report: dict[str, Any]) -> str:
    """The README's table, from a result file."""
    where, results = report["environment"], report["results"]
    lines = result_file.table(HEADINGS, rows(results))
    shape = where["model"]
    lines += [
        "",
        f"{where['cpu']['model']}, {where['threads']} threads, torch {where['torch']['version']}, transformers "
        f"{where['transformers']} ({where['peer_attention']} attention), {where['date'][:10]}, commit "
        f"{(where['commit'] or 'unknown')[:10]}. Random weights in bf16, {shape['num_hidden_layers']} layers of width "
        f"{shape['hidden_size']}, {shape['num_attention_heads']} heads, "
        f"{shape['n_routed_experts']} experts, top-k {shape['index_topk']}, {results[0]['case']['kv_cache']} cache; "
        f"prompts included; medians of {results[0]['seconds']['ours']['turns']} turns in one process.",
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m serving_benchmarks.ops.cpu_generate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16], help="requests at a time; default: 1 16")
    parser.add_argument("--contexts", type=int, nargs="+", default=[512], help="prompt tokens; default: 512")
    parser.add_argument("--new-tokens", type=int, default=128, help="of each request; default: %(default)s")
    parser.add_argument("--heads", type=int, default=16, help="of attention; default: %(default)s")
    parser.add_argument("--kv-cache", choices=["fp8", "bf16"], default="fp8", help="ours; default: %(default)s")
    parser.add_argument(
        "--peer-attention",
        choices=["eager", "sdpa"],
        default="eager",
        help="of transformers, whose default sdpa is slower here; default: %(default)s",
    )
    parser.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="default: as many as torch takes (%(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="turns of both; default: %(default)s")
    result_file.add_output(parser)
    result_file.add_markdown(parser)
    options = parser.parse_args()
    if options.markdown:
        result_file.print_markdown(parser, options.markdown, markdown)
        return 0
    for name in ("batches", "new_tokens", "heads", "threads"):
        values = getattr(options, name)
        if min(values if isinstance(values, list) else [values]) < 1:
            parser.error(f"--{name.replace('_', '-')} must be 1 or more")
    if min(options.contexts) < 2:
        parser.error("--contexts must be 2 or more")
    if options.rounds < 2:
        parser.error("--rounds must be 2 or more, or there is no spread")
    try:
        import transformers
        from transformers import DeepseekV32ForCausalLM  # noqa: F401
    except ImportError as error:
        parser.error(f"needs transformers 5, the peer: {error}")
    result_file.require_writable(parser, options.output)

    console = Console(stderr=True)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    cases = [(batch, context) for context in options.contexts for batch in options.batches]
    results = []
    with (
        tempfile.TemporaryDirectory() as folder,
        Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
        ) as progress,
    ):
        task = progress.add_task("making the checkpoint", total=len(cases) * options.rounds)
        make_checkpoint(Path(folder), options.heads, max(options.contexts) + options.new_tokens)
        for batch, context in cases:
            progress.update(task, description=f"{batch} requests, {context} tokens")
            results.append(measure(Path(folder), batch, context, options, lambda: progress.advance(task)))
    shown = Table(*HEADINGS, box=None, padding=(0, 1))
    for line in rows(results):
        shown.add_row(*line)
    Console(width=120, highlight=False).print(shown)
    result_file.write(
        options.output,
        results,
        console,
        model={**SHAPE, "num_attention_heads": options.heads},
        threads=options.threads,
        transformers=transformers.__version__,
        peer_attention=options.peer_attention,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
