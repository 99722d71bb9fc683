"""What a mistake is answered with: an error that names what was asked, where and the way out, at the line that made it.

Plugins of every broken kind are in ``tests/plugins/test_isolation.py``.
"""

import re
from types import SimpleNamespace

import pytest
import torch
from nnsight.intervention.interleaver import OutOfOrderError
from transformers import AutoConfig, AutoModelForCausalLM, BertConfig, BertModel, LlamaConfig, T5Config

from nnterp import StandardizedTransformer, Unavailable, UnsupportedFamily, families
from nnterp.testing import mistake

IDS = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])
WIDTH = 32


def logits(model):
    with model.trace(IDS):
        found = model.logits.save()
    return found


@pytest.fixture
def model(small_model):
    """A model that has to give the same logits after the test as before it."""
    before = logits(small_model)
    yield small_model
    assert logits(small_model).equal(before)


# -- names ------------------------------------------------------------------------------------------------------------


def test_an_unknown_value(model):
    block = model.layers[0]
    with mistake(AttributeError, "layer_outputs", re.escape(block.path), "Did you mean layer_output"):
        block.layer_outputs  # here  # noqa: B018
    with mistake(AttributeError, "layer_outputs", "Did you mean layer_output"), model.trace(IDS):
        block.layer_outputs.save()  # here
    with mistake(AttributeError, "attention_outptu", "Did you mean attention_output"), model.trace(IDS):
        block.self_attn.attention_outptu.save()  # here
    with mistake(AttributeError, "nothing_like_it", "Its values: .*layer_output", "its modules: "), model.trace(IDS):
        block.nothing_like_it.save()  # here
    with mistake(AttributeError, "logit", "Did you mean logits"), model.trace(IDS):
        model.logit.save()  # here


def test_an_unknown_value_is_not_assigned(model):
    """An assignment that no value takes would otherwise be an attribute, and no edit."""
    zeros = torch.zeros(2, 6, WIDTH)
    with mistake(AttributeError, "layer_outputs", "Did you mean layer_output"), model.trace(IDS):
        model.layers[0].layer_outputs = zeros  # here
    with mistake(AttributeError, "logit", "Did you mean logits"), model.trace(IDS):
        model.logit = zeros  # here
    with mistake(AttributeError, "is a module", "attention_output"), model.trace(IDS):
        model.layers[0].self_attn = zeros  # here
    model.my_notes = "outside a run an attribute is an attribute"
    del model.my_notes


@pytest.mark.parametrize("index", [4, 99, -5])
def test_a_block_out_of_range(model, index):
    what = (rf"\[{index}\]", "4 blocks", "0 to 3")
    with mistake(IndexError, *what):
        model.layers[index]  # here
    with mistake(IndexError, *what), model.trace(IDS):
        model.layers[index].layer_output.save()  # here
    with mistake(IndexError, str(index), "4 blocks"):
        model.support(layer=index)  # here
    with mistake(IndexError, str(index), "4 blocks"), model.trace(IDS):
        model.skip_layers(0, index)  # here
    with mistake(IndexError, str(index), "4 blocks"), model.trace(IDS):
        model.steer(index, torch.zeros(WIDTH))  # here


def test_a_layer_that_is_no_number(model):
    with mistake(TypeError, "int", "'0'"):
        model.support(layer="0")  # here
    with mistake(ValueError, "comes after"), model.trace(IDS):
        model.skip_layers(2, 1)  # here


def test_a_module_that_a_block_does_not_have(model):
    block = model.layers[1]
    with mistake(AttributeError, "no linear_attn module on this block", re.escape(block.path)):
        block.linear_attn  # here  # noqa: B018
    with mistake(AttributeError, "no linear_attn module on this block"), model.trace(IDS):
        block.linear_attn.attention_output.save()  # here


# -- values -----------------------------------------------------------------------------------------------------------


def test_a_value_outside_a_trace(model):
    block = model.layers[1]
    way_out = (re.escape(block.path), r"with model\.trace", r"\.save\(\)")
    with mistake(ValueError, "layer_output", *way_out):
        block.layer_output  # here  # noqa: B018
    with mistake(ValueError, "layer_output", *way_out):
        block.layer_output = torch.zeros(2, 6, WIDTH)  # here
    with mistake(ValueError, "attention_queries", r"with model\.trace"):
        block.self_attn.attention_queries  # here  # noqa: B018
    with mistake(ValueError, "logits of model", r"with model\.trace"):
        model.logits  # here  # noqa: B018
    with mistake(ValueError, r"with model\.trace"):
        model.next_token_probs  # here  # noqa: B018


