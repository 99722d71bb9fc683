"""DeepSeek-V4: several residual streams, compressed and indexed keys, sinks, experts hashed by token."""

import re

import pytest
import torch

from nnterp.testing import BiasedMixtureSuite, Block, Site, Within, WithSink
from nnterp.testing.comparing import ULPS_AFTER_MODEL, assert_close, assert_differs, assert_same
from nnterp.testing.oracles import greedy

SLIDING, HEAVY, INDEXED = "sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"
CONNECTIONS = ("attention_post", "attention_comb", "mlp_post", "mlp_comb")


class OneTensor(WithSink):
    """Keys and values are one tensor and recorded apart; in place, an edit of the keys is one of the model's own."""

    def __call__(self, at, module, query, key, value, mask, **options):
        if key is value:
            key, value = key.view_as(key), key.clone()
        return super().__call__(at, module, query, key, value, mask, **options)


class HyperConnected(Block):
    """The block written out."""

    def __call__(self, at, block, hidden, input_ids=None, **kwargs):
        post, comb, collapsed = block.attn_hc(hidden)
        attended, _ = block.self_attn(block.input_layernorm(collapsed), **kwargs)
        mid = at("layer_mid", joined(hidden, post, comb, attended))
        post, comb, collapsed = block.ffn_hc(mid)
        return joined(mid, post, comb, block.mlp(block.post_attention_layernorm(collapsed), input_ids=input_ids))


def joined(streams, post, comb, output):
    """The streams, mixed, and each with its share of a sublayer's output."""
    post, comb = post.to(streams.dtype), comb.to(streams.dtype)
    return post[..., None] * output[..., None, :] + comb.transpose(-1, -2) @ streams


def premix() -> Site:
    return Site(
        "self_attn.o_a_proj",
        "input",
        read=lambda call, tensor: tensor.reshape(*tensor.shape[:2], call.model.config.num_attention_heads, -1),
        write=lambda call, tensor, value: value.reshape(tensor.shape),
    )


