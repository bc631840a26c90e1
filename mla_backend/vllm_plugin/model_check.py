"""What `mla-backend doctor --model` says of a checkpoint: whether vLLM serves it with this package, and what fits."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape

from mla_backend.vllm_plugin import models, native_rows, versions

GIB = 2**30
USED = 0.92
"""vLLM's default share of a GPU's memory."""
ACTIVATIONS = 5 * GIB
"""On each GPU, for activations and CUDA graphs: an estimate."""
TEXT_CONFIGS = ("text_config", "language_config", "llm_config")
"""Where config.json of a multimodal model has that of its language model."""
BLOCK = 64
"""Tokens in a block of the cache."""
ROWS = {
    (versions.SPARSE, True): {"fp8": "fp8_ds_mla", "auto": "bf16", versions.NVFP4: "nvfp4_352"},
    (versions.SPARSE, False): {"fp8": "fp8_tensor_512", "auto": "bf16_512"},
    (versions.DENSE, True): {"fp8": "fp8_tensor_576", "auto": "bf16"},
}
"""By backend, and whether rows have rope: --kv-cache-dtype, and the format of its rows."""
V4_ROWS = {models.V4: {"fp8_model1": {}}}
V4_ROWS[models.V41] = {"fp8_model1": {}, "fp8_528": {native_rows.OPTION: native_rows.NATIVE}}
"""Formats of `fp8` rows on Hopper, and what --additional-config must have for them."""


class Gpus(NamedTuple):
    number: int
    memory: int
    """Bytes of each."""
    tensor_parallel: int
    """GPUs that share each layer; there are `number // tensor_parallel` pipeline stages."""


def gpus(number: int, memory: int, tensor_parallel: int) -> Gpus:
    """As asked for; a ValueError where that can't be."""
    if number < 1:
        raise ValueError(f"--gpus must be 1 or more; got {number}")
    if tensor_parallel < 1 or number % tensor_parallel:
        raise ValueError(f"--tensor-parallel must divide the number of GPUs; got {tensor_parallel} and {number}")
    return Gpus(number, memory, tensor_parallel)


def examine(folder: Path, gpus: Gpus | None) -> dict[str, Any]:
    """What can be said of the checkpoint in a folder, as plain data."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"--model must be a folder of this machine with a config.json; got {folder}")
    config = json.loads((folder / "config.json").read_text())
    known = isinstance(config, dict)
    nested = next((config[key] for key in TEXT_CONFIGS if key in config), config) if known else None
    text = {key: value for key, value in nested.items() if value is not None} if isinstance(nested, dict) else {}
    for key in ("num_hidden_layers", "num_attention_heads"):
        if not isinstance(text.get(key), int) or text[key] < 1:
            raise ValueError(f"{folder / 'config.json'} must have a {key} of 1 or more; got {text.get(key)!r}")
    model_config = _as_vllm_has_it(config, text)
    backend = versions.SPARSE if text.get("index_topk") or models.has_v4_attention(model_config) else versions.DENSE
    is_served = models.is_served(backend, model_config)
    report: dict[str, Any] = {"folder": str(folder), "architectures": list(model_config.architectures)}
    report["backend"] = backend if is_served else None
    report["why_not"] = None if is_served else f"{backend}: {models.why_not(backend, model_config)}"
    report["weights"] = weights_in(folder)
    report["gpus"] = gpus and gpus._asdict()
    report["caches"] = _caches(backend, model_config, report["weights"], gpus) if is_served else []
    return report


def _as_vllm_has_it(config: dict[str, Any], text: dict[str, Any]) -> Any:
    """What the plugin reads of vLLM's ModelConfig."""
    found = SimpleNamespace(architectures=config.get("architectures") or [], hf_text_config=SimpleNamespace(**text))
    family = models.family_of(found)
    found.use_mla = family is not None and text.get("kv_lora_rank") is not None
    found.model_arch_config = SimpleNamespace(total_num_attention_heads=text["num_attention_heads"])
    return found


