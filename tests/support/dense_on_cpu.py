"""Lets vLLM prefill densely on a CPU, as it does on a GPU: `worker_extension_cls="dense_on_cpu.Extension"`."""

from typing import Any

from mla_backend.vllm_plugin import backend
from mla_backend.vllm_plugin.backend import SparseMLALayer

counted = {"dense": 0, "sparse": 0}
_init, _forward = SparseMLALayer.__init__, SparseMLALayer.forward_mha


def _dense_too(self: SparseMLALayer, *args: Any, **kwargs: Any) -> None:
    _init(self, *args, **kwargs)
    self.supports_dense_mha_prefill = True


def _counting(self: SparseMLALayer, q: Any, *args: Any, **kwargs: Any) -> None:
    metadata = args[3]
    if metadata.dense:  # not vLLM's own choice, which is for all prompts of a step
        dense = sum(tokens.stop - tokens.start for tokens, _ in metadata.dense)
        counted["dense"] += dense
        counted["sparse"] += len(q) - dense
    return _forward(self, q, *args, **kwargs)


SparseMLALayer.__init__, SparseMLALayer.forward_mha = _dense_too, _counting
backend.SHORT_EXTEND = 4  # tests have short prompts


class Extension:
    """What the test asks of the worker."""

    def counted_tokens(self) -> dict[str, int]:
        """How many tokens of prompts that are longer than the selection attended densely, and how many did not, summed
        over layers."""
        return counted
