"""Times every sensible launch of sparse attention on a GPU, or fits the cost model's constants to such timings.

Without files it times random numbers of tokens, slots and heads in five row formats, in situ as `kernels` does. With
files, those that it wrote on one or more GPUs, it fits the constants of csrc/include/mla/schedule/constants.h, says how
much slower the model's choice is than the best launch that was timed, and with --write writes that file.
"""

import argparse
import csv
import ctypes
import json
import math
import random
import re
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.progress import track
from torch import Tensor

import mla_backend
from mla_backend import library
from mla_backend.formats import format_number
from mla_backend.plan import KERNELS, PRODUCTS, Launch, new_workspace
from serving_benchmarks import options as opt
from serving_benchmarks.ops import batches, kernels, timing
from serving_benchmarks.ops.peer_kernels import SparseProblem

CONSTANTS = Path(__file__).parents[2] / "csrc/include/mla/schedule/constants.h"
TABLE = re.compile(r"(?<=kGpuCosts\[\] = {\n).*?(?=};\n)", re.DOTALL)  # its table, an entry for each GPU
TOKENS = (*range(1, 9), 10, 12, 14, 16, 17, 20, 24, 28, 32, 33, 36, 40, 44, 48, 51, 56, 60, 64, 66, 67, 70, 80, 96, 112)
TOKENS += (128, 132, 133, 140, 148, 160, 192, 200, 224, 256, 264, 300, 352, 400, 448, 512, 1024)
SLOTS, HEADS = (128, 256, 384, 512, 640, 1024, 1152, 2048, 4096, 8192, 32768), (8, 16, 24, 32, 48, 64, 96, 128)
MOST_ROWS = 2**21  # that a call reads: larger ones say nothing new
FORMATS = {"fp8_ds_mla": 4, "bf16": 2, "fp8_model1": 1, "fp8_tensor_576": 1, "nvfp4_352": 1}
"""How often a format is drawn."""
GROUPS, ENDS = ("gpu", "swap_ab_8", "swap_ab_16", "swap_ab_32", "m64", "m64_fp8"), (3, 16, 29, 42, 55)
"""The model's constants, in their order: the GPU's, then each kernel's."""
WORTH_TIMING, WORTH_KEEPING = 1.6, 1.15
"""Launches whose time, by the model or measured, is at most so many times that of the best."""
MOST_CANDIDATES = 128


class Size(NamedTuple):
    format: str
    heads: int
    slots: int
    tokens: int
    products: str


class Model:
    """The cost model of csrc/include/mla/schedule/cost.h on one GPU, as `library.describe_gpu` says it."""

    def __init__(self, gpu: dict[str, Any]) -> None:
        self.gpu = library.Gpu(**{**gpu, "clusters": tuple(gpu["clusters"])})
        self._launches = (ctypes.c_int32 * library.LAUNCH_NUMBERS * MOST_CANDIDATES)()
        self._times = (ctypes.c_double * MOST_CANDIDATES)()

    def weigh(self, size: Size, constants: np.ndarray | None = None) -> np.ndarray:
        """The time of each candidate in us, with these constants or the GPU's own."""
        given = None if constants is None else constants.ctypes.data_as(ctypes.c_void_p)
        numbers = ctypes.c_int64(size.tokens), ctypes.c_int64(size.slots), size.heads
        numbers += format_number(size.format, "format"), PRODUCTS.index(size.products)
        count = library.weigh(ctypes.byref(self.gpu), given, *numbers, MOST_CANDIDATES, self._launches, self._times)
        return np.array(self._times[:count])

    def launches(self, size: Size) -> list[Launch]:
        """The candidates, in the order of their times."""
        return [Launch(KERNELS[kernel], *more) for kernel, *more in self._launches[: len(self.weigh(size))]]


def random_sizes(
    count: int, seed: int = 0, products: str = "exact", formats: Sequence[str] = tuple(FORMATS)
) -> list[Size]:
    """So many different sizes. Those of FP8 products are those that m64_fp8 takes."""
    draw, found = random.Random(seed), {}
    while len(found) < count:
        fmt = draw.choices(formats, [FORMATS[name] for name in formats])[0]
        size = Size(fmt, draw.choice(HEADS), draw.choice(SLOTS), draw.choice(TOKENS), products)
        fp8 = size.heads > 32 and size.slots <= 2048 and fmt in ("fp8_ds_mla", "fp8_tensor_576")
        if size.slots * size.tokens <= MOST_ROWS and (fp8 or products == "exact"):
            found[size] = None
    return list(found)


