"""A block that is skipped at every step of a generation is one the model does not have.

transformers tells the length of what came before by one block's part of the key/value cache, which a skipped block
adds nothing to. The oracle is the bare module without the block, which generates without a cache.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM

from nnterp import StandardizedTransformer
from nnterp.testing import checkpoint
from nnterp.testing.oracles import greedy

STEPS = 4
PROMPTS = ["The quick brown fox jumps over", "Paris is"]
FAMILIES = {
    "llama": {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 48},
    "gpt2": {"n_embd": 32, "n_layer": 4, "n_head": 4},
    "bloom": {"hidden_size": 32, "n_layer": 4, "n_head": 4},
    "gemma2": {
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "head_dim": 8,
        "sliding_window": 4,
    },
}


@pytest.fixture(params=FAMILIES)
def build(request):
    """Builds the same random module each time."""

    def build():
        config = checkpoint.config(model_type=request.param, **FAMILIES[request.param])
        return checkpoint.randomized(AutoModelForCausalLM.from_config(config, attn_implementation="eager")).eval()

    return build


def without(module, blocks):
    """Tokens and logits of each step of the bare ``module`` whose ``blocks`` hand on what they are given."""
    inputs = checkpoint.tokenizer()(PROMPTS, return_tensors="pt", padding=True)
    inputs.pop("token_type_ids", None)
    body = module.transformer.h if hasattr(module, "transformer") else module.model.layers
    for index in blocks:
        returned = type(body[index]).__name__ == "BloomBlock"
        body[index].forward = lambda hidden, *_, tuple_=returned, **__: (hidden, None) if tuple_ else hidden
    options = {"use_cache": False, "return_dict_in_generate": True, "output_logits": True}
    with torch.no_grad():
        found = module.generate(**inputs, **greedy(STEPS), **options)
    return found.sequences, torch.stack(found.logits)


@pytest.mark.parametrize("blocks", [(0, 0), (1, 2), (0, 3)])
def test_blocks_skipped_at_every_step_of_a_padded_batch(build, blocks):
    model = StandardizedTransformer(build(), tokenizer=checkpoint.tokenizer())
    tokens, expected = without(build(), range(blocks[0], blocks[1] + 1))
    with torch.no_grad(), model.generate(PROMPTS, **greedy(STEPS)) as tracer:
        logits = [].save()
        for _ in tracer.iter[:STEPS]:
            model.skip_layers(*blocks)
            logits.append(model.logits[:, -1].clone())
        written = tracer.result.save()
    assert written.equal(tokens)
    torch.testing.assert_close(torch.stack(logits), expected, rtol=0, atol=2e-5)


def test_a_block_skipped_by_every_invoke_at_every_step(build):
    model = StandardizedTransformer(build(), tokenizer=checkpoint.tokenizer())
    _, expected = without(build(), [0])
    with torch.no_grad(), model.generate(**greedy(STEPS)) as tracer:
        with tracer.invoke(PROMPTS[0]):
            for _ in tracer.iter[:STEPS]:
                model.skip_layer(0)
        with tracer.invoke(PROMPTS[1]):
            logits = [].save()
            for _ in tracer.iter[:STEPS]:
                model.skip_layer(0)
                logits.append(model.logits[:, -1].clone())
    torch.testing.assert_close(torch.stack(logits), expected[:, 1:], rtol=0, atol=2e-5)


def test_a_block_that_runs_after_it_was_skipped_does_not_attend_to_what_is_not_there(build):
    model = StandardizedTransformer(build(), tokenizer=checkpoint.tokenizer())
    with pytest.raises(RuntimeError), torch.no_grad(), model.generate(PROMPTS, **greedy(STEPS)):
        model.skip_layer(1)
