"""The embedded engine: models of the Hugging Face hub over the library's ops. So far its model half.

    model = engine.load_model("path/to/checkpoint")
    caches = engine.new_caches(model.config, blocks=1000)
    logits = model(token_ids, positions, engine.Batch(...), caches)

Needs the extra `engine`. docs/engine.md goes through it.
"""

from mla_backend.engine.batch import Batch, LayerCache, new_caches
from mla_backend.engine.config import ModelConfig, Yarn
from mla_backend.engine.model import Model, load_model
from mla_backend.engine.sparse import ExactAttention, KernelAttention, SparseAttention
from mla_backend.engine.weights import Checkpoint, load_weights

__all__ = [
    "Batch",
    "Checkpoint",
    "ExactAttention",
    "KernelAttention",
    "LayerCache",
    "Model",
    "ModelConfig",
    "SparseAttention",
    "Yarn",
    "load_model",
    "load_weights",
    "new_caches",
]
