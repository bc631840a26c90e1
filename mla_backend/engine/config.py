"""Reads a checkpoint's `config.json`, for the two families that the engine runs."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mla_backend.formats import FORMATS

FAMILIES = ("deepseek_v32", "glm_moe_dsa")
INDEX_DIM = 128
"""Dims of the indexer's keys, as in their cache formats."""
MOST = {
    "num_hidden_layers": 1024,
    "n_routed_experts": 8192,
    "n_group": 8192,
    "topk_group": 8192,
    "num_experts_per_tok": 8192,
    "n_shared_experts": 1024,
    "num_attention_heads": 4096,
    "index_n_heads": 128,
    "index_topk": 4096,
    "vocab_size": 2**24,
}
"""What a count may be at most, many times that of any released model; 2^20 for sizes, 2^31 - 1 for positions."""
MOST_SIZE = 2**20
POSITIONS = ("max_position_embeddings", "original_max_position_embeddings")
RANGES = {
    "rms_norm_eps": (0.0, 1.0),
    "rope_theta": (1.0 + 1e-6, 1e15),
    "routed_scaling_factor": (-1e6, 1e6),
    "factor": (1.0, 1e6),
    "beta_fast": (1e-6, 1e6),
    "beta_slow": (1e-6, 1e6),
    "mscale": (0.0, 1e6),
    "mscale_all_dim": (0.0, 1e6),
    "attention_factor": (0.0, 1e6),
}
"""Between which bounds a number is."""


def read_json(path: Path) -> Any:
    """The contents of a JSON file; a ValueError names it if it isn't one."""
    try:
        return json.loads(path.read_text())
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or nested without end
        raise ValueError(f"{path} must be JSON: {error}") from None


