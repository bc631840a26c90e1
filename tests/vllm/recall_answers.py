"""How many held-out questions the tiny checkpoint answers under vLLM.

python tests/vllm/recall_answers.py --kv-cache-dtype fp8
"""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CHECKPOINT = ROOT / "examples" / "recall" / "checkpoint"


def main() -> int:
    """Prints the share that is right; exits with 1 below 99 %."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--backend", default="SPARSE_MLA")
    parser.add_argument("--kv-cache-dtype", default="fp8", help="fp8 or auto, which is bf16")
    parser.add_argument("--tokens", type=int, default=1000, help="length of the contexts, about")
    parser.add_argument("--contexts", type=int, default=10)
    parser.add_argument("--questions", type=int, default=20, help="for each context")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--json", default="", help="where to write what was found")
    given = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from vllm import LLM, SamplingParams

    from examples.recall.task import prompts

    asked = [prompt for seed in range(given.contexts) for prompt in prompts(seed, given.tokens, given.questions)]
    llm = LLM(
        str(CHECKPOINT),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        attention_backend=given.backend,
        kv_cache_dtype=given.kv_cache_dtype,
        max_model_len=given.tokens + 100,
        gpu_memory_utilization=0.3,
        enforce_eager=given.eager,
        compilation_config={"mode": 0} if given.eager else {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    )
    texts = [{"prompt_token_ids": prompt.context_tokens + prompt.question_tokens} for prompt in asked]
    sampling = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, detokenize=False)
    outputs = llm.generate(texts, sampling, use_tqdm=False)
    right = sum(
        list(output.outputs[0].token_ids)[: len(prompt.answer_tokens)] == prompt.answer_tokens
        for output, prompt in zip(outputs, asked, strict=True)
    )
    found = {**vars(given), "asked": len(asked), "right": right}
    print(
        f"{given.backend}, {given.kv_cache_dtype} cache, {'eager' if given.eager else 'CUDA graphs'}: "
        f"{right} of {len(asked)} right"
    )
    if given.json:
        Path(given.json).write_text(json.dumps(found))
    return 0 if right >= 0.99 * len(asked) else 1


if __name__ == "__main__":
    raise SystemExit(main())
