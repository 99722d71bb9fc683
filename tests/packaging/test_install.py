"""The distributions installed into fresh environments: the core alone, with one package, with a third-party plugin."""

import pytest

pytestmark = pytest.mark.packaging

TINY_LLAMA = """
import json, warnings
import torch
from nnterp import StandardizedTransformer, families
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4)
module = LlamaForCausalLM(config).eval()
ids = torch.tensor([[3, 1, 4, 1, 5]])
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    model = StandardizedTransformer(module)
with model.trace(ids):
    stream = model.layers[1].layer_output.save()
    logits = model.logits.save()
with torch.no_grad():
    expected = module(input_ids=ids, output_hidden_states=True)
print(json.dumps({
    "family": model.family.__name__,
    "warnings": [str(warning.message) for warning in caught if "nnterp" in str(warning.message)],
    "stream": torch.equal(stream, expected.hidden_states[2]),
    "logits": torch.equal(logits, expected.logits),
}))
"""


def test_the_core_alone(fresh):
    core = fresh("nnterp-core")
    assert core.distributions() == {"nnterp-core"}
    assert core.report("import json, nnterp; from nnterp import families; print(json.dumps(families.known()))") == []

    llama = core.report(TINY_LLAMA)
    assert llama["family"] == "nnterp.families.default"
    assert llama["stream"]
    assert llama["logits"]
    (warning,) = llama["warnings"]
    assert "'llama'" in warning
    assert "nnterp-families-dense serves it: pip install nnterp" in warning

    advice = core.report("""
import json, warnings
import nnterp
from nnterp import families

def said(action):
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            action()
    except (Warning, ImportError, ValueError) as error:
        return str(error)

print(json.dumps({
    "moe": said(lambda: families.lookup("mixtral")),
    "recurrent": said(lambda: families.lookup("mamba2")),
    "vllm": said(lambda: families.lookup("llama", engine="vllm")),
    "engine": said(lambda: nnterp.StandardizedVLLM),
}))
""")
    for extra, message in [("moe", "moe"), ("recurrent", "recurrent"), ("vllm", "vllm"), ("vllm", "engine")]:
        assert f"pip install 'nnterp[{extra}]'" in advice[message]


def test_one_extra(fresh):
    environment = fresh("nnterp[recurrent]")
    assert environment.distributions() == {
        "nnterp",
        "nnterp-core",
        "nnterp-families-dense",
        "nnterp-families-recurrent",
    }
    plugins = environment.report("""
import json
from nnterp import families
print(json.dumps({plugin.name: plugin.state for plugin in families.plugins()}))
""")
    assert plugins == {"dense": "loaded", "recurrent": "loaded"}
    llama = environment.report(TINY_LLAMA)
    assert llama == {"family": "nnterp_families_dense.llama", "warnings": [], "stream": True, "logits": True}


def test_somebody_elses_plugin(fresh):
    environment = fresh("nnterp-core", "acme-nnterp")
    assert environment.distributions() == {"nnterp-core", "acme-nnterp"}
    acme = environment.report("""
import json
import torch
from nnterp import StandardizedTransformer, families
from acme_nnterp._modeling import AcmeConfig, AcmeForCausalLM

config = AcmeConfig(vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4)
model = StandardizedTransformer(AcmeForCausalLM(config).eval())
with model.trace(torch.tensor([[3, 1, 4, 1, 5]])):
    entering = model.layers[1].layer_input.save()
    attention = model.layers[1].self_attn.attention_output.save()
    mlp = model.layers[1].mlp.mlp_output.save()
    leaving = model.layers[1].layer_output.save()
print(json.dumps({
    "known": families.known(),
    "family": model.family.__name__,
    "one object": model.family is families.acme,
    "identity": torch.allclose(entering + attention + mlp, leaving, atol=1e-6),
}))
""")
    assert acme == {"known": ["acme"], "family": "acme_nnterp.acme", "one object": True, "identity": True}
