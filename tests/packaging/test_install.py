"""The distributions installed into fresh environments: the core alone, with one package, with a third-party plugin."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

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


SERVED = """
import json
from nnterp import families

found = [(name, families.lookup(name)) for name in {types!r}]
print(json.dumps({{name: [family.__name__, len(family.ENVOYS) > 0] for name, family in found}}))
"""

RUN_ONE = """
import json
import torch
from nnterp import StandardizedTransformer
from transformers import AutoConfig, AutoModelForCausalLM

config = AutoConfig.for_model({model_type!r}, **{config!r})
module = AutoModelForCausalLM.from_config(config).eval()
ids = torch.tensor([[3, 1, 4, 1, 5]])
model = StandardizedTransformer(module)
with torch.no_grad(), model.trace(ids):
    value = model.layers[0].{value}.save()
    logits = model.logits.save()
with torch.no_grad():
    expected = module(input_ids=ids).logits
print(json.dumps([list(value.shape), torch.equal(logits, expected)]))
"""

SMALL = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2}


def family_types(package):
    """The types a package of this repository serves: a module each."""
    source = ROOT / package / "src" / package.replace("-", "_")
    return sorted(path.stem for path in source.glob("*.py") if not path.stem.startswith("_"))


def test_the_mixtures(fresh):
    environment = fresh("nnterp[moe]")
    assert environment.distributions() == {"nnterp", "nnterp-core", "nnterp-families-dense", "nnterp-families-moe"}
    types = family_types("nnterp-families-moe")
    assert len(types) >= 12
    served = environment.report(SERVED.format(types=types))
    assert served == {name: [f"nnterp_families_moe.{name}", True] for name in types}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = {**SMALL, **heads, "intermediate_size": 48, "num_local_experts": 4}
    ran = environment.report(RUN_ONE.format(model_type="mixtral", config=config, value="mlp.router_logits"))
    assert ran == [[1, 5, 4], True]


def test_the_recurrent_mixers(fresh):
    environment = fresh("nnterp[recurrent]")
    types = family_types("nnterp-families-recurrent")
    served = environment.report(SERVED.format(types=types))
    assert served == {name: [f"nnterp_families_recurrent.{name}", True] for name in types}
    config = {**SMALL, "num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1}
    ran = environment.report(RUN_ONE.format(model_type="mamba2", config=config, value="linear_attn.state_output"))
    assert ran == [[1, 4, 8, 16], True]


def test_the_wrappers(fresh):
    """The overlays are there, and the script of the package's README, run by it alone, prints what it says."""
    environment = fresh("nnterp[vision]")
    types = family_types("nnterp-vision")
    assert len(types) >= 8
    served = environment.report(f"""
import json
from nnterp import families
print(json.dumps({{name: families.wrapper(name).__name__ for name in {types!r}}}))
""")
    assert served == {name: f"nnterp_vision.{name}" for name in types}
    readme = (ROOT / "nnterp-vision/README.md").read_text()
    script = "\n".join(re.findall(r"```python\n(.*?)```", readme, re.DOTALL))
    assert environment.run("-c", script).splitlines() == re.findall(r"^# (\(\(.*)$", script, re.MULTILINE)


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
