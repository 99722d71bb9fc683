"""Every value read and edited, in a plain trace, against the bare model."""

import pytest
import torch
from torch import Tensor

from nnterp.testing.comparing import ULPS_AFTER_MODEL, assert_close, assert_differs, assert_same
from nnterp.testing.edits import edit_of, moved, only_at, only_row, rows, spot
from nnterp.testing.facts import ROOT_VALUES, Facts
from nnterp.testing.oracles import Edit, Within

#: The values with an axis of heads.
HEADED = tuple(
    f"self_attn.attention_{part}"
    for part in ("queries", "keys", "values", "scores", "probabilities", "head_outputs", "premix")
)


class Writing(Facts):
    """Tests that take one value each."""

    def edited_at(self, value: str) -> int | None:
        return None if value in ROOT_VALUES else self.EDITED

    def assigned(self, value: str, edit, ids: Tensor | None = None) -> Tensor:
        """The logits of a trace that assigns ``edit(value)``."""
        host, name = self.host(value, self.EDITED)
        with self.model.trace(self.ids if ids is None else ids):
            setattr(host, name, edit(getattr(host, name)))
            logits = self.model.logits.save()
        return logits

    def test_read_is_what_the_bare_model_has(self, value: str) -> None:
        """On every block, with the layout it documents, and reading it changes nothing."""
        expected = self.recorded(value)
        for layer in self.layers_of(value, self.blocks):
            host, name = self.host(value, layer)
            with self.model.trace(self.ids):
                read = getattr(host, name).clone().save()
                logits = self.model.logits.save()
            assert_close(read, expected[value, layer])
            layout = getattr(type(host), name).layout
            assert isinstance(read, layout), f"{tuple(read.shape)} {read.dtype} is no {layout}"
            assert_same(logits, self.loaded.clean_logits)

    def test_assignment_reaches_the_model(self, value: str) -> None:
        logits = self.assigned(value, edit_of(value))
        assert_differs(logits, self.loaded.clean_logits)
        assert_close(logits, self.edited(value, self.edited_at(value), edit_of(value)), ULPS_AFTER_MODEL)

    def test_edit_is_seen_by_every_value_after_it(self, value: str) -> None:
        """Read in the trace that edits, the value is what was assigned, and all that follows is what it makes."""
        host, name = self.host(value, self.EDITED)
        place, edit = (value, self.edited_at(value)), edit_of(value)
        edits = {place: edit}
        if value == "layer_mid" and not isinstance(self.where(value), Within):
            edits = self.mid_through_attention(edit)
        if edits is None:
            return
        places = self.places(self.served())
        after = places[places.index(place) + 1 :]
        hosts = [self.host(*later) for later in after]
        with self.model.trace(self.ids):
            assigned = edit(getattr(host, name))
            setattr(host, name, assigned)
            read_back = getattr(host, name).clone().save()
            assigned = assigned.clone().save()
            read = [].save()
            for later, attribute in hosts:
                read.append(getattr(later, attribute).clone())
        assert_same(read_back, assigned)
        inside = self.oracle([v for v in self.served() if self.is_inside(v)], self.blocks, edits)
        outside = self.oracle([v for v in self.served() if not self.is_inside(v)], self.blocks, edits)
        for later, got in zip(after, read, strict=True):
            assert_close(got, (inside if self.is_inside(later[0]) else outside)[later], ULPS_AFTER_MODEL)

    def mid_through_attention(self, edit: Edit) -> dict | None:
        """The edit of the attention's contribution that makes the stream in mid-block what ``edit`` makes it."""
        summed = type(self).mid_sum is Facts.mid_sum and self.has(self.layout_name, "self_attn.attention_output")
        if not summed:
            return None
        entering = self.recorded("layer_input")["layer_input", self.EDITED]
        mid = edit(self.recorded("layer_mid")["layer_mid", self.EDITED])
        return {("self_attn.attention_output", self.EDITED): lambda _: mid.reshape(entering.shape) - entering}

    def test_in_place_edit_is_the_assignment(self, value: str) -> None:
        host, name = self.host(value, self.EDITED)
        edit = edit_of(value)

        def edit_in_place() -> Tensor:
            with self.model.trace(self.ids):
                live = getattr(host, name)
                live[:] = edit(live)
                logits = self.model.logits.save()
            return logits

        if value in self.REFUSES_IN_PLACE:
            with pytest.raises(RuntimeError, match="view"):
                edit_in_place()
            with torch.no_grad():
                logits = edit_in_place()
        else:
            logits = edit_in_place()
        assert_same(logits, self.assigned(value, edit))

    def test_one_head_zeroed_in_place(self, value: str) -> None:
        dims = self.dims(value)
        index = tuple(0 if axis in ("num_heads", "num_kv_heads") else slice(None) for axis in dims)
        host, name = self.host(value, self.EDITED)
        with torch.no_grad(), self.model.trace(self.ids):
            getattr(host, name)[index] = 0
            logits = self.model.logits.save()
        assert_differs(logits, self.loaded.clean_logits)
        zeroed = only_at(index, torch.zeros_like)
        assert_close(logits, self.edited(value, self.EDITED, zeroed), ULPS_AFTER_MODEL)

    test_one_head_zeroed_in_place.values = HEADED

    def assert_untouched(self, actual: Tensor, clean: Tensor) -> None:
        """What other tokens' edits leave as it was, bit by bit."""
        assert_same(actual, clean)

    def test_edit_of_one_token_changes_nothing_before_it(self, value: str) -> None:
        index = spot(self.dims(value))
        edit = only_at(index, moved)
        logits = self.assigned(value, edit)
        clean = self.loaded.clean_logits
        self.assert_untouched(logits[0], clean[0])
        self.assert_untouched(logits[1, :-1], clean[1, :-1])
        assert_differs(logits[1, -1], clean[1, -1])
        assert_close(logits, self.edited(value, self.edited_at(value), edit), ULPS_AFTER_MODEL)

    def test_each_invoke_has_its_own_rows(self, value: str) -> None:
        """One invoke reads and the other edits; then both edit; then the second edits in place."""
        host, name = self.host(value, self.EDITED)
        dims, edit, layer = self.dims(value), edit_of(value), self.edited_at(value)
        clean = self.recorded(value)[value, layer]
        second = self.edited(value, layer, only_row(1, 2, dims, edit))
        first = self.edited(value, layer, only_row(0, 2, dims, edit))

        with self.model.trace() as tracer:
            with tracer.invoke(self.ids[:1]):
                read = getattr(host, name).clone().save()
                untouched = self.model.logits.save()
            with tracer.invoke(self.ids[1:]):
                setattr(host, name, edit(getattr(host, name)))
                logits = self.model.logits.save()
        assert_close(read, rows(clean, dims, 2, 0))
        self.assert_untouched(untouched, self.loaded.clean_logits[:1])
        assert_close(logits, second[1:], ULPS_AFTER_MODEL)

        with self.model.trace() as tracer:
            with tracer.invoke(self.ids[:1]):
                setattr(host, name, edit(getattr(host, name)))
                both_first = self.model.logits.save()
            with tracer.invoke(self.ids[1:]):
                setattr(host, name, edit(getattr(host, name)))
                both_second = self.model.logits.save()
        assert_close(both_first, first[:1], ULPS_AFTER_MODEL)
        self.assert_untouched(both_second, logits)

        with torch.no_grad(), self.model.trace() as tracer:
            with tracer.invoke(self.ids[:1]):
                untouched = self.model.logits.save()
            with tracer.invoke(self.ids[1:]):
                live = getattr(host, name)
                live[:] = edit(live)
                in_place = self.model.logits.save()
        self.assert_untouched(untouched, self.loaded.clean_logits[:1])
        self.assert_untouched(in_place, logits)
