"""Hostile inputs, made from seeds, and what has to hold of each.

An attack is a function of a random number generator, a folder that it may fill, and a device. It raises if the product
does anything but refuse the input with an error that it documents, or deal with it rightly. Tests run some seeds of
each (`run`); `make torture` runs as many as there is time for.
"""

import copy
import functools
import json
import math
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

import mla_backend
import right_calls
from mla_backend import Plan
from mla_backend.arguments import call
from mla_backend.plan import choose_launch, workspace_floats
from plans import planned
from problems import WAYS, assert_accurate, random_problem

ROOT = Path(__file__).parents[2]
CHECKPOINT = ROOT / "examples" / "recall" / "checkpoint"
INT = torch.int32
Attack = Callable[[Random, Path, str], None]


def run(attack: str, seeds: Iterable[int], device: str = "cpu") -> None:
    """Runs an attack with each of these seeds. What it raises names the seed that repeats it."""
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(seed)
            try:
                ATTACKS[attack](Random(f"{attack} {seed}"), Path(folder), device)
            except Exception as error:
                raise AssertionError(f"attack {attack}, seed {seed}: {type(error).__name__}: {error}") from error


# Numbers and JSON

INTEGERS = [-(2**31), -(2**31) + 1, -65, -2, -1, 0, 1, 2, 15, 16, 17, 64, 1000, 10**6, 2**30, 2**31 - 2, 2**31 - 1]
NUMBERS = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, 1e-38, -1.0, 1e30, 3.4e38, -3.4e38]
VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 10**400, -(10**400), 0.5, -0.0, 1e-300, 1e300, 1e999, math.nan),
    *("", "x", "0", "\x00", "\u2028", "a" * 5000, "<script>alert(1)</script>", "../x", "/etc/passwd", "\ufeff", "é"),
    *([], [None], [[]], [0], [-1], ["x"], [{}], {}, {"": 0}, {"a": {"a": {}}}, {"role": 5}),
]


def mutated_json(random: Random, value: Any, times: int) -> Any:
    """A copy in which some values, anywhere, are others, are gone or stand twice."""
    value = json.loads(json.dumps(value))
    for _ in range(times):
        spots: list[tuple[Any, Any]] = []

        def collect(found: Any, spots: list[tuple[Any, Any]] = spots) -> None:
            for key in list(found) if isinstance(found, dict) else range(len(found)):
                spots.append((found, key))
                if isinstance(found[key], dict | list):
                    collect(found[key])

        if not isinstance(value, dict | list) or not value:
            return copy.deepcopy(random.choice(VALUES))
        collect(value)
        holder, key = random.choice(spots)
        match random.randrange(6):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, list):
                holder.append(holder[key])
            case 2 if isinstance(holder[key], int | float) and abs(holder[key]) < 2**63:
                holder[key] = random.choice([-holder[key], holder[key] + 1, holder[key] / 3, holder[key] * 2**20])
            case _:
                holder[key] = copy.deepcopy(random.choice(VALUES))
    return value


