"""Block tables and slots of a batch, for the kernels, as CPU tensors."""

from array import array
from collections.abc import Sequence as Many

import torch
from torch import Tensor

from kv_cache.arguments import require_count
from kv_cache.sequence import Sequence


def block_table(sequences: Many[Sequence]) -> Tensor:
    """int32 `[R, most blocks of a sequence]`: each sequence's blocks, then -1."""
    _require(sequences)
    width = max((len(sequence.blocks) for sequence in sequences), default=0)
    if not width:
        return torch.empty(len(sequences), 0, dtype=torch.int32)
    rows, nothing = array("i"), array("i", [-1])
    for sequence in sequences:
        rows.extend(sequence.blocks)
        rows.extend(nothing * (width - len(sequence.blocks)))
    return torch.frombuffer(rows, dtype=torch.int32).view(len(sequences), width)


def slot_mapping(sequences: Many[Sequence], counts: Many[int]) -> Tensor:
    """int64 `[sum of counts]`: the slots of each sequence's next tokens, after its computed ones.

    There has to be room for them: call `admit` or `allocate` before, and `commit` after.
    """
    _require(sequences)
    if not isinstance(counts, Many):
        raise TypeError(f"counts must be a sequence of ints; got {type(counts).__name__}")
    if len(counts) != len(sequences):
        raise ValueError(f"counts must be {len(sequences)} numbers, one a sequence; got {len(counts)}")
    slots = array("q")
    for sequence, count in zip(sequences, counts, strict=True):
        size, blocks = sequence.block_size, sequence.blocks
        require_count("counts", count)
        position, end = sequence.computed, sequence.computed + count
        if end > len(blocks) * size:
            raise ValueError(f"counts must have room: 0 to {len(blocks) * size - position} tokens; got {count}")
        while position < end:
            first = blocks[position // size] * size
            stop = min(end, position - position % size + size)
            slots.extend(range(first + position % size, first + position % size + stop - position))
            position = stop
    return torch.frombuffer(slots, dtype=torch.int64) if slots else torch.empty(0, dtype=torch.int64)


def _require(sequences: object) -> None:
    told = "sequences must be a sequence of kv_cache.Sequence; got "
    if not isinstance(sequences, Many):
        raise TypeError(told + type(sequences).__name__)
    for sequence in sequences:
        if not isinstance(sequence, Sequence):
            raise TypeError(f"{told}one of {type(sequence).__name__}")
