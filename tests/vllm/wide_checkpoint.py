"""A checkpoint of a few layers of DeepSeek-V3.2's width, with random weights of the magnitude of trained ones.

So attention matters to what comes out; with the weights that vLLM makes up by itself (`--load-format dummy`) it
doesn't.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

VOCABULARY = 32768
LAYERS = 4


def config(heads: int, max_positions: int, hidden_size: int = 7168, drafts: bool = False) -> dict[str, Any]:
    """`config.json` of DeepSeek-V3.2 with fewer layers, no experts and a smaller vocabulary.

    Args:
        drafts: whether there is a layer for multi-token prediction.
    """
    return dict(
        architectures=["DeepseekV32ForCausalLM"],
        model_type="deepseek_v32",
        dtype="bfloat16",
        vocab_size=VOCABULARY,
        bos_token_id=0,
        eos_token_id=1,
        hidden_size=hidden_size,
        intermediate_size=4096,
        moe_intermediate_size=2048,
        num_hidden_layers=LAYERS,
        first_k_dense_replace=LAYERS + drafts,
        moe_layer_freq=1,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        num_attention_heads=heads,
        num_key_value_heads=heads,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        index_n_heads=64,
        index_head_dim=128,
        index_topk=2048,
        max_position_embeddings=max_positions,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0),
        hidden_act="silu",
        attention_bias=False,
        tie_word_embeddings=False,
        num_nextn_predict_layers=int(drafts),
    )


def write(folder: Path, heads: int, max_positions: int, hidden_size: int = 7168, drafts: bool = False) -> None:
    """Random weights, each of a row N(0, 1 / its length), so that activations keep their size from layer to layer. What
    a layer of them drafts is as good as never right."""
    c = config(heads, max_positions, hidden_size, drafts)
    latent = c["kv_lora_rank"] + c["qk_rope_head_dim"]
    query, value = c["qk_nope_head_dim"] + c["qk_rope_head_dim"], c["qk_nope_head_dim"] + c["v_head_dim"]
    sizes = {"model.embed_tokens": (VOCABULARY, hidden_size), "lm_head": (VOCABULARY, hidden_size)}
    norms = {"model.norm": hidden_size}
    if drafts:
        layer = f"model.layers.{LAYERS}"
        sizes |= {f"{layer}.eh_proj": (hidden_size, 2 * hidden_size)}
        sizes |= {f"{layer}.{name}": (VOCABULARY, hidden_size) for name in ("embed_tokens", "shared_head.head")}
        norms |= {f"{layer}.{name}": hidden_size for name in ("enorm", "hnorm", "shared_head.norm")}
    for i in range(LAYERS + drafts):
        layer, attention = f"model.layers.{i}", f"model.layers.{i}.self_attn"
        sizes |= {
            f"{attention}.q_a_proj": (c["q_lora_rank"], hidden_size),
            f"{attention}.q_b_proj": (heads * query, c["q_lora_rank"]),
            f"{attention}.kv_a_proj_with_mqa": (latent, hidden_size),
            f"{attention}.kv_b_proj": (heads * value, c["kv_lora_rank"]),
            f"{attention}.o_proj": (hidden_size, heads * c["v_head_dim"]),
            f"{attention}.indexer.wq_b": (c["index_n_heads"] * c["index_head_dim"], c["q_lora_rank"]),
            f"{attention}.indexer.wk": (c["index_head_dim"], hidden_size),
            f"{attention}.indexer.weights_proj": (c["index_n_heads"], hidden_size),
            f"{layer}.mlp.gate_proj": (c["intermediate_size"], hidden_size),
            f"{layer}.mlp.up_proj": (c["intermediate_size"], hidden_size),
            f"{layer}.mlp.down_proj": (hidden_size, c["intermediate_size"]),
        }
        norms |= {
            f"{layer}.input_layernorm": hidden_size,
            f"{layer}.post_attention_layernorm": hidden_size,
            f"{attention}.q_a_layernorm": c["q_lora_rank"],
            f"{attention}.kv_a_layernorm": c["kv_lora_rank"],
            f"{attention}.indexer.k_norm": c["index_head_dim"],
        }

    def drawn(seed: int, size: tuple[int, int]) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(size, generator=generator).mul_(size[-1] ** -0.5).bfloat16()

    with ThreadPoolExecutor() as pool:  # a generator works alone, and there are over a billion numbers to draw
        weights = pool.map(drawn, range(len(sizes)), sizes.values())
        tensors = {f"{name}.weight": weight for name, weight in zip(sizes, weights, strict=True)}
    for name, size in norms.items():
        dtype = torch.float32 if name.endswith("k_norm") else torch.bfloat16
        tensors[f"{name}.weight"] = torch.ones(size, dtype=dtype)
        if name.endswith("k_norm"):
            tensors[f"{name}.bias"] = torch.zeros(size, dtype=dtype)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(c, indent=2))  # last: what has it is whole