class Timer:
    """Times launches between matrix products that read their weights from memory."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.caches, self.before = kernels.Caches(0), kernels.products(batches.SETS)
        for call in self.before:  # loads kernels, so that capturing does not have to
            call()
        self.alone = timing.captured(self.before, 2)
        tokens, heads = max(TOKENS), max(HEADS)
        self.q = torch.randn(batches.SETS, tokens * heads * 576, device="cuda").div_(kernels.MAGNITUDE).bfloat16()
        self.slots = torch.randint(batches.SMALLEST_CACHE, (batches.SETS, MOST_ROWS), dtype=torch.int32, device="cuda")

    def calls(self, size: Size, launch: Launch) -> list[timing.Call]:
        """A call on each set of queries and lists."""
        name, heads, slots, tokens, products = size
        rows = mla_backend.FORMATS[name]
        plan = mla_backend.plan(tokens, slots, launch=launch, device="cuda")
        how = {"cache": self.caches[name, batches.BLOCK], "plan": plan}
        how["workspace"] = new_workspace(launch.ctas, heads, torch.device("cuda"))
        more = {"cache_format": name, "cache_scale": kernels.SCALES.get(name, 1.0), "products": products}
        counts = torch.full((tokens,), slots, dtype=torch.int32, device="cuda")

        def call(q: Tensor, lists: Tensor) -> timing.Call:
            q = q[: tokens * heads * rows.head_dim].view(tokens, heads, rows.head_dim)
            lists = lists[: tokens * slots].view(tokens, slots)
            return kernels.prepare_ours(SparseProblem(q, lists, counts, kernels.SCALE, 1, more), **how)[0].call

        return [call(*one) for one in zip(self.q, self.slots, strict=True)]

    def time(self, size: Size, launches: Sequence[Launch], rounds: int) -> list[float]:
        """us of each launch: the median over rounds in which all take turns."""
        bursts = []
        for launch in launches:
            calls = [call for pair in zip(self.before, self.calls(size, launch), strict=True) for call in pair]
            for call in calls:
                call()
            bursts.append(timing.captured(calls, 2))
        for burst in bursts:
            burst.run()
        taken = []
        for _ in range(rounds):
            alone = self.alone.seconds()
            taken.append([2 * burst.seconds() - alone for burst in bursts])
        return [statistics.median(samples) * 1e6 for samples in zip(*taken, strict=True)]


def measure(options: argparse.Namespace) -> int:
    opt.require_gpu()
    gpu = library.describe_gpu(torch.cuda.current_device())
    model, timer, began = Model(gpu), Timer(), time.monotonic()
    lines = []
    for number, size in enumerate(random_sizes(options.sizes, options.seed, options.products, options.formats), 1):
        if time.monotonic() - began > options.limit_s:
            break
        candidates, us = model.launches(size), model.weigh(size)
        chosen = [launch for launch, one in zip(candidates, us, strict=True) if one <= WORTH_TIMING * us.min()]
        found = sorted(zip(timer.time(size, chosen, options.rounds), chosen, strict=True))
        lines += [(*size, *launch, f"{us:.2f}") for us, launch in found if us <= WORTH_KEEPING * found[0][0]]
        print(f"{number}: {size}: {found[0][1]} {found[0][0]:.1f} us, of {len(found)}", flush=True)
    with options.output.open("w", newline="") as file:
        file.write(f"# {torch.cuda.get_device_name()}\n# {json.dumps(gpu)}\n")
        csv.writer(file).writerows([(*Size._fields, *Launch._fields, "us"), *lines])
    return 0


class Timings:
    """A file of timings: what each candidate of each size took."""

    def __init__(self, path: Path) -> None:
        lines = path.read_text().splitlines()
        self.name, self.gpu = lines[0][2:], json.loads(lines[1][2:])
        self.model = Model(self.gpu)
        taken: dict[Size, dict[Launch, float]] = {}
        for fmt, heads, slots, tokens, products, kernel, *numbers, us in csv.reader(lines[3:]):
            size = Size(fmt, int(heads), int(slots), int(tokens), products)
            taken.setdefault(size, {})[Launch(kernel, *map(int, numbers))] = float(us)
        self.measured: dict[Size, np.ndarray] = {}
        """NaN: a candidate that was not timed, or that was much slower than the best."""
        for size, by_launch in taken.items():
            us = np.array([by_launch.get(launch, math.nan) for launch in self.model.launches(size)])
            if not np.isnan(us).all():
                self.measured[size] = us

    def regrets(self, constants: np.ndarray | None) -> dict[Size, float]:
        """By what share the model's choice is slower than the best."""
        found = {}
        for size, us in self.measured.items():
            chosen = us[self.model.weigh(size, constants).argmin()]
            found[size] = (WORTH_KEEPING if math.isnan(chosen) else chosen / np.nanmin(us)) - 1
        return found

    def loss(self, constants: np.ndarray) -> float:
        """The regret of a random choice among launches that are about equal to the model, and a bit of its errors."""
        total = 0.0
        for size, us in self.measured.items():
            modelled = self.model.weigh(size, constants)
            slower = np.where(np.isnan(us), WORTH_KEEPING, us / np.nanmin(us)) - 1
            slower += 8 * slower**2  # better slightly slower in many sizes than much in one
            weight = np.exp(-(modelled / modelled.min() - 1) / 0.015)
            total += weight @ slower / weight.sum() + 0.1 * np.nanmean(np.abs(np.log(modelled / us)))
        return total / len(self.measured)