def mutated_bytes(random: Random, data: bytes) -> bytes:
    """Cut, with other bytes, with more bytes or with a part twice."""
    for _ in range(random.randint(1, 3)):
        at = random.randrange(len(data) + 1)
        match random.randrange(5):
            case 0:
                data = data[:at]
            case 1:
                added = random.choice([b"\xff", b"\x00", b"\n", b'"', b"{", b"[", b"\\ud800", b"}"])
                data = data[:at] + added + data[at:]
            case 2:
                data = data[:at] + random.randbytes(random.randint(1, 8)) + data[at + random.randint(0, 8) :]
            case 3:
                data = data[:at] + data[at // 2 :]
            case 4:
                data = data[:at] + random.choice([b"[", b'{"a":']) * random.choice([10, 100_000]) + data[at:]
    return data


# Ops


class Guarded:
    """Tensors to write into, each in the middle of memory that nobody may change."""

    GUARD, BYTE = 4096, 0x5A

    def __init__(self, device: str):
        self.device = device
        self._buffers: list[tuple[Tensor, int]] = []

    def tensor(self, dtype: torch.dtype, *shape: int) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        buffer = torch.full((2 * self.GUARD + size,), self.BYTE, dtype=torch.uint8, device=self.device)
        self._buffers.append((buffer, size))
        return buffer[self.GUARD : self.GUARD + size].view(dtype).view(shape)

    def copy(self, value: Any) -> Any:
        """The same with its tensors in such memory."""
        if isinstance(value, Plan):
            return Plan(self.copy(value.table), value.launch)
        if isinstance(value, tuple):
            return tuple(map(self.copy, value))
        return self.tensor(value.dtype, *value.shape).copy_(value) if isinstance(value, Tensor) else value

    def check(self) -> None:
        for number, (buffer, size) in enumerate(self._buffers):
            changed = (buffer != self.BYTE).nonzero().flatten() - self.GUARD
            beside = changed[(changed < 0) | (changed >= size)].tolist()
            assert not beside, f"bytes {beside[:8]} of output {number}, which has {size}, were written"


def mutated_plan(random: Random, plan: Tensor) -> Tensor:
    rows = plan.tolist()
    for _ in range(random.randint(1, 4)):
        row, column = random.randrange(len(rows)), random.randrange(8)
        match random.randrange(7):
            case 0:
                rows[row][column] = random.choice(INTEGERS)
            case 1:
                rows[row][column] += random.choice([-1, 1])
            case 2:
                rows[row][column] ^= 1 << random.randrange(31)
            case 3:
                rows[row] = [random.choice(INTEGERS) for _ in range(8)]
            case 4:
                other = random.randrange(len(rows))
                rows[row], rows[other] = rows[other], rows[row]
            case 5:
                rows.insert(row, list(rows[random.randrange(len(rows))]))
            case 6:
                at = rows[row][0]
                rows.insert(row, [at, at, 0, random.choice([0, 1]), 0, random.choice(INTEGERS), 0, rows[row][7]])
    wrapped = [[(number + 2**31) % 2**32 - 2**31 for number in row] for row in rows]
    return torch.tensor(wrapped, dtype=INT)


def plans(random: Random, folder: Path, device: str) -> None:
    """A plan that does not fit is replaced on a CPU. On a GPU it means nothing, but writes nowhere else, and the next
    call is right."""
    tokens, topk = random.randint(0, 5), random.choice([0, 1, 16, 100, 700])
    heads = random.choice([1, 2, 16, 17, 32, 64])
    fmt, products = random.choice(WAYS)
    problem = random_problem(fmt, tokens, heads, topk, products=products)
    if random.random() < 0.5:
        problem.topk_length = torch.randint(-3, topk + 4, (tokens,), dtype=INT)
    planned_tokens = tokens if random.random() < 0.8 else random.randint(0, 9)
    lengths = problem.topk_length if planned_tokens == tokens and random.random() < 0.5 else None
    plan = planned(planned_tokens, topk, topk_length=lengths, num_heads=heads, ctas=random.randint(1, 7))
    if random.random() < 0.8:
        table = mutated_plan(random, plan.table)
        plan = Plan(table, plan.launch._replace(ctas=len(table)))
    guarded, there = Guarded(device), problem.to(device)
    out, lse = guarded.tensor(problem.q.dtype, tokens, heads, 512), guarded.tensor(torch.float32, tokens, heads)
    if device == "cpu":
        got = there.solve(plan=plan, out=out, lse=lse)
        guarded.check()
        lengths = torch.full((tokens,), topk) if problem.topk_length is None else problem.topk_length
        seen = (problem.indices >= 0) & (problem.indices < problem.cache.shape[:2].numel())
        seen &= torch.arange(topk) < lengths.unsqueeze(1)
        of_one = problem.cache.shape[-1] == 656 and bool((seen.sum(1) == 1).any())
        return assert_accurate(
            got, problem.but(products="exact").oracle(), distance=1e-5 if of_one else 5e-6
        )  # docs/contract.md
    workspace = guarded.tensor(torch.float32, workspace_floats(plan.launch.ctas, heads)).zero_()
    launch = choose_launch(device, heads, planned_tokens, topk, products=products)._replace(ctas=plan.launch.ctas)
    there.solve(plan=Plan(plan.table.to(device), launch), workspace=workspace, out=out, lse=lse)
    torch.cuda.synchronize()
    guarded.check()
    workspace.zero_()  # a wild plan may leave numbers among its counters
    good = planned(tokens, topk, topk_length=there.topk_length, num_heads=heads, ctas=launch.ctas, device=device)
    got = there.solve(plan=good, workspace=workspace, out=out, lse=lse)
    guarded.check()
    problem.hold(got)


def mask_lists(**arguments: Any) -> None:
    call(torch.ops.mla_backend.mask_lists.default, *arguments.values())


def mask_call(topk: int) -> Callable[..., object]:
    blocks, bits = torch.randint(-3, 6, (2, 1, 3, 5), dtype=INT), torch.randint(-(2**31), 2**31, (5, 16, 1)).int()
    given = {"blocks": blocks, "bits": bits, "q_block": 16, "kv_block": 10, "queries": 40, "positions": 47, "first": 7}
    given |= {"list_full": False, "block_table": torch.zeros(2, 4, dtype=INT), "page_size": 8}
    return partial(mask_lists, **given, slots=torch.zeros(9, topk, dtype=INT), lengths=torch.zeros(9, dtype=INT))


TABLES = "block_table", "staged_table", "requests", "request_ids", "positions"
OPTIONAL = "plan", "sink", "extra", "topk_length", "d_lse", "return_max_logits", "slots_of", "workspace"


def calls(random: Random, guarded: Guarded) -> tuple[Callable[..., object], dict[str, Any]]:
    """An op and arguments that are right, all tensors in guarded memory. Some calls lack what is optional."""
    device = guarded.device
    t, h, k = random.randint(0, 3), random.choice([1, 3, 16]), random.choice([0, 1, 20, 70])
    op = random.choice([*("attention", "dense") * 2, *right_calls.OPS, "plan", "mask"])
    if op == "plan":
        out = Plan(torch.zeros(4, 8, dtype=INT), planned(t, k, ctas=4, device=device).launch)
        made = partial(mla_backend.plan, num_tokens=t, topk=k, topk_length=torch.full((t,), k, dtype=INT), out=out)
    else:
        fmt, products = random.choice(WAYS)
        made = mask_call(k) if op == "mask" else right_calls.complete(op, t, h, k, fmt, device)
    found = dict(made.keywords)
    if op in ("attention", "dense"):
        slots = k if op == "attention" else found["block_table"].shape[1] * found["cache"].shape[1]
        found["plan"] = mla_backend.plan(t, slots, num_heads=math.prod(found["q"].shape[1:-1]), device=device)
        found["products"] = products
    if op == "dense":
        found |= {"causal": random.random() < 0.7, "batch_invariant": random.random() < 0.3}
    if op == "convert":
        found |= {"rank": random.randrange(2), "interleave": random.choice([1, 3])}
    if op == "backward":
        found["workspace"] = torch.zeros(random.choice([1, 2, 5]) * k * 4 * 1152, dtype=torch.uint8)
    if op == "tokens":
        found["queries"] = found["queries"].to(random.choice([torch.bfloat16, torch.float8_e4m3fn]))
        found["slots_of"] = torch.randint(-1, 6, (2, 4), dtype=INT), random.choice([1, 16, 2**31 - 1])
    if op in ("tokens", "index") and random.random() < 0.5:
        found["cache"] = torch.zeros(4, 16, 128).bfloat16()
    left_out = random.sample(OPTIONAL, random.choice([0, 0, 2, 5]))
    if op == "tokens" and random.random() < 0.5:
        left_out.append("scores")
    for name in [name for name in found if name.startswith(tuple(left_out))]:
        del found[name]
    for name in [name for name in TABLES if isinstance(found.get(name), Tensor) and op != "dense"]:
        found[name] = torch.randint_like(found[name], -1, 6)
    return made.func, {name: guarded.copy(value) for name, value in found.items()}


def mutated_tensor(random: Random, tensor: Tensor) -> Tensor:
    """Other numbers in it, or another shape, dtype, device or other strides. It stays within its memory."""
    match random.randrange(11):
        case 0 | 1 | 2:
            numbers = INTEGERS if not tensor.is_floating_point() else NUMBERS
            flat = tensor.clone().flatten()
            for _ in range(random.randint(1, 4) if len(flat) else 0):
                low, high = (0, 255) if tensor.dtype == torch.uint8 else (-math.inf, math.inf)
                number = torch.tensor(min(max(random.choice(numbers), low), high))
                flat[random.randrange(len(flat))] = number.to(tensor.dtype)  # infinite where it is too large
            return flat.view(tensor.shape)
        case 3:
            return tensor.to(random.choice([torch.float16, torch.float64, torch.int16, torch.int64, torch.bool]))
        case 4:
            return tensor.unsqueeze(random.randrange(tensor.dim() + 1))
        case 5 if tensor.dim():
            return tensor[: random.randint(0, len(tensor))]
        case 6 if tensor.dim():
            dim = random.randrange(tensor.dim())
            return torch.cat([tensor, tensor], dim)
        case 7 if tensor.dim() > 1:
            return tensor.transpose(*random.sample(range(tensor.dim()), 2))
        case 8 if tensor.dim() and tensor.numel():
            return tensor.flatten()[:1].expand(tensor.shape)
        case 9 if tensor.numel():
            sizes = [random.randint(1, max(size, 1)) for size in tensor.shape]
            strides = [random.choice([0, 1, 2, stride, stride + 1]) for stride in tensor.stride()]
            reach = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
            return tensor.as_strided(sizes, strides) if reach <= tensor.numel() else tensor
        case 10:
            return tensor.to("meta")
    return tensor.contiguous().clone()


def ops(random: Random, folder: Path, device: str) -> None:
    """Wrong arguments are refused by name, or a call with unusual numbers writes nothing but its outputs."""
    guarded = Guarded(device)
    op, arguments = calls(random, guarded)
    for name in random.sample(sorted(arguments), random.randint(1, 3)):
        value = arguments[name]
        if random.random() < 0.1:
            arguments[name] = random.choice([None, "x", [], 5, 1.5, True, object(), *INTEGERS, *NUMBERS])
        elif isinstance(value, Tensor):
            arguments[name] = mutated_tensor(random, value)
        elif isinstance(value, int) and not isinstance(value, bool):
            arguments[name] = random.choice(INTEGERS[:-6])
        elif isinstance(value, float):
            arguments[name] = random.choice(NUMBERS)
    tensors = [name for name in arguments if isinstance(arguments[name], Tensor)]
    if tensors and random.random() < 0.2:  # one argument in the memory of another
        arguments[random.choice(tensors)] = arguments[random.choice(tensors)]
    try:
        try:
            op(**arguments)
        except (ValueError, TypeError) as error:
            assert " must " in str(error) or " needs " in str(error) or "argument" in str(error), f"unclear: {error}"
        if device != "cpu":
            torch.cuda.synchronize()
        guarded.check()
    except Exception as error:
        given = ", ".join(f"{name}={_described(value)}" for name, value in arguments.items())
        raise AssertionError(f"{op.__name__}({given}): {type(error).__name__}: {error}") from error


def _described(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)} on {value.device}" if isinstance(value, Tensor) else repr(value)


