"""What a mistake at a recurrent mixer is answered with: at the line that made it, and the model is as it was."""

import pytest
import torch
from nnsight.intervention.interleaver import OutOfOrderError

from nnterp import Unavailable, chunk_per_token, route_kernels
from nnterp.testing import mistake

IDS = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])


def logits(model):
    with torch.no_grad(), model.trace(IDS):
        found = model.logits.save()
    return found


@pytest.fixture
def model(request, models):
    """A model that has to give the same logits after the test as before it."""
    found = models[request.param]
    before = logits(found)
    yield found
    route_kernels(found.family, "default")
    assert logits(found).equal(before)


every_mixer = pytest.mark.parametrize("model", ["mamba", "mamba2", "qwen3_next"], indirect=True)
delta_net = pytest.mark.parametrize("model", ["qwen3_next"], indirect=True)
mamba = pytest.mark.parametrize("model", ["mamba"], indirect=True)
mamba2 = pytest.mark.parametrize("model", ["mamba2"], indirect=True)


def donor(model):
    with torch.no_grad(), model.trace(IDS):
        state = model.layers[0].linear_attn.state_output.clone().save()
    return state


@every_mixer
def test_outside_a_run(model):
    mixer, state = model.layers[0].linear_attn, donor(model)
    with mistake(ValueError, "only while the model runs", "attention_keys"):
        mixer.attention_keys  # here  # noqa: B018
    with mistake(ValueError, "only while the model runs", "state_output"):
        mixer.state_output = state  # here
    with mistake(ValueError, "only while the model runs", "states_at"):
        mixer.states_at([0])  # here


@mamba2
def test_a_state_written_where_there_is_none(model):
    mixer, state = model.layers[0].linear_attn, donor(model)
    with mistake(Unavailable, "set_state_after", "state_input, betas or decays"), model.trace(IDS):
        mixer.set_state_after(2, state)  # here
    with mistake(Unavailable, "state of", "states_at"), model.trace(IDS):
        mixer.state = state  # here
    with mistake(Unavailable, "chunk_per_token"), model.trace(IDS):
        mixer.state_after(2)  # here
    chunk_per_token(model)
    with mistake(Unavailable, "set_state_after"), model.trace(IDS):
        mixer.set_state_after(2, state)  # here
    chunk_per_token(model, enabled=False)


@delta_net
def test_a_state_written_under_the_chunked_kernel(model):
    mixer, state = model.layers[0].linear_attn, donor(model)
    for act in ("set_state_after", "state_after"):
        with mistake(Unavailable, act, "route_kernels"), model.trace(IDS):
            getattr(mixer, act)(*((2, state) if act == "set_state_after" else (2,)))  # here
    with mistake(Unavailable, "route_kernels"), model.trace(IDS):
        mixer.state = state  # here


@delta_net
def test_a_block_without_a_mixer(model):
    with mistake(AttributeError, "no linear_attn module"), model.trace(IDS):
        model.layers[1].linear_attn.state_output.save()  # here
    with mistake(AttributeError, "no linear_attn module"), model.trace(IDS):
        model.layers[1].linear_attn.set_state_after(0, IDS)  # here
    with mistake(AttributeError, "no self_attn module"), model.trace(IDS):
        model.layers[0].self_attn.attention_queries.save()  # here


@every_mixer
def test_a_token_past_the_prompt(model):
    mixer = model.layers[0].linear_attn
    for token in (6, -7):
        with mistake(IndexError, "tokens 0 to 5", f"no {token}"), model.trace(IDS):
            mixer.states_at([0, token])  # here
    with mistake(TypeError, "number"), model.trace(IDS):
        mixer.states_at(["last"])  # here
    with mistake(TypeError, "states_at", r"\[2\] for one"), model.trace(IDS):
        mixer.states_at(2)  # here
    with mistake(ValueError, "no token"), model.trace(IDS):
        mixer.states_at([])  # here
    with mistake(IndexError, "tokens 0 to 0"), model.generate(IDS, max_new_tokens=3) as tracer:
        for step in tracer.iter[0:3]:
            if step == 1:
                mixer.states_at([1])  # here


@pytest.mark.parametrize("model", ["mamba", "qwen3_next"], indirect=True)
def test_a_token_of_a_walk_past_the_prompt(model):
    mixer, state = model.layers[0].linear_attn, donor(model)
    route_kernels(model.family)
    with mistake(IndexError, "tokens 0 to 5"), model.trace(IDS):
        mixer.state_after(6)  # here
    with mistake(IndexError, "tokens 0 to 5"), model.trace(IDS):
        mixer.set_state_after(-7, state)  # here
    with mistake(OutOfOrderError, "past token 0"), model.trace(IDS):
        late = mixer.state_after(3)
        mixer.set_state_after(0, late)  # here


