"""The conformance kit of families on vLLM: `EngineSuite`, which compares a real engine with transformers.

    from nnterp_vllm.testing import EngineSuite

    class TestLlama(EngineSuite):
        CONFIG = dict(model_type="llama", hidden_size=128, num_hidden_layers=3, num_attention_heads=4,
        intermediate_size=192)

It is `nnterp.testing`'s kit as far as it says where a value is in the bare model, so a suite of the same family on
transformers states the same facts. Heads have to be at least 32 wide in float32, which is what the engine's kernels
take.
"""

import os

import pytest

# Before torch and vLLM are imported, which read them once: one thread, the engine in this process.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

for name in ("checkpoint", "reading", "running", "writing"):
    pytest.register_assert_rewrite(f"{__name__}.{name}")

from nnterp_vllm.testing.checkpoint import EngineCheckpoint, assert_near  # noqa: E402
from nnterp_vllm.testing.reading import Reading  # noqa: E402
from nnterp_vllm.testing.running import Running  # noqa: E402
from nnterp_vllm.testing.writing import Writing  # noqa: E402

__all__ = ["EngineCheckpoint", "EngineSuite", "assert_near"]


class EngineSuite(Reading, Writing, Running):
    """What holds of every family on vLLM; a subclass states its facts (`nnterp_vllm.testing.checkpoint.EngineFacts`).

    One layout a class, whose engine runs for as long as the class is tested.
    """