@dataclass(frozen=True)
class Yarn:
    """YaRN: rope scaled for contexts longer than in pre-training."""

    factor: float
    original_positions: int
    """The longest context of the pre-training."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a model. A tuple has an entry for each layer."""

    family: str
    vocab_size: int
    hidden_size: int
    layers: int
    norm_eps: float
    max_positions: int
    tied_embeddings: bool
    """The output projection is the embedding."""

    heads: int
    q_lora_rank: int
    nope_dim: int
    """Dims of a query head without rope."""
    value_dim: int
    """Dims of a head's value, expanded from the latent."""
    rope_theta: float
    yarn: Yarn | None

    index_heads: int
    index_topk: int
    index_rope_interleaved: bool
    """The indexer's rope rotates neighbouring dims (2i, 2i + 1), not the halves (i, i + 32)."""
    shares_selection: tuple[bool, ...]
    """Which layers have no indexer, and attend to what the last one before them selected."""

    mlp_size: int
    is_moe: tuple[bool, ...]
    experts: int
    expert_size: int
    shared_experts: int
    experts_per_token: int
    expert_groups: int
    groups_per_token: int
    normalise_expert_weights: bool
    expert_scale: float

    weight_block: tuple[int, int] | None
    """Rows and columns that share a scale in a checkpoint of FP8 weights."""

    latent_dim: int = FORMATS["bf16"].latent
    rope_dim: int = FORMATS["bf16"].rope

    @property
    def query_dim(self) -> int:
        """Dims of a query head, before it is absorbed."""
        return self.nope_dim + self.rope_dim

    @staticmethod
    def from_folder(folder: str | Path) -> "ModelConfig":
        """Reads `config.json` of a checkpoint."""
        path = Path(folder) / "config.json"
        if not path.is_file():
            raise FileNotFoundError(f"folder must be a checkpoint with a config.json; {path} does not exist")
        raw = read_json(path)
        if not isinstance(raw, dict):
            raise ValueError(f"{path} must be a JSON object; got a {type(raw).__name__}")
        try:
            return ModelConfig.from_dict(raw)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    @staticmethod
    def from_dict(raw: Mapping[str, Any]) -> "ModelConfig":
        """From the contents of `config.json`. A model that the engine can't compute rightly is a ValueError."""
        family = raw.get("model_type")
        if family not in FAMILIES:
            raise ValueError(f"model_type must be one of {', '.join(FAMILIES)}; got {_short(family)}")
        _require_supported(raw)
        layers = _count(raw, "num_hidden_layers")
        theta, yarn = _rope(raw)
        config = ModelConfig(
            family=family,
            vocab_size=_count(raw, "vocab_size"),
            hidden_size=_count(raw, "hidden_size"),
            layers=layers,
            norm_eps=_number(raw, "rms_norm_eps"),
            max_positions=_count(raw, "max_position_embeddings"),
            tied_embeddings=_flag(raw, "tie_word_embeddings", False),
            heads=_count(raw, "num_attention_heads"),
            q_lora_rank=_count(raw, "q_lora_rank"),
            nope_dim=_count(raw, "qk_nope_head_dim"),
            value_dim=_count(raw, "v_head_dim"),
            rope_theta=theta,
            yarn=yarn,
            index_heads=_count(raw, "index_n_heads"),
            index_topk=_count(raw, "index_topk"),
            index_rope_interleaved=_flag(raw, "indexer_rope_interleave", family == "glm_moe_dsa"),
            shares_selection=_shares_selection(raw, layers) if family == "glm_moe_dsa" else (False,) * layers,
            mlp_size=_count(raw, "intermediate_size"),
            is_moe=_is_moe(raw, layers),
            experts=_count(raw, "n_routed_experts"),
            expert_size=_count(raw, "moe_intermediate_size"),
            shared_experts=_count(raw, "n_shared_experts"),
            experts_per_token=_count(raw, "num_experts_per_tok"),
            expert_groups=_count(raw, "n_group"),
            groups_per_token=_count(raw, "topk_group"),
            normalise_expert_weights=_flag(raw, "norm_topk_prob", True),
            expert_scale=_number(raw, "routed_scaling_factor"),
            weight_block=_weight_block(raw.get("quantization_config")),
        )
        if config.experts % config.expert_groups:
            raise ValueError(f"n_group must divide n_routed_experts={config.experts}; got {config.expert_groups}")
        if config.groups_per_token > config.expert_groups:
            raise ValueError(
                f"topk_group must be n_group={config.expert_groups} or less; got {config.groups_per_token}"
            )
        reachable = config.experts // config.expert_groups * config.groups_per_token
        if config.experts_per_token > reachable:
            raise ValueError(
                f"num_experts_per_tok must be {reachable} or less, the experts of {config.groups_per_token} groups; "
                f"got {config.experts_per_token}"
            )
        return config


def _require_supported(raw: Mapping[str, Any]) -> None:
    """Refuses other values of the keys that have one value in all released models. A missing key has that value."""
    expected = {
        "kv_lora_rank": FORMATS["bf16"].latent,
        "qk_rope_head_dim": FORMATS["bf16"].rope,
        "index_head_dim": INDEX_DIM,
        "num_key_value_heads": raw.get("num_attention_heads"),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        "rope_interleave": True,
    }
    for key, value in expected.items():
        if raw.get(key, value) != value:
            raise ValueError(f"{key} must be {value!r}, the only one supported; got {_short(raw[key])}")


def _count(raw: Mapping[str, Any], key: str) -> int:
    value = raw.get(key)
    most = 2**31 - 1 if key in POSITIONS else MOST.get(key, MOST_SIZE)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ValueError(f"{key} must be an integer from 1 to {most}; got {_short(value)}")
    return value


def _integer(raw: Mapping[str, Any], key: str, default: int) -> int:
    value = raw.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > MOST_SIZE:
        raise ValueError(f"{key} must be an integer of at most {MOST_SIZE}; got {_short(value)}")
    return value


def _flag(raw: Mapping[str, Any], key: str, default: bool) -> bool:
    value = raw.get(key, default)
    if not isinstance(value, bool):
        raise ValueError(f"{key} must be true or false; got {_short(value)}")
    return value


