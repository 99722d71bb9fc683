"""Token ids of other lengths, and where steering adds. The oracle is the bare module, by its hooks and its logits."""

import numpy as np
import pytest
import torch

IDS = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])
OTHERS = [IDS[:1, :3], IDS.reshape(1, 12)]
BATCH = ["The capital of France is", "king"]


def bare(model, ids, **inputs):
    with torch.no_grad():
        return model._module(ids, **inputs).logits


@pytest.mark.parametrize("ids", OTHERS)
def test_ids_of_another_length_take_a_mask_of_ones_with_them(small_model, ids):
    for prompt in (IDS[:1], "king king hello"):
        with small_model.trace(prompt):
            small_model.input_ids = ids
            logits = small_model.logits.save()
        torch.testing.assert_close(logits, bare(small_model, ids))


@pytest.mark.parametrize("ids", OTHERS)
def test_the_mask_may_be_assigned_too(small_model, ids):
    mask = torch.ones_like(ids)
    mask[:, 0] = 0
    expected = bare(small_model, ids, attention_mask=mask)
    for first in ("ids", "mask"):
        with small_model.trace(IDS[:1]):
            if first == "ids":
                small_model.input_ids = ids
            small_model.attention_mask = mask
            if first == "mask":
                small_model.input_ids = ids
            logits = small_model.logits.save()
        torch.testing.assert_close(logits, expected)


def test_ids_of_another_length_are_refused_where_the_mask_says_nothing_of_them(small_model):
    ids = IDS[:, :2]
    with pytest.raises(ValueError, match="input_ids of model.*attention_mask"), small_model.trace(BATCH):
        small_model.input_ids = ids
    with pytest.raises(ValueError, match="input_ids of model.*cache"), small_model.generate(IDS, max_new_tokens=2):
        small_model.input_ids = ids
    with pytest.raises(ValueError, match="input_ids of model.*invokes"), small_model.trace() as tracer:
        with tracer.invoke(IDS[:1]):
            small_model.input_ids = ids[:1]
        with tracer.invoke(IDS[1:]):
            small_model.logits.save()


PLACES = [[0, 1], (0, 1), range(2), torch.tensor([0, 1]), np.array([0, 1])]


@pytest.mark.parametrize("rows", PLACES, ids=lambda places: type(places).__name__)
@pytest.mark.parametrize("positions", PLACES, ids=lambda places: type(places).__name__)
def test_steering_adds_at_every_position_of_every_row(small_model, rows, positions):
    """However both are given, and not at pairs of them."""
    vector = torch.randn(32, generator=torch.Generator().manual_seed(0))
    added = torch.zeros(2, 6, 32)
    added[:2, :2] = vector
    with small_model.trace(IDS):
        before = small_model.layers[1].layer_output.clone().save()
        small_model.steer(np.int64(1), vector, batch_index=rows, token_positions=positions)
        after = small_model.layers[1].layer_output.save()
    assert after.equal(before + added)
