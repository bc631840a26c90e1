"""vLLM's load format `mla_random`: weights drawn in vLLM's own model, for models whose checkpoint we can't write.

What is drawn depends on the seed and a parameter's name, so that engines with different backends have the same model.
A worker registers the format as it imports the class below, before it loads the model.
"""

import torch
from torch import nn
from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from serving_benchmarks.models import models
from serving_benchmarks.run import overlap
from serving_benchmarks.run.engine import MeasuredWorker


@register_model_loader("mla_random")
class RandomWeights(BaseModelLoader):
    def __init__(self, load_config: LoadConfig):
        super().__init__(load_config)
        self.seed, self.overlap = (load_config.model_loader_extra_config[name] for name in ("seed", "overlap"))

    def download_model(self, model_config: ModelConfig) -> None:
        pass

    @torch.no_grad()
    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        for name, parameter in model.named_parameters():
            models.draw(parameter, name, self.seed)
        if self.overlap is not None:
            overlap.install(model_config, self.overlap, parameter.device)


class RandomWeightsWorker(MeasuredWorker):
    """vLLM's `worker_extension_cls`."""
