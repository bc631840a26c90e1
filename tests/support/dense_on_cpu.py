"""Lets vLLM prefill densely on a CPU, as it does on a GPU: `worker_extension_cls="dense_on_cpu.Extension"`. The
environment variable LONGEST_MASKED is the longest context of tokens that attend with masks."""

import os
from typing import Any

from vllm.config import get_current_vllm_config

from mla_backend.vllm_plugin import backend, beginnings, replacements
from mla_backend.vllm_plugin.backend import SparseMLALayer

counted = {"dense": 0, "masked": 0, "sparse": 0}
_init, _forward = SparseMLALayer.__init__, SparseMLALayer.forward_mha


def _dense_too(self: SparseMLALayer, *args: Any, **kwargs: Any) -> None:
    _init(self, *args, **kwargs)
    self.supports_dense_mha_prefill, self.longest_masked = True, int(os.environ["LONGEST_MASKED"])
    self.splits_prompts = replacements.split_prompts_if_possible(get_current_vllm_config())


def _counting(self: SparseMLALayer, q: Any, *args: Any, **kwargs: Any) -> None:
    metadata = args[3]
    if metadata.dense:  # not vLLM's own choice, which is for all prompts of a step
        dense = sum(tokens.stop - tokens.start for tokens, _ in metadata.dense)
        masked = sum(len(one.blocks) * one.blocks.step for one in metadata.masked)
        counted["dense"] += dense
        counted["masked"] += masked
        counted["sparse"] += len(q) - dense - masked
    return _forward(self, q, *args, **kwargs)


SparseMLALayer.__init__, SparseMLALayer.forward_mha = _dense_too, _counting
backend.SHORT_EXTEND, beginnings.MASKED = 4, 16  # tests have short prompts


class Extension:
    """What the test asks of the worker."""

    def counted_tokens(self) -> dict[str, int]:
        """How many tokens of prompts that are longer than the selection attended densely, with a mask, and sparsely,
        summed over layers."""
        return counted
