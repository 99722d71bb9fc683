"""What the values are to one another: the block's sum, attention's formula, transformers' own account."""

import torch
from torch import Tensor

from nnterp.testing.comparing import ULPS_AFTER_MODEL, assert_close, assert_differs, assert_same
from nnterp.testing.facts import Facts
from nnterp.testing.oracles import Formula, Site, run


class Formulas(Facts):
    def of_block(self, layer: int):
        """A function from a value's name to what was read of it on block ``layer``."""
        return lambda value: self.everything[value, layer]

    def test_one_trace_reads_every_value(self) -> None:
        """In forward order, each as it is when it is read alone."""
        for place, read in self.everything.items():
            assert_close(read, self.recorded(place[0])[place])

    def test_contributions_add_up_to_the_output(self) -> None:
        if not {"self_attn.attention_output", "mlp.mlp_output"} <= set(self.served()):
            return
        for layer in self.blocks:
            float_sum = self.contribution_sum(lambda value, i=layer: self.everything[value, i].float())
            assert_close(float_sum, self.of_block(layer)("layer_output").float())

    def test_mid_is_the_stream_after_attention(self) -> None:
        if not {"self_attn.attention_output", "layer_mid"} <= set(self.served()):
            return
        for layer in self.blocks:
            assert_close(self.mid_sum(self.of_block(layer)), self.of_block(layer)("layer_mid"))

    def test_stream_passes_from_block_to_block(self) -> None:
        for layer in self.blocks[1:]:
            assert_same(self.everything["layer_input", layer], self.everything["layer_output", layer - 1])

    def test_sublayers_are_called_with_their_inputs(self) -> None:
        values = set(self.served())
        for layer in self.blocks:
            block = self.of_block(layer)
            if self.ATTENTION_INPUT in values:
                module = self.module(f"layers.{layer}.self_attn")
                called = run(self.bare, lambda: self.bare(**self.inputs()), {"x": (module, Site("", "input"))})
                assert_close(block(self.ATTENTION_INPUT), called["x"])
            if {"mlp_input", self.MLP_INPUT} <= values:
                assert_same(block("mlp_input"), block(self.MLP_INPUT))

    def test_projections_make_the_outputs(self) -> None:
        """The bare output projections, applied to the premix and to the neurons, give what they gave in the model."""
        for value, path in (("self_attn.attention_premix", "self_attn.o_proj"), ("mlp.mlp_neurons", "mlp.down_proj")):
            for layer in self.blocks if value in self.served() else ():
                module = self.module(f"layers.{layer}.{path}")
                came_out = run(self.bare, lambda: self.bare(**self.inputs()), {"x": (module, Site(""))})
                entering = self.of_block(layer)(value)
                entering = entering.flatten(-2) if value.endswith("premix") else entering
                assert_close(module(entering).detach(), came_out["x"])

    def test_hidden_states_are_transformers(self) -> None:
        output = self.bare(**self.inputs(), output_hidden_states=True)
        states = [state.detach() for state in output.hidden_states]
        assert_same(self.everything["layer_input", 0], states[0])
        for layer in self.blocks[:-1]:
            assert_same(self.everything["layer_output", layer], states[layer + 1])
        if "final_norm_output" in self.served():
            assert_same(self.everything["final_norm_output", None], self.final_state(states[-1]))

    def final_state(self, last: Tensor) -> Tensor:
        """The final norm's output, from the last of transformers' hidden states."""
        return last

    # -- attention ----------------------------------------------------------------------------------------------------

    def test_pattern_is_transformers(self) -> None:
        if "self_attn.attention_probabilities" not in self.served():
            return
        attentions = self.bare(**self.inputs(), output_attentions=True).attentions
        for layer in self.blocks:
            assert_same(self.everything["self_attn.attention_probabilities", layer], attentions[layer].detach())

    def test_pattern_is_a_causal_distribution(self) -> None:
        if "self_attn.attention_probabilities" not in self.served():
            return
        batch, tokens = self.ids.shape
        patterns = [self.everything["self_attn.attention_probabilities", layer] for layer in self.blocks]
        for pattern in patterns:
            assert pattern.shape == (batch, self.model.num_heads, tokens, tokens)
            assert pattern.dtype == self.bare.lm_head.weight.dtype
            assert_same(pattern, pattern.tril())
            sums = pattern.sum(-1)
            if self.ATTENTION_SINK:
                assert ((sums > 0) & (sums < 1)).all()
            else:
                assert_close(sums, torch.ones_like(sums))
        assert_differs(patterns[-1], patterns[0])

    def test_attention_formula(self) -> None:
        """softmax(scores) is the pattern, it mixes the values, and the oracles' formula is the model's."""
        names = ("scores", "probabilities", "values", "head_outputs")
        if self.FORMULA is None or len(self.served(*(f"self_attn.attention_{name}" for name in names))) < len(names):
            return
        for layer in self.blocks:
            scores, pattern, values, heads = (self.everything[f"self_attn.attention_{n}", layer] for n in names)
            module = self.module(f"layers.{layer}.self_attn")
            assert_close(self.FORMULA.pattern(module, scores).to(pattern.dtype), pattern)
            assert_close((pattern @ self.FORMULA.repeated(pattern, values)).transpose(1, 2), heads)
        assert_close(
            self.recorded("self_attn.attention_scores").output.logits.detach(),
            self.loaded.clean_logits,
            ULPS_AFTER_MODEL,
        )

    def test_queries_and_keys_make_the_scores(self) -> None:
        """Where the family scores by the plain formula; `oracles.Formula.scores` says how another one does."""
        names = [f"self_attn.attention_{name}" for name in ("queries", "keys", "scores")]
        plain_formula = getattr(type(self.FORMULA), "scores", None) is Formula.scores
        if not plain_formula or len(self.served(*names)) < len(names):
            return
        causal = torch.ones(6, 6, dtype=torch.bool).tril()
        for layer in self.blocks:
            queries, keys, scores = (self.everything[name, layer] for name in names)
            module = self.module(f"layers.{layer}.self_attn")
            plain = Formula.repeated(queries, keys).transpose(-1, -2)
            plain = queries @ plain * module.scaling
            visible = causal & (scores > -1e30)
            assert_close(plain.masked_fill(~visible, 0), scores.masked_fill(~visible, 0))
            assert visible.any(-1).all()

    # -- the MLP ------------------------------------------------------------------------------------------------------

    def test_activation_makes_the_neurons(self) -> None:
        if len(self.served("mlp.mlp_activation", "mlp.mlp_neurons", "mlp_input")) < 3:
            return
        for layer in self.blocks:
            block = self.of_block(layer)
            neurons = self.neurons(self.module(f"layers.{layer}.mlp"), block("mlp.mlp_activation"), block("mlp_input"))
            assert_close(neurons.detach(), block("mlp.mlp_neurons"))

    def neurons(self, mlp: torch.nn.Module, activation: Tensor, entering: Tensor) -> Tensor:
        """What the down projection sums: the activation, times ``up_proj`` of the input where there is a gate."""
        return activation * mlp.up_proj(entering) if hasattr(mlp, "gate_proj") else activation