class TestDeepseekV4(BiasedMixtureSuite):
    FAMILY = "deepseek_v4"
    CONFIG = {
        "model_type": "deepseek_v4",
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "partial_rotary_factor": 0.5,
        "q_lora_rank": 24,
        "o_groups": 2,
        "o_lora_rank": 12,
        "sliding_window": 4,
        "layer_types": [SLIDING, HEAVY, INDEXED],
        "compress_rates": {HEAVY: 2, INDEXED: 2},
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_topk": 2,
        "hc_mult": 3,
        "max_position_embeddings": 64,
        "moe_intermediate_size": 24,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "swiglu_limit": 0.5,
    }
    NATIVE = {
        "embed_tokens": "model.embed_tokens",
        "layers": "model.layers",
        "norm": "model.norm",
        "hc_head": "model.hc_head",
        "layers.0.mlp.router": "model.layers.0.mlp.gate",
        "layers.0.self_attn.o_proj": None,
    }
    EXPECTED_UNAVAILABLE = {"mlp.mlp_activation": "inside its experts", "mlp.mlp_neurons": "inside its experts"}
    SITES = {
        "layer_mid": Within("layer_mid"),
        "self_attn.attention_premix": premix(),
        "attention_post": Site("attn_hc", argument=0),
        "attention_comb": Site("attn_hc", argument=1),
        "mlp_post": Site("ffn_hc", argument=0),
        "mlp_comb": Site("ffn_hc", argument=1),
    }
    FORMULA = OneTensor()
    BLOCK = HyperConnected()
    ATTENTION_SINK = True
    SDPA = False
    PADDING_MATTERS = True
    SHARED = "shared_experts"
    OUTPUTS_LOGITS = False
    #: Blocks whose experts are chosen by the token's id.
    HASHED = (0,)
    LAYOUTS = {
        "compressed": {},
        "indexed_hashed_batched": {
            "config": {
                "layer_types": [HEAVY, INDEXED, SLIDING],
                "mlp_layer_types": ["hash_moe", "hash_moe", "moe"],
                "hc_mult": 2,
                "o_groups": 4,
            },
            "load": {"experts_implementation": "batched_mm"},
            "HASHED": (0, 1),
        },
        "sliding_top_1": {
            "config": {
                "layer_types": [SLIDING] * 3,
                "mlp_layer_types": ["moe"] * 3,
                "scoring_func": "sigmoid",
                "num_experts_per_tok": 1,
                "hc_mult": 4,
                "o_groups": 1,
            },
            "HASHED": (),
            "PADDING_MATTERS": False,
            "OUTPUTS_LOGITS": True,
        },
    }

    @classmethod
    def all_values(cls):
        return [*super().all_values(), *CONNECTIONS]

    def prepare(self, model):
        super().prepare(model)
        generator = torch.Generator().manual_seed(7)
        for name, table in model.named_buffers():
            if name.endswith("tid2eid"):
                order = torch.rand(len(table), model.config.n_routed_experts, generator=generator).argsort(-1)
                table.copy_(order[:, : table.shape[1]])

    def expected_reason(self, value, layer):
        if value == "mlp.choice_scores" and layer in self.HASHED:
            return "token's id"
        return super().expected_reason(value, layer)

    def visible(self, layer):
        """The tokens in the window, and the windows compressed by the time of the query."""
        config, tokens = self.bare.config, self.ids.shape[1]
        seen = super().visible(layer).triu(1 - config.sliding_window)
        kind = config.layer_types[layer]
        if kind == SLIDING:
            return seen
        rate = config.compress_rates[kind]
        window, query = torch.arange(tokens // rate), torch.arange(tokens)
        return torch.cat([seen, window < (query[:, None] + 1) // rate], dim=-1)

    def scored(self, logits):
        if self.bare.config.scoring_func == "sqrtsoftplus":
            return torch.nn.functional.softplus(logits).sqrt()
        return super().scored(logits)

    def expert(self, experts, expert, tokens):
        limit = self.bare.config.swiglu_limit
        gate, up = (tokens @ experts.gate_up_proj[expert].T).chunk(2, dim=-1)
        return (experts.act_fn(gate.clamp(max=limit)) * up.clamp(-limit, limit)) @ experts.down_proj[expert].T

    def test_bfloat16(self):
        """Where the bare model does not run in bfloat16 (5.19.0: its norms hand float32 on), ours says the same."""
        try:
            self.loaded.load_bare(dtype=torch.bfloat16)(**self.inputs())
        except RuntimeError as error:
            model, words = self.loaded.load(dtype=torch.bfloat16), re.escape(str(error))
            with pytest.raises(RuntimeError, match=words), model.trace(self.ids):
                model.logits.save()
        else:
            super().test_bfloat16()

    # -- the streams --------------------------------------------------------------------------------------------------

    def mid_sum(self, block_values):
        return self.mixed(block_values, "attention", "layer_input", "self_attn.attention_output")

    def contribution_sum(self, block_values):
        return self.mixed(block_values, "mlp", "layer_mid", "mlp.mlp_output")

    @staticmethod
    def mixed(block_values, sublayer, streams, output):
        """Stream ``k``: ``post[k] * output + sum_j comb[j, k] * stream[j]``."""
        post, comb = block_values(f"{sublayer}_post"), block_values(f"{sublayer}_comb")
        mixed = torch.einsum("bsjk,bsjd->bskd", comb, block_values(streams))
        return mixed + torch.einsum("bsk,bsd->bskd", post, block_values(output))

    def test_connections(self):
        """Shares between 0 and 2; what a stream is mixed of sums to one; streams that begin as the embedding."""
        for layer in self.blocks:
            for name in ("attention", "mlp"):
                post, comb = self.of_block(layer)(f"{name}_post"), self.of_block(layer)(f"{name}_comb")
                assert ((post > 0) & (post < 2)).all()
                assert_close(comb.sum(-2), torch.ones_like(post), 64)
                assert (comb.sum(-1) - 1).abs().max() < 0.05
        embedded, streams = self.everything["token_embeddings", None], self.everything["layer_input", 0]
        assert_same(streams, embedded[:, :, None].expand_as(streams))
        assert streams.shape[2] == self.bare.config.hc_mult == self.model.layers[0].streams

    def test_lens_of_every_block(self):
        """Of streams of any leading shape; what is no stream is refused, and the lens of one vector is one's own."""
        bare, model = self.bare, self.model
        for layer in self.blocks:
            streams = self.everything["layer_output", layer]
            with torch.no_grad():
                expected = bare.lm_head(bare.model.norm(bare.model.hc_head(streams)))
                assert_same(model.project_on_vocab(streams), expected)
                assert_close(model.project_on_vocab(streams[0, 1]), expected[0, 1])
        for wrong in (streams[..., :1, :], streams[0, 0, 0]):
            with pytest.raises(ValueError, match="streams of a token"):
                model.project_on_vocab(wrong)

    def test_steered_stream(self):
        """One stream of a token can be steered alone, by a vector for each."""
        model, clean = self.model, self.everything["layer_output", 0]
        vector = torch.zeros(self.bare.config.hc_mult, model.hidden_size)
        vector[1] = 1.0
        with model.trace(self.ids):
            model.steer(0, vector, token_positions=2)
            stream = model.layers[0].layer_output.clone().save()
            logits = model.logits.save()
        expected = clean.clone()
        expected[:, 2, 1] += 1.0
        assert_same(stream, expected)
        assert_differs(logits, self.loaded.clean_logits)

    def test_block_skipped_at_every_step(self):
        """As the bare model without the block, which generates without a cache."""
        bare, options = self.loaded.load_bare(), {"return_dict_in_generate": True, "output_logits": True}
        bare.model.layers[0].forward = lambda hidden, *args, **kwargs: hidden
        expected = bare.generate(**self.inputs(), use_cache=False, **greedy(3), **options)
        with torch.no_grad(), self.model.generate(self.ids, **greedy(3)) as tracer:
            logits = [].save()
            for _ in tracer.iter[:3]:
                self.model.skip_layer(0)
                logits.append(self.model.logits[:, -1].clone())
            tokens = tracer.result.save()
        assert_same(tokens, expected.sequences)
        for got, bare_logits in zip(logits, expected.logits, strict=True):
            assert_close(got, bare_logits, ULPS_AFTER_MODEL)

    # -- hashed experts -----------------------------------------------------------------------------------------------

    @property
    def hashed(self):
        return self.EDITED in self.HASHED

    def test_written_logits_change_the_routing(self):
        if not self.hashed:
            return super().test_written_logits_change_the_routing()
        clean = self.read_parts()
        table = self.module(f"layers.{self.EDITED}.mlp.router").tid2eid
        assert_same(clean["expert_indices"], table[self.ids])
        with self.model.trace(self.ids):
            self.moe.router_logits = self.moe.router_logits * 2
            weights, indices = self.moe.expert_weights.clone().save(), self.moe.expert_indices.clone().save()
        assert_same(indices, clean["expert_indices"])
        assert_differs(weights, clean["expert_weights"])
        return None

    def test_banned_experts_get_no_token(self):
        if not self.hashed:
            return super().test_banned_experts_get_no_token()
        with pytest.raises(ValueError, match="token's id"), self.model.trace(self.ids):
            self.moe.ban_experts(0)
        return None

    def test_bias_is_in_the_choice(self):
        return None if self.hashed else super().test_bias_is_in_the_choice()

    def test_written_choice_chooses_and_does_not_weight(self):
        return None if self.hashed else super().test_written_choice_chooses_and_does_not_weight()

    def test_a_banned_expert_is_not_chosen_for_its_bias(self):
        return None if self.hashed else super().test_a_banned_expert_is_not_chosen_for_its_bias()
