"""The demo's findings on a trained model: facts, induction, the patching hand-off, steering."""

import pytest
import torch

from nnterp import StandardizedTransformer, checkpoints
from nnterp.activations import compute_next_token_probs
from nnterp.demo import prompts, script
from nnterp.interventions import logit_lens, patch_object_attn_lens
from nnterp.prompt_utils import Prompt, run_prompts

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def smollm2():
    directory = str(checkpoints.smollm2())
    return StandardizedTransformer(directory, dispatch=True, device="cpu", attn_implementation="eager")


def test_what_it_knows(smollm2):
    for prompt, answer, expected in (
        ("The Eiffel Tower is in the city of", " Paris", 0.66),
        ("The capital of Germany is", " Berlin", 0.80),
    ):
        probs = compute_next_token_probs(smollm2, prompt)[0]
        best, prob = next(iter(smollm2.probs_to_dict(probs, k=1).items()))
        assert best == answer and prob == pytest.approx(expected, abs=0.01)


def test_prompts_with_named_answers(smollm2):
    facts = [("Germany", "Berlin", "Paris"), ("France", "Paris", "Berlin")]
    asked = [
        Prompt.from_strings(f"The capital of {country} is", {"right": right, "wrong": wrong}, smollm2)
        for country, right, wrong in facts
    ]
    found = run_prompts(smollm2, asked, get_probs_func=logit_lens)
    assert (found["right"][:, -1] > 0.75).all() and (found["wrong"][:, -1] < 0.01).all()
    assert (found["right"][:, :20] < 0.01).all()


def test_the_lens_ends_in_paris(smollm2):
    lens = script.logit_lens(smollm2, iter)
    assert lens.answer == " Paris" and lens.answer_prob[-1] == pytest.approx(0.66, abs=0.01)
    assert lens.answer_rank[-2:] == [1, 1] and min(lens.answer_rank[:20]) > 1000


def test_an_induction_head(smollm2):
    found = script.induction(smollm2, iter)
    assert (found.layer, found.head) == (18, 6)
    assert float(found.scores.max()) > 0.8 and float(found.scores[:10].max()) < 0.1
    first, second = found.surprise
    assert second < first - 8


def test_the_fact_is_handed_over_between_blocks_22_and_24(smollm2):
    found = script.patching(smollm2, iter)
    assert found.source == prompts.FACT.format("Germany") and found.target == prompts.FACT.format("France")
    assert found.source_share > 0.99 and found.target_share < 0.01
    assert (found.share[:23, found.subject] > 0.95).all() and (found.share[23:, found.subject] < 0.05).all()
    assert (found.share[:23, -1] < 0.05).all() and (found.share[23:, -1] > 0.9).all()
    assert found.hand_off == 23
    assert int(found.heads.share.argmax()) == 4 and float(found.heads.attention[4]) > 0.7


def test_attending_to_another_country_moves_the_answer_there_alone(smollm2):
    probs = patch_object_attn_lens(smollm2, "The Germany", "The capital of France is", 3, num_patches=1)
    berlin = probs[0, :, smollm2.tokenizer(" Berlin")["input_ids"][0]]
    assert int(berlin.argmax()) == 23 and float(berlin[23]) > 0.5
    assert float(torch.cat([berlin[:23], berlin[24:]]).max()) < 0.05


def test_steering_moves_the_mood(smollm2):
    found = script.steering(smollm2, iter)
    share = dict(zip(found.factors, found.bright_share, strict=True))
    assert share[-1.0] < 0.05 < share[0.0] < 0.5 and share[1.0] > 0.95
    texts = dict(found.continuations)["I went for a walk and I saw"]
    assert "knife" in texts[-1.0] and "sunset" in texts[1.0]
