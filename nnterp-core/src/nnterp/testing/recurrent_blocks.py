"""`FamilySuite`'s statements about blocks, where these are not all alike: mixers, attentions and MLPs by block."""

import pytest

from nnterp import Unavailable
from nnterp.testing.comparing import assert_same
from nnterp.testing.recurrent_facts import RecurrentFacts
from nnterp.testing.recurrent_reading import ULPS_OF_A_RECURRENCE


class RecurrentBlocks(RecurrentFacts):
    ULPS_UNDER_SDPA = ULPS_OF_A_RECURRENCE

    # -- names --------------------------------------------------------------------------------------------------------

    def test_module_outputs_have_their_widths(self) -> None:
        mixers = [self.mixer(layer) for layer in self.recurrent]
        mixers += [self.envoy(self.model.layers[i], host) for host in self.ATTENTIONS for i in self.with_host(host)]
        for mixer in mixers:
            with self.model.trace(self.ids):
                mixed = mixer.output.save()
            mixed = mixed[0] if isinstance(mixed, tuple) else mixed
            assert mixed.shape[-1] == self.model.hidden_size
        with self.model.trace(self.ids):
            block = self.model.layers[0].output.save()
            head = self.model.lm_head.output.save()
        block = block[0] if isinstance(block, tuple) else block
        assert [block.shape[-1], head.shape[-1]] == [self.model.hidden_size, self.model.vocab_size]
        assert self.model.lm_head._module.in_features == self.module("embed_tokens").embedding_dim

    def test_mixers_without_a_value_say_why(self) -> None:
        """What its kernels do not hold, on a read and a write, in a trace and outside; the model works afterwards."""
        mixer = self.mixer()
        for name, reason in self.RECURRENCE.UNAVAILABLE.items():
            assert reason in mixer.support()[name]
            for act in (lambda name=name: getattr(mixer, name), lambda name=name: setattr(mixer, name, self.ids)):
                if name == "states" and act.__code__.co_names[0] == "setattr":
                    continue  # read-only in any case
                with pytest.raises(Unavailable, match=reason):
                    act()
                with pytest.raises(Unavailable, match=reason), self.model.trace(self.ids):
                    act()
        with self.model.trace(self.ids):
            logits = self.model.logits.save()
        assert_same(logits, self.loaded.clean_logits)

    # -- sizes --------------------------------------------------------------------------------------------------------

    def test_sizes_of_the_mixer(self) -> None:
        config = self.bare.config.get_text_config()
        assert self.MIXER_WIDTH_KEYS, "MIXER_WIDTH_KEYS: the config key of each of the mixer's sizes"
        for layer in self.recurrent:
            for size, key in self.MIXER_WIDTH_KEYS.items():
                assert getattr(self.mixer(layer), size) == getattr(config, key), size

    def test_blocks_by_what_they_have(self) -> None:
        assert self.model.attention_layers == self.with_host(self.ATTENTIONS[0])
        assert self.model.linear_attention_layers == self.recurrent == self.with_host(self.MIXER)
        assert self.model.mlp_layers == self.with_host("mlp")
        assert self.model.moe_layers == self.mixtures()

    # -- other ways of running ----------------------------------------------------------------------------------------

    def test_cache_and_get(self) -> None:
        model, layer = self.model, self.mixed
        block = model.layers[layer]
        with model.trace(self.ids) as tracer:
            cache = tracer.cache(modules=[block, self.mixer()])
        output, stream = cache[block.path].output, self.everything["layer_output", layer]
        assert_same(output[0] if isinstance(output, tuple) else output, stream)
        with model.trace(self.ids):
            got = model.get(f"layers.{layer}.layer_output").save()
        assert_same(got, stream)
