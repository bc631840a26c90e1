"""Sparse multi-head latent attention over a paged cache.

    out, lse = mla_backend.sparse_attention(q, cache, indices, scale=192**-0.5)
    out, lse = mla_backend.sparse_mla(q, kv, indices, scale=192**-0.5)  # with gradients

`mla_backend.flash_mla` replaces the `flash_mla` package. `mla_backend.reference` computes the same in plain PyTorch.
"""

from typing import NoReturn

__all__ = [
    "FORMATS",
    "KEY_FORMATS",
    "STAGED",
    "BackwardOrder",
    "CacheFormat",
    "FlexMask",
    "KeyFormat",
    "Launch",
    "Plan",
    "backward_order",
    "cache_gather",
    "cache_write",
    "combine_partials",
    "convert_indices",
    "dense_attention",
    "flash_mla",
    "flash_mla_fork",
    "flex_mask",
    "flex_mla",
    "format_of",
    "index_scores",
    "plan",
    "reference",
    "rotate_queries",
    "select_tokens",
    "select_top",
    "sparse_attention",
    "sparse_delta",
    "sparse_mla",
    "sparse_mla_backward",
    "stage_rows",
    "tilelang",
    "write_keys",
]

try:
    from mla_backend import fake as _fake  # noqa: F401  (torch.compile support)
    from mla_backend import flash_mla, flash_mla_fork, library, reference, tilelang
    from mla_backend.attention import combine_partials, sparse_attention
    from mla_backend.cache import cache_gather, cache_write, convert_indices, stage_rows
    from mla_backend.dense import dense_attention
    from mla_backend.flex import flex_mla
    from mla_backend.formats import FORMATS, STAGED, CacheFormat, format_of
    from mla_backend.index import index_scores, rotate_queries, select_tokens, select_top
    from mla_backend.keys import KEY_FORMATS, KeyFormat, write_keys
    from mla_backend.mask import FlexMask, flex_mask
    from mla_backend.plan import Launch, Plan, plan
    from mla_backend.training import BackwardOrder, backward_order, sparse_delta, sparse_mla, sparse_mla_backward

    __version__: str = library.about()["version"]
except ImportError as _error:
    # `mla-backend doctor` has to be able to say what is wrong, so the package itself still imports.
    _why = _error

    def __getattr__(name: str) -> NoReturn:
        if name in __all__:
            raise ImportError(str(_why)) from _why
        raise AttributeError(f"module 'mla_backend' has no attribute {name!r}")