def fit(timings: Timings, start: np.ndarray, passes: int, kernels: Sequence[str] = GROUPS) -> np.ndarray:
    """Coordinate search: each constant in turn, of those of `kernels`, is moved by a share that shrinks."""
    groups = dict(zip(GROUPS, np.split(np.arange(len(start)), ENDS), strict=True))
    moving = np.concatenate([groups[name] for name in kernels])
    best, least = start.copy(), timings.loss(start)
    for step in track([0.3, 0.15, 0.08, 0.04, 0.02], description=timings.name):
        for _ in range(passes):
            before = least
            for i in moving:
                for factor in (1 + step, 1 / (1 + step)):
                    moved = best.copy()
                    moved[i] *= factor
                    if (loss := timings.loss(moved)) < least:
                        best, least = moved, loss
            if before - least < 1e-4:
                break
    return best


def as_entry(timings: Timings, constants: np.ndarray) -> str:
    """The GPU's entry in the table."""
    of_gpu, *of_kernels = np.split(constants, ENDS)
    numbers = [", ".join(f"{n:.4g}" for n in group) for group in (of_gpu, *of_kernels)]
    lines = [f'{{"{timings.name}", {timings.gpu["clock_ghz"]:.3f}, {timings.gpu["memory_tbs"]:.3f}, {numbers[0]},']
    return "    " + ",\n     ".join([lines[0].rstrip(","), *(f"{{{kernel}}}" for kernel in numbers[1:])]) + "},\n"


def constants_in(text: str) -> dict[str, np.ndarray]:
    """Of each GPU in the table of constants.h."""
    entries = re.findall(r'{"(.*?)",(.*?}})', TABLE.search(text)[0], re.DOTALL)
    return {name: np.array(re.findall(r"[-+.\de]+", numbers)[2:], float) for name, numbers in entries}


def summary(regrets: dict[Size, float]) -> str:
    values, worst = np.array(list(regrets.values())), max(regrets, key=regrets.get)
    told = f"the model's choice is {values.mean():.2%} slower than the best of {len(values)} sizes on average, more"
    return f"{told} than 3 % in {(values > 0.03).sum()}, {values.max():.0%} at worst ({worst})"


def fit_files(options: argparse.Namespace) -> int:
    entries = []
    for path in options.files:
        timings = Timings(path)
        known = constants_in(CONSTANTS.read_text())
        fitted = fit(timings, known.get(timings.name, next(iter(known.values()))), options.passes, options.kernels)
        print(f"{timings.name}: {summary(timings.regrets(fitted))}")
        entries.append(as_entry(timings, fitted))
    if options.write:
        CONSTANTS.write_text(TABLE.sub(lambda _: "".join(entries), CONSTANTS.read_text()))
        print(f"{CONSTANTS} is written; build the library again")
    return 0


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="timings to fit the constants to")
    parser.add_argument("--write", action="store_true", help="write the fitted constants")
    opt.add(parser, "--passes", opt.count, "of the fit", 3)
    opt.add_list(parser, "--kernels", opt.one_of(GROUPS), "whose constants are fitted", ",".join(GROUPS))
    told = "of the sizes that are timed; default: %(default)s"
    parser.add_argument("--products", choices=PRODUCTS, default="exact", help=told)
    opt.add_list(parser, "--formats", opt.one_of(FORMATS), "of the sizes that are timed", ",".join(FORMATS))
    opt.add(parser, "--sizes", opt.count, "that are timed", 600)
    opt.add(parser, "--seed", int, "of the choice of sizes", 0)
    told = "time no further size after so many seconds; default: all are timed"
    opt.add(parser, "--limit-s", opt.positive, told, math.inf, "S")
    opt.add_rounds(parser, 5)
    parser.add_argument("--output", type=opt.new_file, metavar="FILE", help="where timings are written, as CSV")


def run(options: argparse.Namespace) -> int:
    if options.files:
        return fit_files(options)
    if options.output is None:
        raise opt.Refused("--output FILE says where the timings go; or name FILEs to fit to")
    return measure(options)
