"""The paged cache manager: which blocks hold a sequence's tokens, and the bytes of those blocks.

    layout = kv_cache.Layout(61, 64, mla_backend.FORMATS["fp8_ds_mla"], mla_backend.KEY_FORMATS["fp8"])
    storage = kv_cache.Storage(layout, blocks=1000)
    manager = kv_cache.CacheManager(1000, 64, storage=storage)
    sequence = manager.sequence(prompt)
    hits = manager.admit(sequence)

It knows how many bytes a block takes, and nothing of what they mean: it imports torch and no other package.
docs/kv_cache.md goes through a scheduler's step.
"""

from kv_cache.blocks import BlockPool, OutOfBlocks
from kv_cache.host import HostTier
from kv_cache.manager import CacheManager, Statistics
from kv_cache.sequence import Sequence
from kv_cache.storage import Layout, RowFormat, Storage
from kv_cache.tables import block_table, slot_mapping

__all__ = [
    "BlockPool",
    "CacheManager",
    "HostTier",
    "Layout",
    "OutOfBlocks",
    "RowFormat",
    "Sequence",
    "Statistics",
    "Storage",
    "block_table",
    "slot_mapping",
]
