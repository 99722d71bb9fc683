"""Llama 4: weights on the experts' inputs, a sum in place, dense blocks, chunked attention, blocks without position."""

import pytest
import torch
from torch.nn import functional as F

from nnterp import Unavailable
from nnterp.testing import Formula, MixtureSuite, Site, WrittenOut
from nnterp.testing.comparing import assert_close, assert_same
from nnterp.testing.mixture_writing import ROW, TOKEN, assert_only_token
from nnterp.testing.running import PROMPTS, real_tokens

WEIGHTS = "expert_input_weights"


class Unpromoted(Formula):
    """The softmax runs in the dtype of the scores."""

    def pattern(self, module, scores):
        return torch.softmax(scores, dim=-1)


class Written(WrittenOut):
    """Each expert of all tokens, each weighted for it."""

    def forward(self, at, hidden):
        tokens = hidden.flatten(0, 1)
        logits = at("router_logits", F.linear(tokens, self.router.weight))
        chosen, indices = logits.topk(self.router.top_k, dim=-1)
        indices, sigmoids = at("expert_indices", indices), chosen.sigmoid()
        weights = torch.zeros_like(logits)
        for slot in range(self.router.top_k):
            weights = weights.scatter(1, indices[:, slot, None], sigmoids[:, slot, None])
        weights = at(WEIGHTS, weights)
        routed = sum(self.expert(self.experts, e, tokens * weights[:, e, None]) for e in range(logits.shape[1]))
        shared = self.mixture.shared_expert(tokens)
        return shared + at("routed_output", routed), logits


