"""Every value is what transformers computes, in the same layout."""

from typing import Any

import pytest
import torch

from nnterp.components.standard import axis_size, block_support
from nnterp.testing.comparing import assert_same
from nnterp_vllm.testing.checkpoint import NEVER, RECOMPUTED, EngineFacts, assert_near


class Reading(EngineFacts):
    def test_what_is_there_and_what_is_not(self):
        """Exactly what the suite says is unavailable is, and says why."""
        expected = {**NEVER, **self.OTHERWISE_UNAVAILABLE, **self.EXPECTED_UNAVAILABLE}
        found = {name: reason for name, reason in self.model.support().items() if reason is not None}
        assert set(found) == set(expected)
        for name, part in expected.items():
            reasons = found[name].values() if isinstance(found[name], dict) else [found[name]]
            assert all(part in reason for reason in reasons), (name, found[name])

    def test_reading_what_is_not_there_raises(self):
        model, prompt = self.model, self.prompt
        with (
            pytest.raises(RuntimeError, match="Unavailable: attention_mask .* no mask"),
            model.trace(prompt, max_tokens=1),
        ):
            model.attention_mask.save()
        missing = [name for name, reason in block_support(model.layers[self.EDITED]).items() if reason is not None]
        for name in missing:
            host, own = self.host(name, self.EDITED)
            with pytest.raises(RuntimeError, match="Unavailable: "), model.trace(prompt, max_tokens=1):
                getattr(host, own).save()

    def test_sizes(self):
        config = self.bare.config.get_text_config()
        model = self.model
        assert (model.num_layers, model.hidden_size) == (config.num_hidden_layers, config.hidden_size)
        assert model.vocab_size == config.vocab_size
        for name, size in self.SIZES.items():
            host, _, own = name.rpartition(".")
            assert getattr(self.envoy(model.layers[self.EDITED], host) if host else model, own) == size, name

    def test_value_is_what_transformers_computes(self, value):
        if value == "logits":
            return assert_near(self.clean, self.bare_logits()[-1])
        layers = self.layers_of_value(value)
        run = self.oracle([value], layers)
        for layer, read in zip(layers, self.read(value), strict=True):
            assert_near(read, run[value, layer].masked_fill(run[value, layer] < -1e30, float("-inf")))
        return None

    def test_value_has_its_layout(self, value):
        host, name = self.host(value, self.EDITED)
        described = getattr(type(host), name)
        (read, *_) = self.read(value)
        assert isinstance(read, described.layout)
        assert read.shape[0] == 1
        sizes = dict(zip(described.dims, read.shape, strict=True))
        for axis in set(sizes) - {"batch", "seq", "query", "key"}:
            assert sizes[axis] == (self.OWN_SIZES.get(value, {}).get(axis) or axis_size(host, axis)), axis

    def test_root_values(self):
        model, prompt = self.model, self.prompt
        with model.trace(prompt, max_tokens=1, temperature=0.0):
            ids = model.input_ids.save()
            size = model.input_size.save()
            embedded = model.token_embeddings.save()
            logits = model.logits.save()
        assert ids[0].tolist() == prompt
        assert tuple(size) == (1, len(prompt)) == tuple(embedded.shape[:2])
        assert tuple(logits.shape) == (1, 1, model.vocab_size)
        with model.trace(prompt, max_tokens=1, temperature=0.0):
            probs = model.next_token_probs.save()
        assert_same(probs, logits[:, -1].softmax(-1))
        assert len(model.probs_to_dict(probs[0], 3)) == 3

    def test_contributions_add_up(self):
        """The identity that the values are defined by, to the last bits."""
        for layer in self.blocks:
            values = {value: self._on(value, layer) for value in ("layer_input", *self.contributions(), "layer_output")}
            self.summed = layer
            expected = self.contribution_sum(values.__getitem__)
            off = (values["layer_output"] - expected).abs().max().item()
            assert off <= 8 * torch.finfo(expected.dtype).eps * expected.abs().max().item()

    def _on(self, value: str, layer: int) -> Any:
        return self.read(value)[self.layers_of_value(value).index(layer)]

    def test_the_pattern_is_causal_and_sums_to_one(self):
        if not self.ATTENTIONS:
            pytest.skip("no softmax attention")
        for layer, pattern in zip(self.blocks, self.read(RECOMPUTED[1]), strict=True):
            assert not pattern.masked_select(~self.visible(layer)).any()
            assert_near(pattern.sum(-1), torch.ones(pattern.shape[:-1]), 1e-6)

    def test_reading_changes_nothing(self):
        """A request that reads everything gives the same logits to the last bit."""
        for value in self.served():
            if value != "logits":
                self.read(value)
                assert_same(self._logits_while_reading(value), self.clean)

    def _logits_while_reading(self, value: str) -> Any:
        name = value.rpartition(".")[2]
        hosts = [self.host(value, layer)[0] for layer in self.layers_of_value(value)]
        model = self.model
        with model.trace(self.prompt, max_tokens=1, temperature=0.0):
            for host in hosts:
                getattr(host, name)
            logits = model.logits.save()
        return logits[0, -1]

    def test_a_part_read_through_the_model_or_held_before(self):
        """A module of a block named before the trace gives what it gives from the model on."""
        model, prompt, at = self.model, self.prompt, self.EDITED
        for value in self.contributions():
            host, name = self.host(value, at)
            path = value.rpartition(".")[0]
            with model.trace(prompt, max_tokens=1, temperature=0.0):
                held = getattr(host, name).save()
            with model.trace(prompt, max_tokens=1, temperature=0.0):
                part = model.layers[at]
                for step in path.split("."):
                    part = getattr(part, step) if step else part
                reached = getattr(part, name).save()
            assert_same(held, reached)

    def test_the_lens(self):
        """Every block's prediction is transformers' norm and head of that block's stream; the last is the logits."""
        model, prompt, last = self.model, self.prompt, self.blocks[-1]
        run = self.oracle(["layer_output"], self.blocks)
        for layer in self.blocks:
            with model.trace(prompt, max_tokens=1, temperature=0.0):
                lens = model.project_on_vocab(model.layers[layer].layer_output).save()
                logits = model.logits.save()
            assert_near(lens, self.bare_lens(run["layer_output", layer]).detach())
            assert_same(logits[0, -1], self.clean)
        assert layer == last
        assert_near(lens[0, -1], self.clean)

    def bare_lens(self, stream: Any) -> Any:
        """transformers' final norm and head, and the cap behind it."""
        head = self.bare.get_output_embeddings()
        logits = head(self.module("norm")(stream))
        cap = getattr(self.bare.config.get_text_config(), "final_logit_softcapping", None)
        return logits if cap is None else cap * torch.tanh(logits / cap)
