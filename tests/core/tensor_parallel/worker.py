"""Everything one process computes of the checkpoint it is given: run alone, and by two ranks that share the model.

usage: worker.py RESULTS CHECKPOINT
"""

import os
import sys

import torch

from nnterp import StandardizedTransformer, Unavailable

RANK = int(os.environ.get("RANK", 0))
IDS = torch.tensor([[5, 17, 42, 3, 9], [8, 1, 77, 20, 31]])

#: Values of a block with the index of what an edit changes: head 1, or one neuron, or everything.
HEAD, HEAD_OUTPUT, NEURON, ALL = (slice(None), 1), (slice(None), slice(None), 1), (..., 5), ...
EDITS = {
    "layer_input": ALL,
    "self_attn.attention_queries": HEAD,
    "self_attn.attention_keys": HEAD,
    "self_attn.attention_values": HEAD,
    "self_attn.attention_scores": HEAD,
    "self_attn.attention_probabilities": HEAD,
    "self_attn.attention_head_outputs": HEAD_OUTPUT,
    "self_attn.attention_premix": HEAD_OUTPUT,
    "self_attn.attention_output": ALL,
    "layer_mid": ALL,
    "mlp_input": ALL,
    "mlp.mlp_activation": NEURON,
    "mlp.mlp_neurons": NEURON,
    "mlp.mlp_output": ALL,
    "layer_output": ALL,
}
ROOT = ("token_embeddings", "final_norm_output", "lm_head_output", "logits", "next_token_probs")


def host(model, name):
    """The envoy that has the value ``name`` of block 1, and its name there."""
    *path, value = name.split(".")
    return model.layers[1].get(path[0]) if path else model.layers[1], value


def read(model, name):
    envoy, value = host(model, name)
    with model.trace(IDS):
        found = getattr(envoy, value).detach().clone().save()
    return found


def edit_in_place(model, name, index):
    envoy, value = host(model, name)
    with model.trace(IDS):
        getattr(envoy, value)[index] += 1
        logits = model.logits.detach().clone().save()
    return logits


def assign(model, name, index):
    envoy, value = host(model, name)
    with model.trace(IDS):
        changed = getattr(envoy, value).clone()
        changed[index] *= -2
        setattr(envoy, value, changed)
        logits = model.logits.detach().clone().save()
    return logits


def gradient(model, name):
    """How the sum of the squared logits changes with the value."""
    envoy, value = host(model, name)
    with model.trace(IDS):
        found = getattr(envoy, value)
        found.requires_grad_(True) if found.is_leaf else None
        with model.logits.pow(2).sum().backward():
            grad = found.grad.clone().save()
    return grad


def root_value(model, name):
    with model.trace(IDS):
        found = getattr(model, name).detach().clone().save()
    return found


def generation(model):
    """Tokens with one head silenced at every step, and the pattern of a step first read there."""
    attention = model.layers[1].self_attn
    with model.generate(IDS, max_new_tokens=3, do_sample=False) as tracer:
        for _ in tracer.iter[:3]:
            attention.attention_head_outputs[:, :, 1] = 0
        tokens = tracer.result.save()
    with model.generate(IDS, max_new_tokens=3, do_sample=False) as tracer:
        for _ in tracer.iter[1]:
            model.layers[0].layer_output.save()
        for _ in tracer.iter[2]:
            pattern = attention.attention_probabilities.detach().clone().save()
    return tokens, pattern


def invokes(model):
    """Two prompts, one of which loses a head."""
    attention = model.layers[1].self_attn
    with model.trace() as tracer:
        with tracer.invoke(IDS[:1]):
            attention.attention_values[:, 1] = 0
            first = model.logits.detach().clone().save()
        with tracer.invoke(IDS[1:]):
            queries = attention.attention_queries.detach().clone().save()
            second = model.logits.detach().clone().save()
    return first, queries, second


def methods(model):
    with model.trace(IDS):
        last = model.layers[-1].layer_output
        lens = model.project_on_vocab(last).detach().clone().save()
    with model.trace(IDS):
        model.steer(1, torch.ones(model.hidden_size), factor=0.5)
        steered = model.logits.detach().clone().save()
    with model.trace(IDS):
        model.skip_layer(1)
        skipped = model.logits.detach().clone().save()
    return lens, steered, skipped


def sizes(model):
    names = ("num_heads", "num_kv_heads", "head_dim", "qk_head_dim")
    found = {name: getattr(model.layers[1].self_attn, name) for name in names}
    return {**found, "intermediate_size": model.layers[1].mlp.intermediate_size}


def measure(model):
    """Every value, edit and method, by name; Unavailable by its words."""
    todo = {"sizes": (sizes, ()), "support": (lambda model: model.support(), ())}
    todo |= {f"{name} read": (read, (name,)) for name in EDITS}
    todo |= {f"{name} edited in place": (edit_in_place, (name, index)) for name, index in EDITS.items()}
    todo |= {f"{name} assigned": (assign, (name, index)) for name, index in EDITS.items()}
    todo |= {f"{name} gradient": (gradient, (name,)) for name in EDITS}
    todo |= {name: (root_value, (name,)) for name in ROOT}
    todo |= {each.__name__: (each, ()) for each in (generation, invokes, methods)}
    found = {}
    for name, (function, arguments) in todo.items():
        try:
            found[name] = function(model, *arguments)
        except Unavailable as reason:
            found[name] = str(reason)
    with torch.no_grad():
        found["in place without gradients"] = edit_in_place(model, "self_attn.attention_queries", HEAD)
    if model._module._supports_sdpa:
        model._module.set_attn_implementation("sdpa")
        for name in ("self_attn.attention_queries", "self_attn.attention_head_outputs"):
            found[f"{name} under sdpa"] = read(model, name), edit_in_place(model, name, EDITS[name])
    return found


def load(checkpoint):
    if "RANK" not in os.environ:
        return StandardizedTransformer(checkpoint, dispatch=True, device="cpu", attn_implementation="eager")
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(tp_size=2)
    return StandardizedTransformer(checkpoint, dispatch=True, attn_implementation="eager", distributed_config=config)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
    results, checkpoint = sys.argv[1:]
    torch.save(measure(load(checkpoint)), f"{results}-{RANK}.pt")
    if "RANK" in os.environ:
        torch.distributed.destroy_process_group()
