"""Checkpoints for vLLM, and vLLM running them."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

RELEASED_KEYS = dict(topk_method="noaux_tc", scoring_func="sigmoid", moe_layer_freq=1)
"""What released checkpoints say in config.json; vLLM reads it, and transformers doesn't write it."""
GLM_KEYS = dict(indexer_rope_interleave=True, index_topk_pattern="FSSS")
PROMPT_LENGTHS = (5, 33, 64, 100, 131, 20, 1, 150)
NEW_TOKENS = 24


def config_with(**parts: dict[str, Any]) -> SimpleNamespace:
    """What a class reads of a VllmConfig: `parallel` of its parallel_config, and so on."""
    return SimpleNamespace(**{f"{name}_config": SimpleNamespace(**given) for name, given in parts.items()})


def common_metadata(starts: Tensor, on_host: Tensor, lengths: Tensor, block_table: Tensor) -> Any:
    """vLLM's metadata of a step, of requests whose queries begin there."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    tokens, slots = int(on_host[-1]), torch.zeros(int(on_host[-1]), dtype=torch.int64, device=starts.device)
    counts = dict(num_reqs=len(lengths), num_actual_tokens=tokens, max_query_len=int(on_host.diff().max()))
    tensors = dict(query_start_loc=starts, query_start_loc_cpu=on_host, seq_lens=lengths, slot_mapping=slots)
    return CommonAttentionMetadata(**tensors, **counts, max_seq_len=77, block_table_tensor=block_table)


def make_checkpoint(name: str, folder: Path) -> Path:
    """A random model of engine_models with real magnitude, whose tokens are the words t0, t1, ..."""
    import engine_models
    from serving_benchmarks.models import models

    torch.manual_seed(0)
    engine_models.save(engine_models.theirs(name), folder)
    path = folder / "config.json"
    more = {**RELEASED_KEYS, **(GLM_KEYS if name.startswith("glm") else {})}
    path.write_text(json.dumps({**json.loads(path.read_text()), **more}))
    models.write_tokenizer(folder, engine_models.SHAPE["vocab_size"])
    return folder


def make_dense_checkpoint(folder: Path, prompts: list[list[int]]) -> tuple[Any, list[list[int]]]:
    """A random DeepSeek-V3 of the same size, whose MTP layer is mostly right about what follows these prompts.

    Returns:
        transformers' model, and the tokens that it goes on with.
    """
    from safetensors.torch import load_file, save_file

    import engine_models
    from serving_benchmarks.models.drafts import mtp_layer

    torch.manual_seed(0)
    shape = {name: value for name, value in engine_models.SHAPE.items() if not name.startswith("index_")}
    smooth = dict(topk_group=4, num_experts_per_tok=8)
    model = engine_models.random_model("DeepseekV3", **{**shape, **smooth, "rope_parameters": engine_models.PLAIN})
    engine_models.save(model, folder)
    config, index = folder / "config.json", folder / "model.safetensors.index.json"
    # vLLM may have read a DeepSeek-V3.2 before: it names transformers' class of DeepSeek-V3 after that one
    keys = {**json.loads(config.read_text()), **RELEASED_KEYS, "model_type": "deepseek_v3"}
    config.write_text(json.dumps(keys))
    files = json.loads(index.read_text())
    parts = (load_file(folder / file) for file in set(files["weight_map"].values()))
    saved = {name: tensor for part in parts for name, tensor in part.items()}
    continued = [engine_models.their_generation(model, prompt, NEW_TOKENS)[0] for prompt in prompts]
    added = mtp_layer(saved, shape["num_hidden_layers"], _next_hidden(model, prompts, continued))
    save_file(added, folder / "mtp.safetensors", metadata={"format": "pt"})
    files["weight_map"] |= dict.fromkeys(added, "mtp.safetensors")
    index.write_text(json.dumps(files))
    return model, continued


@torch.inference_mode()
def _next_hidden(model: Any, prompts: list[list[int]], continued: list[list[int]]) -> Tensor:
    """fp32 `[hidden, 2 * hidden]`: maps a token and the hidden state before it to the next one, after the prompts."""
    features, wanted = [], []
    for prompt, row in zip(prompts, continued, strict=True):
        text = torch.tensor([prompt + row])
        hidden = model(text, output_hidden_states=True).hidden_states[-1][0, len(prompt) - 1 :]
        embedded = model.model.embed_tokens(text)[0, len(prompt) :]
        rows = [x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) for x in (embedded, hidden)]
        features.append(torch.cat([rows[0], rows[1][:-1]], dim=1))
        wanted.append(rows[1][1:])
    x, y = torch.cat(features).double(), torch.cat(wanted).double()
    return torch.linalg.lstsq(x, y, driver="gelsd").solution.T.float().contiguous()


def config_of(folder: Path, **options: Any) -> Any:
    """What vLLM makes of a user's options, before it starts anything."""
    from vllm.engine.arg_utils import EngineArgs

    given = dict(skip_tokenizer_init=True, max_model_len=256, dtype="bfloat16")
    return EngineArgs(model=str(folder), **{**given, **options}).create_engine_config()