def weights_in(folder: Path) -> int | None:
    """Bytes of a folder's safetensors files, or of those that its index promises; None if it has neither."""
    files, index = list(folder.glob("*.safetensors")), folder / "model.safetensors.index.json"
    if index.is_file():
        contents = json.loads(index.read_text())
        named = [folder / name for name in {*contents.get("weight_map", {}).values()}]
        if not named or not all(file.is_file() for file in named):
            return contents.get("metadata", {}).get("total_size")
        files = named
    return sum(file.stat().st_size for file in files) or None


def _caches(backend: str, model_config: Any, weights: int | None, gpus: Gpus | None) -> list[dict[str, Any]]:
    """By --kv-cache-dtype and option: the rows, bytes per token over all layers, and tokens that fit."""
    from mla_backend import FORMATS, KEY_FORMATS

    if (family := models.v4_family(model_config)) is not None:
        unknown = {"token": None, "tokens": None}
        return [
            {"dtype": "fp8", "additional_config": more, "format": name, "row": FORMATS[name].token_bytes, **unknown}
            for name, more in V4_ROWS[family].items()
        ]
    text, found = model_config.hf_text_config, []
    layers = text.num_hidden_layers
    for dtype, name in ROWS[backend, text.qk_rope_head_dim > 0].items():
        row, token, tokens = FORMATS[name].token_bytes, None, None
        if models.family_of(model_config).has_equal_layers:
            keys = KEY_FORMATS["fp8"].token_bytes if backend == versions.SPARSE else 0
            indexed = _layers_with_indexer(text)
            token = layers * row + indexed * keys
            if gpus is not None and weights is not None:
                stage = -(-layers * gpus.tensor_parallel // gpus.number)
                room = int(USED * gpus.memory) - weights // gpus.number - ACTIVATIONS
                tokens = max(0, room // (BLOCK * (stage * row + min(indexed, stage) * keys))) * BLOCK
        found.append({"dtype": dtype, "format": name, "row": row, "token": token, "tokens": tokens})
    return found


def _layers_with_indexer(text: Any) -> int:
    layers = range(text.num_hidden_layers)
    kinds = getattr(text, "indexer_types", None) or getattr(text, "index_topk_pattern", None)
    if kinds:
        return sum(kind in ("full", "F") for kind in kinds[: len(layers)])
    every, first = max(getattr(text, "index_topk_freq", 1), 1), getattr(text, "index_skip_topk_offset", 2)
    return sum(max(layer - first + 1, 0) % every == 0 for layer in layers)


def render(report: dict[str, Any], console: Console) -> None:
    """Prints a report for people."""

    def say(line: str) -> None:
        console.print(escape(line), soft_wrap=True)

    say(f"{report['folder']}: {', '.join(report['architectures']) or 'no architecture'}")
    if report["backend"] is None:
        say(f"  not served. {report['why_not']}")
        return
    say(f"  served by vLLM with --attention-backend {report['backend']}")
    weights, gpus = report["weights"], report["gpus"]
    unknown = "no safetensors files or index in the folder, so what fits beside them is not known"
    size = f"{weights / GIB:.1f} GiB" if weights and weights > GIB // 10 else f"{(weights or 0) / 2**20:.1f} MiB"
    say(f"  weights: {size if weights else unknown}")
    for cache in report["caches"]:
        more = cache.get("additional_config")
        option = f" --additional-config '{json.dumps(more)}'" if more else ""
        rows = f"  --kv-cache-dtype {cache['dtype']}{option}: KV rows {cache['format']}, {cache['row']} bytes"
        if cache["token"] is None:
            say(f"{rows}. Layers are of several kinds, so what fits is not computed")
            continue
        keys = ", indexer keys included" if report["backend"] == versions.SPARSE else ""
        say(f"{rows}; {cache['token']} bytes per token over all layers{keys}{_fit(cache, gpus)}")
    if gpus is None:
        say("  no GPU is here. What fits: --gpus 8 --gpu-memory 80G")


def _fit(cache: dict[str, Any], gpus: dict[str, Any] | None) -> str:
    if gpus is None or cache["tokens"] is None:
        return ""
    here = f"{gpus['number']} x {gpus['memory'] / GIB:.0f} GiB, tensor parallelism {gpus['tensor_parallel']}"
    if not cache["tokens"]:
        return f"; does not fit on {here}: the weights leave no room"
    return f"; {cache['tokens']} tokens fit beside the weights on {here}"
