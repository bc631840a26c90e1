"""The paged cache manager: which blocks a sequence's tokens lie in, and the bytes of those blocks.

    storage = kv_cache.Storage(kv_cache.Layout(layers=61, block_size=64, keys="fp8"), blocks=1000)
    manager = kv_cache.CacheManager(1000, 64, storage=storage)
    sequence = manager.sequence(prompt)
    hits = manager.admit(sequence)

It knows formats and blocks, never attention. docs/kv_cache.md goes through a scheduler's step.
"""

from kv_cache.blocks import BlockPool, OutOfBlocks
from kv_cache.host import HostTier
from kv_cache.keys import KEY_FORMATS, KeyFormat
from kv_cache.manager import CacheManager, Statistics
from kv_cache.sequence import Sequence
from kv_cache.storage import Layout, Storage
from kv_cache.tables import block_table, slot_mapping
from mla_backend.formats import FORMATS, CacheFormat, format_of

__all__ = [
    "FORMATS",
    "KEY_FORMATS",
    "BlockPool",
    "CacheFormat",
    "CacheManager",
    "HostTier",
    "KeyFormat",
    "Layout",
    "OutOfBlocks",
    "Sequence",
    "Statistics",
    "Storage",
    "block_table",
    "format_of",
    "slot_mapping",
]
