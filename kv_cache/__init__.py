"""The paged cache manager: blocks, prefix sharing and a host tier over the formats of `mla_backend`.

Not in this version yet; the formats themselves are here.
"""

from mla_backend.formats import FORMATS, CacheFormat, format_of

__all__ = ["FORMATS", "CacheFormat", "format_of"]
