"""Asks the tiny checkpoint about a context of a thousand tokens, of which attention sees 128 at a time.

python -m examples.recall.show
"""

import argparse
import random

from rich.console import Console

from examples.recall.accuracy import CHECKPOINT
from mla_backend.engine import Engine, SamplingParams
from serving_benchmarks.models.recall import prompts, text_of

SHOWN = 60
"""Characters of a context at its beginning and its end."""


def main() -> int:
    """Prints questions and answers; exits with 1 if one is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=1000, help="length of the context")
    parser.add_argument("--questions", type=int, default=8, help="how many, all in one batch")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="of context and questions")
    parser.add_argument("--kv-cache", choices=["fp8", "bf16"], default="fp8")
    given = parser.parse_args()
    try:
        asked = prompts(given.seed, given.tokens, given.questions)
    except ValueError:
        parser.error(f"--questions {given.questions} is more than {given.tokens} tokens have facts, or none")
    engine = Engine(CHECKPOINT, kv_cache=given.kv_cache, max_model_len=given.tokens + 100)
    chats = [[{"role": "user", "content": prompt.text}] for prompt in asked]
    answers = [result.text.strip() for result in engine.generate(chats, SamplingParams(max_tokens=8))]

    console = Console(highlight=False)
    context = asked[0].text
    console.print(f"{given.tokens} tokens (seed {given.seed}): {context[:SHOWN]} [dim]...[/dim]\n")
    right = 0
    for prompt, answer in zip(asked, answers, strict=True):
        good = answer == text_of(prompt.answer)
        right += good
        verdict = "[green]right[/green]" if good else f"[red]wrong, it is {text_of(prompt.answer)}[/red]"
        console.print(f"  {text_of(prompt.question):36} [bold]{answer:14}[/bold] {verdict}")
    cache = f"{given.kv_cache.upper()} cache on {engine.device}"
    console.print(f"\n{right} of {len(asked)} right, with the {cache}. Training never paired these names and values.")
    return 0 if right == len(asked) else 1


if __name__ == "__main__":
    raise SystemExit(main())
