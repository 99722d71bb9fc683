"""Every edit does what the same edit does in transformers, and an engine outlives every mistake."""

from typing import Any

import pytest
import torch

from nnterp.testing.comparing import assert_differs, assert_same
from nnterp.testing.edits import moved, only_at, spot
from nnterp_vllm.testing.checkpoint import RECOMPUTED, EngineFacts, assert_near, requests_in_this_step


class Writing(EngineFacts):
    def _written(self, value: str, new: Any, in_place: bool = False) -> Any:
        """The logits with ``value`` of the block `EDITED` replaced by ``new``."""
        host, name = self.host(value, self.EDITED)
        model = self.model
        with model.trace(self.prompt, max_tokens=1, temperature=0.0):
            if in_place:
                getattr(host, name)[:] = new
            else:
                setattr(host, name, new)
            logits = model.logits.save()
        return logits[0, -1]

    def _clean(self, value: str) -> Any:
        layers = self.layers_of_value(value)
        return self.read(value)[layers.index(None if None in layers else self.EDITED)]

    def test_an_edit_is_transformers_edit(self, value):
        """Assigned, written in place, and at the last token alone."""
        if value in RECOMPUTED or value in self.UNEDITED:
            pytest.skip("not written")
        clean = self._clean(value)
        if value == "logits":
            new = moved(clean)
            assert_same(self._written(value, new), new[0, -1])
            return assert_same(self._written(value, new, in_place=True), new[0, -1])
        expected = self.edited(value, self.EDITED, moved)[0, -1].detach()
        assert_differs(expected, self.clean)
        assigned = self._written(value, moved(clean))
        assert_near(assigned, expected)
        assert_same(self._written(value, moved(clean), in_place=True), assigned)
        host, name = self.host(value, self.EDITED)
        at_last = only_at(spot(getattr(type(host), name).dims), moved)
        assert_near(self._written(value, at_last(clean)), self.edited(value, self.EDITED, at_last)[0, -1].detach())
        return None

    def test_a_wrong_shape_is_refused_and_the_engine_lives(self, value):
        if value in RECOMPUTED:
            with pytest.raises(RuntimeError, match="AttributeError: .* read-only"):
                self._written(value, self._clean(value))
            return assert_same(self.engine_logits(), self.clean)
        clean = self._clean(value)
        for wrong in (torch.cat([clean, clean]), clean[..., :-1], clean[0]):
            with pytest.raises(RuntimeError, match="ValueError: .*takes shape"):
                self._written(value, wrong)
        with pytest.raises(RuntimeError, match="ValueError: .*takes torch.float32"):
            self._written(value, clean.double())
        return assert_same(self.engine_logits(), self.clean)

    def test_values_are_private(self):
        """What was saved stays as it was read, whatever is written to it after the block moved on."""
        model, prompt, at = self.model, self.prompt, self.EDITED
        with model.trace(prompt, max_tokens=1, temperature=0.0):
            stream = model.layers[at].layer_output.save()
            after = model.layers[-1].layer_output.save()
            stream[:] = 0
            logits = model.logits.save()
        assert not stream.any()
        assert after.any()
        assert_same(logits[0, -1], self.clean)

    def test_two_reads_of_a_statement_are_one_tensor(self):
        model, prompt, at = self.model, self.prompt, self.EDITED
        with model.trace(prompt, max_tokens=1, temperature=0.0):
            model.layers[at].layer_output[:, -1] += 0.5 * model.layers[at].layer_output[:, -1]
            logits = model.logits.save()
        expected = self.edited("layer_output", at, last_by_half_more)[0, -1].detach()
        assert_near(logits[0, -1], expected)

    def test_an_engine_outlives_a_block_that_raises(self):
        model, prompt, at = self.model, self.prompt, self.EDITED
        with (
            pytest.raises(RuntimeError, match="ZeroDivisionError"),
            model.trace(prompt, max_tokens=1, temperature=0.0),
        ):
            model.layers[at].layer_output.sum() / 1
            1 / 0  # noqa: B018
        with (
            pytest.raises(RuntimeError, match="OutOfOrderError"),
            model.trace(prompt, max_tokens=1, temperature=0.0),
        ):
            model.layers[at].layer_output.save()
            model.layers[at].layer_input.save()
        with (
            pytest.raises(RuntimeError, match="NoSuchName|AttributeError"),
            model.trace(prompt, max_tokens=1, temperature=0.0),
        ):
            model.layers[at].layer_outptu.save()
        assert_same(self.engine_logits(), self.clean)

    def test_steer(self):
        model, prompt, at = self.model, self.prompt, self.EDITED
        vector = torch.linspace(-1, 1, model.hidden_size)
        with model.trace(prompt, max_tokens=1, temperature=0.0):
            model.steer(at, vector, factor=2.0, token_positions=-2)
            logits = model.logits.save()

        def steered(stream):
            stream = stream.clone()
            stream[:, -2] += 2.0 * vector
            return stream

        assert_near(logits[0, -1], self.edited("layer_output", at, steered)[0, -1].detach())

    def test_skip(self):
        """What enters a block that is skipped leaves it, of this request alone."""
        model, prompt, at = self.model, self.prompt, self.EDITED
        entering = self.oracle(["layer_input"], [at])["layer_input", at]
        expected = self.edited("layer_output", at, lambda _: entering)[0, -1].detach()
        with model.trace(prompt, max_tokens=1, temperature=0.0):
            model.skip_layer(at)
            logits = model.logits.save()
        assert_near(logits[0, -1], expected)
        with model.trace(prompt, max_tokens=1, temperature=0.0):
            model.skip_layers(at, self.blocks[-1])
            logits = model.logits.save()
        assert_near(logits[0, -1], self.bare_lens(entering)[0, -1].detach())
        with model.trace(max_tokens=1, temperature=0.0) as tracer:
            with tracer.invoke(prompt):
                model.skip_layer(at)
                skipped = model.logits.save()
            with tracer.invoke(prompt):
                together = requests_in_this_step(model.layers[at].layer_input).save()
                beside = model.logits.save()
        assert together == 2
        assert_near(skipped[0, -1], expected)
        assert_near(beside[0, -1], self.clean)


def last_by_half_more(stream):
    stream = stream.clone()
    stream[:, -1] *= 1.5
    return stream