class TestLlama4Text(MixtureSuite):
    FAMILY = "llama4_text"
    CONFIG = {
        "model_type": "llama4_text",
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 24,
        "intermediate_size_mlp": 48,
        "max_position_embeddings": 64,
        "num_local_experts": 5,
        "num_experts_per_tok": 1,
        "attention_chunk_size": 4,
    }
    NATIVE = {
        "embed_tokens": "model.embed_tokens",
        "layers": "model.layers",
        "norm": "model.norm",
        "layers.0.mlp": "model.layers.0.feed_forward",
    }
    EXPECTED_UNAVAILABLE = {
        "mlp.mlp_activation": "inside its experts",
        "mlp.mlp_neurons": "inside its experts",
        "mlp.expert_weights": "expert_input_weights",
        "mlp.expert_outputs": "experts interface",
    }
    SITES = {
        "mlp.mlp_output": Site(
            "mlp",
            read=lambda call, tensor: tensor.view(call.args[0].shape),
            write=lambda call, tensor, value: value.view(tensor.shape),
        )
    }
    ROUTER = "router"
    SHARED = "shared_expert"
    EXPERT_WIDTH_KEY = "intermediate_size"
    MLP_WIDTH_KEY = "intermediate_size"
    IMPLEMENTATIONS = False
    PARTS = (*MixtureSuite.PARTS, WEIGHTS)
    LOOP = Written
    FORMULA = Unpromoted()
    LAYOUTS = {
        "every_block": {},
        "second_dense": {
            "config": {
                "interleave_moe_layer_step": 2,
                "no_rope_layers": [1, 0, 1],
                "floor_scale": 2,
                "use_qk_norm": False,
            },
            "DENSE": (0, 2),
            "MLP_WIDTH_KEY": None,
        },
        "top_2_first_dense": {
            "config": {
                "num_experts_per_tok": 2,
                "moe_layers": [1, 2],
                "no_rope_layers": [1, 1, 0],
                "layer_types": ["full_attention"] * 3,
                "attention_bias": True,
                "tie_word_embeddings": True,
            },
            "DENSE": (0,),
            "MLP_WIDTH_KEY": None,
        },
    }

    def native(self, path):
        found = super().native(path)
        return found and found.replace("feed_forward.act_fn", "feed_forward.activation_fn")

    def expert(self, experts, expert, tokens):
        gate, up = (tokens @ experts.gate_up_proj[expert]).chunk(2, dim=-1)
        return (F.silu(gate) * up) @ experts.down_proj[expert]

    def rest_of_block(self, block, mid):
        added = block("mlp")(block("post_attention_layernorm")(mid))
        return mid + (added[0] if isinstance(added, tuple) else added).view(mid.shape)

    def slot_weights(self, read):
        return read[WEIGHTS].gather(2, read["expert_indices"])

    def slot_output(self, expert, hidden, weight):
        return expert(hidden * weight)

    def routed_site(self, mixture):
        def added(call, tensor):
            return tensor.unflatten(0, (call.module.num_experts, -1)).sum(0)

        return mixture.experts, Site("", read=added)

    def routes(self):
        """An expert takes a token once, and no slot has a weight of its own."""
        top_k, experts = self.moe.top_k, self.moe.num_experts
        table = torch.rand(*self.ids.shape, experts, generator=torch.Generator().manual_seed(4)).argsort(-1)
        one = [(1, None)] if top_k == 1 else []
        return [*one, (list(range(1, 1 + top_k)), None), (table[..., :top_k], None)]

    # -- weights ------------------------------------------------------------------------------------------------------

    def without(self, slots):
        """The routed experts' sum without ``slots``, ``[batch, seq, top_k]``, and what those had added."""
        clean, moe = self.read_parts(), self.moe
        hidden, indices, weights = clean["mlp_input"], clean["expert_indices"], self.slot_weights(clean)
        added = torch.zeros_like(hidden)
        for expert in range(moe.num_experts):
            for slot in range(moe.top_k):
                chosen = (slots & (indices == expert))[..., slot, None]
                added += moe.expert_output(expert, hidden * weights[..., slot, None]).where(chosen, 0)

        def remove(moe):
            moe.expert_input_weights = moe.expert_input_weights.scatter(2, indices, weights.masked_fill(slots, 0))

        return self.traced(remove)["routed_output"], added

    @torch.no_grad()
    def test_zeroed_weight_removes_that_slot(self):
        clean = self.read_parts()
        slots = torch.zeros_like(clean["expert_indices"], dtype=torch.bool)
        slots[ROW, TOKEN, 0] = True
        routed, added = self.without(slots)
        assert_only_token(routed, clean["routed_output"])
        self.assert_near(clean["routed_output"] - routed, added, clean["routed_output"])
        expert = clean["expert_indices"][ROW, TOKEN, 0]

        def zero(moe):
            moe.expert_input_weights[ROW, TOKEN, expert] = 0

        assert_same(self.traced(zero)["routed_output"], routed)
        if self.moe.top_k == 1:
            assert not routed[ROW, TOKEN].any()

    @torch.no_grad()
    def test_filled_weights_remove_one_expert(self):
        clean = self.read_parts()
        for expert in clean["expert_indices"].unique()[:2]:
            slots = clean["expert_indices"] == expert
            routed, added = self.without(slots)
            self.assert_near(clean["routed_output"] - routed, added, clean["routed_output"])
            kept = ~slots.any(-1)
            assert_same(routed[kept], clean["routed_output"][kept])

    @torch.no_grad()
    def test_weight_of_another_expert_routes_there_too(self):
        clean, moe = self.read_parts(), self.moe
        other = (set(range(moe.num_experts)) - set(clean["expert_indices"][ROW, TOKEN].tolist())).pop()

        def add(moe):
            moe.expert_input_weights[ROW, TOKEN, other] = 0.75

        routed = self.traced(add)["routed_output"]
        assert_only_token(routed, clean["routed_output"])
        out = moe.expert_output(other, 0.75 * clean["mlp_input"][ROW, TOKEN])
        self.assert_near(routed[ROW, TOKEN] - clean["routed_output"][ROW, TOKEN], out, clean["routed_output"])

    def test_no_weight_of_a_slot_can_be_forced(self):
        experts = list(range(self.moe.top_k))
        with pytest.raises(Unavailable, match="expert_input_weights"), self.model.trace(self.ids):
            self.moe.route_to(experts, weights=0.5)
        with self.model.trace(self.ids):
            logits = self.model.logits.save()
        assert_same(logits, self.loaded.clean_logits)

    def test_a_token_takes_an_expert_once(self):
        if self.moe.top_k == 1:
            return
        with pytest.raises(ValueError, match="takes an expert once"), self.model.trace(self.ids):
            self.moe.route_to(1)
        with pytest.raises(ValueError, match="takes an expert once"), self.model.trace(self.ids):
            self.moe.expert_indices = torch.zeros_like(self.moe.expert_indices)

    # -- what a trace has read ----------------------------------------------------------------------------------------

    def test_what_was_read_stays(self):
        """The routed sum is not added into the shared expert's output that a trace has kept."""
        with self.model.trace(self.ids):
            kept = self.moe.shared_expert_output.save()
            copied = self.moe.shared_expert_output.clone().save()
            self.model.logits.save()
        assert_same(kept, copied)

    # -- attention ----------------------------------------------------------------------------------------------------

    def test_left_padded_batch(self, value):
        """Where queries are scaled by their place transformers counts the padding, so a padded row is not as alone."""
        if self.layout_name != "second_dense":
            super().test_left_padded_batch(value)
            return
        host, name = self.host(value, self.EDITED)
        inputs, place = self.padded(), self.place(value)
        expected = self.oracle([value], [self.EDITED], inputs=inputs)[place]
        with self.model.trace(PROMPTS):
            read = getattr(host, name).clone().save()
        mask = inputs["attention_mask"]
        for row, length in enumerate(mask.sum(-1).tolist()):
            got, bare = (real_tokens(each, self.dims(value), row, length, mask) for each in (read, expected))
            assert_close(got, bare)
