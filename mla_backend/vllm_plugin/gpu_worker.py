"""vLLM's worker for GPUs, which makes DeepSeek-V4's model use our layer. The model is built in the worker's process."""

from typing import Any

from vllm.v1.worker.gpu_worker import Worker

from mla_backend.vllm_plugin import deepseek_v4


class SparseMLAV4Worker(Worker):
    def load_model(self, *args: Any, **kwargs: Any) -> None:
        deepseek_v4.install()
        super().load_model(*args, **kwargs)
