"""What vLLM's HiSparse does for the layers of an index group, on a CPU and a row at a time."""

from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace

import torch
from torch import Tensor


@dataclass(eq=False)
class Request:
    rows: list[Tensor]
    """Of each layer, what is in its cache: uint8 `[length, bytes]`."""
    host: list[int] = field(default_factory=list)
    """Blocks on the host."""
    pages: list[int] = field(default_factory=list)
    """Blocks on the device; 0 where a page is read from the host."""
    hot: list[int] = field(default_factory=list)
    """Blocks on the device for hot rows."""
    held: dict[int, int] = field(default_factory=dict)
    """Which host row has which hot slot: the one used last is the last."""

    @property
    def length(self) -> int:
        return len(self.rows[0])


class SimulatedGroup:
    """A pool of blocks on the device, each with a page of every layer, and a cache of each layer on the host."""

    def __init__(self, layers: int, row: Tensor, blocks: int, block_size: int, hot_blocks: int):
        """`row` is like a row of the cache."""
        self.layers, self.block_size, self.hot_blocks = layers, block_size, hot_blocks
        self.dtype, self.width = row.dtype, len(row)
        shape = blocks * layers, block_size, self.width
        self.pool = torch.zeros(shape, dtype=self.dtype)
        self.host = [torch.zeros(16 * blocks, block_size, self.width, dtype=self.dtype) for _ in range(layers)]
        self.free, self.free_host = list(range(1, blocks)), list(range(1, 16 * blocks))
        self.batch: list[Request] = []
        self.misses = self.hits = self.staged = 0
        for cache in (self.pool, *self.host):
            cache.view(torch.uint8).fill_(255)  # NaN, until somebody writes

    # ---- what a scheduler does ----

    def begin(self, request: Request) -> None:
        request.hot = [self.free.pop() for _ in range(self.hot_blocks)]

    def write(self, request: Request, rows: list[Tensor]) -> None:
        """Adds rows, to pages on the device and to the host."""
        for i in range(len(rows[0])):
            page, offset = divmod(request.length + i, self.block_size)
            if page == len(request.pages):
                request.pages.append(self.free.pop())
                request.host.append(self.free_host.pop())
            for layer, of_layer in enumerate(rows):
                self.page(layer, request.pages[page])[offset] = of_layer[i]
                self.host[layer][request.host[page], offset] = of_layer[i]
        request.rows = [torch.cat(both) for both in zip(request.rows, rows, strict=True)]

    def spill(self, request: Request, page: int) -> None:
        """Leaves a page to the host."""
        if request.pages[page]:
            self._drop(request.pages[page])
            request.pages[page] = 0

    def end(self, request: Request) -> None:
        for block in (*filter(None, request.pages), *request.hot):
            self._drop(block)
        request.pages, request.hot, request.held = [], [], {}

    def _drop(self, block: int) -> None:
        for layer in range(self.layers):
            self.page(layer, block).view(torch.uint8).fill_(255)
        self.free.append(block)

    def page(self, layer: int, block: int) -> Tensor:
        return self.pool[block * self.layers + layer]

    # ---- what a layer asks ----

    def cache(self, layer: int) -> SimpleNamespace:
        return SimpleNamespace(all_context_pages_resident=all(all(one.pages) for one in self.batch))

    def physical_kv_cache(self, layer: int) -> Tensor:
        return self.pool[layer:]

    def convert_logical_to_physical_topk(
        self, layer: int, picked: Tensor, metadata: SimpleNamespace, *, block_stride_rows, return_valid_counts
    ) -> tuple[Tensor, Tensor]:
        assert block_stride_rows is None and return_valid_counts
        if layer == 0:
            self.found, self.copies = self._resolve(picked, metadata.req_id_per_token[: len(picked)])
        assert len(self.found) == len(picked), "layers that follow ask for what the first one asked"
        pool, host = self.physical_kv_cache(layer).flatten(0, 1), self.host[layer].flatten(0, 1)
        for source, to in self.copies:
            pool[to] = host[source]
        return self.found, (self.found >= 0).sum(1).int()

    def _resolve(self, picked: Tensor, requests: Tensor) -> tuple[Tensor, list[tuple[int, int]]]:
        found, copies = torch.full_like(picked, -1), []
        size, stride = self.block_size, self.block_size * self.layers
        for row, request in enumerate(self.batch):
            missing: dict[int, list[tuple[int, int]]] = {}
            for token in (requests == row).nonzero().flatten().tolist():
                for i, position in enumerate(picked[token].tolist()):
                    page, offset = divmod(position, size)
                    if position >= 0 and request.pages[page]:
                        found[token, i] = request.pages[page] * stride + offset
                    elif position >= 0:
                        missing.setdefault(request.host[page] * size + offset, []).append((token, i))
            slots = self.hot_blocks * size
            assert len(missing) <= slots, "the hot rows hold what a step needs"
            for source in missing:
                if source in request.held:
                    request.held[source] = request.held.pop(source)
                    self.hits += 1
            for source, wanted in missing.items():
                if source not in request.held:
                    if len(request.held) < slots:
                        slot = len(request.held)
                    else:
                        slot = request.held.pop(next(one for one in request.held if one not in missing))
                    request.held[source] = slot
                    copies.append((source, request.hot[slot // size] * stride + slot % size))
                    self.misses += 1
                slot = request.held[source]
                for token, i in wanted:
                    found[token, i] = request.hot[slot // size] * stride + slot % size
        return found, copies

    def stage_prefill_rows(self, layer: int, cache: Tensor, metadata: SimpleNamespace) -> tuple[Tensor, Tensor, Tensor]:
        """Whole contexts of prefill, from wherever they are."""
        assert cache.data_ptr() == self.host[layer].data_ptr(), "a layer gives its own cache"
        requests, pages = self.batch[metadata.num_decodes :], []
        table = torch.zeros(len(requests), max(len(one.pages) for one in requests), dtype=torch.int32)
        for row, request in enumerate(requests):
            for i, (block, on_host) in enumerate(zip(request.pages, request.host, strict=True)):
                table[row, i] = len(pages)
                pages.append(self.page(layer, block) if block else cache[on_host])
        self.staged += 1
        return torch.stack(pages), table, metadata.req_id_per_token[metadata.num_decode_tokens :] - metadata.num_decodes


class Traffic:
    """Requests that come, decode, are preempted, find prefixes and end, at random."""

    def __init__(self, random: Random, group: SimulatedGroup, rows, most_queries: int):
        """`rows(n)` makes n new rows for each layer."""
        self.random, self.group, self.rows, self.most_queries = random, group, rows, most_queries
        self.running: list[Request] = []
        self.ended: list[Request] = []

    def step(self) -> list[int]:
        """Has the next step's tokens written, and its requests be the group's batch: those that decode first. Returns
        how many tokens each has."""
        random, group = self.random, self.group
        for request in list(self.running):
            for page in range(len(request.pages) - 1):  # the last is still written
                if random.random() < 0.3:
                    group.spill(request, page)
            if random.random() < 0.1 or len(group.free) < 12:  # preempted, or at its end: its host blocks stay
                group.end(request)
                self.running.remove(request)
                self.ended.append(request)
        begin = random.random() < 0.5 and len(self.running) < 4 and len(group.free) > 16
        tokens = {id(one): random.randint(1, self.most_queries) for one in self.running}
        for request in self.running:
            if random.random() < 0.2:
                tokens[id(request)] = random.randint(self.most_queries + 1, 30)  # the prompt goes on
        if begin or not self.running:
            request = self._new()
            self.running.append(request)
            tokens[id(request)] = random.randint(self.most_queries + 1, 40)
        batch = [one for one in self.running if tokens[id(one)] <= self.most_queries]
        batch += [one for one in self.running if tokens[id(one)] > self.most_queries]
        for request in batch:
            group.write(request, self.rows(tokens[id(request)]))
        group.batch = batch
        return [tokens[id(one)] for one in batch]

    def _new(self) -> Request:
        found = self.random.choice(self.ended) if self.ended and self.random.random() < 0.6 else None
        pages = self.random.randint(0, found.length // self.group.block_size) if found else 0
        rows = [of_layer[: pages * self.group.block_size] for of_layer in (found.rows if pages else self.rows(0))]
        request = Request(rows, found.host[:pages] if pages else [], [0] * pages)
        self.group.begin(request)
        return request
