"""The ways a checkpoint becomes a model: lazily, at once, as a ready module with a tokenizer or without."""

import pytest
import torch
from nnsight.modeling import huggingface
from nnsight.modeling.transformers import TransformersModel
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from nnterp import StandardizedTransformer

PROMPT = "The Eiffel Tower is in"


@pytest.fixture
def bare(small_checkpoint):
    return AutoModelForCausalLM.from_pretrained(small_checkpoint).eval()


@pytest.fixture
def tokenizer(small_checkpoint):
    return AutoTokenizer.from_pretrained(small_checkpoint)


@pytest.fixture
def without_tokenizer(bare):
    """A ready module that knows no checkpoint, and so no tokenizer."""
    return StandardizedTransformer(from_nowhere(bare))


def from_nowhere(bare):
    module = type(bare)(type(bare.config)(**bare.config.to_diff_dict())).eval()
    module.load_state_dict(bare.state_dict())
    return module


def bare_logits(bare, tokenizer, text):
    with torch.no_grad():
        return bare(**tokenizer(text, return_tensors="pt")).logits


def logits_of(model, *inputs, **kwargs):
    with torch.no_grad(), model.trace(*inputs, **kwargs):
        logits = model.logits.save()
    return logits


# -- a directory ------------------------------------------------------------------------------------------------------


