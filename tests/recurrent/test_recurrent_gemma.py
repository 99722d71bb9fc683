"""RecurrentGemma: real-gated linear recurrences, whose state is kept on the module, and local attention."""

from contextlib import contextmanager
from functools import partial

import pytest
import torch
from transformers import DynamicCache
from transformers.models.recurrent_gemma import modeling_recurrent_gemma as modeling

from nnterp.testing import RecurrentSuite
from nnterp.testing.comparing import ULPS_AFTER_MODEL, assert_close, assert_differs, assert_same
from nnterp.testing.oracles import greedy
from nnterp.testing.recurrent_oracles import BETAS, DECAYS, KEYS, QUERIES, VALUES, Kernel, Recurrence

INF = float("inf")
#: Before transformers 5.24.0 several tokens over a cache get a mask that is too short.
CHUNKED = "sliding_attention" in modeling.TEMPORAL_BLOCK_CLASSES


class Unit(Recurrence):
    """RG-LRU: one number per channel. The kernel is a method of a module inside the mixer."""

    COMPONENT = "GatedRecurrence"
    PROMPT = STEP = "_rnn_scan"
    REFUSES_IN_PLACE = ()
    UNAVAILABLE = {QUERIES: "no key says where", KEYS: "no key says where", BETAS: "are in attention_values"}
    HEADS = "channels"
    FROM_A_STATE = False
    FRESH = "anew at position 0"

    @contextmanager
    def replaced(self, block, serve):
        unit = block.temporal_block.rg_lru
        plain = type(unit)._rnn_scan
        unit._rnn_scan = lambda *args, **kwargs: serve(Kernel(partial(plain, unit), False, args, kwargs))
        try:
            yield
        finally:
            del unit._rnn_scan

    def entering(self, kernel):
        gate, reset = kernel.arguments["recurrent_gate"], kernel.arguments["reset"]
        return {VALUES: kernel.arguments["hidden_states"], DECAYS: gate.float().log().masked_fill(reset, -INF)}

    def put(self, kernel, values, changed):
        given, kept = kernel.arguments, values[DECAYS].exp()
        if DECAYS not in changed:  # the model's own to the bit
            kept = given["recurrent_gate"].masked_fill(given["reset"], 0).detach() + (kept - kept.detach())
        given.update(hidden_states=values[VALUES], recurrent_gate=kept, reset=torch.zeros_like(given["reset"]))

    def initial(self, kernel):
        state, first = kernel.arguments["recurrent_states"], self.entering(kernel)[DECAYS][:, 0]
        return None if state is None or torch.isneginf(first).all() else state.clone()

    def called(self, kernel, initial):
        return kernel() if initial is None else kernel(recurrent_states=initial)

    def returned(self, kernel, outputs, final):
        return outputs, final

    def zeros(self, values):
        return torch.zeros_like(values[VALUES][:, 0])

    def next_state(self, state, now):
        return state * now[DECAYS].exp() + now[VALUES]

    def read(self, state, now, extras):
        return state