@pytest.mark.parametrize("value", ["attention_scores", "attention_probabilities"])
def test_an_unavailable_value(small_checkpoint, value):
    model = StandardizedTransformer(str(small_checkpoint), dispatch=True, attn_implementation="sdpa")
    before = logits(model)
    attention = model.layers[1].self_attn
    why = (value, re.escape(attention.path), "'sdpa'", 'attn_implementation="eager"')
    with mistake(Unavailable, *why):
        getattr(attention, value)  # here
    with mistake(Unavailable, *why), model.trace(IDS):
        getattr(attention, value).save()  # here
    with mistake(Unavailable, *why), model.trace(IDS):
        setattr(attention, value, torch.zeros(2, 4, 6, 6))  # here
    with mistake(Unavailable, *why):
        hasattr(attention, value)  # here
    assert logits(model).equal(before)


@pytest.mark.parametrize(
    ("host", "value", "layout", "shape"),
    [
        ("layers.1", "layer_input", "Residual", (2, 6, WIDTH)),
        ("layers.1", "layer_mid", "Residual", (2, 6, WIDTH)),
        ("layers.1", "layer_output", "Residual", (2, 6, WIDTH)),
        ("layers.1.self_attn", "attention_queries", "Queries", (2, 4, 6, 8)),
        ("layers.1.self_attn", "attention_probabilities", "Pattern", (2, 4, 6, 6)),
        ("layers.1.self_attn", "attention_premix", "HeadOutputs", (2, 6, 4, 8)),
        ("layers.1.self_attn", "attention_output", "Residual", (2, 6, WIDTH)),
        ("layers.1.mlp", "mlp_output", "Residual", (2, 6, WIDTH)),
        ("", "token_embeddings", "Residual", (2, 6, WIDTH)),
        ("", "logits", "Logits", (2, 6, 400)),
    ],
)
def test_an_assignment_of_another_shape_rank_dtype_or_device(model, host, value, layout, shape):
    envoy = model.get(host) if host else model
    what = (value, re.escape(envoy.path), layout)
    right = torch.zeros(shape)
    wrong = [
        (right[:1], ValueError, re.escape(str(shape)), re.escape(str(tuple(right[:1].shape)))),
        (right[..., :1], ValueError, re.escape(str(shape)), "broadcast"),
        (right[0], ValueError, re.escape(str(shape)), "broadcast"),
        (right[None], ValueError, re.escape(str(shape)), "broadcast"),
        (right.double(), ValueError, "torch.float32", "torch.float64", r"\.to\(\)"),
        (right.long(), ValueError, "torch.float32", "torch.int64", r"\.to\(\)"),
        (right.to("meta"), ValueError, "cpu", "meta"),
        (0.0, TypeError, re.escape(str(shape)), "float"),
        (None, TypeError, re.escape(str(shape)), "NoneType"),
        ((right, None), TypeError, re.escape(str(shape)), "tuple"),
    ]
    for assigned, kind, *words in wrong:
        with mistake(kind, *what, *words), model.trace(IDS):
            setattr(envoy, value, assigned)  # here


def test_an_assignment_in_one_of_two_invokes_has_that_invokes_rows(model):
    with mistake(ValueError, r"\(1, 6, 32\)", r"\(2, 6, 32\)"), model.trace() as tracer:
        with tracer.invoke(IDS[:1]):
            model.layers[1].layer_output = torch.zeros(2, 6, WIDTH)  # here
        with tracer.invoke(IDS[1:]):
            model.logits.save()


def test_derived_values_are_read_only(model):
    with mistake(AttributeError, "next_token_probs", r"assign model\.logits"), model.trace(IDS):
        model.next_token_probs = torch.zeros(2, 400)  # here
    with mistake(AttributeError, "input_size", "assign input_ids"), model.trace(IDS):
        model.input_size = (2, 6)  # here


def test_values_against_the_order_of_the_forward(model):
    late = ("layer_mid of", re.escape(model.layers[1].path), "run past it", r"model\.order\(\)")
    with mistake(OutOfOrderError, *late), model.trace(IDS):
        model.layers[2].layer_output.save()
        model.layers[1].layer_mid.save()  # here
    with mistake(OutOfOrderError, *late), model.trace(IDS):
        model.layers[2].layer_output.save()
        model.layers[1].layer_mid = torch.zeros(2, 6, WIDTH)  # here


def test_a_value_inside_a_block_that_is_skipped(model):
    with mistake(OutOfOrderError, "attention_output of", "not served in this run", "skipped"), model.trace(IDS):
        model.skip_layer(1)
        model.layers[1].self_attn.attention_output.save()  # here


