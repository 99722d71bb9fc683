"""Standard values of a model that runs on a server, which knows the plain model alone.

A client that loaded no weights traces through nnsight's own protocol (`server.py`, another process) and gets what the
same checkpoint gives when it is loaded here: every value, edits of each, sessions, generation, errors at the client.
"""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from nnsight import CONFIG
from nnsight.intervention.backends.remote import RemoteError
from nnsight.modeling import huggingface
from nnsight.modeling.transformers import TransformersModel
from transformers import AutoTokenizer

from nnterp import StandardizedTransformer, Unavailable
from nnterp.testing import checkpoint

SERVER = Path(__file__).parent / "server.py"
SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
FAMILIES = {
    "llama": {**SMALL, "num_key_value_heads": 2},
    "gpt2": {"n_layer": 2, "n_embd": 32, "n_head": 4},
    "granite": {**SMALL, "num_key_value_heads": 2, "residual_multiplier": 0.3},
}
IDS = torch.tensor([[5, 17, 42, 3, 9], [8, 1, 77, 20, 31]])
BLOCK = (
    "layer_input",
    "attention_norm_output",
    "self_attn.attention_queries",
    "self_attn.attention_keys",
    "self_attn.attention_values",
    "self_attn.attention_scores",
    "self_attn.attention_probabilities",
    "self_attn.attention_head_outputs",
    "self_attn.attention_premix",
    "self_attn.attention_output",
    "layer_mid",
    "mlp_norm_output",
    "mlp_input",
    "mlp.mlp_activation",
    "mlp.mlp_neurons",
    "mlp.mlp_output",
    "layer_output",
)

