"""A mixer's state carried over: what a call starts from and what it leaves to the next, edited."""

from typing import Any

import pytest
import torch
from torch import Tensor

from nnterp.testing.comparing import ULPS_AFTER_MODEL, assert_close, assert_differs, assert_same
from nnterp.testing.edits import moved, noise, only_at, only_row
from nnterp.testing.oracles import greedy
from nnterp.testing.recurrent_oracles import BETAS, DECAYS
from nnterp.testing.recurrent_reading import STEPS, ULPS_OF_A_RECURRENCE
from nnterp.testing.recurrent_states import RecurrentStates

#: The axes of a mixer's values that are parts of it on their own.
PARTS = ("heads", "groups", "channels")


class RecurrentWriting(RecurrentStates):
    # -- one head -----------------------------------------------------------------------------------------------------

    def test_one_part_of_the_mixer_zeroed_in_place(self) -> None:
        """The first head, group or channel of each value, against the bare kernels."""
        for layer in self.recurrent:
            mixer = self.mixer(layer)
            for name in (*self.entering(layer), "attention_head_outputs"):
                if name in self.RECURRENCE.READ_ONLY:
                    continue
                dims = getattr(type(mixer), name).dims
                index = tuple(0 if axis in PARTS else slice(None) for axis in dims)
                with torch.no_grad(), self.model.trace(self.ids):
                    getattr(mixer, name)[index] = 0
                    logits = self.model.logits.save()
                edits = {name: only_at(index, torch.zeros_like)}
                assert_differs(logits, self.loaded.clean_logits)
                assert_close(logits, self.kernels((), edits, layer=layer).output.logits, ULPS_AFTER_MODEL)

    def test_two_invokes_edit_two_values(self) -> None:
        """Each another value of the one mixer, and the first reads what it did not edit."""
        mixer, names = self.mixer(), [n for n in self.entering() if n not in self.RECURRENCE.READ_ONLY]
        for upper, lower in zip(names, names[1:] + names[:1], strict=True):
            with torch.no_grad(), self.model.trace() as tracer:
                with tracer.invoke(self.ids[:1]):
                    setattr(mixer, upper, moved(getattr(mixer, upper)))
                    first = self.model.logits.save()
                with tracer.invoke(self.ids[1:]):
                    live = getattr(mixer, lower)
                    live[:] = moved(live)
                    second = self.model.logits.save()
            for logits, name, row in ((first, upper, 0), (second, lower, 1)):
                edit = only_row(row, 2, ("batch",), moved)
                expected = self.kernels((), {name: edit}).output.logits[row : row + 1]
                assert_close(logits, expected, ULPS_AFTER_MODEL)
            if len(names) < 2:
                break

    def test_nothing_is_kept_between_runs(self) -> None:
        """Neither on the envoy nor on the module, whatever a run read and however it ended."""
        mixer, layer = self.mixer(), self.mixed
        kept = set(vars(mixer)), set(vars(mixer._module))
        self.read_mixer(layer)
        self.states_at(layer, [1])
        with pytest.raises(ZeroDivisionError), self.model.trace(self.ids):
            mixer.attention_values.sum() / (1 // 0)
        with self.model.trace(self.ids):
            mixer.attention_values.save()
        assert (set(vars(mixer)), set(vars(mixer._module))) == kept

    # -- betas and decays that are one quantity -----------------------------------------------------------------------

    def test_coupled_betas_and_decays_imply_each_other(self) -> None:
        """Where the kernel is given one of them: read after an edit of the other, and after a second edit."""
        if not self.RECURRENCE.BESIDE:
            return
        mixer, clean = self.mixer(), self.read_mixer(self.mixed)
        rates = (clean[DECAYS] / clean[BETAS])[:1, :1]
        with torch.no_grad():
            with self.model.trace(self.ids):
                mixer.betas[:, 2] = 0
                without = mixer.decays.clone().save()
                mixer.decays[:, 4] = -1.0
                both = mixer.betas.clone().save()
                mixer.betas[:, 4] *= 2
                again = mixer.decays.clone().save()
                weights = mixer.effective_attention.clone().save()
                outputs = mixer.attention_head_outputs.clone().save()
            betas = clean[BETAS].clone()
            betas[:, 2] = 0
            betas[:, 4] = 2 * (-1.0 / rates[:, 0])
            expected = self.kernels(("attention_head_outputs",), {BETAS: lambda _: betas})
        assert not without[:, 2].any()
        assert_same(without[:, [0, 1, 3, 4, 5]], clean[DECAYS][:, [0, 1, 3, 4, 5]])
        assert_close(both[:, 4], (-1.0 / rates[:, 0]).expand_as(both[:, 4]))
        assert_close(again[:, 4], torch.full_like(again[:, 4], -2.0))
        assert_close(outputs, expected["attention_head_outputs"], ULPS_AFTER_MODEL)
        assert not weights[..., 2].any()
        with pytest.raises(ValueError, match="one quantity"), self.model.trace(self.ids):
            betas, decays = mixer.betas, mixer.decays
            betas[:, 0] = 1.0
            decays[:, 0] = -100.0

    def test_zero_betas_leave_the_state(self) -> None:
        """Of a step: what it starts from is what it leaves, where `decays` follows `betas`; to the bit."""
        if not self.RECURRENCE.BESIDE:
            return
        mixer = self.mixer()
        with self.model.generate(self.ids, **greedy(3)) as tracer:
            found = {}.save()
            for step in tracer.iter[0:3]:
                if step == 1:
                    found["before"] = mixer.state_input.clone()
                    mixer.betas[:] = 0
                    found["after"] = mixer.state_output.clone()
        assert found["before"].any()
        assert_same(found["after"], found["before"])

    # -- what a call leaves -------------------------------------------------------------------------------------------

    def test_edited_final_state_changes_the_next_step(self) -> None:
        """And not its own call: of the prompt and of a step, assigned, in place, and by one of two invokes."""
        mixer, layer = self.mixer(), self.mixed
        for at_call in (0, 1):
            expected = self.kernels((), {"state_output": moved}, self.stepwise, layer=layer, at_call=at_call).output
            clean = self.kernels((), {}, self.stepwise, layer=layer).output
            for in_place in (False, True):
                with self.model.generate(self.ids, **greedy(STEPS)) as tracer:
                    logits = [].save()
                    for step in tracer.iter[0:STEPS]:
                        if step == at_call:
                            live = mixer.state_output
                            if in_place:
                                live[:] = moved(live)
                            else:
                                mixer.state_output = moved(live)
                        logits.append(self.model.logits[:, -1].clone())
                for step, (got, bare) in enumerate(zip(logits, expected.logits, strict=True)):
                    assert_close(got, bare, ULPS_AFTER_MODEL)
                    if step <= at_call:
                        assert_close(got, clean.logits[step], ULPS_AFTER_MODEL)
                assert_differs(logits[at_call + 1], clean.logits[at_call + 1])
            row = only_row(1, 2, ("batch",), moved)
            expected = self.kernels((), {"state_output": row}, self.stepwise, layer=layer, at_call=at_call).output
            with self.model.generate(**greedy(STEPS)) as tracer:
                with tracer.invoke(self.ids[:1]):
                    first = [].save()
                    for _ in tracer.iter[0:STEPS]:
                        first.append(self.model.logits[:, -1].clone())
                with tracer.invoke(self.ids[1:]):
                    second = [].save()
                    for step in tracer.iter[0:STEPS]:
                        if step == at_call:
                            mixer.state_output = moved(mixer.state_output)
                        second.append(self.model.logits[:, -1].clone())
            for upper, lower, bare in zip(first, second, expected.logits, strict=True):
                assert_close(torch.cat([upper, lower]), bare, ULPS_AFTER_MODEL)

    def test_edited_final_state_is_the_caches(self) -> None:
        """What was assigned is what transformers' cache holds, and the values of the call are as they were."""
        clean = self.read_mixer(self.mixed)
        with torch.no_grad(), self.model.trace(self.ids, use_cache=True) as tracer:
            outputs = self.mixer().attention_head_outputs.clone().save()
            self.mixer().state_output = moved(self.mixer().state_output)
            logits = self.model.logits.save()
            result = tracer.result.save()
        assert_close(outputs, clean["attention_head_outputs"])
        assert_close(logits, self.loaded.clean_logits)
        assert_close(self.state_of(self.cache_of(result), self.mixed), moved(clean["state_output"]))

    def test_state_served_stays_what_it_was(self) -> None:
        """What a step reads is a copy: the steps after do not overwrite it, and holding it edits nothing."""
        mixer = self.mixer()
        with self.model.generate(self.ids, **greedy(STEPS)) as tracer:
            held, copies = [].save(), [].save()
            for step in tracer.iter[0:STEPS]:
                if step:
                    held.append(mixer.state_input)
                    copies.append(held[-1].clone())
                held.append(mixer.state_output)
                copies.append(held[-1].clone())
        for state, copy in zip(held, copies, strict=True):
            assert_same(state, copy)

    def test_call_that_keeps_no_cache(self) -> None:
        """Its final state is None and takes no value; the states after chosen tokens are there all the same."""
        mixer, layer = self.mixer(), self.mixed
        state = self.donor(layer)
        with torch.no_grad(), self.model.trace(self.ids, use_cache=False):
            final = [mixer.state_output].save()
            logits = self.model.logits.save()
        assert final == [None]
        assert_same(logits, self.bare(**self.inputs(), use_cache=False).logits)
        with pytest.raises(ValueError, match="keeps no cache"), self.model.trace(self.ids, use_cache=False):
            mixer.state_output = state
        with torch.no_grad(), self.model.trace(self.ids, use_cache=False):
            states = mixer.states_at([1, -1]).clone().save()
        expected = self.states_of(layer)[:, [1, -1]]
        assert_close(states.double(), expected, ULPS_OF_A_RECURRENCE, torch.float32)

    # -- what a call starts from --------------------------------------------------------------------------------------

    def test_edited_initial_state_of_a_step(self) -> None:
        mixer, layer = self.mixer(), self.mixed
        parts = ("attention_head_outputs", "state_output")
        # bare kernels are handed a state from the second call on
        expected = self.kernels(parts, {"state_input": moved}, self.stepwise, layer=layer, at_call=1)
        for in_place in (False, True):
            with self.model.generate(self.ids, **greedy(STEPS)) as tracer:
                logits, read = [].save(), {}.save()
                for step in tracer.iter[0:STEPS]:
                    if step == 2:
                        live = mixer.state_input
                        if in_place:
                            live[:] = moved(live)
                        else:
                            mixer.state_input = moved(live)
                        for part in parts:
                            read[part] = getattr(mixer, part).clone()
                    logits.append(self.model.logits[:, -1].clone())
            for got, bare in zip(logits, expected.output.logits, strict=True):
                assert_close(got, bare, ULPS_AFTER_MODEL)
            for part in parts:
                assert_close(read[part], expected.calls[part][2], ULPS_AFTER_MODEL)

    def donor(self, layer: int) -> Tensor:
        """A state that some other prompt left."""
        ids = self.ids.flip(1)
        with torch.no_grad(), self.model.trace(ids):
            state = self.mixer(layer).state_output.clone().save()
        return state

    def test_prompt_that_starts_from_a_state(self) -> None:
        """A fresh prompt is given another's final state: the recurrence from there; or what cannot be is refused."""
        for layer in self.recurrent:
            mixer, state = self.mixer(layer), self.donor(layer)
            if not self.RECURRENCE.FROM_A_STATE:
                why = self.RECURRENCE.FRESH
                self.refuse([(ValueError, why, lambda m=mixer, s=state: setattr(m, "state_input", s))])
                continue
            read = self.read_mixer(layer)
            states, outputs = self.recurrence_of({**self.computed_from(read), "initial": state}, layer)
            with torch.no_grad(), self.model.trace(self.ids):
                mixer.state_input = state
                back = mixer.state_input.clone().save()
                served = mixer.attention_head_outputs.clone().save()
                final = mixer.state_output.clone().save()
                logits = self.model.logits.save()
            assert_same(back, state)
            with torch.no_grad(), self.model.trace(self.ids):
                mixer.state_input = state
                mixer.attention_keys[:, 3] *= 2
                some = mixer.states_at([4, 0]).clone().save()
            keys = read["attention_keys"].clone()
            keys[:, 3] *= 2
            edited = {**self.computed_from(read), "initial": state, "attention_keys": keys}
            expected = self.recurrence_of(edited, layer)[0][:, [4, 0]]
            assert_close(some.double(), expected, ULPS_OF_A_RECURRENCE, torch.float32)
            assert_close(served.double(), outputs, ULPS_OF_A_RECURRENCE, torch.float32)
            assert_close(final.double(), states[:, -1], ULPS_OF_A_RECURRENCE, torch.float32)
            expected = self.kernels((), {"attention_head_outputs": lambda _, new=served: new}, layer=layer)
            assert_close(logits, expected.output.logits, ULPS_AFTER_MODEL)
            assert_differs(logits, self.loaded.clean_logits)
            self.one_of_two_starts_from(state, layer, served)

    def one_of_two_starts_from(self, state: Tensor, layer: int, served: Tensor) -> None:
        """Either invoke, and then both, each from a state of its own."""
        mixer, clean = self.mixer(layer), self.read_mixer(layer)["attention_head_outputs"]
        for given in ((True, False), (False, True), (True, True)):
            with torch.no_grad(), self.model.trace() as tracer:
                with tracer.invoke(self.ids[:1]):
                    if given[0]:
                        mixer.state_input = state[:1]
                    upper = mixer.attention_head_outputs.clone().save()
                    first = self.model.logits.save()
                with tracer.invoke(self.ids[1:]):
                    if given[1]:
                        mixer.state_input = state[1:]
                    lower = mixer.attention_head_outputs.clone().save()
            for row, (outputs, started) in enumerate(zip((upper, lower), given, strict=True)):
                expected = (served if started else clean)[row : row + 1]
                assert_close(outputs, expected, ULPS_OF_A_RECURRENCE)
            if not given[0]:
                assert_close(first, self.loaded.clean_logits[:1], ULPS_OF_A_RECURRENCE)

    def test_gradient_of_a_given_state(self) -> None:
        """Of the state that a prompt is made to start from: what the recurrence gives in float64."""
        if not self.RECURRENCE.FROM_A_STATE:
            return
        layer, mixer = self.mixed, self.mixer()
        state = self.donor(layer).requires_grad_()
        read = self.read_mixer(layer)
        weights = noise(read["attention_head_outputs"], seed=5)
        with self.model.trace(self.ids):
            mixer.state_input = state
            loss = (mixer.attention_head_outputs * weights).sum()
            loss.backward()
        double = state.detach().double().requires_grad_()
        _, outputs = self.recurrence_of({**self.computed_from(read), "initial": double}, layer)
        (outputs * weights).sum().backward()
        assert_close(state.grad.double(), double.grad, ULPS_OF_A_RECURRENCE, torch.float32)

    def test_state_patched_from_one_run_of_a_session_into_another(self) -> None:
        """A prompt's final state in the second step of another's generation."""
        mixer, layer = self.mixer(), self.mixed
        state = self.donor(layer)
        expected = self.kernels((), {"state_input": lambda _: state}, self.stepwise, layer=layer, at_call=0).output
        with self.model.session():
            with self.model.trace(self.ids.flip(1)):
                left = mixer.state_output.clone()
            with self.model.generate(self.ids, **greedy(STEPS)) as tracer:
                logits = [].save()
                for step in tracer.iter[0:STEPS]:
                    if step == 1:
                        mixer.state_input = left
                    logits.append(self.model.logits[:, -1].clone())
        for got, bare in zip(logits, expected.logits, strict=True):
            assert_close(got, bare, ULPS_AFTER_MODEL)

    # -- bad input ----------------------------------------------------------------------------------------------------

    def test_bad_writes(self) -> None:
        """Of a wrong shape or dtype, of what is no tensor, of what is read-only."""
        mixer, state = self.mixer(), self.donor(self.mixed)
        cases: list[tuple[type[Exception], str, Any]] = []
        for name in (*self.entering(), "attention_head_outputs"):
            if name in self.RECURRENCE.READ_ONLY:
                cases.append((AttributeError, name, lambda n=name: setattr(mixer, n, getattr(mixer, n))))
                continue
            cases += [
                (ValueError, name, lambda n=name: setattr(mixer, n, getattr(mixer, n)[:1])),
                (ValueError, name, lambda n=name: setattr(mixer, n, getattr(mixer, n).double())),
                (TypeError, name, lambda n=name: setattr(mixer, n, 0)),
            ]
        cases.append((ValueError, "state_output", lambda: setattr(mixer, "state_output", state[:1])))
        if self.RECURRENCE.FROM_A_STATE:
            cases += [
                (ValueError, "state_input", lambda: setattr(mixer, "state_input", state[..., :1])),
                (ValueError, "state_input", lambda: setattr(mixer, "state_input", state.double())),
                (TypeError, "state_input", lambda: setattr(mixer, "state_input", 0)),
            ]
        self.refuse(cases)
