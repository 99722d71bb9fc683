"""The sample distribution: what its two lines of metadata and its one file give a user."""

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import nnsight
import pytest
import torch

from nnterp import StandardizedTransformer, families
from nnterp.testing import FamilySuite, Site


@pytest.fixture(scope="module", autouse=True)
def installed(acme_site: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(acme_site)
        importlib.import_module("acme_nnterp.acme")
        yield


@pytest.fixture
def modeling() -> ModuleType:
    return importlib.import_module("acme_nnterp._modeling")


@pytest.fixture
def module(modeling: ModuleType) -> torch.nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    torch.manual_seed(0)
    return modeling.AcmeForCausalLM(modeling.AcmeConfig(vocab_size=50, num_key_value_heads=2, **sizes)).eval()


def test_it_is_found():
    listed = next(plugin for plugin in families.plugins() if plugin.distribution == "acme-nnterp")
    assert (listed.name, listed.version, listed.package, listed.state) == ("acme", "1.3.0", "acme_nnterp", "loaded")
    assert listed.families[None] == {"acme": "acme_nnterp.acme"}
    assert families.lookup("acme") is families.acme is sys.modules["acme_nnterp.acme"]


def test_its_checkpoint_loads_in_a_process_that_has_not_seen_the_modeling_code(module, acme_site, tmp_path):
    module.save_pretrained(tmp_path)
    script = (
        "import sys, nnterp; from nnterp.loading import read_config;"
        f"assert 'acme_nnterp._modeling' not in sys.modules; print(read_config({str(tmp_path)!r}, {{}}).model_type)"
    )
    environment = {**os.environ, "PYTHONPATH": str(acme_site)}
    ran = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert ran.stdout.strip() == "acme", ran.stderr


def test_its_model_answers_to_the_standard_names(module):
    model = StandardizedTransformer(module)
    assert model.family is families.acme
    assert type(model.layers[0]) is families.acme.Layer
    assert model.layers[0].self_attn is model.model.layers[0].mixer
    assert (model.num_layers, model.num_heads, model.num_kv_heads, model.hidden_size) == (3, 4, 2, 32)

    ids = torch.tensor([[3, 1, 4, 1, 5]])
    with model.trace(ids):
        streams = nnsight.save([])
        for block in model.layers:
            entering, attention = block.layer_input, block.self_attn.attention_output
            streams.append((entering, attention, block.mlp.mlp_output, block.layer_output))
        logits = model.logits.save()
    with torch.no_grad():
        expected = module(input_ids=ids, output_hidden_states=True)
    torch.testing.assert_close(logits, expected.logits)
    for block, (entering, attention, mlp, leaving) in enumerate(streams):
        torch.testing.assert_close(entering, expected.hidden_states[block])
        torch.testing.assert_close(entering + attention + mlp, leaving)


def test_an_edit_reaches_its_model(module):
    model = StandardizedTransformer(module)
    ids = torch.tensor([[3, 1, 4]])
    with model.trace(ids):
        model.skip_layers(0, model.num_layers - 1)
        logits = model.logits.save()
    with torch.no_grad():
        torch.testing.assert_close(logits, module.lm_head(module.model.norm(module.model.embed_tokens(ids))))


def test_the_auto_classes_know_it_once_it_is_looked_up(module, tmp_path):
    from transformers import AutoModelForCausalLM

    families.lookup("acme")
    module.save_pretrained(tmp_path)
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path)) is type(module)


class TestConformance(FamilySuite):
    """The kit that nnterp's own families are tested with, as the author of a plugin subclasses it."""

    FAMILY = "acme"
    CONFIG = {
        "model_type": "acme",
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
    }
    NATIVE = {
        "embed_tokens": "model.embed_tokens",
        "layers": "model.layers",
        "norm": "model.norm",
        "layers.0.input_layernorm": "model.layers.0.pre_norm",
        "layers.0.self_attn": "model.layers.0.mixer",
        "layers.0.mlp": "model.layers.0.ffn",
        "layers.0.post_attention_layernorm": None,
    }
    EXPECTED_UNAVAILABLE = {"layer_mid": "parallel"}
    SITES = {"mlp_norm_output": Site("pre_norm")}
