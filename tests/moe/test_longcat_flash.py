"""LongCat-Flash: two attentions and two MLPs in a block, a mixture that skips over half of it, identity experts."""

import pytest
import torch

from nnterp import Unavailable, components
from nnterp.interventions import patch_object_attn_lens
from nnterp.testing import BiasedMixtureSuite, Block, Site, Within, gated_expert
from nnterp.testing.comparing import ULPS_AFTER_MODEL, assert_close, assert_differs, assert_same
from nnterp.testing.oracles import greedy

MIDS = ("layer_mid_0", "layer_half", "layer_mid_1")
LISTS = {
    "self_attn": components.Attention,
    "mlps": components.Mlp,
}


class TwoHalves(Block):
    """The block written out."""

    def __call__(self, at, block, hidden, **kwargs):
        attended, _ = block.self_attn[0](hidden_states=block.input_layernorm[0](hidden), **kwargs)
        stream = at("layer_mid_0", hidden + attended)
        normed = block.post_attention_layernorm[0](stream)
        skipped = block.mlp(normed)
        stream = at("layer_half", stream + block.mlps[0](normed))
        attended, _ = block.self_attn[1](hidden_states=block.input_layernorm[1](stream), **kwargs)
        stream = at("layer_mid_1", stream + attended)
        return stream + block.mlps[1](block.post_attention_layernorm[1](stream)) + skipped


