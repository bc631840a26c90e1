"""What a benchmark has to know of the model that it runs: its `config.json`, without loading it."""

from pathlib import Path
from typing import Any

from mla_backend.engine.config import read_json


def folder_of(model: str) -> Path:
    """The folder of a checkpoint's small files: the one that is named, or a copy of what the Hugging Face hub has."""
    folder = Path(model)
    if (folder / "config.json").is_file():
        return folder
    if folder.exists() or model.count("/") != 1 or model.startswith((".", "/")):
        raise ValueError(f"must be a folder with a config.json, or a repository of the Hugging Face hub; got {model}")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=["*.json", "tokenizer*", "*.jinja"]))
    except Exception as error:  # of many kinds: no network, no such repository, no right to read it
        raise ValueError(f"{model} is no folder, and can't be had from the hub: {error}") from error


def read(folder: Path) -> dict[str, Any]:
    """`config.json`, which must say how many tokens there are."""
    config = read_json(folder / "config.json")
    if not isinstance(config, dict) or not isinstance(config.get("vocab_size"), int):
        raise ValueError(f"{folder}/config.json must have a vocab_size")
    return config


def describe(model: str, config: dict[str, Any], load_format: str | None) -> dict[str, Any]:
    """Its shape, for a result file, and of random weights what they were made with."""
    keys = {
        "model_type": "model_type",
        "layers": "num_hidden_layers",
        "heads": "num_attention_heads",
        "hidden_size": "hidden_size",
        "experts": "n_routed_experts",
        "index_topk": "index_topk",
        "dense_layers": "first_k_dense_replace",
        "vocab_size": "vocab_size",
        "random_weights_seed": "random_weights_seed",
    }
    name = Path(model).resolve().name if Path(model).exists() else model
    return {"name": name, **{ours: config.get(theirs) for ours, theirs in keys.items()}, "load_format": load_format}