# Files

LINES = [
    {"prompt": "x", "id": 1, "max_tokens": 5, "stop": ["a", "b"], "temperature": 0.5, "seed": 3},
    {"tokens": [1, 2, 3], "id": "a", "top_k": 5, "logprobs": 2, "n": 2, "repetition_penalty": 1.1},
    {"messages": [{"role": "user", "content": "x"}], "min_p": 0.1, "top_p": 0.9},
    {
        **{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions"},
        "body": {"messages": [{"role": "user", "content": "x"}], "model": "m", "logprobs": True, "top_logprobs": 2},
    },
    {"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "max_tokens": 4}},
]


def lines(random: Random, folder: Path, device: str) -> None:
    """Every line is read or reported, and what is read can be asked for and written."""
    from mla_backend.engine import SamplingParams
    from mla_backend.generate.prompts import read

    data = []
    for _ in range(random.randint(1, 6)):
        line = json.dumps(mutated_json(random, random.choice(LINES), random.randint(0, 3))).encode()
        data.append((mutated_bytes(random, line) if random.random() < 0.4 else line).replace(b"\n", b" ") + b"\n")
    items, bad = read(data, SamplingParams(), jsonl=random.choice([True, None]), chat=random.random() < 0.2)
    assert {item.number for item in items}.isdisjoint(one.number for one in bad)
    assert len({item.id for item in items}) == len(items)
    for item in items:
        json.dumps([item.id, item.prompt, item.model], ensure_ascii=False).encode()
        assert item.digest
    for one in bad:
        one.why.encode()


RECORD = b'{"id": "%d", "prompt": "x", "completions": [], "usage": {}, "digest": "0123456789abcdef"}\n'


def files(random: Random, folder: Path, device: str) -> None:
    """Going on with a file keeps every whole record of it, or refuses and leaves it alone."""
    from mla_backend.generate.results import ResultFile

    path = folder / "results"
    content = b"".join(RECORD % i for i in range(random.randint(0, 4)))
    content = mutated_bytes(random, content) if random.random() < 0.8 else content[: random.randrange(len(content) + 1)]
    path.write_bytes(content)
    try:
        results = ResultFile(path, resume=True)
    except ValueError as error:
        assert "--output" in str(error) and path.read_bytes() == content
        return
    results.write({"id": "new", "digest": "x"})
    results.close()
    kept = path.read_bytes().removesuffix(b'{"id": "new", "digest": "x"}\n')
    assert content.startswith(kept) and b"\n" not in content[len(kept) :] and kept.count(b"\n") >= len(results.finished)


# Checkpoints and requests


@functools.cache
def _weights() -> bytes:
    return (CHECKPOINT / "model.safetensors").read_bytes()


def _copy(folder: Path) -> None:
    for path in CHECKPOINT.iterdir():
        if path.name != "model.safetensors":
            shutil.copy(path, folder / path.name)
    (folder / "model.safetensors").symlink_to(CHECKPOINT / "model.safetensors")


def _damage_weights(random: Random, folder: Path) -> None:
    """Changes the header, or cuts the file."""
    data = _weights()
    size = struct.unpack("<Q", data[:8])[0]
    header, rest = data[8 : 8 + size], data[8 + size :]
    match random.randrange(3):
        case 0:
            header = json.dumps(mutated_json(random, json.loads(header), random.randint(1, 3))).encode()
        case 1:
            header = mutated_bytes(random, header)
        case 2:
            rest = rest[: random.randrange(len(rest))]
    length = len(header) if random.random() < 0.8 else random.choice([0, 1, 2**31, 2**63, 2**64 - 1])
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", length) + header + rest)


def checkpoints(random: Random, folder: Path, device: str) -> None:
    """A damaged checkpoint is refused with a text, or answers with tokens of its vocabulary."""
    from mla_backend.engine import Engine, SamplingParams

    _copy(folder)
    names = ["config.json", "config.json", "config.json", "weights", "tokenizer.json", "tokenizer_config.json"]
    match random.choice([*names, "generation_config.json", "model.safetensors.index.json"]):
        case "weights":
            _damage_weights(random, folder)
        case "model.safetensors.index.json" as name:
            index = {"weight_map": {"model.embed_tokens.weight": "model.safetensors", "x": "y"}}
            (folder / name).write_text(json.dumps(mutated_json(random, index, random.randint(1, 3))))
        case name:
            path = folder / name
            data = path.read_bytes() if path.is_file() else b'{"eos_token_id": [1, 2]}'
            if random.random() < 0.8:
                path.write_text(json.dumps(mutated_json(random, json.loads(data), random.randint(1, 2))))
            else:
                path.write_bytes(mutated_bytes(random, data))
    try:
        kv_cache = random.choice(["fp8", "bf16"])
        engine = Engine(folder, device=device, dtype=torch.float32, kv_cache=kv_cache, memory=2**23)
    except (ValueError, FileNotFoundError, TypeError) as error:
        assert str(error)
        return
    (result,) = engine.generate([[5, 6, 7]], SamplingParams(max_tokens=2))
    assert all(0 <= token < engine.model.config.vocab_size for token in result.tokens)


@functools.cache
def _engine(device: str):
    from mla_backend.engine import Engine

    return Engine(CHECKPOINT, device=device, dtype=torch.float32, memory=2**22, max_model_len=160)


def requests(random: Random, folder: Path, device: str) -> None:
    """A request is refused, or ends for one of the known reasons; the engine goes on."""
    from mla_backend.engine import SamplingParams

    engine, wanted = _engine(device), {"max_tokens": random.choice([1, 3, 10**9])}
    numbers = [*NUMBERS, *VALUES, 1e-9, 1e9, 0.999999]
    for name in random.sample(["temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "n"], 2):
        wanted[name] = random.choice([random.choice(numbers), random.choice([0, 1, 2]), random.random()])
    for name in random.sample(["stop", "stop_tokens", "logprobs", "ignore_eos", "max_tokens"], 1):
        wanted[name] = random.choice([random.choice(VALUES), ("a",), (5,), 3, True])
    tokens = [random.choice([1, 5, 6, 300]) for _ in range(random.randint(0, 40))]
    prompt = random.choice([tokens, random.choice(VALUES), [{"role": "user", "content": "x"}], "Josef", tokens * 40])
    if wanted["max_tokens"] == 10**9 and isinstance(wanted.get("n"), int) and wanted["n"] > 4:
        wanted["n"] = 4  # as long as can be, or many: both only take time
    try:
        params = SamplingParams(**wanted)
        if params.n > 64:
            return
        engine.add(prompt, params)
    except (ValueError, TypeError) as error:
        assert str(error)
        return
    while engine.has_work:
        for update in engine.step():
            assert all(0 <= token < engine.model.config.vocab_size for token in update.tokens)
            assert update.finish_reason in (None, "stop", "length", "error")


ATTACKS: dict[str, Attack] = {attack.__name__: attack for attack in (plans, ops, lines, files, checkpoints, requests)}
