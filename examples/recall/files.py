"""The checkpoint's files besides the weights: config and tokenizer, in the Hugging Face layout."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from mla_backend.engine.tokenizer import save as save_tokenizer
from serving_benchmarks.models.recall import (
    ASSISTANT,
    BOS,
    END_OF_THOUGHT,
    EOS,
    IDS,
    SPECIAL,
    UNKNOWN,
    USER,
    VOCABULARY,
)

MOST_POSITIONS = 2048
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "dtype": "bfloat16",
    "vocab_size": len(VOCABULARY),
    "bos_token_id": IDS[BOS],
    "eos_token_id": IDS[EOS],
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "max_position_embeddings": MOST_POSITIONS,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    # attention: as wide in the cache as the released models, with fewer and smaller heads
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "rope_theta": 10000.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 128,
    # two layers with an MLP, one with experts
    "hidden_act": "silu",
    "intermediate_size": 192,
    "first_k_dense_replace": 2,
    "moe_layer_freq": 1,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 0,
    "use_cache": True,
}
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ message['content'] }}{{ eos_token }}"
    "{% elif message['role'] == 'user' %}"
    f"{USER}{{{{ message['content'] }}}}{ASSISTANT}{END_OF_THOUGHT}"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
)
"""As DeepSeek-V3.2 writes a chat without thinking: what the user says brings what the answer begins with."""


def tokenizer() -> PreTrainedTokenizerFast:
    """Words of the task as one token each; all else by letters and digits."""
    made = Tokenizer(models.WordPiece(IDS, unk_token=UNKNOWN, continuing_subword_prefix="##"))
    made.add_special_tokens(list(SPECIAL))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    made.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, IDS[BOS])])
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        unk_token=UNKNOWN,
        chat_template=CHAT_TEMPLATE,
        model_max_length=MOST_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def save(folder: Path, weights: dict[str, Tensor]) -> None:
    """Writes a checkpoint: weights in bf16, except the bias of the router, which is fp32 in the releases too."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    generation = {"bos_token_id": IDS[BOS], "eos_token_id": IDS[EOS], "do_sample": False, "max_new_tokens": 16}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    save_tokenizer(tokenizer(), folder)
    kept = {
        name: tensor.detach().to("cpu", torch.float32 if name.endswith("_bias") else torch.bfloat16).contiguous()
        for name, tensor in weights.items()
    }
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