@every_mixer
def test_a_state_asked_for_too_late(model):
    mixer = model.layers[0].linear_attn
    with mistake(OutOfOrderError, "states_at"), model.trace(IDS):
        model.layers[0].layer_output.save()
        mixer.states_at([0])  # here
    with mistake(OutOfOrderError, "states_at", "past token 0"), model.trace(IDS):
        mixer.attention_head_outputs.save()
        mixer.states_at([0])  # here
    with mistake(OutOfOrderError, "effective_attention of", "run past it"), model.trace(IDS):
        mixer.states_at([0])
        mixer.effective_attention.save()  # here
    with mistake(OutOfOrderError, "attention_keys"), model.trace(IDS):
        mixer.attention_head_outputs.save()
        mixer.attention_keys.save()  # here


@every_mixer
def test_a_write_of_another_shape(model):
    mixer, state = model.layers[0].linear_attn, donor(model)
    for name in ("attention_queries", "attention_values", "attention_head_outputs"):
        with mistake(ValueError, name, "nothing is broadcast|takes shape"), model.trace(IDS):
            setattr(mixer, name, getattr(mixer, name)[:, :1])  # here
        with mistake(ValueError, name), model.trace(IDS):
            setattr(mixer, name, getattr(mixer, name).double())  # here
    with mistake(ValueError, "state_output"), model.trace(IDS):
        mixer.state_output = state.transpose(-1, -2)[..., :1]  # here
    with mistake(TypeError, "state_output"), model.trace(IDS):
        mixer.state_output = None  # here


@pytest.mark.parametrize("model", ["mamba2", "qwen3_next"], indirect=True)
def test_a_given_state_of_another_shape(model):
    """On a fresh prompt, in one of two invokes with the rows of both, and at a step."""
    mixer, state = model.layers[0].linear_attn, donor(model)
    with mistake(ValueError, "state_input", "takes shape"), model.trace(IDS):
        mixer.state_input = state.transpose(-1, -2)  # here
    with mistake(TypeError, "state_input"), model.trace(IDS):
        mixer.state_input = 0  # here
    with mistake(ValueError, "state_input", "takes shape"), model.trace() as tracer:
        with tracer.invoke(IDS[:1]):
            mixer.state_input = state  # here
        with tracer.invoke(IDS[1:]):
            model.logits.save()
    with mistake(ValueError, "state_input"), model.generate(IDS, max_new_tokens=3) as tracer:
        for step in tracer.iter[0:3]:
            if step == 1:
                mixer.state_input = state[:1]  # here


@mamba
def test_what_mamba_cannot_be_given(model):
    mixer, state = model.layers[0].linear_attn, donor(model)
    with mistake(ValueError, "state_input", "starts from zeros"), model.trace(IDS):
        mixer.state_input = state  # here
    with mistake(AttributeError, "betas"), model.trace(IDS):
        mixer.betas = mixer.betas  # here
    with mistake(AttributeError, "decays"), model.trace(IDS):
        mixer.decays = mixer.decays  # here


@every_mixer
def test_what_is_derived_is_not_assigned(model):
    mixer = model.layers[0].linear_attn
    with mistake(AttributeError, "effective_attention", "attention_keys"), model.trace(IDS):
        mixer.effective_attention = mixer.effective_attention  # here


@mamba2
def test_betas_and_decays_edited_to_different_ones(model):
    """At the line that reads on; or, where nothing is read any more, by the run."""
    mixer = model.layers[0].linear_attn
    with mistake(ValueError, "one quantity"), model.trace(IDS):
        betas, decays = mixer.betas, mixer.decays
        betas[:, 0] = 1.0
        decays[:, 0] = -100.0
        mixer.betas.save()  # here
    with pytest.raises(ValueError, match="one quantity"), model.trace(IDS):
        betas, decays = mixer.betas, mixer.decays
        betas[:, 0] = 1.0
        decays[:, 0] = -100.0


@every_mixer
def test_a_word_that_is_none(model):
    with mistake(ValueError, "torch", "default", "fla"):
        route_kernels(model.family, "fla")  # here
    with mistake(AttributeError, "Did you mean attention_keys"), model.trace(IDS):
        model.layers[0].linear_attn.attention_key.save()  # here
