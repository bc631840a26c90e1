"""A batch: what a forward pass needs to know of its tokens. And the caches that it reads and writes."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from mla_backend.engine.config import INDEX_DIM, ModelConfig
from mla_backend.formats import FORMATS
from mla_backend.keys import KEY_FORMATS


@dataclass
class TokenBatch:
    """Tokens of several requests, concatenated: one token of a request that decodes, a chunk of one that prefills.

    R is the number of requests, T that of all tokens. The requests are in the order of the block table.
    """

    block_table: Tensor
    """int32 `[R, most blocks]`: each request's blocks, then -1."""
    slots: Tensor
    """int64 `[T]`: the cache slot that each token is written to; -1 for none."""
    token_counts: list[int]
    """Tokens of each request in this batch. This and the next are on the host, so that nothing waits for a device."""
    context_lengths: list[int]
    """Tokens of each request in the cache, including those of this batch. A captured graph has more: it serves all
    contexts up to that length."""
    logits_at: Tensor
    """int64 `[N]`: the tokens of the batch whose logits are wanted."""
    keeps_some: bool = False
    """One or more of the tokens are known to have a slot, which saves a check at every write."""

    def __post_init__(self) -> None:
        requests, tokens = len(self.block_table), len(self.slots)
        if len(self.token_counts) != requests or sum(self.token_counts) != tokens:
            raise ValueError(
                f"token_counts must be {requests} numbers, one a row of block_table, that sum up to the {tokens} "
                f"tokens of slots; got {self.token_counts}"
            )
        pairs = zip(self.token_counts, self.context_lengths, strict=False)
        if len(self.context_lengths) != requests or any(context < count for count, context in pairs):
            raise ValueError(
                f"context_lengths must be {requests} numbers, each its token_counts or more; got {self.context_lengths}"
            )

    @property
    def decodes_only(self) -> bool:
        """Every request has one token."""
        return len(self.token_counts) == len(self.slots)

    @cached_property
    def request_ids(self) -> Tensor:
        """int32 `[T]`: each token's row of the block table."""
        if self.decodes_only:
            return torch.arange(len(self.slots), dtype=torch.int32, device=self.slots.device)
        counts = torch.tensor(self.token_counts, dtype=torch.int64)
        return torch.arange(len(counts), dtype=torch.int32).repeat_interleave(counts).to(self.slots.device)


@dataclass
class LayerCache:
    """The paged caches of a layer. Both have the same blocks."""

    latent: Tensor
    """`[blocks, block_size, width]` of bf16, fp8_ds_mla or nvfp4_352 rows, or fp32 rows of 576 for `ExactAttention`."""
    keys: Tensor | None
    """The indexer's keys, of a format in `mla_backend.KEY_FORMATS`, or fp32 `[blocks, block_size, 128]`; None in a
    layer without an indexer."""


def new_caches(
    config: ModelConfig,
    blocks: int,
    block_size: int = 64,
    *,
    latent: str = "fp8_ds_mla",
    keys: str = "fp8",
    device: torch.device | str = "cpu",
) -> list[LayerCache]:
    """Caches of zeros for every layer.

    Args:
        latent: bf16, fp8_ds_mla, nvfp4_352 or fp32.
        keys: a name in `mla_backend.KEY_FORMATS`, or fp32.
    """
    latents = {name: (FORMATS[name].width, FORMATS[name].dtype) for name in ("bf16", "fp8_ds_mla", "nvfp4_352")}
    latents["fp32"] = (config.latent_dim + config.rope_dim, torch.float32)
    all_keys = {name: (fmt.width, fmt.dtype) for name, fmt in KEY_FORMATS.items()}
    all_keys["fp32"] = (INDEX_DIM, torch.float32)
    for name, value, known in (("latent", latent, latents), ("keys", keys, all_keys)):
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}; got {value!r}")

    def cache(width: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(blocks, block_size, width, dtype=dtype, device=device)

    return [
        LayerCache(cache(*latents[latent]), None if shares else cache(*all_keys[keys]))
        for shares in config.shares_selection
    ]
