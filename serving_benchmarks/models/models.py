"""Models of the real width and few layers, with random weights: what attention costs in them is what it costs in the
real ones, and they fit on one GPU.

    python -m serving_benchmarks.models.models --like deepseek-v3.2 --layers 4 --heads 16 --experts 8 --output FOLDER
    python -m serving_benchmarks.models.models --check --output FOLDER

Each weight matrix is N(0, 1 / its row length), so that activations keep their size from layer to layer and scores of
attention spread by 1. So attention matters: --check shows it, by having each token attend to random ones of the prompt,
later ones too, in place of its context, which must change what the model says. (It doesn't with weights that vLLM makes
up by `--load-format dummy`.)
Heads may be fewer than the real model has, as on one GPU of several that share it. Rope is not stretched by YaRN.
"""

import argparse
import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

from mla_backend.engine import Batch, KernelAttention, Model, ModelConfig, load_model, new_caches
from mla_backend.engine.sparse import Query
from mla_backend.engine.tokenizer import save as save_tokenizer

COMMON = dict(
    dtype="bfloat16",
    bos_token_id=0,
    eos_token_id=1,
    moe_intermediate_size=2048,
    moe_layer_freq=1,
    n_shared_experts=1,
    n_group=1,
    topk_group=1,
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    scoring_func="sigmoid",
    topk_method="noaux_tc",
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    index_head_dim=128,
    index_topk=2048,
    hidden_act="silu",
    attention_bias=False,
    attention_dropout=0.0,
    initializer_range=0.02,
    tie_word_embeddings=False,
    num_nextn_predict_layers=0,
)
LIKE = {
    "deepseek-v3.2": dict(
        architectures=["DeepseekV32ForCausalLM"],
        model_type="deepseek_v32",
        vocab_size=129280,
        hidden_size=7168,
        intermediate_size=18432,
        num_attention_heads=128,
        q_lora_rank=1536,
        qk_nope_head_dim=128,
        v_head_dim=128,
        index_n_heads=64,
        max_position_embeddings=163840,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0),
    ),
    "glm-5": dict(
        architectures=["GlmMoeDsaForCausalLM"],
        model_type="glm_moe_dsa",
        vocab_size=154880,
        hidden_size=6144,
        intermediate_size=12288,
        num_attention_heads=64,
        q_lora_rank=2048,
        qk_nope_head_dim=192,
        v_head_dim=256,
        index_n_heads=32,
        indexer_rope_interleave=True,
        max_position_embeddings=202752,
        rms_norm_eps=1e-5,
        rope_theta=1000000.0,
        rope_parameters=dict(rope_type="default", rope_theta=1000000.0),
    ),
}
"""What their config.json says, but for how many layers and experts there are."""
SHAPE = ("layers", "dense_layers", "heads", "experts", "vocab_size")
"""What can be asked for, as options and result files name it."""
REAL_EXPERTS = 256
"""That all real ones have, and models of random weights have not."""
SPECIAL_TOKENS = 2
"""Of the tokenizer, the first ones."""
AT_ONCE = 2**24
"""Random numbers that are drawn at a time."""
SHARD_BYTES = 2 * 10**9
BLOCK_SIZE = 64
CHECK_TOKENS = 4
"""That the check generates after each prompt."""
CHANGED_SHARE = 0.75
"""Of the prompts must go on with another first token, or attention means too little."""


