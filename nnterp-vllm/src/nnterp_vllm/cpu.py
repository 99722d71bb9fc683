"""nnsight's worker and model runner on vLLM's CPU backend.

nnsight 0.8.1 instruments vLLM's GPU runner alone. vLLM's CPU runner is made from that one, so nnsight's additions go
over it as they are; the worker is vLLM's, which then gives its runner this class. Both are named by import path and
imported in the engine's own process.
"""

import vllm.v1.worker.cpu.shm  # noqa: F401  before vLLM's CPU worker, which needs what it sets up
from nnsight.modeling.vllm.model_runners.GPUModelRunner import NNsightGPUModelRunner
from nnsight.modeling.vllm.workers.GPUWorker import NNsightGPUWorker
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker


class CPURunner(NNsightGPUModelRunner, CPUModelRunner):
    """vLLM's CPU runner, whose forward is interleaved with the blocks that its requests carry."""


class Worker(NNsightGPUWorker, CPUWorker):
    """vLLM's CPU worker with that runner."""

    def init_device(self) -> None:
        CPUWorker.init_device(self)
        self.model_runner.__class__ = CPURunner
