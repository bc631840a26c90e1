"""Prefixes in host memory: evicted prefixes go there, and come back when they are found again.

A prefix is either in host memory or on the device. On a GPU the copies over the bus run in the background, in order, on
a stream of their own. To save blocks, the current stream only gathers them into a buffer; after that they may be
overwritten. The current stream waits for a load.
"""

import contextlib
import weakref
from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from kv_cache.arguments import require_a, require_count
from kv_cache.blocks import Evicted
from kv_cache.storage import Storage


class HostTier:
    """Room for whole blocks of all layers, pinned if the storage is on a GPU.

    Args:
        storage: what blocks are saved from and loaded into.
        host_bytes: that may be used, at least those of one block.
    """

    def __init__(self, storage: Storage, host_bytes: int):
        require_a(Storage, storage=storage)
        require_count("host_bytes", host_bytes, at_least=storage.layout.block_bytes)
        self.blocks = storage.layout.blocks_in(host_bytes)
        self._storage = storage
        self._parts = [
            torch.empty(self.blocks, part.shape[0], part.shape[2], dtype=part.dtype) for part in storage.parts
        ]
        self._saved: OrderedDict[bytes, int] = OrderedDict()  # least recently saved first
        self._free = list(range(self.blocks))
        self._stream = torch.cuda.Stream(storage.device) if storage.device.type == "cuda" else None
        if self._stream:
            for part in self._parts:
                _pin(part)

    def __len__(self) -> int:
        return len(self._saved)

    def __contains__(self, name: bytes) -> bool:
        return name in self._saved

    def save(self, evicted: Evicted) -> None:
        """Saves these blocks. The least recently saved ones make room."""
        copies: dict[int, int] = {}
        for name, block in evicted:
            if name in self._saved:
                self._saved.move_to_end(name)
                continue
            if self._free:
                host_block = self._free.pop()
            elif self._saved:
                host_block = self._saved.popitem(last=False)[1]
            else:  # every block is being loaded
                break
            self._saved[name] = host_block
            copies[host_block] = block  # if this call has used the host block before, the later block stays
        if not copies:
            return
        ids = self._storage.ids(list(copies.values()))
        for host, part in zip(self._parts, self._storage.parts, strict=True):
            gathered = part.index_select(1, ids).transpose(0, 1).contiguous()  # [n, layers, words]
            with self._background(gathered, after_current=True):
                for host_block, rows in zip(copies, gathered, strict=True):
                    host[host_block].copy_(rows, non_blocking=True)

    def take(self, names: Sequence[bytes]) -> list[int]:
        """The host blocks of these prefixes. They can't be found any more, and stay in use until they are loaded."""
        return [self._saved.pop(name) for name in names]

    def load(self, host_blocks: Sequence[int], blocks: Sequence[int]) -> None:
        """Copies taken host blocks into blocks. Everything that the current stream does after this sees them."""
        ids = self._storage.ids(blocks)
        for host, part in zip(self._parts, self._storage.parts, strict=True):
            with self._background():
                gathered = torch.empty(len(host_blocks), *host.shape[1:], dtype=host.dtype, device=part.device)
                for host_block, rows in zip(host_blocks, gathered, strict=True):
                    rows.copy_(host[host_block], non_blocking=True)
            if self._stream:
                current = torch.cuda.current_stream(part.device)
                current.wait_stream(self._stream)
                gathered.record_stream(current)
            part.index_copy_(1, ids, gathered.transpose(0, 1))
        self._free += host_blocks

    @contextlib.contextmanager
    def _background(self, *used: Tensor, after_current: bool = False):
        """Copies in this context run on the stream for copies, if there is one. `used` are kept alive until then."""
        if not self._stream:
            yield
            return
        if after_current:
            self._stream.wait_stream(torch.cuda.current_stream(self._storage.device))
        with torch.cuda.stream(self._stream):
            yield
        for tensor in used:
            tensor.record_stream(self._stream)


def _pin(tensor: Tensor) -> None:
    """Pins a tensor's memory. torch's allocator of pinned memory would round its size up to a power of two."""
    cudart = torch.cuda.cudart()
    address = tensor.data_ptr()
    if error := int(cudart.cudaHostRegister(address, tensor.nbytes, 0)):
        raise RuntimeError(f"host memory of {tensor.nbytes} bytes can't be pinned: CUDA error {error}")
    weakref.finalize(tensor, cudart.cudaHostUnregister, address)
