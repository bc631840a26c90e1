"""What a plan has to be, whoever made it; and what GPU's launches and plans are, where there is none."""

import ctypes
import functools
import os
import shlex
import subprocess
import tempfile
from pathlib import Path

import torch

import mla_backend
from mla_backend import Launch
from mla_backend.formats import format_number
from mla_backend.library import Gpu
from mla_backend.plan import KERNELS, choose_launch, products_number

CSRC = Path(__file__).parents[2] / "csrc"
SPLIT_FOR_CLUSTERS = [
    *((1, 16), (5, 16), (8, 16), (17, 16), (20, 16), (33, 16), (50, 16)),
    *((3, 8), (12, 8), (16, 8), (30, 5), (33, 8), (60, 8), (1, 100), (8, 64)),
]
"""Tokens and heads: on Hopper each token gets as many splits as a cluster has CTAs."""
WHOLE_TOKENS = 209
"""So many are not split. With 17 to 32 heads and fp8 rows swap_ab serves them in CTAs of 32 heads, with more m64."""
FEW_AND_MANY = [(2, 20), (WHOLE_TOKENS, 8), (WHOLE_TOKENS, 32), (WHOLE_TOKENS, 64)]
"""Tokens and heads: one for each kernel that a Hopper GPU has."""
TOKEN_UNITS = 3
"""What a token costs a CTA besides its tiles, in tiles, where there are fewer than two CTAs for each token."""


def gpu(multiprocessors=132, hopper=True, clusters=True, clock_ghz=1.98, memory_tbs=4.8):
    """A GPU like an H200: of its multiprocessors some can't be used by clusters that don't fit its partitions."""
    left_over = {2: 0, 3: multiprocessors / 9, 6: multiprocessors * 3 / 13}
    found = Gpu(multiprocessors, hopper, clock_ghz=clock_ghz, memory_tbs=memory_tbs)
    for ctas in range(2, 17 if clusters else 0):
        found.clusters[ctas] = (multiprocessors - int(left_over.get(ctas, multiprocessors / 11))) // ctas
    return found


@functools.cache
def _host():
    """gpu_host.cpp, compiled as the library is."""
    with tempfile.TemporaryDirectory() as folder:
        target, source = Path(folder) / "gpu_host.so", Path(__file__).with_name("gpu_host.cpp")
        compiler = shlex.split(os.environ.get("CXX", "g++"))
        flags = ["-std=c++17", "-O2", "-fPIC", "-shared", f"-I{CSRC}", f"-I{CSRC}/include"]
        subprocess.run([*compiler, *flags, source, "-o", target], check=True)
        return ctypes.CDLL(str(target))


def gpu_launch(device, tokens, heads, slots=2048, *, fmt="fp8_ds_mla", batch_invariant=False, products="exact"):
    """How a GPU computes attention. None: any number of tokens or slots."""
    numbers = (ctypes.c_int32 * 6)()
    tokens, slots = (ctypes.c_int64(-1 if n is None else n) for n in (tokens, slots))
    more = format_number(fmt, "fmt"), ctypes.c_bool(batch_invariant), products_number(products, fmt)
    _host().gpu_launch(ctypes.byref(device), tokens, slots, heads, *more, numbers)
    return Launch(KERNELS[numbers[0]], *numbers[1:])


def by_load(ctas, cluster=1, splits=0):
    """A launch of a GPU with a plan of so many CTAs."""
    return Launch("swap_ab", 16, splits, cluster, 0, ctas)


def gpu_plan(tokens, topk, launch, *, topk_length=None, extra_topk=0, extra_topk_length=None, batch_invariant=False):
    """The table that a GPU has to make, int32 `[ctas, 8]`: a CPU's walk over the tokens, with a GPU's tiles."""
    rows = torch.empty((launch.ctas, 8), dtype=torch.int32)
    lengths = topk_length, extra_topk_length
    assert all(n is None or (n.dtype == torch.int32 and n.is_cpu and n.is_contiguous()) for n in lengths)
    pointers = [ctypes.c_void_p(None if n is None else n.data_ptr()) for n in lengths]
    numbers, whole = (ctypes.c_int32 * 6)(*launch.numbers()), ctypes.c_bool(batch_invariant)
    _host().gpu_plan(tokens, topk, extra_topk, *pointers, whole, ctypes.c_void_p(rows.data_ptr()), numbers)
    return rows


def planned(tokens, topk, *, ctas, device=None, num_heads=16, splits=0, cluster=1, **more):
    """A plan of so many CTAs for the kernel that serves so many heads."""
    lengths = more.get("topk_length")
    device = device or ("cpu" if lengths is None else lengths.device)
    known = {name: more[name] for name in ("cache_format", "products") if name in more}
    launch = choose_launch(device, num_heads, tokens, topk, **known)
    launch = launch._replace(splits=splits, cluster=cluster, rounds=int(splits == 1), ctas=ctas)
    return mla_backend.plan(tokens, topk, launch=launch, device=device, **more)


def tiles_of(lengths, tile_slots=16):
    return [-(-max(n, 0) // tile_slots) for n in lengths]


def walk(table, tiles, tile_slots_wanted=16):
    """Checks a table row by row against each token's tiles; returns the splits of each token."""
    position = (0, 0)  # token, tile
    splits = [0] * len(tiles)
    partials = []
    for token_begin, token_end, tile_begin, tile_end, split, known, partial, tile_slots in table.tolist():
        assert tile_slots == tile_slots_wanted
        if token_begin == token_end:
            continue
        assert (token_begin, tile_begin) == position, "a CTA begins where the one before it ends"
        assert split == splits[token_begin]
        for token in range(token_begin, token_end):
            splits[token] += 1
        last = token_end - 1
        opens = tile_end < tiles[last]
        position = (last, tile_end) if opens else (token_end, 0)
        used = (tile_begin > 0) + (opens and not (tile_begin > 0 and token_end - token_begin == 1))
        partials += range(partial, partial + used)
        if opens and not (tile_begin > 0 and token_end - token_begin == 1):
            assert known > 1, "the CTA that begins a split token knows its splits"
        else:
            assert known == 1
    assert position == (len(tiles), 0), "the last CTA ends at the end"
    assert partials == list(range(len(partials))) and len(partials) <= 2 * table.shape[0], (
        "each partial result has a slot"
    )
    return splits
