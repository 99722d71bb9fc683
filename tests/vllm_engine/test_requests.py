"""What holds of a request whatever the family: shown on one Llama against transformers, on one engine."""

import gc

import pytest
import torch
from transformers import AutoModelForCausalLM

from nnterp import StandardizedVLLM, UnsupportedFamily
from nnterp.testing import checkpoint
from nnterp_vllm.testing import assert_near
from nnterp_vllm.values import Flat

OPTIONS = {"dtype": "float32", "max_model_len": 64, "kv_cache_memory_bytes": 64 << 20}
GREEDY = {"temperature": 0.0}
PROMPT = [11, 42, 7, 99, 150, 23]
SIZES = {
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 192,
    "max_position_embeddings": 128,
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    config = checkpoint.config(model_type="llama", eos_token_id=None, **SIZES)
    return str(checkpoint.save(config, tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="module")
def bare(directory):
    return AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def model(directory):
    engine = StandardizedVLLM(directory, dispatch=True, **OPTIONS)
    yield engine
    engine.vllm_entrypoint.llm_engine.engine_core.shutdown()
    del engine
    gc.collect()


def generated(bare, steps, hooked=None, prompt=PROMPT):
    """The bare model's greedy tokens, ``hooked(stream)`` in the place of what leaves block 1 at every step."""
    handle = None
    if hooked is not None:
        handle = bare.model.layers[1].register_forward_hook(lambda module, args, output: hooked(output))
    with torch.no_grad():
        out = bare.generate(
            input_ids=torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=steps,
            min_new_tokens=steps,
            do_sample=False,
        )
    if handle is not None:
        handle.remove()
    return out[0, len(prompt) :].tolist()


def test_every_step_of_a_batch_has_its_own_edit(model, bare):
    """Three requests that generate together: one steered, one zeroed at its last token, one left alone."""
    vector = torch.randn(128, generator=torch.Generator().manual_seed(4))
    first, second, third = PROMPT, PROMPT[:3], [5, 6, 7, 8, 9, 10, 11, 12]
    with model.trace(max_tokens=8, ignore_eos=True, **GREEDY) as tracer:
        with tracer.invoke(first):
            for _ in tracer.iter[:8]:
                model.layers[1].layer_output += vector
            one = tracer.result.save()
        with tracer.invoke(second):
            for _ in tracer.iter[:8]:
                model.layers[1].layer_output = model.layers[1].layer_output * 0.5
            two = tracer.result.save()
        with tracer.invoke(third):
            three = tracer.result.save()
    assert list(one.outputs[0].token_ids) == generated(bare, 8, lambda stream: stream + vector, first)
    assert list(two.outputs[0].token_ids) == generated(bare, 8, lambda stream: stream * 0.5, second)
    assert list(three.outputs[0].token_ids) == generated(bare, 8, prompt=third)


def test_an_installed_edit(model, bare):
    """A block that every request runs, whose last statement writes: it goes back at the end of the block."""
    with model.edit() as (_, edit):
        model.layers[1].layer_output[:] = 0
    with model.trace(PROMPT, max_tokens=1, **GREEDY):
        logits = model.logits.save()
    edit.clear()
    with model.trace(PROMPT, max_tokens=1, **GREEDY):
        clean = model.logits.save()
    handle = bare.model.layers[1].register_forward_hook(lambda module, args, output: torch.zeros_like(output))
    with torch.no_grad():
        expected = bare(torch.tensor([PROMPT])).logits[:, -1]
    handle.remove()
    assert_near(logits[:, -1], expected)
    with torch.no_grad():
        assert_near(clean[:, -1], bare(torch.tensor([PROMPT])).logits[:, -1])


def test_what_is_not_read_is_not_copied(model, monkeypatch):
    """A value is laid out, copied and compared when a block reads it, and nothing else is."""
    copies = []
    laid_out = Flat._laid_out
    monkeypatch.setattr(
        Flat, "_laid_out", lambda self, obj, element: copies.append(self.name) or laid_out(self, obj, element)
    )
    with model.trace(PROMPT, max_tokens=2, ignore_eos=True, **GREEDY):
        model.layers[1].layer_output.save()
        model.layers[2].mlp.mlp_output.save()
    assert set(copies) == {"layer_output", "mlp_output"}
    copies.clear()
    with model.trace(PROMPT, max_tokens=2, ignore_eos=True, **GREEDY) as tracer:
        tracer.result.save()
    assert copies == []


def test_a_family_that_is_not_there(tmp_path):
    """vLLM has modules of its own for it, and no family here says where its values are."""
    config = checkpoint.config(model_type="bloom", hidden_size=64, n_layer=2, n_head=2)
    directory = checkpoint.save(config, tmp_path)
    with pytest.raises(UnsupportedFamily, match="'bloom' on vllm"):
        StandardizedVLLM(str(directory), **OPTIONS)


def test_heads_that_are_split_over_devices(directory):
    """Each device has the attention of its own heads alone: what is a part is not handed out as the whole."""
    model = StandardizedVLLM(directory, tensor_parallel_size=2, **OPTIONS)
    support = model.support(1)
    assert "tensor parallelism" in support["self_attn.attention_queries"]
    assert "tensor parallelism" in support["self_attn.attention_probabilities"]
    assert support["self_attn.attention_premix"] is None
    assert model.layers[1].self_attn.num_heads == 4


def test_names_of_the_callers_own(directory):
    """More aliases than the family's, and one that names nothing, on a tree without an engine."""
    model = StandardizedVLLM(directory, rename={"layers": "blocks"}, **OPTIONS)
    assert model.blocks[0].path == model.layers[0].path
    assert model.support()["layer_output"] is None
    with pytest.raises(ValueError, match="names no module"):
        StandardizedVLLM(directory, rename={"transformer.h": "blocks"}, **OPTIONS)


def test_several_edits_of_one_read(model, bare):
    """A copy that is written to twice, read again between, and written in another value's turn lands once, whole."""
    with model.trace(PROMPT, max_tokens=1, **GREEDY):
        block = model.layers[1]
        block.layer_output[:, 0] = 0
        block.layer_output[:, -1] *= 3
        seen = block.layer_output.clone().save()
        entering = model.layers[2].layer_input.clone().save()
        logits = model.logits.save()

    def edited(stream):
        stream = stream.clone()
        stream[:, 0] = 0
        stream[:, -1] *= 3
        return stream

    handle = bare.model.layers[1].register_forward_hook(lambda module, args, output: edited(output))
    with torch.no_grad():
        out = bare(torch.tensor([PROMPT]), output_hidden_states=True)
    handle.remove()
    assert_near(seen, out.hidden_states[2])
    assert torch.equal(seen, entering)
    assert_near(logits[:, -1], out.logits[:, -1])