def test_a_loop_over_more_steps_than_there_are_ends_with_them(model):
    with pytest.warns(UserWarning, match="never reached"), model.generate(IDS, max_new_tokens=2) as tracer:
        streams = [].save()
        for _ in tracer.iter[:5]:
            streams.append(model.layers[1].layer_output)
    assert 1 <= len(streams) <= 2


def test_a_value_of_another_model(model, small_checkpoint):
    """Its location has the same name, and would be answered with the traced model's value."""
    other = StandardizedTransformer(str(small_checkpoint), dispatch=True, attn_implementation="eager")
    expected = logits(other)
    for host, value, zeros in (
        (other.layers[1], "layer_output", torch.zeros(2, 6, WIDTH)),
        (other, "logits", expected),
    ):
        what = (value, re.escape(host.path), "another model")
        with mistake(ValueError, *what), model.trace(IDS):
            getattr(host, value).save()  # here
        with mistake(ValueError, *what), model.trace(IDS):
            setattr(host, value, zeros)  # here
    with mistake(ValueError, "next_token_probs", "another model"), model.trace(IDS):
        other.next_token_probs.save()  # here
    assert logits(other).equal(expected)


def test_a_value_inside_a_backward_block(model):
    with mistake(ValueError, "layer_output", "no gradient", r"\.grad"), model.trace(IDS):  # noqa: SIM117
        with model.logits.sum().backward():
            model.layers[1].layer_output.grad.save()  # here


def test_an_edited_copy_of_a_model_is_that_model(model):
    with model.edit() as (_, edited):
        edited.layers[1].layer_output[:] = 0
    with edited.trace(IDS):
        model.layers[1].layer_output[:] = model.layers[1].layer_output + 1
        stream = edited.layers[1].layer_output.clone().save()
    assert stream.eq(1).all()


@pytest.mark.parametrize("options", [{"num_beams": 2}, {"num_return_sequences": 3, "do_sample": True}])
def test_several_rows_for_a_prompt_in_one_of_two_invokes(model, options):
    """An invoke would see, and edit, the rows of the other as well."""
    rows = 2 * max(value for value in options.values() if type(value) is int)
    with mistake(ValueError, "layer_output", f"{rows} rows", "gave it 2"), model.generate(**options) as tracer:
        with tracer.invoke(IDS[:1], max_new_tokens=2):
            model.layers[1].layer_output[:] = 0  # here
        with tracer.invoke(IDS[1:]):
            model.logits.save()
    with model.generate(IDS, max_new_tokens=2, **options):
        stream = model.layers[1].layer_output.save()
    assert stream.shape == (rows, 6, WIDTH)


def test_a_trace_without_a_prompt(model):
    for inputs in ((), ([],)):
        with mistake(ValueError, "logits of model", "given a prompt"), model.trace(*inputs):
            model.logits.save()  # here


def test_the_logits_of_a_call_that_returns_a_tuple(model):
    with mistake(ValueError, "logits of model", "tuple", "'logits'"), model.trace(IDS, return_dict=False):
        model.logits.save()  # here


def test_sizes_are_read_only(model):
    with mistake(AttributeError, "hidden_size", "def hidden_size"):
        model.hidden_size = 64  # here


# -- methods ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vector", [torch.zeros(5), torch.zeros(WIDTH, 1), torch.tensor(1.0), 1.0, None])
def test_steer_with_no_vector_of_the_streams_width(model, vector):
    got = str(tuple(vector.shape)) if isinstance(vector, torch.Tensor) else type(vector).__name__
    with mistake(ValueError, "32 .hidden_size.", re.escape(got)), model.trace(IDS):
        model.steer(1, vector)  # here


def test_steer_against_the_order_of_the_blocks(model):
    with mistake(ValueError, "ascending", re.escape("[2, 0]")), model.trace(IDS):
        model.steer([2, 0], torch.zeros(WIDTH))  # here


def test_a_block_skipped_with_what_is_no_stream(model):
    with mistake(ValueError, "layer_output", r"\(2, 6, 32\)", r"\(2, 6, 5\)"), model.trace(IDS):
        model.layers[1].skip_with(torch.zeros(2, 6, 5))  # here
    with mistake(ValueError, r"\(2, 6, 32\)", r"\(6, 32\)"), model.trace(IDS):
        model.skip_layers(1, 2, skip_with=torch.zeros(6, WIDTH))  # here


def test_a_projection_of_another_width(model):
    for wrong, got in ((torch.zeros(2, 5), r"\(2, 5\)"), (torch.tensor(1.0), r"\(\)"), ([1.0], "list")):
        with mistake(ValueError, "project_on_vocab", "hidden_size 32", got):
            model.project_on_vocab(wrong)  # here
        with mistake(ValueError, "project_on_vocab", "hidden_size 32", got):
            model.get_topk_closest_tokens(wrong)  # here
    with mistake(ValueError, "project_on_vocab", r"\(2, 6, 5\)"), model.trace(IDS):
        model.project_on_vocab(model.layers[1].layer_output[..., :5])  # here


