"""JetMoE: two choices of experts a token, for attention and for the MLP; one expert, two, or three of one key head."""

from contextlib import contextmanager

import pytest
import torch
from torch.nn import functional as F

from nnterp.testing import MixtureSuite, WrittenOut
from nnterp.testing.comparing import assert_close, assert_differs, assert_same
from nnterp.testing.mixture_facts import MixtureFacts
from nnterp.testing.mixture_writing import MixtureWriting

ROUTING = ("router_logits", "expert_weights", "expert_indices")


def choice(at, router, tokens):
    """The experts of each token and their weights: the top k, then a softmax over them."""
    logits = at("router_logits", F.linear(tokens, router.layer.weight).float())
    chosen, indices = logits.topk(router.top_k, dim=-1)
    return at("expert_indices", indices), at("expert_weights", chosen.softmax(-1).type_as(tokens))


class Written(WrittenOut):
    """The mixture, slot by slot."""

    def forward(self, at, hidden):
        tokens = hidden.flatten(0, 1)
        slots = at("expert_outputs", self.slots(tokens, *choice(at, self.router, tokens)))
        return at("routed_output", slots.sum(1)).view(hidden.shape) + self.mixture.bias


class RoutingWritten(WrittenOut):
    """The router of the attention: it orders the slots by their experts, which the bare module then runs."""

    @contextmanager
    def looping(self, at):
        def laid_out(module, args, kwargs):
            self.rows = kwargs["hidden_states"].shape[:2]

        def forward(tokens):
            indices, weights = choice(at, self.router, tokens)
            of_slot = indices.flatten().tolist()
            order = sorted(range(len(of_slot)), key=of_slot.__getitem__)
            slots, load = torch.tensor(order), [of_slot.count(e) for e in range(self.router.num_experts)]
            return slots, slots // self.router.top_k, weights.flatten()[slots], load, None

        handle = self.mixture.register_forward_pre_hook(laid_out, with_kwargs=True)
        self.router.forward = forward
        try:
            yield
        finally:
            handle.remove()
            del self.router.forward


CONFIG = {
    "model_type": "jetmoe",
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "kv_channels": 8,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
}
LAYOUTS = {
    "top_2": {},
    "top_1": {"config": {"num_experts_per_tok": 1}, "OWN_SIZES": {}},
    "top_3_of_one_key_head": {
        "config": {"num_experts_per_tok": 3, "num_key_value_heads": 1, "tie_word_embeddings": False},
        "OWN_SIZES": {f"self_attn.attention_{part}": {"num_kv_heads": 3} for part in ("keys", "values")},
    },
}


class TestJetMoe(MixtureSuite):
    FAMILY = "jetmoe"
    CONFIG = CONFIG
    NATIVE = {
        "embed_tokens": "model.embed_tokens",
        "layers": "model.layers",
        "norm": "model.norm",
        "layers.0.self_attn": "model.layers.0.self_attention",
        "layers.0.self_attn.o_proj": None,
    }
    EXPECTED_UNAVAILABLE = {
        **MixtureSuite.EXPECTED_UNAVAILABLE,
        "self_attn.attention_premix": "an output projection of its own",
    }
    OWN_SIZES = {f"self_attn.attention_{part}": {"num_kv_heads": 4} for part in ("keys", "values")}
    ROUTER = "router"
    EXPERTS = None
    EXPERT_WIDTH_KEY = "intermediate_size"
    IMPLEMENTATIONS = False
    OUTPUTS_LOGITS = False  # in a list with those of its attention: below
    LOOP = Written
    LAYOUTS = LAYOUTS

    def scanned(self):
        pytest.skip("its router counts the tokens of each expert, which shapes alone do not say")

    def expert(self, experts, expert, tokens):
        gate, up = (tokens @ experts.input_linear.weight[expert].T).chunk(2, dim=-1)
        return (F.silu(gate) * up) @ experts.output_linear.weight[expert].T

    def mixture_sum(self, routed, shared):
        return routed + self.module(f"layers.{self.EDITED}.mlp").bias

    def test_routed_output_is_what_the_experts_return(self):
        """There is no module that returns it: what the mixture adds, less its bias."""
        read = self.read_parts()
        assert_same(self.mixture_sum(read["routed_output"], None).detach(), read["mlp_output"])

    def test_router_logits_are_transformers(self):
        returned = self.bare(**self.inputs(), output_router_logits=True).router_logits
        routers = len(returned) // len(self.blocks)  # in 5.19.0 the attention's come twice
        for layer in self.blocks:
            block = self.model.layers[layer]
            with self.model.trace(self.ids):
                attended, read = block.self_attn.router_logits.clone().save(), block.mlp.router_logits.clone().save()
            of_block = returned[layer * routers : (layer + 1) * routers]
            assert_same(attended.flatten(0, 1), of_block[0])
            assert_same(read.flatten(0, 1), of_block[-1])


