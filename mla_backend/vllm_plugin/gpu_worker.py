"""vLLM's worker for GPUs, which makes its models use our layers and our indexer. They are built in its process."""

from typing import Any

from vllm.v1.worker.gpu_worker import Worker

from mla_backend.vllm_plugin import mxfp4_keys, native_rows, selection, sharing
from mla_backend.vllm_plugin.models import V41, v4_family


class SparseMLAWorker(Worker):
    def load_model(self, *args: Any, **kwargs: Any) -> None:
        if (family := v4_family(self.vllm_config.model_config)) is V41:
            from mla_backend.vllm_plugin import deepseek_v41

            deepseek_v41.install()
            if native_rows.asked(self.vllm_config):
                native_rows.install()
        elif family is not None:
            from mla_backend.vllm_plugin import deepseek_v4

            deepseek_v4.install()
        if sharing.is_on(self.vllm_config):
            from mla_backend.vllm_plugin import shared_indexer

            shared_indexer.install(self.vllm_config)
        elif selection.is_on(self.vllm_config):
            from mla_backend.vllm_plugin import gpu_indexer

            gpu_indexer.install()
            if mxfp4_keys.asked(self.vllm_config):
                mxfp4_keys.install()
        super().load_model(*args, **kwargs)
