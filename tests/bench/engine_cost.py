"""What reading on the vLLM engine costs next to nnsight's own `VLLM`, where the model's arithmetic is small.

In the environment of the engine (``make env-vllm``), with the engine in this process and on the CPU. Both subjects
read the same tensors: the stream behind every block, which vLLM's Llama blocks return in two halves.
"""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Before torch and vllm are imported, which read them once.
os.environ.update(OMP_NUM_THREADS="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")
os.environ["HF_HUB_OFFLINE"] = "1"

import nnsight
from measure import Row, Samples, in_ms
from nnsight.modeling.vllm import VLLM

from nnterp import StandardizedVLLM
from nnterp.testing import checkpoint
from nnterp_vllm import platform

Run = Callable[[Any], Any]

WHAT = "the vLLM engine"

LAYERS = 12
TOKENS = 16
REQUESTS = 16
#: Engines are started anew each round: where in memory one lies is worth two percent.
ROUNDS = 2
TURNS = 30
OPTIONS = {"dtype": "float32", "max_model_len": 64, "kv_cache_memory_bytes": 64 << 20}
ONE = {"max_tokens": 1, "temperature": 0.0}


class Bare(VLLM):
    """nnsight's own, with what it lacks on a machine without a GPU."""

    if platform.on_cpu():
        platform.prepare_cpu()
        _WORKER_CLS = platform.CPU_WORKER


def rows() -> list[Row]:
    samples = Samples()
    prompts = [[2 + (7 * row + 3 * token) % 290 for token in range(TOKENS)] for row in range(REQUESTS)]
    with tempfile.TemporaryDirectory() as directory:
        config = checkpoint.config(
            model_type="llama",
            num_hidden_layers=LAYERS,
            hidden_size=64,
            intermediate_size=128,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
        path = str(checkpoint.save(config, Path(directory)))
        for _ in range(ROUNDS):
            ours = StandardizedVLLM(path, dispatch=True, **OPTIONS)
            theirs = Bare(path, dispatch=True, **OPTIONS)
            subjects = {**with_nnterp(ours, prompts), **with_nnsight(theirs, prompts)}
            for run in subjects.values():
                run(None)
            samples.interleave(subjects, TURNS)
            for model in (ours, theirs):
                model.vllm_entrypoint.llm_engine.engine_core.shutdown()
            del ours, theirs, subjects, model, run
    one, many = "a request of one token", f"{REQUESTS} requests in a batch"
    blocks = f"layer_output of {LAYERS} blocks"
    return [
        in_ms(f"{one}, {blocks}", "nnsight", samples, "nnterp one", "nnsight one", 1.10),
        in_ms(f"{one}, nothing read", "nnsight", samples, "nnterp untouched", "nnsight untouched", 1.10),
        in_ms(f"{many}, {blocks}", "nnsight", samples, "nnterp many", "nnsight many", 1.10),
        in_ms(f"{many}, nothing read", "nnsight", samples, "nnterp many untouched", "nnsight many untouched", 1.10),
        in_ms(f"{one}, {blocks}", "vLLM, nothing read", samples, "nnterp one", "plain one"),
        in_ms(f"{many}, {blocks}", "vLLM, nothing read", samples, "nnterp many", "plain many"),
    ]


def with_nnterp(model: Any, prompts: list[list[int]]) -> dict[str, Run]:
    def one(_: Any) -> Any:
        with model.trace(prompts[0], **ONE):
            read = nnsight.save([model.layers[i].layer_output for i in range(LAYERS)])
        return read

    def untouched(_: Any) -> Any:
        with model.trace(prompts[0], **ONE):
            read = model.logits.save()
        return read

    def many(_: Any) -> Any:
        with model.trace(**ONE) as tracer:
            for prompt in prompts:
                with tracer.invoke(prompt):
                    read = nnsight.save([model.layers[i].layer_output for i in range(LAYERS)])
        return read

    def many_untouched(_: Any) -> Any:
        with model.trace(**ONE) as tracer:
            for prompt in prompts:
                with tracer.invoke(prompt):
                    read = model.logits.save()
        return read

    return {
        "nnterp one": one,
        "nnterp untouched": untouched,
        "nnterp many": many,
        "nnterp many untouched": many_untouched,
    }


def with_nnsight(model: Any, prompts: list[list[int]]) -> dict[str, Run]:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    plain = SamplingParams(**ONE)
    requests = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]

    def one(_: Any) -> Any:
        with model.trace(prompts[0], **ONE):
            read = nnsight.save([sum(model.model.layers[i].output) for i in range(LAYERS)])
        return read

    def untouched(_: Any) -> Any:
        with model.trace(prompts[0], **ONE):
            read = model.logits.save()
        return read

    def many(_: Any) -> Any:
        with model.trace(**ONE) as tracer:
            for prompt in prompts:
                with tracer.invoke(prompt):
                    read = nnsight.save([sum(model.model.layers[i].output) for i in range(LAYERS)])
        return read

    def many_untouched(_: Any) -> Any:
        with model.trace(**ONE) as tracer:
            for prompt in prompts:
                with tracer.invoke(prompt):
                    read = model.logits.save()
        return read

    return {
        "nnsight one": one,
        "nnsight untouched": untouched,
        "nnsight many": many,
        "nnsight many untouched": many_untouched,
        "plain one": lambda _: model.vllm_entrypoint.generate(requests[:1], plain, use_tqdm=False),
        "plain many": lambda _: model.vllm_entrypoint.generate(requests, plain, use_tqdm=False),
    }
