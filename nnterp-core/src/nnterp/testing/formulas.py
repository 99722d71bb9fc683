"""What the values are to one another: the block's sum, attention's formula, transformers' own account."""

from typing import Any

import torch
from torch import Tensor

from nnterp.testing.comparing import ULPS_AFTER_MODEL, assert_close, assert_differs, assert_same
from nnterp.testing.facts import Facts
from nnterp.testing.oracles import Formula, Site, run


class Formulas(Facts):
    def of_block(self, layer: int):
        """A function from a value's name to what was read of it on block ``layer``; nothing, 0, where it has none."""
        return lambda value: self.everything[value, layer] if self.on(value, layer) else torch.zeros(())

    def test_one_trace_reads_every_value(self) -> None:
        """In forward order, each as it is when it is read alone."""
        for place, read in self.everything.items():
            assert_close(read, self.recorded(place[0])[place])

    def test_contributions_add_up_to_the_output(self) -> None:
        if not set(self.contributions()) <= set(self.served()):
            return
        for layer in self.blocks:
            block = self.of_block(layer)
            total = self.contribution_sum(lambda value, block=block: block(value).float())
            assert_close(total, block("layer_output").float())

    def test_mid_is_the_stream_after_attention(self) -> None:
        if not {"self_attn.attention_output", "layer_mid"} <= set(self.served()):
            return
        for layer in self.layers_of("layer_mid", self.blocks):
            assert_close(self.mid_sum(self.of_block(layer)), self.of_block(layer)("layer_mid"))

    def test_stream_passes_from_block_to_block(self) -> None:
        for layer in self.blocks[1:]:
            assert_same(self.everything["layer_input", layer], self.everything["layer_output", layer - 1])

    def test_sublayers_are_called_with_their_inputs(self) -> None:
        values = set(self.served())
        for layer in self.blocks:
            block = self.of_block(layer)
            for host in self.mixers(layer) if self.ATTENTION_INPUT in values else ():
                module = self.module(f"layers.{layer}.{host}")
                called = run(self.bare, lambda: self.bare(**self.inputs()), {"x": (module, Site("", "input"))})
                assert_close(block(self.ATTENTION_INPUT), called["x"])
            if {"mlp_input", self.MLP_INPUT} <= values and self.on("mlp_input", layer):
                assert_same(block("mlp_input"), block(self.MLP_INPUT))

    def test_projections_make_the_outputs(self) -> None:
        """The bare output projections, applied to the premix and to the neurons, give what they gave in the model."""
        pairs = [(value, "o_proj") for value in self.of_kind("self_attn.attention_premix")]
        pairs += [(value, "down_proj") for value in self.of_kind("mlp.mlp_neurons")]
        for value, projection in pairs:
            path = f"{value.rpartition('.')[0]}.{projection}"
            served = value in self.served() and self.native(f"layers.0.{path}") is not None
            for layer in self.layers_of(value, self.blocks) if served else ():
                module = self.module(f"layers.{layer}.{path}")
                came_out = run(self.bare, lambda: self.bare(**self.inputs()), {"x": (module, Site(""))})
                entering = self.of_block(layer)(value)
                entering = entering.flatten(-2) if value.endswith("premix") else entering
                assert_close(module(entering).detach(), came_out["x"])

    def test_hidden_states_are_transformers(self) -> None:
        output = self.bare(**self.inputs(), output_hidden_states=True)
        states = [state.detach() for state in self.hidden_states(output)]
        assert_same(self.everything["layer_input", 0], states[0])
        for layer in self.blocks[:-1]:
            assert_same(self.everything["layer_output", layer], states[layer + 1])
        if "final_norm_output" in self.served():
            assert_same(self.everything["final_norm_output", None], self.final_state(states[-1]))

    def hidden_states(self, output: Any) -> tuple[Tensor, ...]:
        """The stream entering each block, and the last of what transformers calls hidden states."""
        return output.hidden_states

    def final_state(self, last: Tensor) -> Tensor:
        """The final norm's output, from the last of transformers' hidden states."""
        return last

    # -- attention ----------------------------------------------------------------------------------------------------

    def test_pattern_is_transformers(self) -> None:
        patterns = self.patterns()
        if not patterns:
            return
        attentions = self.bare(**self.inputs(), output_attentions=True).attentions
        for (_, pattern), expected in zip(patterns, attentions, strict=True):
            assert_same(pattern, expected.detach())

    def patterns(self) -> list[tuple[int, Tensor]]:
        """The pattern of each attention, with its block, in forward order."""
        values = self.served(*self.of_kind("self_attn.attention_probabilities"))
        places = [(value, layer) for layer in self.blocks for value in values if self.on(value, layer)]
        return [(layer, self.everything[value, layer]) for value, layer in places]

    def test_pattern_is_a_causal_distribution(self) -> None:
        patterns = self.patterns()
        if not patterns:
            return
        for layer, pattern in patterns:
            visible = self.visible(layer)
            assert pattern.shape == (self.ids.shape[0], self.model.num_heads, *visible.shape)
            assert pattern.dtype == self.bare.lm_head.weight.dtype
            assert not pattern.masked_fill(visible, 0).any()
            sums = pattern.sum(-1)
            if self.ATTENTION_SINK:
                assert ((sums > 0) & (sums < 1)).all()
            else:
                assert_close(sums, torch.ones_like(sums))
        first, last = (pattern[..., : self.ids.shape[1]] for _, pattern in (patterns[0], patterns[-1]))
        assert_differs(last, first)

    def test_attention_formula(self) -> None:
        """softmax(scores) is the pattern, it mixes the values, and the oracles' formula is the model's."""
        names = ("scores", "probabilities", "values", "head_outputs")
        served = self.interiors(*names)
        if self.FORMULA is None or not served:
            return
        for module, (scores, pattern, values, heads), _ in served:
            assert_close(self.FORMULA.pattern(module, scores).to(pattern.dtype), pattern)
            assert_close((pattern @ self.FORMULA.repeated(pattern, values)).transpose(1, 2), heads)
        assert_close(
            self.recorded(self.of_kind("self_attn.attention_scores")[0]).output.logits.detach(),
            self.loaded.clean_logits,
            ULPS_AFTER_MODEL,
        )

    def interiors(self, *names: str) -> list[tuple[torch.nn.Module, list[Tensor], int]]:
        """Of each attention that serves all of ``names``: the bare module, the values, and the block."""
        hosts = [
            host
            for host in self.ATTENTIONS
            if len(self.served(*(f"{host}.attention_{n}" for n in names))) == len(names)
        ]
        return [
            (
                self.module(f"layers.{layer}.{host}"),
                [self.everything[f"{host}.attention_{name}", layer] for name in names],
                layer,
            )
            for layer in self.blocks
            for host in hosts
            if self.on(f"{host}.attention_{names[0]}", layer)
        ]

    def test_queries_and_keys_make_the_scores(self) -> None:
        """Where the family scores by the plain formula; `oracles.Formula.scores` says how another one does."""
        if getattr(type(self.FORMULA), "scores", None) is not Formula.scores:
            return
        for module, (queries, keys, scores), layer in self.interiors("queries", "keys", "scores"):
            plain = Formula.repeated(queries, keys).transpose(-1, -2)
            plain = queries @ plain * module.scaling
            visible = self.visible(layer) & (scores > -1e30)
            assert_close(plain.masked_fill(~visible, 0), scores.masked_fill(~visible, 0))
            assert visible.any(-1).all()

    # -- the MLP ------------------------------------------------------------------------------------------------------

    def test_activation_makes_the_neurons(self) -> None:
        for host in self.MLPS:
            if len(self.served(f"{host}.mlp_activation", f"{host}.mlp_neurons")) < 2 or not self.has_input(host):
                continue
            for layer in self.layers_of(f"{host}.mlp_neurons", self.blocks):
                block, module = self.of_block(layer), self.module(f"layers.{layer}.{host}")
                called = run(self.bare, lambda: self.bare(**self.inputs()), {"x": (module, Site("", "input"))})
                neurons = self.neurons(module, block(f"{host}.mlp_activation"), called["x"])
                assert_close(neurons.detach(), block(f"{host}.mlp_neurons"))

    def has_input(self, host: str) -> bool:
        """Whether the feed-forward at a path is called with what it projects."""
        return host != "mlp" or "mlp_input" in self.served()

    def neurons(self, mlp: torch.nn.Module, activation: Tensor, entering: Tensor) -> Tensor:
        """What the down projection sums: the activation, times ``up_proj`` of the input where there is a gate."""
        return activation * mlp.up_proj(entering) if hasattr(mlp, "gate_proj") else activation