def config(
    like: str, *, layers: int = 4, heads: int | None = None, experts: int = 8, dense_layers: int = 1, **changes: Any
) -> dict[str, Any]:
    """`config.json` of a model like a known one.

    Args:
        like: of LIKE.
        layers, heads, experts: how many; by default all heads.
        dense_layers: so many of the first layers have one MLP and no experts.
        changes: of any other keys.
    """
    given = {**COMMON, **LIKE[like]}
    given |= dict(
        num_hidden_layers=layers,
        first_k_dense_replace=min(dense_layers, layers),
        n_routed_experts=experts,
        num_experts_per_tok=min(8, max(1, experts // 4)),
    )
    given |= changes
    heads = given["num_attention_heads"] if heads is None else heads
    return {**given, "num_attention_heads": heads, "num_key_value_heads": heads}


def command_for(described: dict[str, Any], folder: str) -> str | None:
    """The command that makes a model again; None for one that this program does not make.

    Args:
        described: by `model_config.describe`, in a result file. What older ones lack is the default.
        folder: where the model is to be.
    """
    same = {"model_type": described.get("model_type"), "hidden_size": described.get("hidden_size")}
    like = next((name for name, given in LIKE.items() if same.items() <= given.items()), None)
    if "random_weights_seed" in described:
        random = described["random_weights_seed"] is not None
    else:
        random = (described.get("experts") or REAL_EXPERTS) < REAL_EXPERTS
    if like is None or not random or described.get("index_topk") != COMMON["index_topk"]:
        return None
    options = {"--like": like}
    options |= {f"--{name.replace('_', '-')}": described.get(name) for name in SHAPE}
    options |= {"--seed": described.get("random_weights_seed"), "--output": folder}
    given = [f"{option} {value}" for option, value in options.items() if value is not None]
    return " ".join(["python -m serving_benchmarks.models.models", *given])


@dataclass(frozen=True)
class TensorPlan:
    """A tensor that is to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def draw(self, seed: int) -> Tensor:
        """Depends on the seed, the name and the shape, not on what is drawn before."""
        if len(self.shape) == 1:
            return torch.full(self.shape, 0.0 if self.name.endswith("bias") else 1.0, dtype=self.dtype)
        digest = hashlib.blake2b(f"{seed} {self.name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        rows, length = self.shape
        drawn = torch.empty(self.shape, dtype=self.dtype)
        for some in drawn.split(max(1, AT_ONCE // length)):
            some.copy_(torch.randn(some.shape, generator=generator) * length**-0.5)
        return drawn


def tensors(config: dict[str, Any]) -> list[TensorPlan]:
    """All tensors of the checkpoint, named and typed as the released ones: bf16, but fp32 where precision decides.

    Layers for multi-token prediction (`num_nextn_predict_layers`) come after the others. With random weights what they
    draft is as good as never right.
    """
    layers, drafting = config["num_hidden_layers"], config["num_nextn_predict_layers"]
    with torch.device("meta"):
        model = Model(ModelConfig.from_dict({**config, "num_hidden_layers": layers + drafting}), torch.bfloat16)
    in_fp32 = ("k_norm.weight", "k_norm.bias", "e_score_correction_bias")
    plans = [
        TensorPlan(name, tuple(value.shape), torch.float32 if name.endswith(in_fp32) else torch.bfloat16)
        for name, value in model.state_dict().items()
    ]
    hidden, embedding = (config["hidden_size"],), (config["vocab_size"], config["hidden_size"])
    own = {
        **dict.fromkeys(("enorm", "hnorm", "shared_head.norm"), hidden),
        **dict.fromkeys(("embed_tokens", "shared_head.head"), embedding),
        "eh_proj": (*hidden, 2 * config["hidden_size"]),
    }
    return plans + [
        TensorPlan(f"model.layers.{layer}.{name}.weight", shape, torch.bfloat16)
        for layer in range(layers, layers + drafting)
        for name, shape in own.items()
    ]


def shards(plans: Sequence[TensorPlan], most: int) -> Iterator[list[TensorPlan]]:
    """Neighbours together, each list of so many bytes at most, or of one tensor."""
    some: list[TensorPlan] = []
    for plan in plans:
        if some and sum(p.bytes for p in some) + plan.bytes > most:
            yield some
            some = []
        some.append(plan)
    if some:
        yield some


def write(
    folder: Path,
    config: dict[str, Any],
    *,
    seed: int = 0,
    shard_bytes: int = SHARD_BYTES,
    tokenizer: bool = True,
    on_written: Callable[[int], None] = lambda bytes: None,
) -> None:
    """Writes a checkpoint with random weights, one file after the other, each of which fits in memory.

    Args:
        folder: which must not have a checkpoint.
        config: of the model.
        seed: of the weights, which `config.json` names.
        shard_bytes: of a file, at most.
        tokenizer: whether there is one.
        on_written: called with the bytes of each tensor that is done.
    """
    from safetensors.torch import save_file

    if (folder / "config.json").exists():
        raise FileExistsError(f"folder must not have a checkpoint; {folder} has a config.json")
    folder.mkdir(parents=True, exist_ok=True)
    plans = tensors(config)
    total, free = sum(plan.bytes for plan in plans), shutil.disk_usage(folder).free
    if total > free:
        raise OSError(f"folder needs {total / 1e9:.1f} GB; {folder} has {free / 1e9:.1f}")
    parts = list(shards(plans, shard_bytes))
    place: dict[str, str] = {}
    for number, part in enumerate(parts, start=1):
        file = f"model-{number:05}-of-{len(parts):05}.safetensors"
        drawn = {}
        with ThreadPoolExecutor() as pool:  # a generator works alone, and there are billions of numbers to draw
            for plan, tensor in zip(part, pool.map(partial(TensorPlan.draw, seed=seed), part), strict=True):
                drawn[plan.name] = tensor
                on_written(plan.bytes)
        save_file(drawn, folder / file, metadata={"format": "pt"})
        place |= dict.fromkeys(drawn, file)
    index = {"metadata": {"total_size": total}, "weight_map": place}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    if tokenizer:
        write_tokenizer(folder, config["vocab_size"])
    written = {**config, "random_weights_seed": seed}
    (folder / "config.json").write_text(json.dumps(written, indent=1))  # last, as it makes the folder a checkpoint


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """A tokenizer whose tokens are the words t0, t1, ...: any tokens are a text, which gives the same tokens again."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    own = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocabulary)}, unk_token="t0"))
    own.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # special tokens are looked for within words too, unless they say otherwise: t12 would be read as t1 and a rest
    unknown, end = (AddedToken(word, single_word=True, special=True) for word in ("t0", "t1"))
    save_tokenizer(PreTrainedTokenizerFast(tokenizer_object=own, unk_token=unknown, eos_token=end), folder)


class AttentionElsewhere(KernelAttention):
    """Attends to random slots of those that have been written, in place of those that it is told."""

    def __init__(self, generator: torch.Generator):
        super().__init__()
        self._generator, self._written = generator, 0

    def write(self, kv_c: Tensor, k_pe: Tensor, cache: Tensor, slots: Tensor) -> None:
        self._written = max(self._written, int(slots.max()) + 1)  # they are filled from the first on
        super().write(kv_c, k_pe, cache, slots)

    def attend(
        self,
        q: Query,
        cache: Tensor,
        indices: Tensor,
        lengths: Tensor,
        scale: float,
        plan: Tensor | None,
    ) -> Tensor:
        others = torch.randint(self._written, indices.shape, generator=self._generator, dtype=torch.int32)
        return super().attend(q, cache, others.to(indices.device), lengths, scale, plan)


@torch.inference_mode()
def continued(model: Model, prompt: list[int], tokens: int, sparse: KernelAttention) -> list[int]:
    """What a model says after a prompt, greedily, with attention of one's own, over FP8 caches."""
    for layer in model.model.layers:
        layer.self_attn.sparse = sparse
    device = model.model.embed_tokens.weight.device
    blocks = -(-(len(prompt) + tokens) // BLOCK_SIZE)
    caches = new_caches(model.config, blocks, BLOCK_SIZE, latent="fp8_ds_mla", keys="fp8", device=device)
    table = torch.arange(blocks, dtype=torch.int32, device=device).unsqueeze(0)
    said, new, start = [], prompt, 0
    while len(said) < tokens:
        end = start + len(new)
        positions = torch.arange(start, end, device=device)
        batch = Batch(
            block_table=table,
            slots=positions,
            token_counts=[len(new)],
            context_lengths=[end],
            logits_at=torch.tensor([len(new) - 1], device=device),
        )
        said.append(int(model(torch.tensor(new, device=device), positions, batch, caches).argmax()))
        new, start = said[-1:], end
    return said


@dataclass(frozen=True)
class Checked:
    """What the check has found."""

    prompts: int
    changed: int
    """Prompts that are gone on with by another first token if attention looks elsewhere."""
    repeated: int
    """Prompts that are gone on with by the same tokens if it doesn't."""

    @property
    def attention_matters(self) -> bool:
        return self.repeated == self.prompts and self.changed >= CHANGED_SHARE * self.prompts


def check(
    folder: Path,
    *,
    prompts: int = 8,
    length: int = 256,
    seed: int = 0,
    device: str = "cpu",
    on_prompt: Callable[[], None] = lambda: None,
) -> Checked:
    """Whether what a model says depends on what it attends to.

    Args:
        folder: a checkpoint.
        prompts, length: random ones, of so many tokens.
        seed: of prompts and of where attention looks instead.
        device: where the model runs.
        on_prompt: called when one is done.
    """
    model = load_model(folder, device=device)
    generator = torch.Generator().manual_seed(seed)
    changed = repeated = 0
    for _ in range(prompts):
        prompt = torch.randint(SPECIAL_TOKENS, model.config.vocab_size, (length,), generator=generator).tolist()
        right, again, wrong = (
            continued(model, prompt, CHECK_TOKENS, sparse)
            for sparse in (KernelAttention(), KernelAttention(), AttentionElsewhere(generator))
        )
        changed += right[0] != wrong[0]
        repeated += right == again
        on_prompt()
    return Checked(prompts, changed, repeated)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m serving_benchmarks.models.models",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="of the checkpoint")
    parser.add_argument(
        "--check", action="store_true", help="show that attention matters in it; without --like, of one that is there"
    )
    what = parser.add_argument_group("what is written")
    what.add_argument("--like", choices=LIKE)
    what.add_argument("--layers", type=int, default=4, help="default: %(default)s")
    what.add_argument(
        "--dense-layers", type=int, default=1, help="without experts, the first ones; default: %(default)s"
    )
    what.add_argument("--heads", type=int, help="default: as many as the real one has")
    what.add_argument(
        "--experts", type=int, default=8, help="a token goes to a quarter of them, 8 at most; default: %(default)s"
    )
    what.add_argument("--vocab-size", type=int, help="default: the real one's")
    what.add_argument("--seed", type=int, default=0, help="of the weights; default: %(default)s")
    how = parser.add_argument_group("how it is checked")
    how.add_argument("--prompts", type=int, default=8, help="default: %(default)s")
    how.add_argument("--length", type=int, default=256, help="tokens of each; default: %(default)s")
    how.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    options = parser.parse_args(arguments)
    if options.like is None and not options.check:
        parser.error("--like says what to write, --check that the model of --output is to be checked; give one or both")
    for name in ("layers", "heads", "experts", "vocab_size", "prompts", "length"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be 1 or more; got {getattr(options, name)}")
    if options.dense_layers < 0:
        parser.error(f"--dense-layers must be 0 or more; got {options.dense_layers}")
    if options.vocab_size is not None and options.vocab_size <= SPECIAL_TOKENS:
        parser.error(
            f"--vocab-size must be {SPECIAL_TOKENS + 1} or more, as {SPECIAL_TOKENS} tokens are special ones; "
            f"got {options.vocab_size}"
        )
    if options.check:
        require_device(parser, options.device)
    return options


def require_device(parser: argparse.ArgumentParser, name: str) -> None:
    """Refuses a --device that is not here."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        parser.error(f"--device must be cpu, cuda or cuda:N; got {name}")
    gpus = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= gpus:
        parser.error(f"--device must be here; got {name}, and there are {gpus} GPUs that torch can use")


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    console = Console(stderr=True, highlight=False)
    try:
        if options.like:
            more = {"vocab_size": options.vocab_size} if options.vocab_size else {}
            wanted = config(
                options.like,
                layers=options.layers,
                heads=options.heads,
                experts=options.experts,
                dense_layers=options.dense_layers,
                **more,
            )
            total = sum(plan.bytes for plan in tensors(wanted))
            columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn()
            with Progress(*columns, console=console) as progress:
                task = progress.add_task("writing weights", total=total)
                write(options.output, wanted, seed=options.seed, on_written=lambda n: progress.advance(task, n))
            print(
                f"{options.output}: {total / 1e9:.2f} GB, {wanted['num_hidden_layers']} layers, "
                f"{wanted['num_attention_heads']} heads, {wanted['n_routed_experts']} experts"
            )
        if options.check:
            columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
            with Progress(*columns, console=console) as progress:
                task = progress.add_task("checking", total=options.prompts)
                found = check(
                    options.output,
                    prompts=options.prompts,
                    length=options.length,
                    seed=options.seed,
                    device=options.device,
                    on_prompt=lambda: progress.advance(task),
                )
            print(
                f"attending elsewhere changes the next token of {found.changed} of {found.prompts} prompts; "
                f"attending again, {found.repeated} of {found.prompts} give the same {CHECK_TOKENS} tokens"
            )
            if not found.attention_matters:
                print("error: attention matters too little in this model", file=sys.stderr)
                return 1
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
