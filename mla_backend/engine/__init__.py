"""The embedded engine: models of the Hugging Face hub over the library's ops.

    engine = Engine("path/to/checkpoint")
    for result in engine.generate(["The capital of France is"], SamplingParams(max_tokens=20)):
        print(result.text)

Needs the extra `engine`. docs/engine.md goes through it.
"""

from mla_backend.engine.batch import Batch, LayerCache, new_caches
from mla_backend.engine.config import ModelConfig, Yarn
from mla_backend.engine.engine import Engine, Prompt, Status
from mla_backend.engine.model import Model, load_model
from mla_backend.engine.params import SamplingParams
from mla_backend.engine.results import Collector, Completion, Result, Update
from mla_backend.engine.sampler import TokenLogprobs
from mla_backend.engine.sparse import ExactAttention, KernelAttention, SparseAttention
from mla_backend.engine.tokenizer import Tokenizer
from mla_backend.engine.weights import Checkpoint, load_weights

__all__ = [
    "Batch",
    "Checkpoint",
    "Collector",
    "Completion",
    "Engine",
    "ExactAttention",
    "KernelAttention",
    "LayerCache",
    "Model",
    "ModelConfig",
    "Prompt",
    "Result",
    "SamplingParams",
    "SparseAttention",
    "Status",
    "TokenLogprobs",
    "Tokenizer",
    "Update",
    "Yarn",
    "load_model",
    "load_weights",
    "new_caches",
]
