"""Adds an MTP layer, which drafts tokens, to the recall checkpoint.

Its block is a copy of the last layer's, with a small share in the result. What leads into it, `eh_proj`, is fitted by
least squares: it predicts the next hidden state from the last one and the token in between. Such drafts are often right
where a word follows from the one before, and wrong otherwise, so that some are accepted and some rejected. What the
model generates must not depend on them.
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import rms_norm

from mla_backend.engine import Model, TokenBatch, load_model, new_caches
from serving_benchmarks.models.recall import prompts

CONTEXTS, TOKENS, QUESTIONS = 8, 500, 12  # what is fitted to: some 8000 tokens
FIRST_SEED = 1000  # of those contexts; questions for tests have smaller seeds
RIDGE = 1e-3  # on the diagonal of the products of features, about 1: rare ones get no large weights
BLOCK_SHARE = 0.1  # of the block's output: it was not trained for this input


def add_mtp_layer(source: Path, folder: Path) -> None:
    """Writes a copy of a checkpoint with one MTP layer."""
    folder.mkdir(exist_ok=True)
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, folder)
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}, indent=2) + "\n")
    weights = load_file(source / "model.safetensors")
    added = mtp_layer(weights, config["num_hidden_layers"], _fitted(load_model(source, dtype=torch.float32)))
    save_file({**weights, **added}, folder / "model.safetensors", metadata={"format": "pt"})


def mtp_layer(weights: dict[str, Tensor], layers: int, eh_proj: Tensor) -> dict[str, Tensor]:
    """The tensors of an MTP layer for a checkpoint of so many layers, with this `eh_proj`, `[hidden, 2 * hidden]`."""
    last, draft = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    added = {name.replace(last, draft): tensor.clone() for name, tensor in weights.items() if name.startswith(last)}
    for name in added:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            added[name] *= BLOCK_SHARE
    ones = torch.ones_like(weights["model.norm.weight"])
    added |= {f"{draft}{name}.weight": ones.clone() for name in ("enorm", "hnorm", "shared_head.norm")}
    added[f"{draft}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    added[f"{draft}shared_head.head.weight"] = weights["lm_head.weight"].clone()
    return {**added, f"{draft}eh_proj.weight": eh_proj.to(ones.dtype)}


def _fitted(model: Model) -> Tensor:
    """fp32 `[hidden, 2 * hidden]`: maps a token and the hidden state before it to the next, all with mean square 1."""
    features, wanted = [], []
    for seed in range(FIRST_SEED, FIRST_SEED + CONTEXTS):
        asked = prompts(seed, TOKENS, QUESTIONS)
        tokens = list(asked[0].context_tokens)
        for one in asked:
            tokens += one.question_tokens + one.answer_tokens
        hidden = _hidden(model, tokens)
        embedded = model.model.embed_tokens(torch.tensor(tokens))
        embedded, hidden = (rms_norm(x, x.shape[-1:], eps=1e-6) for x in (embedded, hidden))
        features.append(torch.cat([embedded[1:], hidden[:-1]], dim=1))
        wanted.append(hidden[1:])
    x, y = torch.cat(features).double(), torch.cat(wanted).double()
    products = x.T @ x / len(x) + RIDGE * torch.eye(x.shape[1], dtype=x.dtype)
    return torch.linalg.solve(products, x.T @ y / len(x)).T.float().contiguous()


@torch.inference_mode()
def _hidden(model: Model, tokens: list[int]) -> Tensor:
    """fp32 `[tokens, hidden]`: the hidden state of each token that the model takes its logits from."""
    kept: list[Tensor] = []
    count, lengths = torch.arange(len(tokens)), [len(tokens)]
    batch = TokenBatch(torch.zeros(1, 1, dtype=torch.int32), count, lengths, lengths, count)
    with model.model.norm.register_forward_hook(lambda module, given, out: kept.append(out)):
        model(torch.tensor(tokens), count, batch, new_caches(model.config, 1, len(tokens), latent="bf16", keys="bf16"))
    return kept[0]
