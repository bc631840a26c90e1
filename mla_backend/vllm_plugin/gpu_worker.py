"""vLLM's worker for GPUs, which makes its models use our layers and our indexer. They are built in its process."""

from typing import Any

from vllm.v1.worker.gpu_worker import Worker

from mla_backend.vllm_plugin import selection
from mla_backend.vllm_plugin.models import has_v4_attention


class SparseMLAWorker(Worker):
    def load_model(self, *args: Any, **kwargs: Any) -> None:
        if has_v4_attention(self.vllm_config.model_config):
            from mla_backend.vllm_plugin import deepseek_v4

            deepseek_v4.install()
        if selection.is_on(self.vllm_config):
            from mla_backend.vllm_plugin import gpu_indexer

            gpu_indexer.install()
        super().load_model(*args, **kwargs)