pytestmark = [
    pytest.mark.slow,
    # Names of a block read in one line of code each, with whatever the client's terminal shows switched off.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A directory per family; asked for by its path, which is what the client's key then says."""
    found = {}
    for family, fields in FAMILIES.items():
        config = checkpoint.config(model_type=family, **fields)
        found[family] = str(checkpoint.save(config, tmp_path_factory.mktemp(family)))
        huggingface._ID_CACHE[found[family]] = found[family]  # no hub to ask for its canonical name
    return found


@pytest.fixture(scope="module")
def server(checkpoints):
    """The address of a server that has the checkpoints."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(SERVER), *checkpoints.values()]
    shown, CONFIG.APP.REMOTE_LOGGING = CONFIG.APP.REMOTE_LOGGING, False
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        process.stdin.close()
    CONFIG.APP.REMOTE_LOGGING = shown


class Pair:
    """A checkpoint as a client sees it, without weights, and loaded here."""

    def __init__(self, directory, attention="eager"):
        self.client = StandardizedTransformer(directory, attn_implementation=attention)
        self.local = StandardizedTransformer(
            directory, dispatch=True, device="cpu", attn_implementation=attention, dtype=torch.float32
        )


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, checkpoints):
    return Pair(checkpoints[request.param])


@pytest.fixture(scope="module")
def llama(checkpoints):
    return Pair(checkpoints["llama"])


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def read(model, name, **run):
    with model.trace(IDS, **run):
        value = model.layers[1].get(name).detach().save()
    return value


def edit(model, name, value, **run):
    """The logits with ``value`` in place of a value."""
    *path, attribute = name.split(".")
    envoy = model.layers[1].get(path[0]) if path else model.layers[1]
    with model.trace(IDS, **run):
        setattr(envoy, attribute, value)
        logits = model.logits.detach().save()
    return logits


def test_the_key_is_the_plain_models(pair, checkpoints):
    """The server deploys plain models, by these keys."""
    directory = pair.client.repo_id
    tokenizer = AutoTokenizer.from_pretrained(directory)
    plain = TransformersModel(directory, task="text-generation", tokenizer=tokenizer)
    assert pair.client.to_model_key() == plain.to_model_key()


def test_every_value_of_a_block(pair, server):
    """Read and replaced by another, each the same as here; the client never loads a weight."""
    for name in BLOCK:
        if pair.local.support(1)[name] is not None:
            continue
        found = read(pair.client, name, remote=server)
        close(found, read(pair.local, name))
        other = torch.randn(found.shape, generator=torch.Generator().manual_seed(0))
        close(edit(pair.client, name, other, remote=server), edit(pair.local, name, other))
    assert not pair.client.dispatched


def test_in_order_in_one_trace(pair, server):
    results = []
    for model, run in ((pair.client, {"remote": server}), (pair.local, {})):
        block = model.layers[1]
        with model.trace(IDS, **run):
            queries = block.self_attn.attention_queries.detach().save()
            block.self_attn.attention_scores[:, 1] = 0
            pattern = block.self_attn.attention_probabilities.detach().save()
            outputs = block.self_attn.attention_head_outputs.detach().save()
            block.layer_mid[:] *= 2
            logits = model.logits.detach().save()
            top = model.next_token_probs.detach().save()
        results.append([queries, pattern, outputs, logits, top])
    for found, expected in zip(*results, strict=True):
        close(found, expected)


def test_methods_of_the_model(llama, server):
    results = []
    for model, run in ((llama.client, {"remote": server}), (llama.local, {})):
        with model.trace(IDS, **run):
            lens = model.project_on_vocab(model.layers[-1].layer_output).detach().save()
        with model.trace(IDS, **run):
            model.steer(0, torch.ones(32), factor=0.5)
            model.skip_layer(1)
            logits = model.logits.detach().save()
        results.append([lens, logits])
    for found, expected in zip(*results, strict=True):
        close(found, expected)


def test_a_generation_read_at_a_late_step(llama, server):
    results = []
    for model, run in ((llama.client, {"remote": server}), (llama.local, {})):
        with model.generate(IDS, max_new_tokens=4, do_sample=False, **run) as tracer:
            found = [].save()
            for _ in tracer.iter[1]:
                model.layers[0].layer_output.detach().save()
            for _ in tracer.iter[2]:
                found.append(model.layers[1].self_attn.attention_scores.detach())
            for _ in tracer.iter[3]:
                found.append(model.layers[1].layer_mid.detach())
        results.append(found)
    for found, expected in zip(*results, strict=True):
        close(found, expected)


def test_a_session_and_a_stored_edit(llama, server):
    """What one trace of a session finds goes into the next; an edit travels with the model."""
    results = []
    for model, run in ((llama.client, {"remote": server}), (llama.local, {})):
        with model.session(**run):
            with model.trace(IDS):
                pattern = model.layers[0].self_attn.attention_probabilities.detach()
            with model.trace(IDS):
                model.layers[1].self_attn.attention_probabilities = pattern
                logits = model.logits.detach().save()
        with model.edit() as (_, edited):
            edited.layers[1].layer_mid = torch.zeros(2, 5, 32)
        with edited.trace(IDS, **run):
            contribution = edited.layers[1].mlp.mlp_output.detach().save()
        results.append([logits, contribution])
    for found, expected in zip(*results, strict=True):
        close(found, expected)


def test_text_and_several_invokes(llama, server):
    results = []
    for model, run in ((llama.client, {"remote": server}), (llama.local, {})):
        with model.trace(**run) as tracer:
            with tracer.invoke("Paris is the capital"):
                first = model.layers[1].self_attn.attention_probabilities.detach().save()
            with tracer.invoke("Rome"):
                second = model.layers[1].layer_mid.detach().save()
        results.append([first, second])
    for found, expected in zip(*results, strict=True):
        close(found, expected)


def test_a_plain_client_of_the_same_server(llama, server):
    """Before and after it has served standard values: the same outputs, operations and labels."""
    directory = llama.client.repo_id
    plain = TransformersModel(
        directory,
        task="text-generation",
        tokenizer=AutoTokenizer.from_pretrained(directory),
        attn_implementation="eager",
    )
    read(llama.client, "layer_mid", remote=server)
    with plain.trace(IDS, remote=server):
        operations = plain.model.layers[1].source
        names = list(operations.names).save()
        operation = operations.self_mlp_0.output.detach().save()
    read(llama.client, "layer_mid", remote=server)
    with llama.local.trace(IDS):
        expected = llama.local.layers[1].mlp.mlp_output.detach().save()
    close(operation, expected)
    assert names == list(llama.local.layers[1].source.names)


def test_what_is_not_there_is_said_by_the_server(checkpoints, server):
    """The client's attention implementation goes with the request, so both agree on what there is."""
    pair = Pair(checkpoints["llama"], attention="sdpa")
    close(
        read(pair.client, "self_attn.attention_queries", remote=server), read(pair.local, "self_attn.attention_queries")
    )
    with pytest.raises(RemoteError, match="load it with attn_implementation"):
        read(pair.client, "self_attn.attention_scores", remote=server)
    with pytest.raises(Unavailable):
        read(pair.local, "self_attn.attention_scores")


@pytest.mark.parametrize("name", ["layer_mid", "self_attn.attention_scores"])
def test_an_assignment_of_the_wrong_shape_is_refused(llama, server, name):
    with pytest.raises(RemoteError, match="nothing is broadcast"):
        edit(llama.client, name, torch.zeros(1, 1), remote=server)
    close(read(llama.client, name, remote=server), read(llama.local, name))


def test_a_simulated_remote_run(llama):
    """``remote="local"``: the same bytes as a request's, run here."""
    model = llama.local
    for name in ("layer_output", "self_attn.attention_queries", "self_attn.attention_scores", "layer_mid"):
        with contextlib.redirect_stdout(None):
            close(read(model, name, remote="local"), read(model, name))
    close(
        edit(model, "layer_mid", torch.zeros(2, 5, 32), remote="local"),
        edit(model, "layer_mid", torch.zeros(2, 5, 32)),
    )
