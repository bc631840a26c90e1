"""Makes a model of the real width, with few layers and random weights, so that benchmarks fit on one GPU.

Attention costs in it what it costs in the real model. Each weight matrix is N(0, 1 / its row length), so that scores
spread by 1 and tokens depend on what is attended to, as they don't with vLLM's `--load-format dummy`. With fewer heads
it is what one GPU of several computes. Rope is not stretched by YaRN.
"""

import argparse
import hashlib
import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from mla_backend.engine import Model, ModelConfig
from mla_backend.engine.config import read_json
from mla_backend.engine.tokenizer import save as save_tokenizer
from serving_benchmarks import options as types

_GIVEN = json.loads(Path(__file__).with_name("like.json").read_text())
COMMON = _GIVEN.pop("common")
LIKE = {**_GIVEN, "deepseek-v3": {**_GIVEN["deepseek-v3.2"], "architectures": ["DeepseekV3ForCausalLM"]}}
LIKE["deepseek-v3"]["model_type"] = "deepseek_v3"
"""What the real models' config.json says, except how many layers and experts there are."""
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
"""How the released weights are stored."""
SHARD_BYTES = 2 * 10**9
NO_WEIGHTS = ("glm-5.2", "glm-5.3-flash", "hy-v4", "deepseek-v4", "deepseek-v4.1")
"""Models that get a config.json alone, for `--random-weights`: the engine, whose tensors are written, has none."""
KEYS = {"layers": "num_hidden_layers", "heads": "num_attention_heads", "experts": "n_routed_experts"}
KEYS |= {"dense_layers": "first_k_dense_replace"}
KEYS |= {name: name for name in ("model_type", "hidden_size", "index_topk", "vocab_size", "random_weights_seed")}
"""What result files say of a model, and the keys of config.json that say it."""