class TestLongcatFlash(BiasedMixtureSuite):
    FAMILY = "longcat_flash"
    CONFIG = {
        "model_type": "longcat_flash",
        "hidden_size": 32,
        "num_layers": 3,
        "num_attention_heads": 4,
        "ffn_hidden_size": 48,
        "expert_ffn_hidden_size": 24,
        "max_position_embeddings": 64,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "head_dim": 4,
        "v_head_dim": 10,
        "n_routed_experts": 4,
        "zero_expert_num": 2,
        "moe_topk": 2,
    }
    NATIVE = {"embed_tokens": "model.embed_tokens", "layers": "model.layers", "norm": "model.norm"}
    ATTENTIONS = ("self_attn.0", "self_attn.1")
    MLPS = ("mlp", "mlps.0", "mlps.1")
    SITES = {
        **{name: Within(name) for name in MIDS},
        "mlp_input": Site("mlp", "input", read=lambda call, tensor: tensor.clone()),  # mlps[0] is called with it too
    }
    BLOCK = TwoHalves()
    EXPECTED_UNAVAILABLE = {
        **BiasedMixtureSuite.EXPECTED_UNAVAILABLE,
        "mlp.expert_outputs": "experts interface",
        "attention_norm_output": "two attentions",
        "layer_mid": "layer_half",
        "mlp_norm_output": "two MLPs",
        **{f"{name}.{value}": f"{name}[0].{value}" for name, kind in LISTS.items() for value in kind.values()},
    }
    REFUSES_IN_PLACE = ("self_attn.0.attention_values", "self_attn.1.attention_values")
    ROUTER = "router"
    IMPLEMENTATIONS = False
    LAYOUTS = {
        "identities": {},
        "experts_alone": {"config": {"zero_expert_num": 0, "attention_bias": True}},  # with top 1 its own forward fails
        "mostly_identities": {"config": {"n_routed_experts": 2, "zero_expert_num": 4, "moe_topk": 3}},
    }

    @classmethod
    def all_values(cls):
        return [*super().all_values(), *MIDS]

    @property
    def blocks(self):
        return range(self.bare.config.num_layers)

    def scanned(self):
        pytest.skip("its experts' loop runs over what the router chose, which shapes alone do not say")

    def scored(self, logits):
        return logits.softmax(-1)

    def expert(self, experts, expert, tokens):
        return tokens if expert >= experts.num_routed_experts else gated_expert(experts, expert, tokens)

    def mlp_parameters(self):
        return list(self.module("layers.0.mlps.0").parameters())

    def test_streams_of_the_block(self):
        """The formulas of the values between the block's modules, and what the bare modules are called with."""
        for layer in self.blocks:
            block = self.of_block(layer)
            stream = block("layer_input")
            for index, mid in enumerate(MIDS):
                half = index // 2
                added = f"self_attn.{half}.attention_output" if index % 2 == 0 else f"mlps.{half}.mlp_output"
                stream = stream + block(added)
                assert_close(block(mid), stream)
            assert_same(self.everything["mlp_input", layer], self.normed(layer))

    def normed(self, layer):
        norm = self.module(f"layers.{layer}.post_attention_layernorm")[0]
        return norm(self.everything["layer_mid_0", layer]).detach()

    def test_lens_of_one_attention_is_refused(self):
        """The lens edits what a block's attention reads, and says that a block has several."""
        with pytest.raises(Unavailable, match="or several"):
            patch_object_attn_lens(self.model, "Paris is", "Rome is", attn_idx_patch=-1)

    def test_sizes_of_every_module(self):
        config = self.bare.config
        for layer in self.blocks:
            block = self.model.layers[layer]
            assert [len(block.self_attn), len(block.mlps)] == [2, 2]
            for attention, mlp in zip(block.self_attn, block.mlps, strict=True):
                assert (attention.num_heads, attention.head_dim, attention.qk_head_dim) == (4, 10, 12)
                assert mlp.intermediate_size == config.ffn_hidden_size == self.model.intermediate_size
            assert block.mlp.num_experts == config.n_routed_experts + config.zero_expert_num

    def test_sizes_of_the_mixture(self):
        for layer in self.mixtures():
            moe = self.model.layers[layer].mlp
            assert moe.num_experts == self.module(f"layers.{layer}.mlp.router.classifier").out_features
            assert moe.top_k == self.bare.config.moe_topk

    def test_identities_give_the_hidden_state(self):
        """Alone, what comes out is what went in, as a tensor of its own; in the model, its weight times that."""
        moe, config = self.moe, self.bare.config
        identities = range(config.n_routed_experts, moe.num_experts)
        hidden = torch.randn(2, 3, config.hidden_size)
        for expert in identities:
            out = moe.expert_output(expert, hidden)
            assert_same(out, hidden)
            out += 1
            assert not torch.equal(out, hidden)
            with self.model.trace(self.ids):
                entering = self.model.layers[self.EDITED].mlp_input.clone().save()
                moe.route_to(expert)
                weights = moe.expert_weights.clone().save()
                routed = moe.routed_output.clone().save()
            assert_close(routed, (weights.sum(-1, keepdim=True) * entering).detach(), 32)
        with pytest.raises(ValueError, match=f"0 to {moe.num_experts - 1}"):
            moe.expert_output(moe.num_experts, hidden)

    def test_block_skipped_at_every_step(self):
        """Of a padded batch: as the bare model without the block, which generates without a cache."""
        prompts = ["The quick brown fox", "Paris is"]
        inputs = self.model.tokenizer(prompts, return_tensors="pt", padding=True)
        bare, options = self.loaded.load_bare(), {"return_dict_in_generate": True, "output_logits": True}
        bare.model.layers[0].forward = lambda hidden, *args, **kwargs: hidden
        expected = bare.generate(
            inputs["input_ids"], attention_mask=inputs["attention_mask"], use_cache=False, **greedy(3), **options
        )
        with torch.no_grad(), self.model.generate(prompts, **greedy(3)) as tracer:
            logits = [].save()
            for _ in tracer.iter[:3]:
                self.model.skip_layer(0)
                logits.append(self.model.logits[:, -1].clone())
            tokens = tracer.result.save()
        assert_same(tokens, expected.sequences)
        for got, bare_logits in zip(logits, expected.logits, strict=True):
            assert_close(got, bare_logits, ULPS_AFTER_MODEL)

    def test_what_there_are_two_of_is_refused_under_one_name(self):
        """On a read and on a write, which would otherwise be lost; each of the two is edited alone."""
        block = self.model.layers[self.EDITED]
        with pytest.raises(Unavailable, match=r"self_attn\[1\].attention_output"):
            block.self_attn.attention_output  # noqa: B018
        with pytest.raises(Unavailable, match=r"self_attn\[0\].attention_output"), self.model.trace(self.ids):
            block.self_attn.attention_output = torch.zeros(1)
        with pytest.raises(AttributeError, match="attention_outputs"):
            block.self_attn.attention_outputs  # noqa: B018
        outputs = []
        for half in (0, 1):
            with self.model.trace(self.ids):
                attention = block.self_attn[half]
                attention.attention_output = torch.zeros_like(attention.attention_output)
                outputs.append(self.model.logits.save())
            assert_close(
                outputs[half],
                self.edited(f"self_attn.{half}.attention_output", self.EDITED, torch.zeros_like),
                ULPS_AFTER_MODEL,
            )
        assert_differs(*outputs)
