"""The demo's script on models of other kinds: mixtures of experts, recurrent mixers, hybrids of both."""

import io

import pytest
import torch

from nnterp import demo
from nnterp.demo.terminal import Terminal

SHARED = {"vocab_size": 400, "hidden_size": 32, "num_hidden_layers": 4, "initializer_range": 0.3}
SPECIAL = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 128}
EXPERTS = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}

KINDS = {
    "mixtral": {**HEADS, **EXPERTS, "num_local_experts": 4},
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 4},
    "qwen3_next": {
        **HEADS,
        **EXPERTS,
        "head_dim": 8,
        "num_experts": 4,
        "shared_expert_intermediate_size": 24,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
}


@pytest.fixture(scope="module", params=KINDS)
def directory(request, build_tokenizer, tmp_path_factory):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(request.param, **SHARED, **SPECIAL, **KINDS[request.param])
    found = tmp_path_factory.mktemp(request.param)
    AutoModelForCausalLM.from_config(config).save_pretrained(found)
    build_tokenizer().save_pretrained(found)
    return request.param, found


def test_every_experiment_runs_or_says_what_is_missing(directory, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    kind, checkpoint = directory
    stream, html = io.StringIO(), tmp_path / "page.html"
    (examined,) = demo.run([str(checkpoint)], html, Terminal(stream), device="cpu")
    missing = {section.title: section.reason for section in examined.sections if section.finding is None}
    printed = stream.getvalue()
    assert all(title in printed for title in demo.EXPERIMENTS)
    assert html.exists()
    if kind == "mamba2":
        assert list(missing) == ["An induction head"]
        assert "self_attn" in missing["An induction head"]
    else:
        assert missing == {}
