"""What a plan has to be, whoever made it; and what GPU's plans are, where there is none."""

import ctypes
import functools
import os
import shlex
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

from mla_backend import library
from mla_backend.formats import format_number

CSRC = Path(__file__).parents[2] / "csrc"
CUT_FOR_CLUSTERS = [
    *((1, 16), (5, 16), (8, 16), (17, 16), (20, 16), (33, 16), (50, 16)),
    *((3, 8), (12, 8), (16, 8), (30, 5), (33, 8), (60, 8), (1, 100), (8, 64), (8, 128)),
]
"""Tokens and heads: on Hopper each token is cut into as many parts as a cluster has blocks."""
SIXTHS = (16, 16)
"""The same, into six parts, with bf16 rows and lists of 18 tiles."""
UNCUT_TOKENS = 209
"""So many are not. With 17 to 32 heads and fp8 rows `few_heads_wide` serves them, with more `many_heads`."""
FEW_AND_MANY = [(2, 20), (UNCUT_TOKENS, 8), (UNCUT_TOKENS, 32), (UNCUT_TOKENS, 64)]
"""Tokens and heads: one for each kernel that a Hopper GPU has."""
TOKEN_UNITS = 3
"""What a token costs a worker besides its tiles, in tiles, where there are fewer than two workers for each token."""


def gpu(processors=132, hopper_kernels=True):
    """A GPU like an H100: of its multiprocessors some can't be used by clusters that don't fit its partitions."""
    left_over = {2: 0, 3: processors / 9, 6: processors * 3 / 13}
    device = library.Device(processors=processors, hopper_kernels=hopper_kernels)
    for blocks in range(2, device.LARGEST_CLUSTER + 1):
        device.clusters[blocks] = (processors - int(left_over.get(blocks, processors / 11))) // blocks
    return device


@functools.cache
def _host():
    """gpu_host.cpp, compiled as the library is."""
    with tempfile.TemporaryDirectory() as folder:
        target, source = Path(folder) / "gpu_host.so", Path(__file__).with_name("gpu_host.cpp")
        compiler = shlex.split(os.environ.get("CXX", "g++"))
        flags = ["-std=c++17", "-O2", "-fPIC", "-shared", f"-I{CSRC}", f"-I{CSRC}/include"]
        subprocess.run([*compiler, *flags, source, "-o", target], check=True)
        return ctypes.CDLL(str(target))


class Choice(NamedTuple):
    """struct Choice of csrc/include/mla/choice.h."""

    kernel: str
    heads_per_block: int
    parts: int
    workers: int
    cluster: int


def gpu_choice(
    device, tokens, heads, *, fmt="fp8_ds_mla", whole_tokens=False, suits_hopper=True, workers=0, token_tiles=32
):
    """How a GPU computes attention; without workers, with the plan that it gets then."""
    numbers = (ctypes.c_int32 * 5)()
    flags = [format_number(fmt, "fmt"), *(ctypes.c_bool(flag) for flag in (whole_tokens, suits_hopper))]
    tokens, token_tiles = ctypes.c_int64(tokens), ctypes.c_int64(token_tiles)
    _host().gpu_choice(ctypes.byref(device), tokens, heads, *flags, workers, token_tiles, numbers)
    kernels = ("portable", "few_heads", "few_heads_wide", "many_heads")
    return Choice(kernels[numbers[0]], *numbers[1:])


def gpu_plan(
    tokens, topk, workers, *, topk_length=None, extra_topk=0, extra_topk_length=None, batch_invariant=False, device=None
):
    """The table that a GPU has to make, int32 `[workers, 8]`: a CPU's walk over the tokens, with a GPU's tiles. With a
    device, plans for long lists are those for its clusters."""
    rows = torch.empty((workers, 8), dtype=torch.int32)
    lengths = topk_length, extra_topk_length
    assert all(n is None or (n.dtype == torch.int32 and n.is_cpu and n.is_contiguous()) for n in lengths)
    pointers = [ctypes.c_void_p(None if n is None else n.data_ptr()) for n in lengths]
    whole = ctypes.c_bool(batch_invariant)
    described = None if device is None else ctypes.byref(device)
    _host().gpu_plan(tokens, topk, extra_topk, *pointers, whole, ctypes.c_void_p(rows.data_ptr()), workers, described)
    return rows


def cuts_of(device, tokens, heads, topk):
    """What docs/kernels.md has of a default plan for full lists: heads of a block, and how tokens are cut."""
    choice = gpu_choice(device, tokens, heads, token_tiles=-(-topk // 64))
    uncut = not gpu_plan(tokens, topk, choice.workers, device=device)[:, 2].any()
    cut = "" if uncut else "~" if choice.workers % tokens else f"/{choice.workers // tokens}"
    return f"{choice.heads_per_block}{cut}"


def tiles_of(lengths, tile_slots=16):
    return [-(-max(n, 0) // tile_slots) for n in lengths]


def walk(table, tiles, tile_slots_wanted=16):
    """Checks a table row by row against each token's tiles; returns the parts of each token."""
    position = (0, 0)  # token, tile
    parts = [0] * len(tiles)
    partials = []
    for token_begin, token_end, tile_begin, tile_end, part, cut_into, partial, tile_slots in table.tolist():
        assert tile_slots == tile_slots_wanted
        if token_begin == token_end:
            continue
        assert (token_begin, tile_begin) == position, "a worker begins where the one before it ends"
        assert part == parts[token_begin]
        for token in range(token_begin, token_end):
            parts[token] += 1
        last = token_end - 1
        opens = tile_end < tiles[last]
        position = (last, tile_end) if opens else (token_end, 0)
        used = (tile_begin > 0) + (opens and not (tile_begin > 0 and token_end - token_begin == 1))
        partials += range(partial, partial + used)
        if opens and not (tile_begin > 0 and token_end - token_begin == 1):
            assert cut_into > 1, "the worker that begins a cut token knows its parts"
        else:
            assert cut_into == 1
    assert position == (len(tiles), 0), "the last worker ends at the end"
    assert partials == list(range(len(partials))) and len(partials) <= 2 * table.shape[0], (
        "each partial result has a slot"
    )
    return parts