def _object(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = raw.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{key} must be an object or null; got {_short(value)}")
    return value or {}


def _short(value: object) -> str:
    """A value as an error shows it; one of a thousand digits or characters is cut."""
    if isinstance(value, int) and abs(value) >= 10**60:
        return "an integer of 60 digits or more"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _number(raw: Mapping[str, Any], key: str) -> float:
    value = raw.get(key)
    low, high = RANGES[key]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ValueError(f"{key} must be a number from {low:g} to {high:g}; got {_short(value)}")
    return float(value)


def _rope(raw: Mapping[str, Any]) -> tuple[float, Yarn | None]:
    """Newer configs have `rope_parameters`, older ones `rope_theta` and `rope_scaling`."""
    rope = {
        "rope_theta": raw.get("rope_theta"),
        **_object(raw, "rope_scaling"),
        **_object(raw, "rope_parameters"),
    }
    theta = _number(rope, "rope_theta")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"partial_rotary_factor must be 1; got {_short(rope['partial_rotary_factor'])}")
    if kind == "default":
        return theta, None
    if kind != "yarn":
        raise ValueError(f"rope_type must be default or yarn; got {_short(kind)}")
    before = {"original_max_position_embeddings": raw.get("max_position_embeddings"), **rope}
    original = _count(before, "original_max_position_embeddings")
    numbers = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor")
    given = {key: _number(rope, key) for key in numbers if rope.get(key) is not None}
    truncate = _flag(rope, "truncate", True)
    return theta, Yarn(factor=_number(rope, "factor"), original_positions=original, truncate=truncate, **given)


def _is_moe(raw: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """From `mlp_layer_types`, or else all but the first `first_k_dense_replace`."""
    kinds = raw.get("mlp_layer_types")
    if kinds is None:
        dense = _integer(raw, "first_k_dense_replace", 3)
        kinds = ["dense" if i < dense else "sparse" for i in range(layers)]
    return _per_layer("mlp_layer_types", kinds, layers, {"dense": False, "sparse": True})


def _shares_selection(raw: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """From `indexer_types`, a pattern such as FSSF, or the rule that every n-th layer has an indexer."""
    kinds = raw.get("indexer_types") or raw.get("index_topk_pattern")
    if kinds is None:
        every = max(_integer(raw, "index_topk_freq", 1), 1)
        first = _integer(raw, "index_skip_topk_offset", 2)
        kinds = ["shared" if max(i - first + 1, 0) % every else "full" for i in range(layers)]
    values = {"full": False, "shared": True, "F": False, "S": True}
    shares = _per_layer("indexer_types", list(kinds) if isinstance(kinds, str) else kinds, layers, values)
    if shares[0]:
        raise ValueError("indexer_types must begin with full: there is no selection before the first layer to share")
    return shares


def _per_layer(key: str, kinds: Any, layers: int, values: dict[str, bool]) -> tuple[bool, ...]:
    known = isinstance(kinds, list) and all(isinstance(kind, str) and kind in values for kind in kinds)
    if not known or len(kinds) < layers:
        raise ValueError(f"{key} must be {layers} or more of {', '.join(values)}; got {_short(kinds)}")
    return tuple(values[kind] for kind in kinds[:layers])  # what follows belongs to layers for speculation


def _weight_block(quantisation: Mapping[str, Any] | None) -> tuple[int, int] | None:
    if quantisation is None:
        return None
    if not isinstance(quantisation, Mapping):
        raise ValueError(f"quantization_config must be an object or null; got {_short(quantisation)}")
    method, block = quantisation.get("quant_method"), quantisation.get("weight_block_size")
    if method != "fp8" or not isinstance(block, (list, tuple)) or len(block) != 2:
        raise ValueError(
            "quantization_config must have quant_method fp8 and a weight_block_size of two numbers; "
            f"got {_short(method)} and {_short(block)}"
        )
    rows, columns = (_count({"weight_block_size": size}, "weight_block_size") for size in block)
    return rows, columns
