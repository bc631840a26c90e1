"""The embedded engine: DeepSeek-V3.2 and GLM-5 checkpoints over the library's ops.

It is the oracle for whole models, the way to run without vLLM on a CPU, and meant to be read. For speed on GPUs use
vLLM with this package's backend.

    engine = Engine("path/to/checkpoint")
    for result in engine.generate(["The capital of France is"], SamplingParams(max_tokens=20)):
        print(result.text)

Needs the extra `engine`. docs/engine.md goes through it.
"""

from mla_backend.engine.batch import LayerCache, TokenBatch, new_caches
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
    "TokenBatch",
    "TokenLogprobs",
    "Tokenizer",
    "Update",
    "Yarn",
    "load_model",
    "load_weights",
    "new_caches",
]
