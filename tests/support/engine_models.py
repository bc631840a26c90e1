"""Small random models of both families: transformers' own, which write the checkpoints, and a step of ours."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn

from mla_backend.engine import LayerCache, Model, TokenBatch, new_caches

try:
    import transformers
except ImportError as error:
    pytest.skip(f"transformers can't be imported (the extra `engine`): {error}", allow_module_level=True)
if not all(hasattr(transformers, name) for name in ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")):
    pytest.skip(
        f"transformers {transformers.__version__} lacks DeepseekV32ForCausalLM or GlmMoeDsaForCausalLM",
        allow_module_level=True,
    )

BLOCK_SIZE = 16
TOPK = 32
SHAPE = dict(vocab_size=320, hidden_size=128, intermediate_size=192, moe_intermediate_size=64, num_hidden_layers=4)
SHAPE |= dict(num_attention_heads=4, num_key_value_heads=4, n_routed_experts=8, q_lora_rank=96, qk_nope_head_dim=32)
SHAPE |= dict(v_head_dim=48, n_group=4, topk_group=2, num_experts_per_tok=3, index_topk=TOPK, index_n_heads=32)
SHAPE |= dict(first_k_dense_replace=1, max_position_embeddings=512)
SMALL = dict(vocab_size=259, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=2)
SMALL |= dict(num_attention_heads=2, num_key_value_heads=2, q_lora_rank=32)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=8.0, original_max_position_embeddings=64)
PLAIN = dict(rope_type="default", rope_theta=10000.0)
ONE_GROUP = dict(n_group=1, topk_group=1)
SHARED = dict(indexer_types=["full", "shared", "full", "shared"], tie_word_embeddings=True)
FIRST_SELECTS = dict(indexer_types=["full", "shared", "shared", "shared"], rope_parameters=PLAIN)
ALL_SELECTED = dict(index_topk=512, topk_group=4, rope_parameters=dict(**YARN, mscale=1.0))
MODELS = {
    "deepseek_v32": ("DeepseekV32", dict(rope_parameters=dict(**YARN, mscale=1.0, mscale_all_dim=1.0))),
    "deepseek_v32_no_yarn": ("DeepseekV32", dict(rope_parameters=PLAIN)),
    "glm_moe_dsa": ("GlmMoeDsa", dict(**ONE_GROUP, rope_parameters=PLAIN, rms_norm_eps=0.1)),
    "glm_moe_dsa_shared": ("GlmMoeDsa", dict(**SHARED, rope_parameters=dict(**YARN, mscale=0.7))),
    # Smooth: nothing in them jumps when a number is rounded differently, so that errors can be given bounds. All
    # experts are used, and selections don't depend on what attention has computed.
    "deepseek_v32_smooth": ("DeepseekV32", dict(**ALL_SELECTED, num_experts_per_tok=8)),
    "glm_moe_dsa_smooth": ("GlmMoeDsa", dict(**FIRST_SELECTS, **ONE_GROUP, num_experts_per_tok=8)),
}
"""Of each a class of transformers and what it is given besides SHAPE."""


def theirs(name: str, **changes) -> nn.Module:
    """transformers' model in fp32, with random weights of a size that makes attention and routing matter."""
    family, more = MODELS[name]
    return random_model(family, **{**SHAPE, **more, **changes})


