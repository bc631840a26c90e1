"""Reads the tensors of a checkpoint in the Hugging Face layout, one at a time."""

import re
from collections.abc import Iterable
from os.path import isfile  # False for a name that no file can have
from pathlib import Path

import torch
from torch import Tensor, nn

try:
    from safetensors import safe_open
except ImportError as error:
    needed = "transformers tokenizers safetensors jinja2"
    raise ImportError(f"mla_backend.engine needs more packages: pip install {needed}") from error

from mla_backend.engine.config import read_json

SCALE_SUFFIX = "_scale_inv"
"""Suffix of the name of a weight's scales. Despite the name, weights are multiplied with them."""


def _weight_map(index: Path) -> dict[str, str]:
    """Which file has which tensor. Only files of the index's own folder can be named."""
    found = read_json(index)
    names = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(names, dict) or not names:
        raise ValueError(f"{index} must have a weight_map from tensors to files; got {str(names)[:60]}")
    for tensor, name in names.items():
        if not isinstance(name, str) or name in ("", ".", "..") or Path(name).name != name:
            raise ValueError(f"{index}: weight_map must name files of its folder; {tensor} is in {str(name)[:60]!r}")
    return names


class Checkpoint:
    """The tensors of a folder of safetensors files. A tensor is read when it is asked for.

    Args:
        folder: has `model.safetensors`, or several files and `model.safetensors.index.json`, which maps names to files.
        weight_block: rows and columns that share a scale in a quantised weight.
    """

    def __init__(self, folder: str | Path, weight_block: tuple[int, int] | None = None):
        self.folder, self.weight_block = Path(folder), weight_block
        self._open: dict[str, safe_open] = {}
        index, single = self.folder / "model.safetensors.index.json", self.folder / "model.safetensors"
        if index.is_file():
            self._file_of = _weight_map(index)
        elif single.is_file():
            self._file_of = dict.fromkeys(self._file(single.name).keys(), single.name)
        else:
            raise FileNotFoundError(f"folder must have {index.name} or {single.name}; {self.folder} has neither")
        absent = [name for name in sorted(set(self._file_of.values())) if not isfile(self.folder / name)]
        if absent:
            raise FileNotFoundError(f"{index} names {_listed(absent)}, not in {self.folder}")

    def names(self) -> set[str]:
        """The names of all tensors except the scales of quantised weights, which `load` applies."""
        return {name for name in self._file_of if self._weight_of(name) is None}

    def load(self, name: str, dtype: torch.dtype) -> Tensor:
        """A tensor in this dtype, dequantised if it has scales."""
        tensor = self._read(name)
        scales = name + SCALE_SUFFIX
        if scales not in self._file_of:
            if tensor.dtype.itemsize == 1:
                raise ValueError(f"{name} is {tensor.dtype} and must have {scales}; {self.folder} lacks that")
            return tensor.to(dtype)
        if self.weight_block is None:
            raise ValueError(f"{name} has {scales}; config.json must have a quantization_config that says its blocks")
        return dequantise_blocks(tensor, self._read(scales), self.weight_block, name).to(dtype)

    def _weight_of(self, name: str) -> str | None:
        weight = name.removesuffix(SCALE_SUFFIX)
        return weight if weight != name and weight in self._file_of else None

    def _read(self, name: str) -> Tensor:
        try:
            return self._file(self._file_of[name]).get_tensor(name)
        except Exception as error:  # safetensors has its own exception class for broken files
            raise ValueError(f"{name} can't be read from {self.folder / self._file_of[name]}: {error}") from error

    def _file(self, name: str) -> safe_open:
        if name not in self._open:
            try:
                self._open[name] = safe_open(self.folder / name, framework="pt")
            except Exception as error:  # safetensors has an exception of its own for all that may be wrong with a file
                raise ValueError(f"{self.folder / name} must be a safetensors file: {error}") from error
        return self._open[name]


def dequantise_blocks(weight: Tensor, scales: Tensor, block: tuple[int, int], name: str = "weight") -> Tensor:
    """fp32 `[rows, columns]` from e4m3 values and a scale for each block; blocks at the edges may be smaller."""
    rows, columns = weight.shape
    blocks = (-(-rows // block[0]), -(-columns // block[1]))
    if tuple(scales.shape) != blocks:
        raise ValueError(
            f"{name}{SCALE_SUFFIX} must be {list(blocks)}, a scale for each {block[0]}x{block[1]} of "
            f"{[rows, columns]}; got {list(scales.shape)}"
        )
    spread = scales.float().repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return weight.float() * spread


def load_weights(model: nn.Module, checkpoint: Checkpoint, layers: int, device: torch.device | str = "cpu") -> None:
    """Loads every parameter of a model from the tensor of its name, in the dtype that the model declares for it.

    Tensors of layers from `layers` on, which released checkpoints have for speculation, are not read. A tensor that is
    missing, left over or of another shape is an error that names it.
    """
    wanted = model.state_dict(keep_vars=True)
    present = {name for name in checkpoint.names() if not _is_of_later_layer(name, layers)}
    missing, unexpected = sorted(wanted.keys() - present), sorted(present - wanted.keys())
    if missing or unexpected:
        parts = [f"lacks {_listed(missing)}"] if missing else []
        parts += [f"has {_listed(unexpected)}, which the model doesn't know"] if unexpected else []
        raise ValueError(f"{checkpoint.folder} must have the tensors of the model; it {' and '.join(parts)}")
    for name, parameter in wanted.items():
        tensor = checkpoint.load(name, parameter.dtype)
        if tensor.shape != parameter.shape:
            raise ValueError(f"{name} must be {list(parameter.shape)}; {checkpoint.folder} has {list(tensor.shape)}")
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, nn.Parameter(tensor.to(device), requires_grad=False))


def _is_of_later_layer(name: str, layers: int) -> bool:
    found = re.match(r"model\.layers\.(\d+)\.", name)
    return found is not None and int(found[1]) >= layers


def _listed(names: Iterable[str], most: int = 8) -> str:
    """The first few names, and how many more there are."""
    names = [name[:200] for name in names]
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