def read(folder: Path) -> dict[str, Any]:
    """`config.json`, which must say how many tokens the vocabulary has."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"must be a folder with a config.json; got {folder}")
    config = read_json(folder / "config.json")
    if not isinstance(config, dict) or not isinstance(config.get("vocab_size"), int):
        raise ValueError(f"{folder}/config.json must have a vocab_size")
    return config


def config(
    like: str, *, layers: int = 4, heads: int | None = None, experts: int = 8, dense_layers: int = 1, **changes: Any
) -> dict[str, Any]:
    """`config.json` like a real model's, a key of LIKE. The first layers are dense, and `changes` are of other keys."""
    given = {**COMMON, **LIKE[like]}
    given |= dict(num_hidden_layers=layers, first_k_dense_replace=min(dense_layers, layers), n_routed_experts=experts)
    given |= {"num_experts_per_tok": min(8, max(1, experts // 4)), **changes}
    if given["model_type"] == "deepseek_v3":
        given = {key: value for key, value in given.items() if not key.startswith("index_")}
    given |= layers_of(given["model_type"], layers, min(dense_layers, layers))
    heads = given["num_attention_heads"] if heads is None else heads
    return {**given, "num_attention_heads": heads, "num_key_value_heads": heads}


def layers_of(model_type: str, layers: int, dense_layers: int) -> dict[str, Any]:
    """What config.json says of each layer, in models whose layers are of several kinds. Attention is sparse in all."""
    if model_type in ("hy_v4", "glm5_next_text"):
        found = {"mlp_layer_types": ["dense"] * dense_layers + ["sparse"] * (layers - dense_layers)}
        return {**found, "layer_types": ["deepseek_sparse_attention"] * layers}
    if model_type == "deepseek_v4":  # experts by the token, so that rounding changes none
        return {"compress_ratios": [(0, 4, 128, 4)[layer % 4] for layer in range(layers)], "num_hash_layers": layers}
    if model_type == "deepseek_v41":  # a window alone; layers that share keys of pairs; others, keys of single tokens
        half = max(2, layers // 2)
        sources = {"kv_source_layer_ids": [1, half], "index_source_layer_ids": [1, half, half + 1]}
        ratios = [0, *[2] * (half - 1), *[1] * (layers - half)]
        return {"compress_ratios": ratios, **sources, "candidate_source_layer_id": half}
    return {}


def draw(tensor: Tensor, name: str, seed: int) -> None:
    """Fills a tensor with random numbers that depend on the seed, its name, shape and device alone. Sinks and matrices
    have the magnitude of trained ones, norms and scales are 1, biases 0, and whole numbers stay in their range."""
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    generator = torch.Generator(tensor.device).manual_seed(int.from_bytes(digest, "little") >> 1)
    if not tensor.is_floating_point():
        tensor.random_(0, int(tensor.max()) + 1, generator=generator)
    elif tensor.dim() < 2 and "sink" not in name:
        tensor.fill_(0.0 if name.endswith(("bias", "base")) else 1.0)
    else:
        length = tensor.shape[-1] if tensor.dim() > 1 else 1
        for some in tensor.view(-1, length).split(max(1, 2**24 // length)):
            some.copy_(torch.randn(some.shape, generator=generator, device=tensor.device) * length**-0.5)


@dataclass(frozen=True)
class TensorPlan:
    """A tensor of the checkpoint, before it is drawn."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def draw(self, seed: int) -> Tensor:
        drawn = torch.empty(self.shape, dtype=self.dtype)
        draw(drawn, self.name, seed)
        return drawn


def tensors(config: dict[str, Any]) -> list[TensorPlan]:
    """All tensors of the checkpoint, with the names and types of the released ones: bf16, or fp32 for norms and biases.
    MTP layers come after the others. With random weights their drafts are next to never right."""
    layers, drafting = config["num_hidden_layers"], config["num_nextn_predict_layers"]
    wanted, dense = {**config, "num_hidden_layers": layers + drafting}, "index_topk" not in config
    if dense:  # all but the indexer is that of V3.2
        wanted = {**COMMON, **LIKE["deepseek-v3.2"], **wanted, "model_type": "deepseek_v32"}
    with torch.device("meta"):
        model = Model(ModelConfig.from_dict(wanted), torch.bfloat16)
    in_fp32 = ("k_norm.weight", "k_norm.bias", "e_score_correction_bias")
    plans = [
        TensorPlan(name, tuple(value.shape), torch.float32 if name.endswith(in_fp32) else torch.bfloat16)
        for name, value in model.state_dict().items()
        if not (dense and ".indexer." in name)
    ]
    hidden, embedding = (config["hidden_size"],), (config["vocab_size"], config["hidden_size"])
    own = dict.fromkeys(("enorm", "hnorm", "shared_head.norm"), hidden)
    own |= dict.fromkeys(("embed_tokens", "shared_head.head"), embedding)
    own["eh_proj"] = *hidden, 2 * config["hidden_size"]
    return plans + [
        TensorPlan(f"model.layers.{layer}.{name}.weight", shape, torch.bfloat16)
        for layer in range(layers, layers + drafting)
        for name, shape in own.items()
    ]


def write(folder: Path, config: dict[str, Any], *, seed: int | None = 0, shard_bytes: int = SHARD_BYTES) -> int:
    """Writes a checkpoint with random weights, file by file, each small enough for memory. Returns their bytes. Without
    a seed it writes no weights: vLLM draws its own."""
    from safetensors.torch import save_file

    if (folder / "config.json").exists():
        raise FileExistsError(f"folder must not have a checkpoint; {folder} has a config.json")
    folder.mkdir(exist_ok=True)
    plans = [] if seed is None else tensors(config)
    total, free = sum(plan.bytes for plan in plans), shutil.disk_usage(folder).free
    if total > free:
        raise OSError(f"folder needs {total / 1e9:.1f} GB; {folder} has {free / 1e9:.1f}")
    parts: list[list[TensorPlan]] = []  # neighbours, of so many bytes at most, or one tensor
    for plan in plans:
        if not parts or sum(p.bytes for p in parts[-1]) + plan.bytes > shard_bytes:
            parts.append([])
        parts[-1].append(plan)
    files: dict[str, str] = {}
    for number, part in enumerate(parts, start=1):
        file = f"model-{number:05}-of-{len(parts):05}.safetensors"
        with ThreadPoolExecutor() as pool:  # a generator uses one core, and there are billions of numbers
            weights = list(pool.map(partial(TensorPlan.draw, seed=seed or 0), part))
        drawn = {plan.name: tensor for plan, tensor in zip(part, weights, strict=True)}
        save_file(drawn, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(drawn, file)
    if files:
        index = {"metadata": {"total_size": total}, "weight_map": files}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    write_tokenizer(folder, config["vocab_size"])
    written = {**config, **({} if seed is None else {"random_weights_seed": seed})}
    (folder / "config.json").write_text(json.dumps(written, indent=1))  # last, as it makes the folder a checkpoint
    return total


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """A tokenizer whose tokens are the words t0, t1, ..., so that any tokens have a text that gives them again."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    own = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocabulary)}, unk_token="t0"))
    own.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # without single_word, special tokens are found inside of words: t12 would be read as t1 and a rest
    unknown, end = (AddedToken(word, single_word=True, special=True) for word in ("t0", "t1"))
    save_tokenizer(PreTrainedTokenizerFast(tokenizer_object=own, unk_token=unknown, eos_token=end), folder)


def add_options(parser: argparse.ArgumentParser) -> None:
    told = "for the checkpoint"
    parser.add_argument("--output", type=types.folder_in_one, required=True, metavar="FOLDER", help=told)
    told = f"the real model; {', '.join(NO_WEIGHTS)} get a config.json alone, for --random-weights"
    parser.add_argument("--like", choices=LIKE, required=True, help=told)
    types.add(parser, "--layers", types.count, "of the model", 4)
    types.add(parser, "--dense-layers", types.whole(0), "first layers without experts", 1)
    types.add(parser, "--heads", types.count, "default: as many as the real model has")
    types.add(parser, "--experts", types.count, "a token goes to a quarter of them, 8 at most", 8)
    types.add(parser, "--vocab-size", types.whole(3), "default: the real model's")
    weights = parser.add_mutually_exclusive_group()
    types.add(weights, "--seed", int, "of the weights", 0)
    told = "for vLLM's load format dummy, which makes weights of blocks of FP8, as the released ones are"
    weights.add_argument("--no-weights", dest="seed", action="store_const", const=None, help=told)


def run(options: argparse.Namespace) -> int:
    shape = {name: getattr(options, name) for name in ("layers", "dense_layers", "heads", "experts")}
    wanted = config(options.like, **shape, **({"vocab_size": options.vocab_size} if options.vocab_size else {}))
    seed = None if options.like in NO_WEIGHTS else options.seed
    wanted |= {"quantization_config": FP8} if options.seed is None and options.like not in NO_WEIGHTS else {}
    try:
        with Console(stderr=True, highlight=False).status(f"writing {options.output}"):
            total = write(options.output, wanted, seed=seed)
    except (OSError, ImportError, ValueError) as error:
        raise types.Refused(re.sub("^folder ", "--output ", str(error))) from None
    counts = ", ".join(f"{wanted[KEYS[name]]} {name}" for name in ("layers", "heads", "experts"))
    print(f"{options.output}: {total / 1e9:.2f} GB, {counts}")
    return 0
