"""`FamilySuite`'s statements about blocks, where these are not all alike: mixers, attentions and MLPs by block."""

import pytest

from nnterp import Unavailable
from nnterp.components.standard import NoSuchName
from nnterp.testing.comparing import ULPS_AFTER_MODEL, assert_close, assert_same
from nnterp.testing.facts import ROOT_VALUES
from nnterp.testing.recurrent_facts import RecurrentFacts
from nnterp.testing.recurrent_reading import ULPS_OF_A_RECURRENCE

ATTENTION_SIZES = ("num_heads", "num_kv_heads", "head_dim")


class RecurrentBlocks(RecurrentFacts):
    @property
    def SIZES(self) -> tuple[str, ...]:  # noqa: N802
        attention = ATTENTION_SIZES if self.with_host(self.ATTENTIONS[0]) else ()
        feed_forward = ("intermediate_size",) if self.with_host("mlp") else ()
        return ("num_layers", "hidden_size", "vocab_size", *attention, *feed_forward)

    def with_host(self, host: str) -> list[int]:
        """The blocks that have the module at a standard path."""
        if self.native(f"layers.0.{host}") is None:
            return []
        return [layer for layer in self.blocks if self.on(host, layer)]

    # -- names --------------------------------------------------------------------------------------------------------

    def test_standard_names_are_the_native_modules(self) -> None:
        """On every block that has the module, by its standard name and by transformers'."""
        for standard, native in self.NATIVE.items():
            parts = standard.split(".")
            host = parts[2] if standard.startswith("layers.0.") else ""
            layers = [layer for layer in self.blocks if not host or self.on(host, layer)]
            if native is None:
                with pytest.raises(AttributeError):
                    self.model.get(standard)
                continue
            for layer in layers if host else (0,):
                name = standard.replace("layers.0", f"layers.{layer}", 1) if host else standard
                assert self.model.get(name) is self.model.get(self.native(name)), name
        assert "model" not in self.model._aliases
        assert len(self.model.layers) == len(self.blocks) > 1

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

    def test_sizes_are_the_configs(self) -> None:
        model, config = self.model, self.bare.config.get_text_config()
        assert model.num_layers == len(self.blocks) == len(model.layers)
        assert model.hidden_size == config.hidden_size
        assert model.vocab_size == config.vocab_size == self.loaded.clean_logits.shape[-1]
        if self.with_host(self.ATTENTIONS[0]):
            assert model.num_heads == config.num_attention_heads
            assert 1 <= model.num_kv_heads <= model.num_heads
            assert model.num_heads % model.num_kv_heads == 0
        if self.with_host("mlp"):
            shapes = {size for parameter in self.mlp_parameters() for size in parameter.shape}
            width = model.intermediate_size
            assert isinstance(width, int)
            assert (getattr(config, self.MLP_WIDTH_KEY) if self.MLP_WIDTH_KEY else width) in shapes
        with pytest.raises(AttributeError, match="def hidden_size"):
            model.hidden_size = 5

    def mlp_parameters(self) -> list:
        return list(self.module(f"layers.{self.with_host('mlp')[0]}.mlp").parameters())

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

    def test_sdpa(self) -> None:
        """The attention's scores and pattern are not there and say why; everything else is, and edits reach it."""
        if not self.SDPA or not self.with_host(self.ATTENTIONS[0]):
            return
        model = self.loaded.load(attn_implementation="sdpa")
        bare = self.loaded.load_bare(attn_implementation="sdpa")
        missing = self.under_sdpa()
        for value in self.all_values():
            layers = self.layers_of(value, self.blocks)
            if value in ROOT_VALUES or not layers or not self.has(self.layout_name, value):
                continue
            reason = model.support(layer=layers[0])[value]
            assert (reason is None) == (value not in missing), f"{value}: {reason}"
            assert reason is None or missing[value] in reason
        values = [value for value in self.served() if value not in missing]
        expected = self.oracle(values, self.blocks, bare=bare)
        for place, read in self.read_all(model, values=values).items():
            assert_close(read, expected[place])
            assert_close(read, self.everything[place], ULPS_OF_A_RECURRENCE)
        self.assigned_as_bare(values, model, bare, ULPS_AFTER_MODEL)

    def test_a_value_of_another_kind_of_block(self) -> None:
        """A mixer asked of a block that has none, and attention of one that has a mixer, by name at the user's line."""
        pairs = [(host, layer) for host in (*self.ATTENTIONS, self.MIXER) for layer in self.blocks]
        for host, layer in [pair for pair in pairs if pair[1] not in self.with_host(pair[0])]:
            with pytest.raises(NoSuchName, match=f"no {host} module"), self.model.trace(self.ids):
                getattr(self.model.layers[layer], host).attention_output.save()
        with self.model.trace(self.ids):
            logits = self.model.logits.save()
        assert_same(logits, self.loaded.clean_logits)
