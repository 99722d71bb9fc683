"""The engine in processes of its own: what a block names travels there, classes by their import path."""

import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from nnterp.testing import checkpoint
from nnterp_vllm.testing import assert_near

SIZES = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 192}
IDS = [11, 42, 7, 99, 150, 23]

#: Imported by the engine's process as by ours.
OWN = '''
from nnterp_vllm import components
from nnterp_vllm.values import on_engine


class Mlp(components.Mlp):
    """A feed-forward with a value of the script's own."""

    what_it_adds = on_engine(components.Mlp.mlp_output, "output")
'''

SCRIPT = """
import sys
import torch
import own
from nnterp import StandardizedVLLM
from vllm.model_executor.models import llama as modeling

if __name__ == "__main__":
    directory, kind, results = sys.argv[1:]
    more = {"envoys": {modeling.LlamaMLP: own.Mlp}, "rename": {"layers": "blocks"}} if kind == "llama" else {}
    model = StandardizedVLLM(directory, dtype="float32", max_model_len=64, kv_cache_memory_bytes=64 << 20, **more)
    vector = torch.linspace(-1, 1, model.hidden_size)
    with model.trace(IDS, max_tokens=1, temperature=0.0):
        queries = model.layers[1].self_attn.attention_queries.save()
        adds = (model.blocks[1].mlp.what_it_adds if kind == "llama" else model.layers[1].mlp.mlp_output).save()
        stream = model.layers[1].layer_output.clone().save()
        lens = model.project_on_vocab(stream).save()
        model.steer(1, vector, factor=2.0)
        logits = model.logits.save()
    message = ""
    try:
        with model.trace(IDS, max_tokens=1):
            model.layers[1].layer_output = model.layers[1].layer_output[0]
    except RuntimeError as error:
        message = str(error).splitlines()[0]
    with model.trace(IDS, max_tokens=1, temperature=0.0):
        after = model.logits.save()
    found = dict(queries=queries, adds=adds, stream=stream, lens=lens, logits=logits, after=after, message=message)
    torch.save(found, results)
""".replace("IDS", str(IDS))


@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
def test_a_script(kind, tmp_path):
    """One type that vLLM has modules of its own for, with a class and a name of the script's; one on its backend."""
    config = checkpoint.config(model_type=kind, max_position_embeddings=128, **SIZES)
    directory = checkpoint.save(config, tmp_path / "checkpoint")
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "script.py", directory, kind, "results.pt"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = torch.load(tmp_path / "results.pt")

    bare = AutoModelForCausalLM.from_pretrained(directory).eval()
    blocks = bare.model.layers if kind == "llama" else bare.gpt_neox.layers
    caught = {}
    blocks[1].mlp.register_forward_hook(lambda module, args, output: caught.update(adds=output))
    with torch.no_grad():
        clean = bare(torch.tensor([IDS]), output_hidden_states=True)
    assert found["queries"].shape == (1, 4, len(IDS), 32)
    assert_near(found["adds"], caught["adds"])
    stream = clean.hidden_states[2]
    assert_near(found["stream"], stream)
    head, norm = bare.get_output_embeddings(), (bare.model.norm if kind == "llama" else bare.gpt_neox.final_layer_norm)
    with torch.no_grad():
        assert_near(found["lens"], head(norm(stream)))
    assert_near(found["after"][:, -1], clean.logits[:, -1])
    assert found["message"].startswith("ValueError: layer_output of model.model.layers.1")
    blocks[1].register_forward_hook(lambda module, args, output: moved(output, 2.0 * torch.linspace(-1, 1, 128)))
    with torch.no_grad():
        steered = bare(torch.tensor([IDS])).logits[:, -1]
    assert_near(found["logits"][:, -1], steered)


def moved(output, vector):
    """What a block returns, its stream moved by ``vector``."""
    return (output[0] + vector, *output[1:]) if isinstance(output, tuple) else output + vector