def test_probabilities_of_more_than_one_position(model):
    with mistake(ValueError, r"\[vocab_size\]", r"\(2, 400\)"):
        model.probs_to_dict(torch.zeros(2, 400))  # here


# -- loading ----------------------------------------------------------------------------------------------------------


def test_a_rename_that_resolves_nowhere(small_checkpoint):
    with mistake(ValueError, "nothing.here", "my_name", "names no module"):
        StandardizedTransformer(str(small_checkpoint), rename={"nothing.here": "my_name"})  # here
    with mistake(ValueError, "nothing", "norm", "names no module"):
        StandardizedTransformer(str(small_checkpoint), rename={"nothing": "norm"})  # here


def test_a_rename_that_collides(small_checkpoint):
    """With another alias, with a module, with a value, with a method."""
    for taken in ("norm", "logits", "trace", "hidden_size", "generator"):
        with mistake(ValueError, taken):
            StandardizedTransformer(str(small_checkpoint), rename={"lm_head": taken})  # here
    with mistake(ValueError, "self_attn"):
        StandardizedTransformer(str(small_checkpoint), rename={"mlp": "self_attn"})  # here


@pytest.mark.parametrize(
    ("family", "missing"),
    [
        (SimpleNamespace(ENVOYS={}), "RENAME"),
        (SimpleNamespace(RENAME={}), "ENVOYS"),
        (SimpleNamespace(RENAME=[], ENVOYS={}), "RENAME"),
        ("llama", "RENAME and no ENVOYS"),
    ],
)
def test_a_family_without_its_maps(small_checkpoint, family, missing):
    with mistake(TypeError, "family=", f"has no {missing}"):
        StandardizedTransformer(str(small_checkpoint), family=family)  # here


def test_a_registered_family_without_its_maps(small_checkpoint, monkeypatch):
    model_type = AutoConfig.from_pretrained(small_checkpoint).model_type
    monkeypatch.setitem(families.REGISTRY, model_type, SimpleNamespace(RENAME={}))
    with mistake(TypeError, repr(model_type), "no ENVOYS"):
        StandardizedTransformer(str(small_checkpoint))  # here


def test_a_directory_without_config(tmp_path):
    with mistake((OSError, ValueError), re.escape(str(tmp_path)), r"config\.json"):
        StandardizedTransformer(str(tmp_path))  # here


def test_a_directory_that_is_not_there(tmp_path):
    with mistake((OSError, ValueError), "absent"):
        StandardizedTransformer(str(tmp_path / "absent"))  # here


def test_a_config_of_an_unknown_type(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "no_such_type"}')
    with mistake(ValueError, "no_such_type"):
        StandardizedTransformer(str(tmp_path))  # here


def test_an_encoder(tmp_path):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    BertConfig(**sizes).save_pretrained(tmp_path)
    with mistake(UnsupportedFamily, "'bert'", "encoder", "TransformersModel"):
        StandardizedTransformer(str(tmp_path))  # here
    with mistake(UnsupportedFamily, "'bert'", "encoder"):
        StandardizedTransformer(BertModel(BertConfig(**sizes)))  # here


def test_an_encoder_decoder(tmp_path):
    T5Config(d_model=32, num_layers=2, num_heads=4).save_pretrained(tmp_path)
    with mistake(UnsupportedFamily, "'t5'", "encoder-decoder", "TransformersModel"):
        StandardizedTransformer(str(tmp_path))  # here


def test_a_module_without_config():
    with mistake(ValueError, "Linear", "no config", "family="):
        StandardizedTransformer(torch.nn.Linear(2, 2))  # here


def test_tokenizer_attributes_that_do_not_exist(small_checkpoint):
    with mistake(ValueError, "tokenizer_kwargs", "no_such_side"):
        StandardizedTransformer(str(small_checkpoint), tokenizer_kwargs={"no_such_side": "left"})  # here


def test_text_without_a_tokenizer():
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    model = StandardizedTransformer(AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=50, **sizes)).eval())
    for text in ("hello", ["hello", "there"]):
        with mistake(ValueError, "no tokenizer", "token ids", "tokenizer="), model.trace(text):  # here
            model.logits.save()
    with mistake(ValueError, "no tokenizer"):
        model.probs_to_dict(torch.zeros(50))  # here
    assert logits(model).shape == (2, 6, 50)
