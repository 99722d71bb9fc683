"""Requests of several tokens and several requests at once."""

import pytest
import torch

from nnterp.testing import oracles
from nnterp.testing.comparing import assert_same
from nnterp.testing.edits import noise
from nnterp_vllm.testing.checkpoint import RECOMPUTED, EngineFacts, assert_near, requests_in_this_step

STEPS = 4
LONG = 32


class Running(EngineFacts):
    def test_every_step_is_transformers_step(self):
        """Greedy tokens, and each step's stream and logits: the prompt first, then one token at a time."""
        model, prompt, at = self.model, self.prompt, self.EDITED
        run = self.oracle(
            ["layer_output"],
            [at],
            call=lambda: self.bare.generate(**self.inputs(), **oracles.greedy(STEPS)),
        )
        with model.trace(prompt, max_tokens=STEPS, temperature=0.0, ignore_eos=True) as tracer:
            streams = [].save()
            logits = [].save()
            for _ in tracer.iter[:STEPS]:
                streams.append(model.layers[at].layer_output)
                logits.append(model.logits)
        tokens = [step[0, -1].argmax().item() for step in logits]
        assert tokens == run.output[0, len(prompt) :].tolist()
        assert [tuple(step.shape[:2]) for step in streams] == [(1, len(prompt))] + [(1, 1)] * (STEPS - 1)
        for ours, theirs in zip(streams, run.calls["layer_output", at], strict=True):
            assert_near(ours, theirs)

    def test_a_decode_step_has_its_own_tokens_keys_and_no_pattern(self):
        if not self.ATTENTIONS:
            pytest.skip("no softmax attention")
        model, prompt, at = self.model, self.prompt, self.EDITED
        with model.trace(prompt, max_tokens=STEPS, temperature=0.0, ignore_eos=True) as tracer:
            lengths = [].save()
            for _ in tracer.iter[:STEPS]:
                lengths.append(model.layers[at].self_attn.attention_keys.shape[2])
        assert lengths == [len(prompt)] + [1] * (STEPS - 1)
        for value in RECOMPUTED:
            host, name = self.host(value, at)
            with (
                pytest.raises(RuntimeError, match="Unavailable: .* decode step"),
                model.trace(prompt, max_tokens=2, temperature=0.0, ignore_eos=True) as tracer,
            ):
                for _ in tracer.iter[1:2]:
                    getattr(host, name)
        assert_same(self.engine_logits(), self.clean)

    def test_a_steered_generation(self):
        """32 tokens with the stream moved at every step are transformers' under a hook that does the same."""
        model, prompt, at = self.model, self.prompt, self.EDITED
        stream = self.oracle(["layer_output"], [at])["layer_output", at]
        vector = 3.0 * stream.std() * noise(torch.empty(model.hidden_size))
        run = self.oracle(
            [],
            edits={("layer_output", at): lambda stream: stream + vector},
            call=lambda: self.bare.generate(**self.inputs(), **oracles.greedy(LONG)),
        )
        with model.trace(prompt, max_tokens=LONG, min_tokens=LONG, temperature=0.0) as tracer:
            for _ in tracer.iter[:LONG]:
                model.layers[at].layer_output += vector
            result = tracer.result.save()
        assert list(result.outputs[0].token_ids) == run.output[0, len(prompt) :].tolist()
        assert run.output[0].tolist() != self.bare.generate(**self.inputs(), **oracles.greedy(LONG))[0].tolist()

    def test_invokes_are_one_batch_each_with_its_own_edit(self):
        """Prompts of three lengths in one step; every request's edit reaches that request alone."""
        model, at = self.model, self.EDITED
        prompts = [self.prompt, self.prompt[:3], [*self.prompt[::-1], 7]]
        first, second, third = prompts
        alone = [self.bare_logits(prompt)[-1] for prompt in prompts]
        with model.trace(max_tokens=1, temperature=0.0) as tracer:
            with tracer.invoke(first):
                model.layers[at].layer_output[:, -1] *= 2
                a = model.logits.save()
            with tracer.invoke(second):
                in_the_step = requests_in_this_step(model.layers[at].layer_output).save()
                b = model.logits.save()
            with tracer.invoke(third):
                model.layers[at].layer_output = model.layers[at].layer_output * 0.5
                c = model.logits.save()
        assert in_the_step == 3
        assert_near(b[0, -1], alone[1])
        for prompt, logits, factor, clean in ((first, a, 2, alone[0]), (third, c, 0.5, alone[2])):
            expected = self._scaled(prompt, factor if prompt is third else None)
            assert_near(logits[0, -1], expected)
            assert (logits[0, -1] - clean).abs().max() > 1e-3 * clean.abs().max()

    def _scaled(self, prompt, factor):
        def edit(stream):
            stream = stream.clone()
            if factor is None:
                stream[:, -1] *= 2
                return stream
            return stream * factor

        ids = torch.tensor([prompt])
        inputs = self.inputs(ids)
        return self.oracle([], edits={("layer_output", self.EDITED): edit}, inputs=inputs).output.logits[0, -1].detach()

    def test_one_prompt_an_invoke(self):
        model, prompt = self.model, self.prompt
        with (
            pytest.raises(ValueError, match=r"[Mm]ultiple prompts"),
            model.trace([prompt, prompt], max_tokens=1),
        ):
            model.logits.save()

    def test_the_order_is_not_measured(self):
        with pytest.raises(NotImplementedError, match="StandardizedTransformer"):
            self.model.order()
        with pytest.raises(NotImplementedError, match="StandardizedTransformer"):
            self.model.rank("logits")
