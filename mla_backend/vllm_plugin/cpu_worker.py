"""vLLM's worker for CPUs, which makes the model use our indexer. The model is built in the worker's process."""

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from mla_backend.vllm_plugin import cpu_indexer, mxfp4_keys


class SparseMLACpuWorker(CPUWorker):
    def load_model(self, *args: Any, **kwargs: Any) -> None:
        cpu_indexer.install(self.vllm_config.model_config)
        if mxfp4_keys.asked(self.vllm_config):
            mxfp4_keys.install()
        super().load_model(*args, **kwargs)
