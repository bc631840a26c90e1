"""The engine: takes requests and returns tokens, a step at a time."""

import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch
from torch import Tensor

from kv_cache import CacheManager, Layout, OutOfBlocks, Statistics, Storage
from kv_cache import Sequence as CachedSequence
from mla_backend import library
from mla_backend.arguments import described_bytes, require_count
from mla_backend.engine import sampler
from mla_backend.engine.config import ModelConfig
from mla_backend.engine.graphs import DecodeGraphs
from mla_backend.engine.model import load_model
from mla_backend.engine.params import SamplingParams
from mla_backend.engine.request import Request, Sample
from mla_backend.engine.results import Collector, Result, Update
from mla_backend.engine.rows import Rows, to_device
from mla_backend.engine.runner import INVARIANT_ROWS, Runner
from mla_backend.engine.sampler import Picked
from mla_backend.engine.scheduler import Scheduler, Work, require_limits
from mla_backend.engine.text import TextStream
from mla_backend.engine.tokenizer import Message, Tokenizer, end_tokens
from mla_backend.formats import FORMATS
from mla_backend.keys import KEY_FORMATS

Prompt = str | Sequence[int] | Sequence[Message]
"""A text, token ids, or a conversation."""

KV_CACHES = {
    "fp8": (FORMATS["fp8_ds_mla"], KEY_FORMATS["fp8"]),
    "bf16": (FORMATS["bf16"], KEY_FORMATS["bf16"]),
}
"""Formats of the latent cache and of the indexer's keys."""
WATERMARK = 0.01
"""The part of the blocks that admissions leave free, so that running samples can grow before one is preempted."""
GPU_SHARE, CPU_SHARE = 0.85, 0.25
"""How much the cache may take by default: of the memory that is free on a GPU after loading the weights, and of a
machine's memory."""


@dataclass(frozen=True)
class Status:
    """What an engine is doing."""

    waiting: int
    running: int
    preemptions: int
    cache: Statistics


@dataclass(frozen=True)
class Ahead:
    """A decode pass that was launched before the scheduler asked for it, for some samples."""

    samples: list[Sample]
    positions: list[int]
    """The position of each sample's token, and the slot that it was written to."""
    slots: list[int]
    picked: Picked

    def is_valid(self, row: int) -> bool:
        """Whether this is what the sample has to compute now. It isn't if the sample was preempted meanwhile."""
        sequence, position = self.samples[row].sequence, self.positions[row]
        block, offset = divmod(position, sequence.block_size)
        return (
            sequence.computed == position == len(sequence) - 1
            and sequence.blocks[block] * sequence.block_size + offset == self.slots[row]
        )