class TestRecurrentGemma(RecurrentSuite):
    FAMILY = "recurrent_gemma"
    CONFIG = {
        "model_type": "recurrent_gemma",
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "block_types": ["recurrent", "attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "intermediate_size": 96,
        "attention_window_size": 4,
        "logits_soft_cap": 3.0,
    }
    NATIVE = {
        "embed_tokens": "model.embed_tokens",
        "layers": "model.layers",
        "norm": "model.final_norm",
        "layers.0.input_layernorm": "model.layers.0.temporal_pre_norm",
        "layers.0.post_attention_layernorm": "model.layers.0.channel_pre_norm",
        "layers.0.linear_attn": "model.layers.0.temporal_block",
        "layers.0.self_attn": "model.layers.0.temporal_block",
        "layers.0.mlp": "model.layers.0.mlp_block",
    }
    RECURRENCE = Unit()
    BLOCKS = {"linear_attn": (0, 2), "self_attn": (1, 3)}
    MIXER_WIDTH_KEYS = {"channels": "lru_width"}
    PADDING_MATTERS = True  # the short convolution takes padding in
    LAYOUTS = {
        "as_wide_as_the_stream": {},
        "wider": {"config": {"lru_width": 40, "conv1d_width": 3, "attention_bias": True, "num_key_value_heads": 2}},
    }

    def visible(self, layer):
        return super().visible(layer).triu(1 - self.bare.config.attention_window_size)

    # -- the state is the module's: transformers hands on keys and values alone -----------------------------

    def call(self, cache, ids, before):
        self.handed = DynamicCache(config=self.bare.config) if cache is None else cache
        if cache is None and ids.shape[1] == 1:  # whose convolution would go on from the last run's
            for model in (self.bare, self.model._module):
                model._setup_cache(model.config, len(ids), ids.device, model.dtype)
        return self.continued(self.handed, ids, before)

    def continued(self, cache, ids, before):
        positions = torch.arange(before + ids.shape[1]).expand(len(ids), -1)
        more = {"position_ids": positions[:, before:], "attention_mask": torch.ones_like(positions)}
        return {**super().continued(cache, ids, before), **more}

    handed = None

    def cache_of(self, output):
        return self.handed

    def state_of(self, cache, layer):
        return self.kept(self.model._module, layer)

    def kept(self, model, layer):
        """The state that a model keeps between calls."""
        return model.model.layers[layer].temporal_block.rg_lru.recurrent_states.detach()

    def test_cache_receives_the_final_state(self) -> None:
        for layer in self.recurrent:
            caches = {}
            for before, length in ((0, 4), (4, 1), (5, 3 if CHUNKED else 1)):
                ids = self.tokens(before, length)
                with torch.no_grad():
                    self.bare(**self.call(caches.get("bare"), ids, before))
                    caches["bare"] = self.handed
                with torch.no_grad(), self.model.trace(**self.call(caches.get("model"), ids, before)):
                    final = self.mixer(layer).state_output.clone().save()
                caches["model"] = self.handed
                assert_same(final, self.kept(self.bare, layer))
                assert_same(self.kept(self.model._module, layer), self.kept(self.bare, layer))

    @pytest.mark.skipif(not CHUNKED, reason="transformers' mask is too short for several tokens over a cache")
    def test_several_tokens_over_a_cache_are_the_bare_models(self) -> None:
        super().test_several_tokens_over_a_cache_are_the_bare_models()

    def test_prompt_in_one_call_and_in_several(self) -> None:
        """Token by token: of several tokens over a cache the bare convolution forgets what came before."""
        for layer in self.recurrent:
            # a convolution state is made as wide as the stream: a wider one needs two tokens to begin with
            start = (1, 1) if self.bare.config.lru_width == self.model.hidden_size else (2,)
            whole, calls = self.in_calls(8, layer=layer)[0], self.in_calls(*start, *(1,) * 6, layer=layer)
            for name in (VALUES, "attention_head_outputs", "logits"):
                assert_close(torch.cat([call[name] for call in calls], dim=1), whole[name], ULPS_AFTER_MODEL)
            decays = torch.cat([call[DECAYS] for call in calls], dim=1)
            assert torch.isneginf(decays[:, 0]).all() and torch.isneginf(whole[DECAYS][:, 0]).all()
            assert_close(decays[:, 1:], whole[DECAYS][:, 1:], ULPS_AFTER_MODEL)
            assert calls[0]["initial"] is None
            for call, before in zip(calls[1:], calls, strict=False):
                assert_same(call["initial"], before["state_output"])

    # -- where the state starts anew --------------------------------

    def test_state_of_another_prompt_is_not_started_from(self) -> None:
        """What a generation left on the module is nothing to the next one; nor where the reset is edited away."""
        mixer, prompt = self.mixer(), self.ids.flip(0)
        with self.model.trace(prompt):
            clean = mixer.attention_values.clone().save()
            logits = self.model.logits.save()
        with self.model.generate(self.ids, **greedy(3)):
            pass
        assert self.kept(self.model._module, self.mixed).any()
        with self.model.generate(prompt, **greedy(2)) as tracer:
            for _ in tracer.iter[0]:
                initial = [mixer.state_input].save()
                mixer.decays[:, 0] = -0.5
                state = mixer.state_after(0).clone().save()
        assert initial == [None]
        assert_same(state.detach(), clean[:, 0].detach())
        with self.model.trace(prompt):
            again = self.model.logits.save()
        assert_same(again, logits)

    def test_state_given_to_a_fresh_prompt(self) -> None:
        """Refused where the first token would drop it; kept where its decay is edited to."""
        mixer = self.mixer()
        with self.model.trace(self.ids):
            values = mixer.attention_values.clone().save()
        given = torch.linspace(-1, 1, values[:, 0].numel()).view_as(values[:, 0])
        with pytest.raises(ValueError, match="anew at position 0"), self.model.trace(self.ids):
            mixer.state_input = given
        with self.model.trace(self.ids):
            mixer.decays[:, 0] = -0.5
            mixer.state_input = given
            outputs = mixer.attention_head_outputs.clone().save()
            logits = self.model.logits.save()
        assert_close(outputs[:, 0].detach(), given * torch.tensor(-0.5).exp() + values[:, 0].detach())
        assert_differs(logits, self.loaded.clean_logits)
        with pytest.raises(ValueError, match="state_input"), self.model.trace(self.ids):
            mixer.decays[:, 0] = -0.5
            mixer.state_input = given[:1]
        with self.model.trace(self.ids):
            logits = self.model.logits.save()
        assert_same(logits, self.loaded.clean_logits)

    def test_state_written_at_a_decode_step(self) -> None:
        """A call of one token, which transformers computes without its loop, is served and edited as in it."""
        mixer, steps = self.mixer(), greedy(4)

        def generated(write):
            with torch.no_grad(), self.model.generate(self.ids, **steps) as tracer:
                logits, states = [].save(), [].save()
                for step in tracer.iter[0:4]:
                    if step == 2:
                        write()
                        states.append(mixer.states.clone())
                        states.append(mixer.attention_head_outputs.clone())
                        states.append(mixer.state_output.clone())
                    logits.append(self.model.logits[:, -1].clone())
            return logits, states

        clean, (states, outputs, final) = generated(lambda: None)
        assert_same(states, outputs.float())
        assert_same(states[:, 0], final)
        halved, (states, outputs, final) = generated(lambda: mixer.set_state_after(0, mixer.state_after(0) * 0.5))
        assert_same(states, outputs)
        assert_same(states[:, 0], final)

        expected = self.kernels(
            edits=dict.fromkeys(("attention_head_outputs", "state_output"), lambda value: value * 0.5),
            at_call=2,
            call=lambda: self.bare.generate(**self.inputs(), **steps, return_dict_in_generate=True, output_logits=True),
        ).output.logits
        for step, (got, bare) in enumerate(zip(halved, expected, strict=True)):
            assert_close(got, bare, ULPS_AFTER_MODEL)
            assert step < 2 or not torch.equal(got, clean[step])