def random_model(family: str, **shape) -> nn.Module:
    """The same of any class of transformers."""
    config = getattr(transformers, family + "Config")(**shape, attn_implementation="eager")
    model = getattr(transformers, family + "ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, value in model.state_dict().items():
            if key.endswith("norm.weight"):
                value.normal_(1.0, 0.1)
            elif value.dim() == 1:  # a bias
                value.normal_(0.0, 0.1)
            else:
                value.normal_(0.0, value.shape[-1] ** -0.5)
    return model


@torch.inference_mode()
def their_generation(model: nn.Module, prompt: list[int], new_tokens: int) -> tuple[list[int], Tensor]:
    """Greedy, with transformers' own cache: the new tokens, and the logits each was taken from."""
    logits, tokens, cache = [], torch.tensor([prompt]), None
    for _ in range(new_tokens):
        out = model(tokens, past_key_values=cache, use_cache=True)
        logits.append(out.logits[0, -1])
        tokens, cache = logits[-1].argmax().view(1, 1), out.past_key_values
    return [int(row.argmax()) for row in logits], torch.stack(logits)


class Engine:
    """Greedy generation, the plain way: every step takes a chunk of every request. On the device of the model; logits
    are brought to the host."""

    def __init__(self, model: Model, latent: str, keys: str, blocks: int = 64, block_size: int = BLOCK_SIZE):
        self.model, self.block_size = model, block_size
        self.new = partial(torch.tensor, device=model.model.embed_tokens.weight.device)
        how = dict(latent=latent, keys=keys, device=model.model.embed_tokens.weight.device)
        self.caches: list[LayerCache] = new_caches(model.config, blocks, block_size, **how)
        for tensor in (part for cache in self.caches for part in (cache.latent, cache.keys) if part is not None):
            tensor.view(torch.uint8).fill_(0xFF)  # NaN, so that a row that is read without having been written shows
        self.free = torch.randperm(blocks).tolist()  # scattered, so that slots and positions differ

    def generate(
        self, prompts: list[list[int]], new_tokens: int, chunk: int = 1 << 30, forced: list[list[int]] | None = None
    ) -> list[SimpleNamespace]:
        """All prompts at once, a chunk of at most so many tokens of each in a step. They go on with `forced`, whatever
        the logits say. Of each the `generated` tokens, and the `logits` `[N, vocab_size]` that they were taken from."""
        requests = []
        for prompt, after in zip(prompts, forced or [None] * len(prompts), strict=True):
            blocks = [self.free.pop() for _ in range(-(-(len(prompt) + new_tokens) // self.block_size))]
            slots = [block * self.block_size + i for block in blocks for i in range(self.block_size)]
            given = dict(tokens=list(prompt), blocks=blocks, slots=slots, forced=after)
            requests.append(SimpleNamespace(**given, computed=0, rows=[]))
        while work := [request for request in requests if len(request.rows) < new_tokens]:
            self._step(work, chunk)
        for request in requests:
            request.generated, request.logits = request.tokens[-new_tokens:], torch.stack(request.rows)
        return requests

    def _step(self, work: list[SimpleNamespace], chunk: int) -> None:
        """Computes a chunk of each request; one that has reached its end gets its next token."""
        spans = [range(one.computed, min(one.computed + chunk, len(one.tokens))) for one in work]
        pairs = [(one, i) for one, span in zip(work, spans, strict=True) for i in span]
        counts, finished = list(map(len, spans)), []
        for one, span, end in zip(work, spans, accumulate(counts), strict=True):
            one.computed = span.stop
            finished += [(one, end - 1)] if one.computed == len(one.tokens) else []
        width = max(len(one.blocks) for one in work)
        table = self.new([one.blocks + [-1] * (width - len(one.blocks)) for one in work], dtype=torch.int32)
        slots, at = self.new([one.slots[i] for one, i in pairs]), [place for _, place in finished]
        lengths = [one.computed for one in work]
        batch = TokenBatch(table, slots, counts, lengths, self.new(at, dtype=torch.int64))
        tokens, positions = self.new([one.tokens[i] for one, i in pairs]), self.new([i for _, i in pairs])
        logits = self.model(tokens, positions, batch, self.caches)
        for (one, _), row in zip(finished, logits.cpu(), strict=True):
            one.tokens.append(int(row.argmax()) if one.forced is None else one.forced[len(one.rows)])
            one.rows.append(row)


@contextmanager
def one_thread() -> Iterator[None]:
    """Models this small gain nothing from more, and on a busy machine threads that wait for each other cost a lot."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, SHAPE["vocab_size"], (length,), generator=generator).tolist()


def save_tokenizer(folder: Path) -> None:
    """A token for each byte, an end, and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|end|>", "<|user|>", "<|assistant|>"]
    tokenizer = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(alphabet + special)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    own = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    own.chat_template = (
        "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    own.save_pretrained(folder)


def save_small(folder: Path, **more) -> Path:
    """A checkpoint of two layers with a tokenizer, for tests of what is around the model."""
    save(theirs("deepseek_v32", **{**SMALL, "rope_parameters": PLAIN, **more}), folder)
    save_tokenizer(folder)
    return folder


def save(model: nn.Module, folder: Path) -> Path:
    """As a checkpoint of several files."""
    model.save_pretrained(folder, max_shard_size="1MB")
    return folder