def test_a_lazy_model_has_names_and_no_weights_until_it_runs(small_checkpoint, bare, tokenizer):
    model = StandardizedTransformer(str(small_checkpoint))
    assert not model.dispatched and {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert model.num_layers == 4 and model.hidden_size == 32 and model.vocab_size == 400
    assert model.support()["layer_output"] is None and model.tokenizer.padding_side == "left"
    block, attention = model.layers[1], model.layers[1].self_attn
    assert torch.equal(logits_of(model, PROMPT), bare_logits(bare, tokenizer, PROMPT))
    assert model.dispatched and model.device.type == "cpu"
    assert model.layers[1] is block and model.layers[1].self_attn is attention


def test_a_model_that_is_loaded_at_once(small_checkpoint, bare, tokenizer):
    model = StandardizedTransformer(str(small_checkpoint), dispatch=True, device="cpu")
    assert model.dispatched and model.device.type == "cpu"
    assert torch.equal(logits_of(model, PROMPT), bare_logits(bare, tokenizer, PROMPT))


@pytest.mark.parametrize("dispatch", [False, True])
def test_what_the_load_says_reaches_the_model(small_checkpoint, dispatch):
    options = {"attn_implementation": "eager", "dtype": torch.float64}
    model = StandardizedTransformer(str(small_checkpoint), dispatch=dispatch, **options)
    assert model.support(0)["self_attn.attention_probabilities"] is None
    with torch.no_grad(), model.trace(PROMPT):
        pattern = model.layers[0].self_attn.attention_probabilities.save()
    assert pattern.dtype == torch.float64
    torch.testing.assert_close(pattern.sum(-1), torch.ones_like(pattern[..., 0]))


def test_a_config_of_the_callers(small_checkpoint):
    config = AutoConfig.from_pretrained(small_checkpoint)
    setattr(config, "n_layer" if config.model_type == "gpt2" else "num_hidden_layers", 2)
    model = StandardizedTransformer(str(small_checkpoint), config=config)
    assert model.num_layers == 2
    assert logits_of(model, PROMPT).shape[-1] == 400


def test_an_edit_stored_on_a_lazy_model_acts_once_it_is_loaded(small_checkpoint):
    model = StandardizedTransformer(str(small_checkpoint))
    with model.edit(inplace=True):
        model.layers[1].layer_output = torch.zeros_like(model.layers[1].layer_output)
    with torch.no_grad(), model.trace(PROMPT):
        entering = model.layers[2].layer_input.save()
    assert model.dispatched and not entering.any()


def test_two_checkpoints_alive_at_once(small_checkpoint, small_llama, bare, tokenizer):
    model = StandardizedTransformer(str(small_checkpoint))
    with torch.no_grad(), small_llama.trace(PROMPT):
        small_llama.layers[0].layer_output = torch.zeros_like(small_llama.layers[0].layer_output)
        theirs = small_llama.layers[1].layer_input.save()
    assert not theirs.any()
    assert torch.equal(logits_of(model, PROMPT), bare_logits(bare, tokenizer, PROMPT))


# -- a ready module ---------------------------------------------------------------------------------------------------


def test_a_module_with_its_tokenizer_reads_text(bare, tokenizer):
    expected = bare_logits(bare, tokenizer, PROMPT)
    model = StandardizedTransformer(bare, tokenizer=tokenizer)
    assert model._module is bare and model.dispatched and model.tokenizer.padding_side == "left"
    assert torch.equal(logits_of(model, PROMPT), expected)


def test_a_module_stays_on_its_device(bare):
    with torch.device("meta"):
        module = type(bare)(type(bare.config)(**bare.config.to_diff_dict())).eval()
    model = StandardizedTransformer(module)
    assert model.device.type == "meta" and model.support()["layer_output"] is None
    assert model.layers[0].self_attn.head_dim == 8 and list(model.order(1))[-1] == "layer_output"


def test_a_module_from_a_directory_finds_the_tokenizer_there(bare, tokenizer):
    expected = bare_logits(bare, tokenizer, PROMPT)
    model = StandardizedTransformer(bare)
    assert torch.equal(logits_of(model, PROMPT), expected)


def test_a_module_without_a_tokenizer_takes_token_ids(without_tokenizer, bare, tokenizer):
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    expected = bare_logits(bare, tokenizer, PROMPT)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for tokens in (ids, ids.tolist(), ids[0].tolist(), ids[0], inputs):
        assert torch.equal(logits_of(without_tokenizer, tokens), expected)
    assert torch.equal(logits_of(without_tokenizer, **inputs), expected)
    with torch.no_grad(), without_tokenizer.trace() as tracer:
        with tracer.invoke(ids):
            first = without_tokenizer.logits.save()
        with tracer.invoke(ids.flip(1)):
            second = without_tokenizer.logits.save()
    torch.testing.assert_close(first, expected)
    assert not torch.allclose(first, second)


def test_a_module_without_a_tokenizer_generates(without_tokenizer, bare, tokenizer):
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    with without_tokenizer.generate(ids, max_new_tokens=3, do_sample=False) as tracer:
        out = tracer.result.save()
    assert torch.equal(out, bare.generate(ids, max_new_tokens=3, do_sample=False))


@pytest.mark.parametrize("text", [PROMPT, [PROMPT, PROMPT], [{"role": "user", "content": PROMPT}]])
def test_a_module_without_a_tokenizer_says_what_text_needs(without_tokenizer, text):
    for run in (without_tokenizer.trace, without_tokenizer.scan):
        with pytest.raises(ValueError, match=r"no tokenizer.*token ids.*tokenizer=AutoTokenizer"), run(text):
            without_tokenizer.logits.save()
    with pytest.raises(ValueError, match="no tokenizer"), without_tokenizer.trace() as tracer:
        with tracer.invoke([3, 1, 4]):
            without_tokenizer.logits.save()
        with tracer.invoke(text):
            without_tokenizer.logits.save()
    assert logits_of(without_tokenizer, [3, 1, 4]).shape == (1, 3, 400)


def test_what_names_tokens_says_that_there_is_no_tokenizer(without_tokenizer):
    hidden = torch.zeros(1, 1, 32)
    for call in (
        lambda: without_tokenizer.get_topk_closest_tokens(hidden),
        lambda: without_tokenizer.probs_to_dict(torch.full((400,), 1 / 400)),
        lambda: without_tokenizer.add_prefix_false_tokenizer,
    ):
        with pytest.raises(ValueError, match="this model has no tokenizer: pass tokenizer="):
            call()


def test_a_module_without_a_config_needs_a_family():
    with pytest.raises(ValueError, match="no config to tell its model type by: pass family="):
        StandardizedTransformer(torch.nn.Linear(2, 2))


# -- the tokenizer ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["lazy", "at once", "module"])
def test_tokenizer_kwargs_are_set_on_the_tokenizer(small_checkpoint, bare, tokenizer, way):
    options = {"tokenizer_kwargs": {"padding_side": "right", "pad_token": "<unk>"}}
    if way == "module":
        model = StandardizedTransformer(bare, tokenizer=tokenizer, **options)
    else:
        model = StandardizedTransformer(str(small_checkpoint), dispatch=way == "at once", **options)
    logits_of(model, PROMPT)
    assert model.tokenizer.padding_side == "right" and model.tokenizer.pad_token == "<unk>"
    with torch.no_grad(), model.trace(["king", PROMPT]):
        mask, ids = model.attention_mask.save(), model.input_ids.save()
    assert mask[0].tolist() == sorted(mask[0].tolist(), reverse=True) and not mask.all()
    assert (ids[0][mask[0] == 0] == model.tokenizer.convert_tokens_to_ids("<unk>")).all()


def test_tokenizer_kwargs_that_name_nothing(small_checkpoint, bare):
    with pytest.raises(ValueError, match="has no attribute 'padding_sides'"):
        StandardizedTransformer(str(small_checkpoint), tokenizer_kwargs={"padding_sides": "right"})
    with pytest.raises(ValueError, match="there is no tokenizer to set them on"):
        StandardizedTransformer(from_nowhere(bare), tokenizer_kwargs={"padding_side": "right"})


def test_the_tokenizer_without_a_space_in_front_is_loaded_once(small_model):
    tokenizer = small_model.add_prefix_false_tokenizer
    assert tokenizer is small_model.add_prefix_false_tokenizer and tokenizer is not small_model.tokenizer
    assert tokenizer("king")["input_ids"] != tokenizer(" king")["input_ids"]


# -- names ------------------------------------------------------------------------------------------------------------


def test_a_rename_of_the_callers_goes_over_the_familys(small_checkpoint):
    native = "transformer.h" if "gpt2" in str(small_checkpoint) else "model.layers"
    model = StandardizedTransformer(str(small_checkpoint), rename={native: ["layers", "blocks"], "mlp": "ffn"})
    assert model.blocks is model.layers and model.layers[0].ffn is model.layers[0].mlp
    assert logits_of(model, PROMPT).shape[-1] == 400


def test_a_server_is_asked_for_the_plain_model(small_checkpoint, bare, tokenizer, monkeypatch):
    monkeypatch.setitem(huggingface._ID_CACHE, str(small_checkpoint), "somebody/model")  # which the hub is asked for
    standardized = StandardizedTransformer(str(small_checkpoint))
    plain = TransformersModel(bare, task="text-generation", tokenizer=tokenizer)
    assert standardized._remoteable_class() is TransformersModel
    assert standardized._remoteable_model_key() == plain._remoteable_model_key()
    assert standardized.to_model_key() == plain.to_model_key()
