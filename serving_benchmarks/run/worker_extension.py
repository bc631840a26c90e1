"""What is measured inside of vLLM's workers, which may be other processes: vLLM mixes this class into theirs
(`worker_extension_cls`) and calls its methods by name. Answers are JSON, which passes between all processes.
"""

import json

import torch

from serving_benchmarks.results.kernel_times import KernelTimes
from serving_benchmarks.run.compilations import Compilations


class MeasuredWorker:
    """A worker that counts its kernels, what is compiled of them, and its memory."""

    def measured_start(self) -> None:
        """From now on kernels are counted, and steps: workers go on by themselves, so only they know how many."""
        run, self._measured_steps = self.execute_model, 0

        def counted(scheduled, *more, **named):
            self._measured_steps += scheduled.total_num_scheduled_tokens > 0
            return run(scheduled, *more, **named)

        self.execute_model = counted
        self._measured_kernels = KernelTimes()
        self._measured_kernels.start()

    def measured_stop(self) -> str:
        """The device, steps, and what kernels there were since."""
        kernels = self._measured_kernels.stop()
        del self.execute_model  # what the class has is seen again
        return json.dumps([self._measured_kernels.device, self._measured_steps, kernels])

    def measured_compiled(self) -> str:
        """What has been compiled since the last call; nothing at the first, from when on it is looked for."""
        if not hasattr(self, "_measured_compilations"):
            self._measured_compilations = Compilations()
        return json.dumps(self._measured_compilations.take())

    def measured_memory(self) -> str:
        """The most bytes that torch has held on the GPU; null without one."""
        return json.dumps(torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None)