class Engine:
    """Generates with a checkpoint, for any number of requests at once.

        engine = Engine("path/to/checkpoint")
        print(engine.generate(["The capital of France is"])[0].text)

    Args:
        folder: a checkpoint in the Hugging Face layout; tokenizer and chat template are taken from there.
        device: where it runs; a GPU if there is one, unless said otherwise.
        dtype: what the model computes in.
        kv_cache: fp8 (656 + 132 bytes per token and layer) or bf16 (1152 + 256).
        memory: bytes for the cache; decides how many blocks there are. By default what all requests that may run need
            at their longest, but no more than 85 % of what is free on the GPU, or 25 % of the machine's memory.
        block_size: tokens in a block.
        max_model_len: tokens of a prompt and what follows it, at most. By default what the model was made for, or
            what fits into the cache.
        most_running: samples that are worked on at a time.
        tokens_a_step: that are computed in a step, at most; more than most_running.
        chunk: tokens of one prompt that are computed in a step, at most.
        batch_invariant: give a request the same bits whatever it shares steps, chunks and caches with. Slower.
        cuda_graphs: capture decode steps. By default on a GPU where that works: bf16, Hopper or Blackwell.
        host_memory: bytes for prefixes that were evicted from the cache.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
        kv_cache: str = "fp8",
        memory: int | None = None,
        block_size: int = 64,
        max_model_len: int | None = None,
        most_running: int = 128,
        tokens_a_step: int = 2048,
        chunk: int | None = None,
        batch_invariant: bool = False,
        cuda_graphs: bool | None = None,
        host_memory: int = 0,
    ):
        # everything is checked before the weights are read, which may take long
        if kv_cache not in KV_CACHES:
            raise ValueError(f"kv_cache must be one of {', '.join(KV_CACHES)}; got {kv_cache!r}")
        require_limits(tokens_a_step, most_running, chunk)
        self.device = _device(device)
        if cuda_graphs and self.device.type != "cuda":
            raise ValueError(f"cuda_graphs must be False on {self.device}; got True")
        config = ModelConfig.from_folder(folder)
        layout = Layout(config.layers, block_size, *KV_CACHES[kv_cache])
        _require_memory(self.device, layout, memory, host_memory)
        longest = _longest(config, layout, max_model_len, memory)
        self.tokenizer = Tokenizer(folder) if Tokenizer.is_in(folder) else None
        self._end_tokens = end_tokens(folder, self.tokenizer)

        self.model = load_model(folder, dtype=dtype, device=self.device, batch_invariant=batch_invariant)
        if memory is None:
            wanted = most_running * -(-longest // block_size) * layout.block_bytes
            memory = max(min(wanted, _spare_memory(self.device)), layout.block_bytes)
        blocks = layout.blocks_in(memory)
        self.max_model_len = min(longest, blocks * block_size)
        self.storage = Storage(layout, blocks, self.device)
        self.manager = CacheManager(
            blocks, block_size, storage=self.storage, watermark=WATERMARK, host_bytes=host_memory
        )
        self.scheduler = Scheduler(self.manager, tokens_a_step=tokens_a_step, most_running=most_running, chunk=chunk)
        self.runner = Runner(self.model, self.storage)
        if self._graphs_work() if cuda_graphs is None else cuda_graphs:
            self.runner.graphs = DecodeGraphs(
                self.model, self.storage, self.runner.caches, max(most_running, INVARIANT_ROWS), self.max_model_len
            )
        self.runs_ahead = self.device.type == "cuda"
        """Whether a decode pass is launched before the tokens of the last one are read."""
        self._ahead: Ahead | None = None
        self._requests: dict[str, Request] = {}
        self._numbers = count(1)

    def add(self, prompt: Prompt, params: SamplingParams | None = None, *, id: str | None = None) -> str:
        """Adds a request. `step` returns its updates.

        Args:
            prompt: a text, token ids, or messages for the chat template.
            params: greedy, up to 256 tokens, if left out.
            id: one that no other unfinished request has; a number if left out.

        Returns:
            The id.
        """
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params must be SamplingParams; got {type(params).__name__}")
        if id is not None and not isinstance(id, str):
            raise TypeError(f"id must be a text; got {type(id).__name__}")
        id = next(str(i) for i in self._numbers if str(i) not in self._requests) if id is None else id
        if id in self._requests:
            raise ValueError(f"id must be one that no unfinished request has; got {id!r}")
        if params.stop and self.tokenizer is None:
            raise ValueError("stop needs a tokenizer; the checkpoint has none")
        tokens = self.encode(prompt)
        room = self.max_model_len - len(tokens)
        if room < 1:
            raise ValueError(
                f"prompt must be {self.max_model_len - 1} tokens or fewer, one less than max_model_len; "
                f"got {len(tokens)}"
            )
        ends = frozenset(params.stop_tokens) | (frozenset() if params.ignore_eos else self._end_tokens)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        request = Request(id, params, len(tokens), min(params.max_tokens, room), ends, seed)
        self.scheduler.add(self._sample(request, self.manager.sequence(tokens), seats=params.n))
        self._requests[id] = request
        return id

    def encode(self, prompt: Prompt) -> list[int]:
        """The tokens of a prompt, as `add` takes them."""
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
            raise TypeError(f"prompt must be a text, token ids or messages; got {type(prompt).__name__}")
        if isinstance(prompt, str):
            try:
                prompt.encode()
            except UnicodeEncodeError as error:
                raise ValueError(f"prompt must be text; has half of a surrogate pair: {error}") from None
            tokens = self._tokenizer_for("a prompt that is a text").encode(prompt)
        elif len(prompt) and all(isinstance(message, Mapping) for message in prompt):
            if not all(isinstance(message.get(key), str) for message in prompt for key in ("role", "content")):
                raise ValueError("messages must have a role and a content each, both texts")
            tokens = self._tokenizer_for("a conversation").encode_chat(prompt)
        else:
            tokens = list(prompt)
        vocabulary = self.model.config.vocab_size
        for token in tokens:  # a tokenizer's own, too: it may have more of them than the model
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocabulary:
                raise ValueError(f"prompt must have tokens of 0 to {vocabulary - 1}; got {token!r}")
        if not tokens:
            raise ValueError("prompt must be one token or more; got none")
        return tokens

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    @property
    def status(self) -> Status:
        scheduler = self.scheduler
        return Status(len(scheduler.waiting), len(scheduler.running), scheduler.preemptions, self.manager.statistics())

    def step(self) -> list[Update]:
        """One pass of the model, for all requests that the scheduler picks. Returns updates of those that got a token.

        On a GPU the next pass is launched before this one's tokens are read, so that the device works while the host
        does its bookkeeping. Its results are used only where the scheduler then decides the same.
        """
        work = self.scheduler.schedule()
        if not work:
            return []
        groups = self._launch(work)
        self._ahead = self._launch_ahead(groups) if self.runs_ahead else None
        return [self._take(*one) for samples, picked in groups for one in zip(samples, *picked.read(), strict=True)]

    def _launch(self, work: Work) -> list[tuple[list[Sample], Picked]]:
        """Computes what was scheduled and was not launched ahead. Returns samples that got a token, and the tokens."""
        ahead, self._ahead = self._ahead, None
        groups = []
        if ahead is not None:
            counts = dict(work)
            kept = [row for row, sample in enumerate(ahead.samples) if counts.get(sample) == 1 and ahead.is_valid(row)]
            if kept:
                samples = [ahead.samples[row] for row in kept]
                for sample in samples:
                    self.manager.commit(sample.sequence, 1)
                groups.append((samples, ahead.picked if len(kept) == len(ahead.samples) else ahead.picked.rows(kept)))
                done = set(samples)
                work = [(sample, count) for sample, count in work if sample not in done]
        if not work:
            return groups
        logits = self.runner.run([(sample.sequence, count) for sample, count in work])
        for sample, computed in work:
            self.manager.commit(sample.sequence, computed)
        reached = [sample for sample, _ in work if not sample.left]
        rows, samples = [], []
        for row, sample in enumerate(reached):
            family = [sample, *self._fork(sample)]
            samples += family
            rows += [row] * len(family)
        if len(rows) > len(reached):
            logits = logits[rows]
        groups.append((samples, self._pick(logits, samples)))
        return groups

    def _pick(self, logits: Tensor, samples: list[Sample], unread: int = 0) -> Picked:
        """unread: tokens that each sample has got, but that have not been read from the device."""
        draws = [
            sampler.Draw(
                sample.request.params, sample.request.seed + sample.index, sample.new_tokens + unread, sample.seen or ()
            )
            for sample in samples
        ]
        return sampler.pick(logits, draws, self.model.batch_invariant)

    def _launch_ahead(self, groups: list[tuple[list[Sample], Picked]]) -> "Ahead | None":
        """The decode pass that follows, with tokens that are still unread. None where the scheduler may want more than
        that, or where a token has to be known first."""
        scheduler = self.scheduler
        reached = [sample for samples, _ in groups for sample in samples]
        if len(reached) < len(scheduler.running):
            return None  # some prompts are not finished
        if scheduler.waiting and len(scheduler.running) < scheduler.most_running:
            return None
        goes_on = [sample.new_tokens + 1 < sample.request.most_tokens for sample in reached]
        samples = [sample for sample, more in zip(reached, goes_on, strict=True) if more]
        if not samples or any(sample.seen is not None for sample in samples):
            return None
        try:
            for sample in samples:
                self.manager.allocate(sample.sequence, 1)
        except OutOfBlocks:
            return None
        tokens = _joined([picked.tokens for _, picked in groups])
        if len(samples) < len(reached):
            tokens = tokens[to_device(torch.tensor(goes_on).nonzero().squeeze(1), self.device)]
        rows = Rows.following([sample.sequence for sample in samples], tokens)
        picked = self._pick(self.runner.run_rows(rows), samples, unread=1)
        return Ahead(samples, rows.positions.tolist(), rows.slots.tolist(), picked)

    def abort(self, id: str) -> None:
        """Drops an unfinished request. It gets no more updates."""
        if id not in self._requests:
            raise ValueError(f"id must be that of an unfinished request; got {id!r}")
        for sample in self._requests.pop(id).samples:
            if sample.finish_reason is None:
                self.scheduler.remove(sample)

    def generate(
        self, prompts: Iterable[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Result]:
        """Runs prompts to their ends, as many at once as the engine has room for.

        Args:
            prompts: as for `add`.
            params: one for all of them, or a list with one for each.

        Returns:
            A result for each prompt, in their order.
        """
        prompts = list(prompts)
        if isinstance(params, SamplingParams) or params is None:
            params = [params] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(f"params must be {len(prompts)}, one a prompt; got {len(params)}")
        if self.has_work:
            raise RuntimeError("generate needs an engine without unfinished requests, whose updates it would swallow")
        ids: list[str] = []
        results: dict[str, Result] = {}
        collector = Collector()
        try:
            for prompt, wanted in zip(prompts, params, strict=True):
                ids.append(self.add(prompt, wanted))
            while len(results) < len(ids):
                for update in self.step():
                    if result := collector.add(update):
                        results[update.id] = result
        finally:
            for id in ids:
                if id in self._requests:
                    self.abort(id)
        return [results[id] for id in ids]

    def _sample(self, request: Request, sequence: CachedSequence, index: int = 0, seats: int = 1) -> Sample:
        params = request.params
        stream = None
        if self.tokenizer is not None:
            stream = TextStream(self.tokenizer.decode, sequence.tokens[: request.prompt_tokens], params.stop)
        seen = set(sequence.tokens) if params.repetition_penalty != 1 else None
        sample = Sample(request, index, sequence, stream, seats, seen=seen)
        request.samples.append(sample)
        return sample

    def _fork(self, sample: Sample) -> list[Sample]:
        """The other samples of a request whose prompt has just been computed."""
        others = [
            self._sample(sample.request, self.manager.fork(sample.sequence), index) for index in range(1, sample.seats)
        ]
        if others:
            self.scheduler.fork(sample, others)
        return others

    def _take(self, sample: Sample, token: int, logprobs: sampler.TokenLogprobs | None) -> Update:
        """Goes on by a token, and notices when that was the last."""
        request = sample.request
        text, stopped, reason, error = "", False, None, None
        if token == sampler.NO_TOKEN:
            reason, error = "error", f"logits are not finite after {len(sample.sequence.tokens)} tokens"
        else:
            sample.sequence.append(token)
            if sample.seen is not None:
                sample.seen.add(token)
            if token in request.stop_tokens:
                reason = "stop"
            elif sample.stream is not None:
                text, stopped = sample.stream.push(token)
                reason = "stop" if stopped else None
        if reason is None and sample.new_tokens >= request.most_tokens:
            reason = "length"
        if reason is not None:
            if sample.stream is not None and not stopped:
                rest, stopped = sample.stream.finish()
                text, reason = text + rest, "stop" if stopped and error is None else reason
            sample.finish_reason = reason
            self.scheduler.remove(sample)
            if all(other.finish_reason is not None for other in request.samples):
                del self._requests[request.id]
        return Update(
            id=request.id,
            index=sample.index,
            samples=request.params.n,
            tokens=() if error is not None else (token,),
            text=text,
            logprobs=() if logprobs is None else (logprobs,),
            finish_reason=reason,
            prompt_tokens=request.prompt_tokens,
            cached_tokens=request.samples[0].cached_tokens,
            error=error,
        )

    def _tokenizer_for(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(f"{what} needs a tokenizer; the checkpoint has none, but takes token ids")
        return self.tokenizer

    def _graphs_work(self) -> bool:
        """Whether no pass asks the device for anything: torch's grouped products don't on Hopper and Blackwell."""
        if self.device.type != "cuda" or self.model.batch_invariant:
            return self.device.type == "cuda"
        bf16 = self.model.model.embed_tokens.weight.dtype == torch.bfloat16
        return bf16 and torch.cuda.get_device_capability(self.device)[0] in (9, 10)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _require_memory(device: torch.device, layout: Layout, memory: int | None, host_memory: int) -> None:
    """Checks sizes against what there is: allocating more takes long to fail, or ends the process."""
    there_is, there_is_on_host = _all_memory(device), _all_memory(torch.device("cpu"))
    if layout.block_bytes > there_is:
        raise ValueError(
            f"block_size must be small enough for {device}, which has {described_bytes(there_is)} of memory; "
            f"{layout.block_size} tokens take {described_bytes(layout.block_bytes)}"
        )
    block = f"{described_bytes(layout.block_bytes)}, a block, or more"
    if memory is not None:
        require_count("memory", memory)
        given = described_bytes(memory)
        if memory < layout.block_bytes:
            raise ValueError(f"memory must be {block}; got {given}")
        if memory > there_is:
            raise ValueError(f"memory must be at most what {device} has, {described_bytes(there_is)}; got {given}")
    require_count("host_memory", host_memory)
    given = described_bytes(host_memory)
    if 0 < host_memory < layout.block_bytes:
        raise ValueError(f"host_memory must be {block}; got {given}")
    if host_memory > there_is_on_host:
        most = described_bytes(there_is_on_host)
        raise ValueError(f"host_memory must be at most what the machine has, {most}; got {given}")


def _longest(config: ModelConfig, layout: Layout, max_model_len: int | None, memory: int | None) -> int:
    """The most tokens that a request may have, as far as model and memory are known."""
    if max_model_len is None:
        return config.max_positions
    require_count("max_model_len", max_model_len, at_least=2)
    if max_model_len > config.max_positions:
        raise ValueError(
            f"max_model_len must be at most {config.max_positions}, the model's max_position_embeddings; "
            f"got {max_model_len}"
        )
    needed = -(-max_model_len // layout.block_size) * layout.block_bytes
    if memory is not None and memory < needed:
        raise ValueError(
            f"memory must be {described_bytes(needed)} or more for a max_model_len of {max_model_len}; "
            f"got {described_bytes(memory)}"
        )
    return max_model_len


def _device(wanted: torch.device | str | None) -> torch.device:
    usable = torch.cuda.is_available() and bool(library.about()["cuda_archs"])
    if wanted is None:
        return torch.device("cuda" if usable else "cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise ValueError(f"device must be cpu, cuda or cuda:N; got {wanted!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu, cuda or cuda:N; got {wanted!r}")
    if device.type == "cuda" and not usable:
        raise ValueError(f"device must be cpu here, as `mla-backend doctor` explains; got {wanted!r}")
    return device


def _all_memory(device: torch.device) -> int:
    """Bytes that a device has."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _spare_memory(device: torch.device) -> int:
    """Bytes that the cache may take."""
    if device.type == "cuda":
        return int(GPU_SHARE * torch.cuda.mem_get_info(device)[0])
    return int(CPU_SHARE * _all_memory(device))
