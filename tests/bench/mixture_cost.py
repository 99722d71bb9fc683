"""What reading a mixture costs, one expert on demand, and a look at DeepSeek-V3 from its config alone."""

import time
from tempfile import TemporaryDirectory
from typing import Any

import nnsight
import torch
from measure import Row, Samples, in_ms
from nnsight.modeling.transformers import TransformersModel
from subjects import one_thread, tokenizer
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, DeepseekV3Config, MixtralConfig

from nnterp import StandardizedTransformer

WHAT = "mixtures"

LAYERS = 12
EXPERTS = 64
TOP_K = 2
WIDTH = 64
TOKENS = 16
ROUNDS = 5
TURNS = 20

VALUES = ("router_logits", "expert_weights", "expert_indices", "expert_outputs", "routed_output", "mlp_output")

#: DeepSeek-V3 as its authors publish it.
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "max_position_embeddings": 163840,
}


def rows() -> list[Row]:
    return [*reading(), *one_expert(), *deepseek()]


def mixtral(weights: Any = None, layers: int = LAYERS, width: int = WIDTH) -> nn.Module:
    config = MixtralConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=width,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_local_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        vocab_size=256,
        experts_implementation="grouped_mm",
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    if weights is not None:
        model.load_state_dict(weights, assign=True)
    return model


# -- the six values of every block ------------------------------------------------------------------------------------


def reading() -> list[Row]:
    torch.manual_seed(0)
    ids = torch.randint(0, 256, (1, TOKENS))
    samples = Samples()
    with one_thread():
        weights = mixtral().state_dict()
        for _ in range(ROUNDS):
            subjects = {"nnterp": with_nnterp(mixtral(weights), ids), "nnsight": with_nnsight(mixtral(weights), ids)}
            for run in subjects.values():
                run(None)
            samples.interleave(subjects, TURNS)
    what = f"six values of {LAYERS} mixtures of {EXPERTS} experts"
    return [in_ms(what, "nnsight", samples, "nnterp", "nnsight", 1.10)]


def with_nnterp(module: nn.Module, ids: Tensor) -> Any:
    model = StandardizedTransformer(module, tokenizer=tokenizer())

    def run(_: Any) -> Any:
        with model.trace(ids):
            read = nnsight.save([getattr(block.mlp, value) for block in model.layers for value in VALUES])
        return read

    return run


def with_nnsight(module: nn.Module, ids: Tensor) -> Any:
    """The same six with what nnsight has of its own: modules' inputs and outputs, and operations of their forwards."""
    model = TransformersModel(module, task="text-generation", tokenizer=tokenizer())
    mixtures = [block.mlp for block in model.model.layers]
    call = [name for name in mixtures[0].experts.source.names if name.startswith("experts_forward")][-1]

    def run(_: Any) -> Any:
        with model.trace(ids):
            found = []
            for mixture in mixtures:
                found.append(mixture.gate.output[0].view(1, TOKENS, EXPERTS))
                (_, indices, weights), _ = mixture.experts.inputs
                found += [weights.view(1, TOKENS, TOP_K), indices.view(1, TOKENS, TOP_K)]
                slots = getattr(mixture.experts.source, call).source
                found.append(slots.weighted_out_view_0.output.view(1, TOKENS, TOP_K, WIDTH))
                found += [mixture.experts.output.view(1, TOKENS, WIDTH), mixture.output]
            read = nnsight.save(found)
        return read

    return run


# -- one expert -------------------------------------------------------------------------------------------------------


def one_expert() -> list[Row]:
    torch.manual_seed(0)
    samples = Samples()
    with one_thread():
        model = StandardizedTransformer(mixtral(layers=1, width=512), tokenizer=tokenizer())
        mixture = model.layers[0].mlp
        gate, up, down = (nn.Linear(512, 512, bias=False) for _ in range(3))
        hidden = torch.randn(4, 64, 512)
        subjects = {
            "expert_output": lambda _: mixture.expert_output(7, hidden),
            "dense": lambda _: down(F.silu(gate(hidden)) * up(hidden)),
        }
        for run in subjects.values():
            run(None)
        samples.interleave(subjects, 60)
    return [in_ms("expert_output, 512 wide, 256 tokens", "a dense MLP", samples, "expert_output", "dense", 1.05)]


# -- DeepSeek-V3 ------------------------------------------------------------------------------------------------------


def deepseek() -> list[Row]:
    with TemporaryDirectory() as checkpoint:  # a config and no weights
        DeepseekV3Config(**DEEPSEEK_V3).save_pretrained(checkpoint)
        first = StandardizedTransformer(checkpoint, tokenizer=tokenizer())  # what only the first build imports
        maps = {"rename": first._rename, "envoys": first._envoys}
        missing = {name for name, reason in first.support().items() if isinstance(reason, str)}
        if len(first.moe_layers) != 58 or first.layers[-1].mlp.num_experts != 256 or missing:
            raise AssertionError(f"not the model described: mixtures in {first.moe_layers}, without {missing}")
        samples = Samples()

        def standardized(_: Any) -> Any:
            model = StandardizedTransformer(checkpoint, tokenizer=tokenizer())
            return model, model.support()

        def plain(_: Any) -> Any:
            return TransformersModel(checkpoint, task="text-generation", tokenizer=tokenizer(), **maps)

        started = time.monotonic()
        samples.interleave({"nnterp": standardized, "nnsight": plain}, 3)
        if time.monotonic() - started < 0.1:
            raise AssertionError("nothing was built")
    return [
        in_ms("DeepSeek-V3 from its config, and support()", "nnsight, same maps", samples, "nnterp", "nnsight", 1.15)
    ]
