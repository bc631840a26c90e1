"""The tokens of a step, on the host."""

from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kv_cache import Sequence, block_table, slot_mapping
from mla_backend.engine.batch import TokenBatch


@dataclass(frozen=True)
class Rows:
    """T tokens of R sequences, concatenated."""

    token_ids: Tensor
    """int64 `[T]`, like the next two."""
    positions: Tensor
    slots: Tensor
    table: Tensor
    """int32 `[R, most blocks]`: each sequence's blocks, then -1."""
    counts: list[int]
    """Tokens of each sequence here."""
    contexts: list[int]
    """Tokens of each sequence in the cache, including these."""
    wanted: list[int]
    """The tokens whose logits are wanted: the last tokens of their sequences."""

    @staticmethod
    def of(work: Many[tuple[Sequence, int]]) -> "Rows":
        """The next tokens of each sequence, as many as its number says. The cache has to have room for them."""
        sequences, counts = [sequence for sequence, _ in work], [count for _, count in work]
        tokens, positions, wanted = array("i"), array("q"), []
        for sequence, count in work:
            end = sequence.computed + count
            tokens.extend(sequence.tokens[sequence.computed : end])
            positions.extend(range(sequence.computed, end))
            if end == len(sequence):
                wanted.append(len(tokens) - 1)
        return Rows(
            token_ids=torch.frombuffer(tokens, dtype=torch.int32).long(),
            positions=torch.frombuffer(positions, dtype=torch.int64),
            slots=slot_mapping(sequences, counts),
            table=block_table(sequences),
            counts=counts,
            contexts=[sequence.computed + count for sequence, count in work],
            wanted=wanted,
        )

    @staticmethod
    def following(sequences: Many[Sequence], token_ids: Tensor) -> "Rows":
        """The tokens `[R]` after the last ones of fully computed sequences. They may be on a device and still unread.
        The cache has to have room for them."""
        ends = array("q", (sequence.computed for sequence in sequences))
        counts = [1] * len(sequences)
        return Rows(
            token_ids=token_ids,
            positions=torch.frombuffer(ends, dtype=torch.int64),
            slots=slot_mapping(sequences, counts),
            table=block_table(sequences),
            counts=counts,
            contexts=[end + 1 for end in ends],
            wanted=list(range(len(sequences))),
        )

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def decodes_only(self) -> bool:
        """Every sequence has one token."""
        return len(self.counts) == len(self)

    def cut(self, size: int) -> Iterator["Rows"]:
        """Parts of this many tokens, the last one of fewer. In them each token is a sequence of its own."""
        table = self.table.repeat_interleave(torch.tensor(self.counts), dim=0)
        for start in range(0, len(self), size):
            part = slice(start, start + size)
            positions = self.positions[part]
            yield Rows(
                self.token_ids[part],
                positions,
                self.slots[part],
                table[part],
                counts=[1] * len(positions),
                contexts=(positions + 1).tolist(),
                wanted=[token - start for token in self.wanted if start <= token < start + size],
            )

    def padded(self, size: int, blocks: int | None = None) -> "Rows":
        """Padded to `size` tokens, with tokens that have no slot and no blocks, and to `blocks` columns of the table.
        Every sequence has to have one token."""
        more = size - len(self)
        width = self.table.shape[1]
        return Rows(
            functional.pad(self.token_ids, (0, more)),
            functional.pad(self.positions, (0, more)),
            functional.pad(self.slots, (0, more), value=-1),
            functional.pad(self.table, (0, (width if blocks is None else blocks) - width, 0, more), value=-1),
            self.counts + [1] * more,
            self.contexts + [1] * more,
            self.wanted,
        )

    def batch(self, device: torch.device, logits_at: list[int]) -> tuple[Tensor, Tensor, TokenBatch]:
        """A model's inputs: token ids, positions and the batch, on its device. Waits for nothing."""
        batch = TokenBatch(
            block_table=to_device(self.table, device),
            slots=to_device(self.slots, device),
            token_counts=self.counts,
            context_lengths=self.contexts,
            logits_at=to_device(torch.tensor(logits_at, dtype=torch.int64), device),
            keeps_some=True,
        )
        return to_device(self.token_ids, device), to_device(self.positions, device), batch


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor from the host without waiting. A tensor that is on the device already is returned as it is."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
