"""The state after each token: all of them, one by one, some of them; and a state written, with all that follows."""

from typing import Any

import pytest
import torch
from torch import Tensor

from nnterp import Unavailable
from nnterp.testing.comparing import ULPS_AFTER_MODEL, assert_close, assert_differs, assert_same
from nnterp.testing.edits import moved, noise, only_row
from nnterp.testing.oracles import greedy
from nnterp.testing.recurrent_reading import STEPS, ULPS_OF_A_RECURRENCE, RecurrentReading


class RecurrentStates(RecurrentReading):
    def states_of(self, layer: int) -> Tensor:
        """The states of a mixer's prompt in float64, from its served values."""
        return self.recurrence_of(self.computed_from(self.read_mixer(layer)), layer)[0]

    # -- all of them --------------------------------------------------------------------------------------------------

    def test_states_are_the_recurrences(self) -> None:
        """In a prompt and at each step of generation; the last is what the cache receives; the outputs stay."""
        for layer in self.recurrent:
            expected, mixer = self.states_of(layer), self.mixer(layer)
            with self.states_held(), torch.no_grad():
                with self.model.trace(self.ids):
                    states = mixer.states.clone().save()
                    outputs = mixer.attention_head_outputs.clone().save()
                    final = mixer.state_output.clone().save()
                    logits = self.model.logits.save()
                assert isinstance(states, type(mixer).states.layout)
                assert_close(states.double(), expected, ULPS_OF_A_RECURRENCE, torch.float32)
                assert_close(outputs, self.read_mixer(layer)["attention_head_outputs"], ULPS_OF_A_RECURRENCE)
                assert_same(states[:, -1], final)
                assert_close(logits, self.loaded.clean_logits, ULPS_OF_A_RECURRENCE)
                for token in (0, 3, -1):
                    with self.model.trace(self.ids):
                        assert_same(mixer.state_after(token).clone(), states[:, token])
                with self.model.generate(self.ids, **greedy(STEPS)) as tracer:
                    steps = [].save()
                    for _ in tracer.iter[0:STEPS]:
                        held = mixer.states.clone()
                        steps.append((held, mixer.state_output.clone()))
            for step, (held, final) in enumerate(steps):
                assert held.shape[1] == (self.ids.shape[1] if step == 0 else 1)
                assert_same(held[:, -1], final)
            assert_same(steps[0][0], states)

    def test_states_are_read_only(self) -> None:
        mixer = self.mixer()
        with self.states_held():
            with self.model.trace(self.ids):
                states = mixer.states.save()
            with pytest.raises(AttributeError, match="read-only"), self.model.trace(self.ids):
                mixer.states = states
            with torch.no_grad(), self.model.trace(self.ids):
                mixer.states[:] = 0
                logits = self.model.logits.save()
            with torch.no_grad(), self.model.trace(self.ids):
                clean = self.model.logits.save()
        assert_same(logits, clean)

    def test_state_is_visited_once_a_token(self) -> None:
        """Walked with ``tracer.iter``; one visit alone; outside, the first; and on through the steps of generation."""
        if not self.RECURRENCE.STATES_WRITABLE:
            return
        length = self.ids.shape[1]
        for layer in self.recurrent:
            mixer = self.mixer(layer)
            with self.states_held(), torch.no_grad():
                with self.model.trace(self.ids):
                    states = mixer.states.clone().save()
                with self.model.trace(self.ids) as tracer:
                    walked = [].save()
                    for _ in tracer.iter[0:length]:
                        walked.append(mixer.state.clone())
                with self.model.trace(self.ids) as tracer:
                    for _ in tracer.iter[4]:
                        fifth = mixer.state.clone().save()
                with self.model.trace(self.ids):
                    first = mixer.state.clone().save()
                with self.model.generate(self.ids, **greedy(STEPS)) as tracer:
                    all_steps = [].save()
                    for _ in tracer.iter[0 : length + STEPS - 1]:
                        all_steps.append(mixer.state.clone())
                    text = tracer.result.save()
                with self.model.trace(text[:, :-1]):
                    whole = mixer.states.clone().save()
            assert_same(torch.stack(walked, dim=1), states)
            assert_same(fifth, states[:, 4])
            assert_same(first, states[:, 0])
            assert_close(torch.stack(all_steps, dim=1), whole, ULPS_OF_A_RECURRENCE)

    # -- some of them -------------------------------------------------------------------------------------------------

    def test_states_at_chosen_tokens(self) -> None:
        """In any order, twice, counted from the end; under the kernels as they are loaded and where states are held."""
        for layer in self.recurrent:
            expected = self.states_of(layer)
            for tokens in ([3, 0, -1], [2], [1, 1, -2], range(self.ids.shape[1])):
                states, logits = self.states_at(layer, tokens)
                assert isinstance(states, type(self.mixer(layer)).states.layout)
                assert_close(states.double(), expected[:, list(tokens)], ULPS_OF_A_RECURRENCE, torch.float32)
                assert_close(logits, self.loaded.clean_logits, ULPS_OF_A_RECURRENCE)
            with self.states_held(), torch.no_grad():
                with self.model.trace(self.ids):
                    held = self.mixer(layer).states.clone().save()
                some, _ = self.states_at(layer, [4, 0])
                assert_close(some, held[:, [4, 0]], ULPS_OF_A_RECURRENCE)

    def states_at(self, layer: int, tokens: Any) -> tuple[Tensor, Tensor]:
        with torch.no_grad(), self.model.trace(self.ids):
            states = self.mixer(layer).states_at(tokens).clone().save()
            logits = self.model.logits.save()
        return states, logits

    def test_states_at_in_two_invokes(self) -> None:
        """Each asks for tokens of its own, and gets its own rows."""
        for layer in self.recurrent:
            expected, mixer = self.states_of(layer), self.mixer(layer)
            with torch.no_grad(), self.model.trace() as tracer:
                with tracer.invoke(self.ids[:1]):
                    upper = mixer.states_at([1, 4]).clone().save()
                    first = self.model.logits.save()
                with tracer.invoke(self.ids[1:]):
                    lower = mixer.states_at([4, 2, -1]).clone().save()
                    second = self.model.logits.save()
            for got, rows in ((upper, expected[:1, [1, 4]]), (lower, expected[1:, [4, 2, -1]])):
                assert_close(got.double(), rows, ULPS_OF_A_RECURRENCE, torch.float32)
            assert_close(torch.cat([first, second]), self.loaded.clean_logits, ULPS_OF_A_RECURRENCE)

    def test_states_at_in_the_steps_of_generation(self) -> None:
        """A step has one token; steps that are not asked are counted all the same."""
        mixer = self.mixer()
        with self.model.generate(self.ids, **greedy(STEPS)) as tracer:
            found = {}.save()
            for step in tracer.iter[0:STEPS]:
                if step != 1:
                    found[step, "state"] = mixer.states_at([0, -1]).clone()
                found[step, "final"] = mixer.state_output.clone()
        expected = self.states_of(self.mixed)
        assert_close(found[0, "state"].double(), expected[:, [0, -1]], ULPS_OF_A_RECURRENCE, torch.float32)
        for step in range(2, STEPS):
            for state in found[step, "state"].unbind(1):
                assert_same(state, found[step, "final"])

    # -- written ------------------------------------------------------------------------------------------------------

    def written(self, token: int, edit: Any, layer: int, **how: Any) -> dict[str, Tensor]:
        """A trace in which the state after ``token`` is edited, and what it gives."""
        mixer = self.mixer(layer)
        with torch.no_grad(), self.model.trace(self.ids):
            before = mixer.state_after(token)
            if how.get("in_place"):
                before[:] = edit(before)
            else:
                mixer.set_state_after(token, edit(before))
            states = mixer.states.clone().save()
            outputs = mixer.attention_head_outputs.clone().save()
            final = mixer.state_output.clone().save()
            logits = self.model.logits.save()
        return {"states": states, "outputs": outputs, "final": final, "logits": logits}

    def test_written_state_changes_what_follows(self) -> None:
        """What the recurrence gives in float64, the token's own output with it; and nothing before it, to the bit."""
        if not self.RECURRENCE.STATES_WRITABLE:
            return
        last = self.ids.shape[1] - 1
        for layer in self.recurrent:
            with self.states_held():
                with torch.no_grad(), self.model.trace(self.ids):
                    clean_states = self.mixer(layer).states.clone().save()
                    clean = self.model.logits.save()
                for token in (0, 2, last):
                    got = self.written(token, moved, layer)
                    expected = self.kernels(
                        ("attention_head_outputs", "state_output"), {"state": moved}, None, True, layer, at_call=token
                    )
                    assert_same(got["states"][:, token], moved(clean_states[:, token]))
                    assert_same(got["states"][:, :token], clean_states[:, :token])
                    assert_close(got["states"].double(), self.stacked(expected), ULPS_OF_A_RECURRENCE, torch.float32)
                    assert_close(got["outputs"], expected["attention_head_outputs"], ULPS_OF_A_RECURRENCE)
                    assert_close(got["final"], expected["state_output"], ULPS_OF_A_RECURRENCE)
                    assert_close(got["logits"], expected.output.logits, ULPS_OF_A_RECURRENCE)
                    if token:
                        self.assert_untouched(got["logits"][:, :token], clean[:, :token])
                    assert_differs(got["logits"][:, token:], clean[:, token:])
                    for name, value in self.written(token, moved, layer, in_place=True).items():
                        assert_same(value, got[name])

    @staticmethod
    def stacked(run: Any) -> Tensor:
        """The states of a run that visited each, ``[batch, seq, ...]``, float64."""
        return torch.stack(run.calls["state"], dim=1).double()

    def test_state_edited_at_its_visit(self) -> None:
        """``state`` in ``tracer.iter`` is the same edit; of one row, by one of two invokes, leaves the other alone."""
        if not self.RECURRENCE.STATES_WRITABLE:
            return
        mixer, layer = self.mixer(), self.mixed
        with self.states_held(), torch.no_grad():
            expected = self.written(3, moved, layer)
            with self.model.trace(self.ids) as tracer:
                for token in tracer.iter[0:5]:
                    if token == 3:
                        mixer.state = moved(mixer.state)
                logits = self.model.logits.save()
            assert_same(logits, expected["logits"])
            with self.model.trace(self.ids) as tracer:
                for _ in tracer.iter[3]:
                    live = mixer.state
                    live[:] = moved(live)
                logits = self.model.logits.save()
            assert_same(logits, expected["logits"])
            with self.model.trace(self.ids):
                clean = self.model.logits.save()
            row = self.kernels((), {"state": only_row(1, 2, ("batch",), moved)}, None, True, layer, at_call=3)
            with self.model.trace() as tracer:
                with tracer.invoke(self.ids[:1]):
                    untouched = self.model.logits.save()
                with tracer.invoke(self.ids[1:]):
                    mixer.set_state_after(3, moved(mixer.state_after(3)))
                    second = self.model.logits.save()
        assert_close(untouched, clean[:1], ULPS_AFTER_MODEL)
        assert_close(second, row.output.logits[1:], ULPS_OF_A_RECURRENCE)

    def test_each_invoke_writes_its_own_token(self) -> None:
        if not self.RECURRENCE.STATES_WRITABLE:
            return
        mixer, layer = self.mixer(), self.mixed
        with self.states_held(), torch.no_grad():
            runs = [
                self.kernels((), {"state": only_row(row, 2, ("batch",), moved)}, None, True, layer, at_call=token)
                for row, token in ((0, 1), (1, 4))
            ]
            with self.model.trace() as tracer:
                with tracer.invoke(self.ids[:1]):
                    mixer.set_state_after(1, moved(mixer.state_after(1)))
                    first = self.model.logits.save()
                with tracer.invoke(self.ids[1:]):
                    mixer.set_state_after(4, moved(mixer.state_after(4)))
                    second = self.model.logits.save()
        assert_close(first, runs[0].output.logits[:1], ULPS_OF_A_RECURRENCE)
        assert_close(second, runs[1].output.logits[1:], ULPS_OF_A_RECURRENCE)

    def test_state_written_at_a_step_of_generation(self) -> None:
        """And in a stored edit, on prompts of other lengths."""
        if not self.RECURRENCE.STATES_WRITABLE:
            return
        mixer, layer, step = self.mixer(), self.mixed, 2
        call = self.stepwise
        at_call = self.ids.shape[1] + step - 1
        with self.states_held(), torch.no_grad():
            expected = self.kernels((), {"state": moved}, call, True, layer, at_call=at_call).output
            with self.model.generate(self.ids, **greedy(STEPS)) as tracer:
                logits = [].save()
                for now in tracer.iter[0:STEPS]:
                    if now == step:
                        mixer.set_state_after(0, moved(mixer.state_after(0)))
                    logits.append(self.model.logits[:, -1].clone())
            for got, bare in zip(logits, expected.logits, strict=True):
                assert_close(got, bare, ULPS_OF_A_RECURRENCE)
            with self.model.edit() as (_, changed):
                of_edit = self.mixer(layer, changed)
                of_edit.set_state_after(1, moved(of_edit.state_after(1)))
            for ids in (self.ids, self.ids[:1, :4]):
                with changed.trace(ids):
                    logits = changed.logits.save()

                def run(ids: Tensor = ids) -> Any:
                    return self.bare(**self.inputs(ids))

                expected = self.kernels((), {"state": moved}, run, True, layer, at_call=1).output
                assert_close(logits, expected.logits, ULPS_OF_A_RECURRENCE)

    def test_gradient_of_a_state(self) -> None:
        """Of what is read from the state, with respect to it as it is and as it is written."""
        if not self.RECURRENCE.STATES_WRITABLE:
            return
        mixer, layer, token = self.mixer(), self.mixed, 2
        values = self.computed_from(self.read_mixer(layer))
        weights = noise(values["attention_values"], seed=5)

        def gradient(edit: Any) -> Tensor:
            """In float64."""
            seen: list[Tensor] = []

            def at(part: str, state: Tensor) -> Tensor:
                seen.append(edit(state.detach()).requires_grad_() if len(seen) == token else state)
                return seen[-1]

            parameters = self.RECURRENCE.parameters(self.bare_mixer(layer))
            _, outputs = self.RECURRENCE.run(values, parameters, at)
            (outputs * weights).sum().backward()
            return seen[token].grad

        with self.states_held():
            with self.model.trace(self.ids):
                live = mixer.state_after(token)
                clean = live.detach().clone().save()
                loss = (mixer.attention_head_outputs * weights).sum()
                with loss.backward():
                    got = live.grad.save()
            assert_close(got, gradient(Tensor.clone), ULPS_OF_A_RECURRENCE)
            state = moved(clean).requires_grad_()
            with self.model.trace(self.ids):
                mixer.set_state_after(token, state)
                loss = (mixer.attention_head_outputs * weights).sum()
                loss.backward()
            assert_close(state.grad, gradient(moved), ULPS_OF_A_RECURRENCE)
            with self.model.trace(self.ids):
                mixer.state_after(token)[:] = state.detach()
                logits = self.model.logits.save()
            assert_same(logits, self.written(token, moved, layer)["logits"])

    # -- bad input ----------------------------------------------------------------------------------------------------

    def test_bad_states(self) -> None:
        """Tokens that the call has not, shapes that the state has not, states that cannot be written."""
        mixer, length = self.mixer(), self.ids.shape[1]
        refused: list[tuple[type[Exception], str, Any]] = [
            (IndexError, f"no {token}", lambda token=token: mixer.states_at([0, token]))
            for token in (length, -length - 1)
        ]
        refused += [(TypeError, "number", lambda t=token: mixer.states_at([t])) for token in (True, 1.0, "0")]
        refused += [(ValueError, "no token", lambda: mixer.states_at([]))]
        if not self.RECURRENCE.STATES_WRITABLE:
            refused += [
                (Unavailable, "in one step", lambda: mixer.set_state_after(0, self.ids)),
                (Unavailable, "in one step", lambda: mixer.state),
            ]
        self.refuse(refused)
        held: list[tuple[type[Exception], str, Any]] = [
            (IndexError, f"no {length}", lambda: mixer.state_after(length)),
            (TypeError, "number", lambda: mixer.state_after(True)),
        ]
        if self.RECURRENCE.STATES_WRITABLE:
            held += [
                (ValueError, "shape", lambda: mixer.set_state_after(1, mixer.state_after(1)[:1])),
                (ValueError, "dtype|float", lambda: mixer.set_state_after(1, mixer.state_after(1).double())),
                (TypeError, "tensor", lambda: mixer.set_state_after(1, 0)),
                (IndexError, f"no {length}", lambda: mixer.set_state_after(length, self.ids)),
            ]
        with self.states_held():
            self.refuse(held)

    def refuse(self, cases: list[tuple[type[Exception], str, Any]]) -> None:
        """Each ``act`` raises inside a trace, in words that match, and the model works afterwards."""
        with self.model.trace(self.ids):
            clean = self.model.logits.save()
        for kind, words, act in cases:
            with pytest.raises(kind, match=words), self.model.trace(self.ids):
                act()
            with self.model.trace(self.ids):
                logits = self.model.logits.save()
            assert_same(logits, clean)
