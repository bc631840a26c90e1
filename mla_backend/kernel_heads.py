"""Heads that the Hopper attention kernels take at once, as in csrc/include/mla/schedule/cost.h."""

SWAP_AB_HEADS = 32
"""With more heads only the m64 kernel is used for many tokens."""
M64_HEADS = 64
"""So many heads fill the m64 kernel's tile, and are one CTA's."""
