"""Configs of released models are read as they are; what the engine would compute wrongly is refused by name."""

import json

import pytest

pytest.importorskip("safetensors", reason="safetensors is not installed (the extra `engine`)")

from commands import in_python  # noqa: E402
from mla_backend.engine import ModelConfig, Yarn  # noqa: E402
from mla_backend.engine.rope import attention_scale, inverse_frequencies, rotation_scale  # noqa: E402

DEEPSEEK_V32 = json.loads("""{
  "attention_bias": false, "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168,
  "index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048, "intermediate_size": 18432, "kv_lora_rank": 512,
  "max_position_embeddings": 163840, "model_type": "deepseek_v32", "moe_intermediate_size": 2048, "moe_layer_freq": 1,
  "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": true, "num_attention_heads": 128,
  "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
  "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
  "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
    "scale_fmt": "ue8m0", "weight_block_size": [128, 128]},
  "rms_norm_eps": 1e-06,
  "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096, "type": "yarn"},
  "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": false,
  "topk_group": 4, "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 129280
}""")
GLM_5 = {key: value for key, value in DEEPSEEK_V32.items() if key not in ("quantization_config", "rope_scaling")}
GLM_5 |= json.loads("""{
  "hidden_size": 6144, "index_n_heads": 32, "intermediate_size": 12288, "max_position_embeddings": 202752,
  "model_type": "glm_moe_dsa", "n_group": 1, "num_attention_heads": 64, "num_hidden_layers": 78,
  "num_key_value_heads": 64, "q_lora_rank": 2048, "qk_nope_head_dim": 192, "rms_norm_eps": 1e-05, "topk_group": 1,
  "v_head_dim": 256, "vocab_size": 154880, "indexer_rope_interleave": true, "rope_interleave": true,
  "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}
}""")
"""What the released config.json files have."""


def test_deepseek_v32_is_read():
    config = ModelConfig.from_dict(DEEPSEEK_V32)
    assert (config.heads, config.query_dim, config.layers) == (128, 192, 61)
    assert config.is_moe == (False,) * 3 + (True,) * 58
    assert not any(config.shares_selection) and not config.index_rope_interleaved
    assert config.weight_block == (128, 128)
    assert config.rope_theta == 10000 and config.yarn == Yarn(40.0, 4096, 32, 1, 1.0, 1.0)
    assert attention_scale(config) == pytest.approx(192**-0.5 * 1.3688879**2)
    assert rotation_scale(config.yarn) == 1.0
    frequencies = inverse_frequencies(config)
    assert frequencies[0] == 1.0 and frequencies[-1] == pytest.approx(10000 ** (-62 / 64) / 40)


def test_glm_5_is_read():
    config = ModelConfig.from_dict(GLM_5)
    assert config.index_rope_interleaved and not any(config.shares_selection)
    assert config.yarn is None and config.rope_theta == 1000000 and config.weight_block is None
    assert attention_scale(config) == 256**-0.5


@pytest.mark.parametrize(
    "given, shares",
    [
        (dict(indexer_types=["full", "shared", "full"]), (False, True, False)),
        (dict(index_topk_pattern="FSS"), (False, True, True)),
        (dict(index_topk_freq=2), (False, False, True)),
        (dict(index_topk_freq=2, index_skip_topk_offset=1), (False, True, False)),
    ],
)
def test_layers_that_share_a_selection(given, shares):
    assert ModelConfig.from_dict({**GLM_5, "num_hidden_layers": 3, **given}).shares_selection == shares
    with pytest.raises(ValueError, match="indexer_types must begin with full"):
        ModelConfig.from_dict({**GLM_5, "indexer_types": ["shared"] * 78})


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(model_type="deepseek_v3"), "model_type must be one of deepseek_v32, glm_moe_dsa; got 'deepseek_v3'"),
        (dict(hidden_size=None), "hidden_size must be an integer from 1 to"),
        (dict(vocab_size="many"), "vocab_size must be an integer from 1 to"),
        (dict(q_lora_rank=None), "q_lora_rank must be an integer from 1 to"),
        (dict(rms_norm_eps=None), "rms_norm_eps must be a number"),
        (dict(kv_lora_rank=256), "kv_lora_rank must be 512, the only one supported; got 256"),
        (dict(hidden_act="gelu"), "hidden_act must be 'silu', the only one supported; got 'gelu'"),
        (dict(scoring_func="softmax"), "scoring_func must be 'sigmoid'"),
        (dict(attention_bias=True), "attention_bias must be False"),
        (dict(num_key_value_heads=8), "num_key_value_heads must be 128"),
        (dict(rope_scaling=dict(type="linear", factor=2)), "rope_type must be default or yarn; got 'linear'"),
        (dict(rope_scaling=dict(type="yarn")), "factor must be a number"),
        (dict(rope_theta=None), "rope_theta must be a number"),
        (dict(quantization_config=dict(quant_method="awq")), "quantization_config must have quant_method fp8"),
        (dict(n_group=7), "n_group must divide n_routed_experts=256; got 7"),
        (dict(topk_group=9), "topk_group must be n_group=8 or less; got 9"),
        (dict(num_experts_per_tok=129), "num_experts_per_tok must be 128 or less"),
        (dict(mlp_layer_types=["dense"]), "mlp_layer_types must be 61 or more of dense, sparse"),
    ],
)
def test_what_is_not_supported_is_refused(change, message):
    with pytest.raises(ValueError) as error:
        ModelConfig.from_dict({**DEEPSEEK_V32, **change})
    assert message in str(error.value)


WITHOUT_THE_EXTRA = """
import sys
sys.modules["safetensors"] = sys.modules["transformers"] = None
import kv_cache, mla_backend
from mla_backend import cli
try:
    import mla_backend.engine
except ImportError as error:
    print(error)
sys.exit(cli.main(["generate", "model", "x"]))
"""


def test_the_package_does_without_the_extra_and_the_engine_says_that_it_needs_it():
    done = in_python("-c", WITHOUT_THE_EXTRA)
    said = "mla_backend.engine needs more packages: pip install transformers tokenizers safetensors jinja2"
    assert said in done.stdout
    assert done.returncode == 2 and said in done.stderr
    assert "Traceback" not in done.stderr


def test_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json does not exist"):
        ModelConfig.from_folder(tmp_path)
    path = tmp_path / "config.json"
    for content, error in (
        (b"{", "must be JSON"),
        (b"\xff", "must be JSON"),
        (b"[]", "must be a JSON object; got a list"),
        (json.dumps({**DEEPSEEK_V32, "vocab_size": 0}).encode(), "vocab_size must be"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"config\.json:? {error}"):
            ModelConfig.from_folder(tmp_path)
