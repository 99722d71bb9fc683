"""Every location is visited once per call of its module, so a step of a generation is that step.

The oracles are the bare module's hooks and an attention function that takes notes.
"""

import pytest
import torch
from nnsight.intervention.source import SourceNotAvailable
from transformers.models.llama import modeling_llama

IDS = torch.tensor([[5, 17, 42, 3, 9], [8, 1, 77, 20, 31]])
PLAIN_FUNCTION = modeling_llama.eager_attention_forward
STEPS = 4


class Recorded:
    """What every step of a generation computes in block 1, by hooks and by an attention function that takes notes."""

    def __init__(self, module, monkeypatch):
        self.steps = {"mid": [], "queries": [], "scores": [], "probabilities": [], "outputs": []}
        target = module.model.layers[1]
        target.post_attention_layernorm.register_forward_pre_hook(lambda _, args: self.steps["mid"].append(args[0]))

        def noting(attention, query, key, value, mask, scaling, **kwargs):
            output, weights = PLAIN_FUNCTION(attention, query, key, value, mask, scaling, **kwargs)
            if attention is target.self_attn:
                scores = query @ key.repeat_interleave(2, 1).transpose(2, 3) * scaling
                for name, noted in (
                    ("queries", query),
                    ("scores", scores if mask is None else scores + mask),
                    ("probabilities", weights),
                    ("outputs", output),
                ):
                    self.steps[name].append(noted)
            return output, weights

        with monkeypatch.context() as patched, torch.no_grad():
            patched.setattr(modeling_llama, "eager_attention_forward", noting)
            self.tokens = module.generate(IDS, max_new_tokens=STEPS, do_sample=False)

    def check(self, name, step, value):
        assert len(self.steps[name]) == STEPS
        torch.testing.assert_close(value, self.steps[name][step], rtol=0, atol=1e-6)


READS = {
    "mid": lambda block: block.layer_mid,
    "queries": lambda block: block.self_attn.attention_queries,
    "scores": lambda block: block.self_attn.attention_scores,
    "probabilities": lambda block: block.self_attn.attention_probabilities,
    "outputs": lambda block: block.self_attn.attention_head_outputs,
}


@pytest.mark.parametrize("name", READS)
def test_a_value_first_read_at_a_late_step_is_that_steps(served, name, monkeypatch):
    """After a read of something else at an earlier step, which is where locations counted from their first read err."""
    recorded, model = Recorded(served.llama(), monkeypatch), served.standardized()
    with torch.no_grad(), model.generate(IDS, max_new_tokens=STEPS, do_sample=False) as tracer:
        found = [].save()
        for _ in tracer.iter[1]:
            model.layers[0].layer_output.save()
        for _ in tracer.iter[2]:
            found.append(READS[name](model.layers[1]))
    recorded.check(name, 2, found[0])


@pytest.mark.parametrize("name", READS)
def test_every_step_is_counted(served, name, monkeypatch):
    """All steps in order, and again in a later run of the same model, whose counts go on from the first."""
    recorded, model = Recorded(served.llama(), monkeypatch), served.standardized()
    for _ in range(2):
        with torch.no_grad(), model.generate(IDS, max_new_tokens=STEPS, do_sample=False) as tracer:
            found = [].save()
            for _ in tracer.iter[:STEPS]:
                found.append(READS[name](model.layers[1]))
        for step, value in enumerate(found):
            recorded.check(name, step, value)


def test_steps_are_counted_across_implementations(served, monkeypatch):
    """Runs in which there were no scores count as none of theirs, read or not."""
    recorded, model = Recorded(served.llama(), monkeypatch), served.standardized()
    options = {"max_new_tokens": STEPS, "do_sample": False}
    for implementation in ("sdpa", "eager", "sdpa", "eager"):
        model._module.set_attn_implementation(implementation)
        with torch.no_grad(), model.generate(IDS, **options) as tracer:
            queries = [].save()
            for _ in tracer.iter[1:3]:
                queries.append(model.layers[1].self_attn.attention_queries)
        recorded.check("queries", 1, queries[0])
    with torch.no_grad(), model.generate(IDS, **options) as tracer:
        found = [].save()
        for _ in tracer.iter[1]:
            model.layers[0].layer_output.save()
        for _ in tracer.iter[2]:
            found.append(model.layers[1].self_attn.attention_scores)
    recorded.check("scores", 2, found[0])


def test_a_late_edit_changes_that_step_alone(served):
    model = served.standardized()
    options = {"max_new_tokens": STEPS, "do_sample": False}
    with torch.no_grad(), model.generate(IDS, **options) as tracer:
        before = [].save()
        for _ in tracer.iter[:STEPS]:
            before.append(model.layers[1].self_attn.attention_probabilities.clone())
    with torch.no_grad(), model.generate(IDS, **options) as tracer:
        seen = [].save()
        for step in tracer.iter[:STEPS]:
            if step == 2:
                model.layers[1].self_attn.attention_probabilities[:] = 0
            seen.append(model.layers[1].self_attn.attention_head_outputs.abs().sum().item())
    assert [value == 0 for value in seen] == [False, False, True, False]
    assert [tuple(value.shape) for value in before] == [(2, 4, 5, 5), (2, 4, 1, 6), (2, 4, 1, 7), (2, 4, 1, 8)]


def test_two_calls_in_one_forward_are_two_locations(served):
    """The second is served apart, so the n-th visit of a location stays the n-th call of its module."""
    module = served.llama()
    attention = module.model.layers[1].self_attn
    original = type(attention).forward

    class Twice(type(attention)):
        def forward(self, *args, **kwargs):
            original(self, *args, **{**served.without_cache(kwargs), "attention_mask": None})
            return original(self, *args, **kwargs)

    attention.__class__ = Twice
    model = served.standardized(module)
    with torch.no_grad(), model.generate(IDS, max_new_tokens=3, do_sample=False) as tracer:
        shapes = [].save()
        for _ in tracer.iter[:3]:
            shapes.append(tuple(model.layers[1].self_attn.attention_queries.shape))
    assert shapes == [(2, 4, 5, 8), (2, 4, 1, 8), (2, 4, 1, 8)]


def test_operations_first_asked_for_at_a_late_step_are_refused(served):
    """nnsight counts them from then on, and would answer with a later step's."""
    model = served.standardized()
    with (
        pytest.raises(SourceNotAvailable, match="already been called"),
        model.generate(IDS, max_new_tokens=STEPS) as tracer,
    ):
        for _ in tracer.iter[1]:
            model.layers[0].layer_output.save()
        for _ in tracer.iter[2]:
            model.layers[0].source.self_mlp_0.output.save()