class TestRoutingOfAttention(MixtureFacts):
    """What the attention's own router chooses, read and edited as a mixture's is."""

    FAMILY, CONFIG, LAYOUTS = "jetmoe", CONFIG, LAYOUTS
    NATIVE, EXPECTED_UNAVAILABLE = TestJetMoe.NATIVE, TestJetMoe.EXPECTED_UNAVAILABLE

    test_every_value_edited = MixtureWriting.test_every_value_edited
    test_invokes_have_their_own_rows = MixtureWriting.test_invokes_have_their_own_rows
    test_steps_of_generation = MixtureWriting.test_steps_of_generation
    test_gradients_of_the_mixture = MixtureWriting.test_gradients_of_the_mixture
    logits_with, edit_live = MixtureWriting.logits_with, staticmethod(MixtureWriting.edit_live)
    parts = ROUTING

    @property
    def moe(self):
        """The attention, for the tests that are a mixture's."""
        return self.model.layers[self.EDITED].self_attn

    def read_parts(self):
        with self.model.trace(self.ids):
            read = {part: getattr(self.moe, part).clone() for part in ROUTING}.save()
        return {part: value.detach() for part, value in read.items()}

    def written_out(self, layer=None, bare=None):
        attention = self.module(f"layers.{self.EDITED if layer is None else layer}.self_attn", bare)
        return RoutingWritten(attention, attention.experts.router, attention.experts, None)

    def test_every_value_is_the_bare_routers(self):
        for layer in self.blocks:
            expected, attention = self.loop(layer=layer), self.model.layers[layer].self_attn
            sizes = {"batch": 2, "seq": 6, "num_experts": attention.num_experts, "top_k": attention.top_k}
            assert (sizes["num_experts"], sizes["top_k"]) == (5, self.bare.config.num_experts_per_tok)
            for part in ROUTING:
                with self.model.trace(self.ids):
                    read = getattr(attention, part).clone().save()
                assert isinstance(read, getattr(type(attention), part).layout)
                assert read.shape == tuple(sizes[axis] for axis in getattr(type(attention), part).dims)
                assert_close(read.double(), expected[part].double(), precision=torch.float32)
            assert_close(expected.output.logits, self.loaded.clean_logits, 64)

    def test_weight_of_a_slot_is_that_of_its_heads(self):
        """A slot without weight adds nothing, as if its heads had mixed nothing."""
        block = self.model.layers[self.EDITED]
        heads = self.bare.config.num_key_value_heads
        with torch.no_grad(), self.model.trace(self.ids):
            block.self_attn.expert_weights[:, :, 0] = 0
            without = block.self_attn.attention_output.clone().save()
        with torch.no_grad(), self.model.trace(self.ids):
            block.self_attn.attention_head_outputs[:, :, :heads] = 0
            silent = block.self_attn.attention_output.clone().save()
        assert_close(without, silent)
        assert_differs(without, self.everything["self_attn.attention_output", self.EDITED])

    def test_one_expert_for_every_slot(self):
        """An expert may be given to several slots of a token, whose heads then are alike."""
        attention, heads = self.moe, self.bare.config.num_key_value_heads
        with torch.no_grad(), self.model.trace(self.ids):
            attention.expert_indices = torch.full_like(attention.expert_indices, 3)
            queries = attention.attention_queries.clone().save()
            logits = self.model.logits.save()
        for group in queries.split(heads, dim=1):
            assert_same(group, queries[:, :heads])
        expected = self.loop({"expert_indices": lambda value: torch.full_like(value, 3)}).output.logits
        assert_close(logits, expected, 64)
