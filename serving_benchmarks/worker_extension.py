"""What is measured inside of vLLM's workers, which may be other processes: vLLM mixes this class into theirs
(`worker_extension_cls`) and calls its methods by name. Answers are JSON, which passes between all processes.
"""

import json

import torch

from serving_benchmarks.kernel_times import KernelTimes


class MeasuredWorker:
    """A worker that counts its kernels and its memory."""

    def measured_start(self) -> None:
        """From now on kernels are counted."""
        self._measured_kernels = KernelTimes()
        self._measured_kernels.start()

    def measured_stop(self) -> str:
        """What kernels there were since."""
        return json.dumps([self._measured_kernels.device, self._measured_kernels.stop()])

    def measured_memory(self) -> str:
        """The most bytes that torch has held on the GPU; null without one."""
        return json.dumps(torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None)
