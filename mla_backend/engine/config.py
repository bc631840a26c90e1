"""What a checkpoint's `config.json` says about the model, for the two families that the engine runs."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mla_backend.formats import FORMATS

FAMILIES = ("deepseek_v32", "glm_moe_dsa")
INDEX_DIM = 128
"""Of the indexer's keys: what their cache formats hold."""


def read_json(path: Path) -> Any:
    """What a file has; a ValueError that names it if that is no JSON."""
    try:
        return json.loads(path.read_text())
    except (ValueError, RecursionError) as error:  # of JSON, of text that is no UTF-8, of nesting without end
        raise ValueError(f"{path} must be JSON: {error}") from None


@dataclass(frozen=True)
class Yarn:
    """YaRN: rope stretched to contexts longer than those of the pre-training."""

    factor: float
    original_positions: int
    """Length of the contexts of the pre-training."""
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
    """Of a query head, without rope."""
    value_dim: int
    """Of a head, after the latent values have been expanded."""
    rope_theta: float
    yarn: Yarn | None

    index_heads: int
    index_topk: int
    index_rope_interleaved: bool
    """The indexer's rope turns neighbours (2i, 2i + 1), not the halves (i, i + 32)."""
    shares_selection: tuple[bool, ...]
    """Layers without an indexer, which attend to what the last one before them selected."""

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
        """Of a query head, before it is absorbed."""
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
        """From the contents of `config.json`. What the engine would compute wrongly is a ValueError."""
        family = raw.get("model_type")
        if family not in FAMILIES:
            raise ValueError(f"model_type must be one of {', '.join(FAMILIES)}; got {family!r}")
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
            tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
            heads=_count(raw, "num_attention_heads"),
            q_lora_rank=_count(raw, "q_lora_rank"),
            nope_dim=_count(raw, "qk_nope_head_dim"),
            value_dim=_count(raw, "v_head_dim"),
            rope_theta=theta,
            yarn=yarn,
            index_heads=_count(raw, "index_n_heads"),
            index_topk=_count(raw, "index_topk"),
            index_rope_interleaved=bool(raw.get("indexer_rope_interleave", family == "glm_moe_dsa")),
            shares_selection=_shares_selection(raw, layers) if family == "glm_moe_dsa" else (False,) * layers,
            mlp_size=_count(raw, "intermediate_size"),
            is_moe=_is_moe(raw, layers),
            experts=_count(raw, "n_routed_experts"),
            expert_size=_count(raw, "moe_intermediate_size"),
            shared_experts=_count(raw, "n_shared_experts"),
            experts_per_token=_count(raw, "num_experts_per_tok"),
            expert_groups=_count(raw, "n_group"),
            groups_per_token=_count(raw, "topk_group"),
            normalise_expert_weights=bool(raw.get("norm_topk_prob", True)),
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
    """The keys that have one value in all released models, which the code takes for granted. A key that is left out
    has that value."""
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
            raise ValueError(f"{key} must be {value!r}, the only one supported; got {raw[key]!r}")


def _count(raw: Mapping[str, Any], key: str) -> int:
    value = raw.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{key} must be an integer from 1; got {value!r}")
    return value


def _number(raw: Mapping[str, Any], key: str) -> float:
    value = raw.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{key} must be a number; got {value!r}")
    return float(value)


def _rope(raw: Mapping[str, Any]) -> tuple[float, Yarn | None]:
    """Newer configs have `rope_parameters`, older ones `rope_theta` beside `rope_scaling`."""
    rope = {
        "rope_theta": raw.get("rope_theta"),
        **(raw.get("rope_scaling") or {}),
        **(raw.get("rope_parameters") or {}),
    }
    theta = _number(rope, "rope_theta")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"partial_rotary_factor must be 1; got {rope['partial_rotary_factor']!r}")
    if kind == "default":
        return theta, None
    if kind != "yarn":
        raise ValueError(f"rope_type must be default or yarn; got {kind!r}")
    original = rope.get("original_max_position_embeddings", raw["max_position_embeddings"])
    given = {
        key: rope[key]
        for key in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate")
        if rope.get(key) is not None
    }
    return theta, Yarn(factor=_number(rope, "factor"), original_positions=original, **given)


def _is_moe(raw: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """From `mlp_layer_types`, or else all but the first `first_k_dense_replace`."""
    kinds = raw.get("mlp_layer_types")
    if kinds is None:
        dense = raw.get("first_k_dense_replace", 3)
        kinds = ["dense" if i < dense else "sparse" for i in range(layers)]
    return _per_layer("mlp_layer_types", kinds, layers, {"dense": False, "sparse": True})


def _shares_selection(raw: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """From `indexer_types`, a pattern such as FSSF, or the rule that every n-th layer has an indexer."""
    kinds = raw.get("indexer_types") or raw.get("index_topk_pattern")
    if kinds is None:
        every, first = max(raw.get("index_topk_freq", 1), 1), raw.get("index_skip_topk_offset", 2)
        kinds = ["shared" if max(i - first + 1, 0) % every else "full" for i in range(layers)]
    values = {"full": False, "shared": True, "F": False, "S": True}
    shares = _per_layer("indexer_types", list(kinds), layers, values)
    if shares[0]:
        raise ValueError("indexer_types must begin with full: there is no selection before the first layer to share")
    return shares


def _per_layer(key: str, kinds: list[str], layers: int, values: dict[str, bool]) -> tuple[bool, ...]:
    if len(kinds) < layers or not set(kinds) <= values.keys():
        raise ValueError(f"{key} must be {layers} or more of {', '.join(values)}; got {kinds!r}")
    return tuple(values[kind] for kind in kinds[:layers])  # what follows belongs to layers for speculation


def _weight_block(quantisation: Mapping[str, Any] | None) -> tuple[int, int] | None:
    if quantisation is None:
        return None
    method, block = quantisation.get("quant_method"), quantisation.get("weight_block_size")
    if method != "fp8" or not isinstance(block, (list, tuple)) or len(block) != 2:
        raise ValueError(
            "quantization_config must have quant_method fp8 and a weight_block_size of two numbers; "
            f"got {method!r} and {block!r}"
        )
    rows, columns = (_count({"weight_block_size": size}, "weight_block_size") for size in block)
    return rows, columns