def changed(folder: Path, tmp_path: Path, **keys: Any) -> Path:
    """The checkpoint with another config.json; nobody reads the weights."""
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **keys}))
    return tmp_path


@contextmanager
def running(folder: Path, **options: Any) -> Iterator[Any]:
    """A vllm.LLM, whose processes are gone afterwards."""
    from vllm import LLM

    given = dict(dtype="float32", max_model_len=256, max_num_batched_tokens=64, max_num_seqs=32)
    given |= dict(kv_cache_memory_bytes=1 << 27, skip_tokenizer_init=True, disable_log_stats=False)
    llm = LLM(str(folder), **{**given, **options})
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def greedy(new_tokens: int = NEW_TOKENS, **more: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False, **more)


def generate(llm: Any, prompts: list[list[int]], **more: Any) -> list[Any]:
    """One output of each prompt. All begin at once, as what shares a step is rounded alike."""
    llm.sleep(level=0)  # vLLM's word for scheduling nothing
    llm.enqueue([{"prompt_token_ids": p} for p in prompts], greedy(**more), use_tqdm=False)
    llm.wake_up(tags=["scheduling"])
    return llm.wait_for_completion(use_tqdm=False)


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def logits_of(
    folder: Path, prompts: list[list[int]], continued: list[list[int]], latent: str = "bf16", keys: str = "fp8"
) -> list[Tensor]:
    """`[N, vocabulary]` of each prompt: what the embedded engine's model, in fp32, takes these N tokens from."""
    import engine_models
    from mla_backend import engine

    torch.manual_seed(0)
    model = engine.load_model(folder, dtype=torch.float32)
    with engine_models.one_thread():
        made = engine_models.Engine(model, latent, keys, blocks=512)
        requests = made.generate(prompts, len(continued[0]), forced=continued)
    return [request.logits for request in requests]


def assert_follows(folder: Path, prompts, got, latent="bf16", tolerance: float = 0.02, keys="fp8") -> None:
    """Each token is the one that the embedded engine's model takes at its position, or as likely but for rounding."""
    for logits, row in zip(logits_of(folder, prompts, got, latent, keys), got, strict=True):
        behind = logits.max(dim=1).values - logits.gather(1, torch.tensor(row).unsqueeze(1)).squeeze(1)
        assert behind.max() < tolerance, f"a token is {behind.max():.3f} less likely than the likeliest"


@torch.inference_mode()
def errors_of(model: Any, prompts: list[list[int]], outputs: list[Any]) -> tuple[float, float]:
    """How much less likely than the likeliest transformers' model finds a token, and how far off its logprob is, at
    most."""
    behind, off = [], []
    for prompt, row, output in zip(prompts, tokens(outputs), outputs, strict=True):
        exact = model(torch.tensor([prompt + row])).logits[0, len(prompt) - 1 : -1].log_softmax(dim=-1)
        chosen = exact.gather(1, torch.tensor(row).unsqueeze(1)).squeeze(1)
        steps = zip(output.outputs[0].logprobs, row, strict=True)
        behind.append(exact.max(dim=1).values - chosen)
        off.append((torch.tensor([step[token].logprob for step, token in steps]) - chosen).abs())
    return torch.cat(behind).max().item(), torch.cat(off).max().item()


def gauge(llm: Any, name: str) -> float:
    """One of vLLM's own metrics."""
    return sum(metric.value for metric in llm.get_metrics() if metric.name == name)
