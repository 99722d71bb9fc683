"""A model split over two processes is read and edited as the whole one: every value, every edit, every gradient.

Each family runs once alone and once on two ranks that talk over gloo, both through `worker.py`, and what they computed
is compared. Llama's heads and neurons stay split between the projections, OLMo 2's are gathered for the norms over all
heads, GPT-NeoX has one projection for the three inputs and reads one stream twice, Granite scales what it adds.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nnterp.components.attention import Attention
from nnterp.components.sharded import WholeValues, add_rules
from nnterp.testing import checkpoint

WORKER = Path(__file__).parent / "worker.py"
SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
FAMILIES = {
    "llama": {**SMALL, "num_key_value_heads": 2},
    "olmo2": {**SMALL, "num_key_value_heads": 2},
    "gpt_neox": SMALL,
    "granite": {**SMALL, "num_key_value_heads": 2, "residual_multiplier": 0.3, "embedding_multiplier": 2.0},
}
#: How far the two may be apart, relative to the size of the tensor: sums are taken in another order.
TOLERANCE, GRADIENTS = 1e-5, 1e-4


def run(*command, directory):
    """Run one measurement to its end; what it printed is the failure's message."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, *command], cwd=directory, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-6000:]


@pytest.fixture(params=FAMILIES)
def measured(request, tmp_path):
    """What one process computed, and what each of two ranks did."""
    config = checkpoint.config(model_type=request.param, **FAMILIES[request.param])
    directory = str(checkpoint.save(config, tmp_path / request.param))
    run(str(WORKER), "alone", directory, directory=tmp_path)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    run(*launcher, str(WORKER), "rank", directory, directory=tmp_path)
    return [torch.load(tmp_path / name, weights_only=False) for name in ("alone-0.pt", "rank-0.pt", "rank-1.pt")]


def differs(expected, found, tolerance):
    """Whether two results are not the same."""
    if isinstance(expected, tuple):
        return any(differs(*each, tolerance) for each in zip(expected, found, strict=True))
    if not isinstance(expected, torch.Tensor):
        return expected != found
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return True
    scale = expected.abs().max().clamp(min=1) if expected.is_floating_point() else 1
    return bool(((expected - found).abs() > tolerance * scale).any())


@pytest.mark.slow
def test_two_ranks_compute_what_one_process_does(measured):
    alone, *ranks = measured
    for rank in ranks:
        assert rank.keys() == alone.keys()
        wrong = [
            name
            for name, expected in alone.items()
            if differs(expected, rank[name], GRADIENTS if name.endswith("gradient") else TOLERANCE)
        ]
        assert wrong == []


# -- on one process ---------------------------------------------------------------------------------------------------


def test_one_process_has_no_rules(small_model):
    """Nothing is looked up or copied there: the interleaver tests one attribute."""
    fragments = small_model.interleaver.fragments
    assert isinstance(fragments, WholeValues)
    assert not fragments.enabled
    with small_model.trace("hello"):
        small_model.layers[0].self_attn.attention_queries.save()
    assert not fragments.tp_rules


def test_a_value_laid_out_otherwise_where_it_is_served_is_refused(small_model, monkeypatch):
    """Rather than put together along an axis that is another one there."""
    fragments = WholeValues()
    fragments.enabled = True
    attention = small_model.layers[0].self_attn
    output = f"{attention.o_proj.path}.input"
    fragments.tp_rules[output] = ("mesh", "placement")
    monkeypatch.setattr(small_model.interleaver, "fragments", fragments)
    values = {"attention_premix": Attention.attention_premix.at("output")}
    monkeypatch.setattr(type(attention), "values", lambda self: values)
    add_rules(attention)
    with pytest.raises(RuntimeError, match="attention_premix of .* cannot be put together"):
        fragments.whole(f"{attention.path}.output", torch.zeros(1))
