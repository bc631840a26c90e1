"""The command line of `mla-backend generate`."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from mla_backend.terminal import byte_size

if TYPE_CHECKING:  # the engine needs more packages than the other commands do
    from mla_backend.engine.params import SamplingParams

EPILOG = """\
examples:
  mla-backend generate MODEL "The capital of France is" --max-tokens 20
  mla-backend generate MODEL --input questions.txt --chat --output answers.jsonl
  mla-backend generate MODEL --input batch.jsonl --output results.jsonl --resume
  sort -u prompts.txt | mla-backend generate MODEL --temperature 0.8 --samples 4 > results.jsonl

input:
  A text file has a prompt a line. A line of JSON is {"prompt": "..."}, {"messages": [...]} or {"tokens": [...]} with an
  "id" and sampling options, if wanted, or a line of OpenAI's batches: custom_id, method, url and body. Options given
  here hold for all that a line doesn't say. Lines that can't be read are reported and left out.

output:
  On a terminal the text. Elsewhere a line of JSON for each request, in the order in which they finish. Lines of
  OpenAI's batches are answered in kind. Progress is on standard error.

exit status: 0, 1 if something was left out, 2 if the command was wrong, 130 after Ctrl-C."""
INTERRUPTED = 130
"""The exit status that shells give a command that Ctrl-C has ended."""
SAMPLING = {
    "max_tokens": "--max-tokens",
    "temperature": "--temperature",
    "top_k": "--top-k",
    "top_p": "--top-p",
    "min_p": "--min-p",
    "repetition_penalty": "--repetition-penalty",
    "seed": "--seed",
    "stop": "--stop",
    "stop_tokens": "--stop-token",
    "ignore_eos": "--ignore-eos",
    "logprobs": "--logprobs",
    "n": "--samples",
}
"""The fields of SamplingParams, as options."""
ENGINE = {
    "folder": "MODEL",
    "device": "--device",
    "kv_cache": "--kv-cache",
    "memory": "--memory",
    "block_size": "--block-size",
    "max_model_len": "--max-model-len",
    "most_running": "--most-running",
    "tokens_a_step": "--tokens-a-step",
    "chunk": "--chunk",
    "host_memory": "--host-memory",
}
"""The arguments of Engine as options."""


def add(commands) -> argparse.ArgumentParser:
    """Adds the subcommand."""
    parser = commands.add_parser(
        "generate",
        help="generate text with a checkpoint",
        description="Generates with a DeepSeek-V3.2 or GLM-5 checkpoint, for one prompt or a million.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder with config.json, safetensors, tokenizer")
    parser.add_argument(
        "prompts",
        nargs="*",
        default=[],
        metavar="PROMPT",
        help="without any, prompts come from --input or standard input",
    )
    files = parser.add_argument_group("files")
    files.add_argument("--input", type=Path, metavar="FILE", help="a file of prompts; - is standard input")
    files.add_argument(
        "--input-format",
        choices=["text", "jsonl"],
        help="by default jsonl if the first line begins with {, or else text",
    )
    told = "where results go; - is standard output, the default"
    files.add_argument("--output", type=_file_or_stdout, metavar="FILE", help=told)
    files.add_argument(
        "--output-format",
        choices=["text", "jsonl"],
        help="of standard output; by default text on a terminal, or else jsonl",
    )
    files.add_argument(
        "--resume", action="store_true", help="continue --output: what is finished there is not generated again"
    )
    sampling = parser.add_argument_group("sampling (greedy, unless a temperature is given)")
    sampling.add_argument("--chat", action="store_true", help="each prompt is a user's message, for the chat template")
    sampling.add_argument("--max-tokens", type=int, metavar="N", default=256, help="of an answer; default: %(default)s")
    sampling.add_argument("--temperature", type=float, metavar="T", default=0.0, help="default: %(default)s")
    sampling.add_argument("--top-k", type=int, metavar="K", default=0, help="only the K likeliest tokens; 0: all")
    sampling.add_argument(
        "--top-p", type=float, metavar="P", default=1.0, help="only the likeliest tokens, up to a sum of P"
    )
    sampling.add_argument(
        "--min-p", type=float, metavar="P", default=0.0, help="only tokens at least P times as likely as the best"
    )
    sampling.add_argument("--repetition-penalty", type=float, metavar="X", default=1.0, help="default: 1, none")
    sampling.add_argument("--seed", type=int, metavar="N", help="makes samples reproducible")
    sampling.add_argument(
        "--samples", type=int, metavar="N", default=1, help="samples of a prompt; default: %(default)s"
    )
    sampling.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends a sample; may be repeated")
    sampling.add_argument(
        "--stop-token", type=int, action="append", default=[], metavar="ID", help="the same for a token"
    )
    sampling.add_argument("--ignore-eos", action="store_true", help="do not stop at the model's end token")
    sampling.add_argument(
        "--logprobs", type=int, metavar="N", help="log-probabilities of each token and the N likeliest"
    )
    engine = parser.add_argument_group("engine")
    engine.add_argument("--device", help="cpu, cuda or cuda:N; by default a GPU, if one can be used")
    engine.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16", help="default: %(default)s")
    engine.add_argument("--kv-cache", choices=["fp8", "bf16"], default="fp8", help="default: %(default)s")
    engine.add_argument(
        "--memory", type=byte_size, metavar="SIZE", help="of the KV cache, such as 4G or 512M; default: what fits"
    )
    engine.add_argument("--max-model-len", type=int, metavar="N", help="tokens of a prompt and its answer, at most")
    engine.add_argument(
        "--block-size", type=int, metavar="N", default=64, help="tokens in a block; default: %(default)s"
    )
    engine.add_argument(
        "--most-running", type=int, metavar="N", default=128, help="samples that run at a time; default: %(default)s"
    )
    engine.add_argument(
        "--tokens-a-step", type=int, metavar="N", default=2048, help="most tokens in a step; default: %(default)s"
    )
    engine.add_argument("--chunk", type=int, metavar="N", help="most tokens of a prompt in a step")
    engine.add_argument(
        "--host-memory", type=byte_size, metavar="SIZE", default=0, help="for evicted prefixes; default: none"
    )
    engine.add_argument("--batch-invariant", action="store_true", help="the same bits whatever else runs; slower")
    return parser


def _file_or_stdout(text: str) -> Path | None:
    return None if text == "-" else Path(text)


def sampling_params(options: argparse.Namespace) -> "SamplingParams":
    """The options' values; a ValueError or TypeError names a wrong one."""
    from mla_backend.arguments import named
    from mla_backend.engine.params import SamplingParams

    with named(**SAMPLING):
        return SamplingParams(
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p,
            repetition_penalty=options.repetition_penalty,
            seed=options.seed,
            stop=tuple(options.stop),
            stop_tokens=tuple(options.stop_token),
            ignore_eos=options.ignore_eos,
            logprobs=options.logprobs,
            n=options.samples,
        )
