"""A generation that streams: ``mode="async"``, its tokens one by one while a block steers every step."""

import json
import os
import subprocess
import sys

import torch
from transformers import AutoModelForCausalLM

from nnterp.testing import checkpoint

STEPS = 32
IDS = [11, 42, 7, 99, 150, 23]

SCRIPT = """
import asyncio
import json
import sys
import torch
from nnterp import StandardizedVLLM


async def main(directory, results):
    options = dict(dtype="float32", max_model_len=64, kv_cache_memory_bytes=64 << 20)
    model = StandardizedVLLM(directory, mode="async", dispatch=True, **options)
    vector = torch.linspace(-1, 1, model.hidden_size)
    with model.trace(IDS, max_tokens=STEPS, min_tokens=STEPS, temperature=0.0) as tracer:
        norms = [].save()
        for _ in tracer.iter[:STEPS]:
            model.steer(1, vector, factor=2.0)
            norms.append(model.layers[1].layer_output[0, -1].norm().item())
    lengths = []
    async for output in tracer.backend:
        lengths.append(len(output.outputs[0].token_ids))
        last = output
    found = {"lengths": lengths, "tokens": list(last.outputs[0].token_ids), "norms": last.saves["norms"]}
    with open(results, "w") as file:
        json.dump(found, file)
    model.vllm_entrypoint.shutdown()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
""".replace("IDS", str(IDS)).replace("STEPS", str(STEPS))


def test_a_steered_generation_streams(tmp_path):
    sizes = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 192}
    config = checkpoint.config(model_type="llama", max_position_embeddings=128, **sizes)
    directory = checkpoint.save(config, tmp_path / "checkpoint")
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "script.py", directory, "results.json"]
    done = subprocess.run(command, cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["lengths"] == list(range(1, STEPS + 1))

    bare, norms = AutoModelForCausalLM.from_pretrained(directory).eval(), []

    def steered(module, args, output):
        stream = (output[0] if isinstance(output, tuple) else output) + 2.0 * torch.linspace(-1, 1, 128)
        norms.append(stream[0, -1].norm().item())
        return (stream, *output[1:]) if isinstance(output, tuple) else stream

    bare.model.layers[1].register_forward_hook(steered)
    with torch.no_grad():
        expected = bare.generate(
            torch.tensor([IDS]), do_sample=False, max_new_tokens=STEPS, min_new_tokens=STEPS, pad_token_id=1
        )
    assert found["tokens"] == expected[0, len(IDS) :].tolist()
    torch.testing.assert_close(torch.tensor(found["norms"]), torch.tensor(norms), rtol=1e-4, atol=0)
