"""Names and availability: the modules under their standard names, and what `support` says of each value."""

import pytest

from nnterp import Unavailable, components
from nnterp.components import Blocks, EProperty
from nnterp.testing.facts import ROOT_ROWS, Facts


class Naming(Facts):
    def kind(self, host: str, layer: int) -> type | None:
        """The family's class of the envoy that carries ``host``'s values on a block; None where it has none."""
        absent = bool(host) and self.native(f"layers.{layer}.{host}") is None
        return None if absent else getattr(self.family, self.roles()[host], None)

    def hosts(self, layer: int) -> dict[str, type]:
        """The family's class of each envoy of a block that carries values, by its standard name (``""``: the block)."""
        kinds = {host: self.kind(host, layer) for host in self.roles()}
        return {host: kind for host, kind in kinds.items() if kind is not None}

    def expected_rows(self) -> set[str]:
        """A row for each value of each envoy; and for the list of several, which points at its entries."""
        return {
            f"{path}.{name}".lstrip(".")
            for layer in self.blocks
            for host, kind in self.hosts(layer).items()
            for path in {host, host.rpartition(".")[0] or host}
            for name in {*kind.values(), *getattr(components, self.roles()[host]).values()}
        }

    def expected_reason(self, value: str, layer: int) -> str | None:
        """Part of the reason why a block does not serve ``value``, None where it does."""
        return self.EXPECTED_UNAVAILABLE.get(value)

    def test_family_of_the_checkpoint(self) -> None:
        assert self.model.family is self.family

    def test_standard_names_are_the_native_modules(self) -> None:
        for standard, native in self.NATIVE.items():
            if native is None:
                with pytest.raises(AttributeError):
                    self.model.get(standard)
                continue
            assert self.model.get(standard) is self.model.get(native), standard
            if standard.startswith("layers.0."):
                for layer in self.blocks:
                    name = standard.replace("layers.0", f"layers.{layer}", 1)
                    assert self.model.get(name) is self.model.get(self.native(name)), name
        assert "model" not in self.model._aliases
        assert len(self.model.layers) == len(self.blocks) > 1

    def test_every_block_is_of_the_family(self) -> None:
        for layer in self.blocks:
            block = self.model.layers[layer]
            for host, kind in self.hosts(layer).items():
                assert type(self.envoy(block, host)) is kind
                assert issubclass(kind, getattr(components, self.roles()[host]))

    def test_module_outputs_have_their_widths(self) -> None:
        attention = self.envoy(self.model.layers[0], self.ATTENTIONS[0])
        with self.model.trace(self.ids):
            attended = attention.output.save()
            block = self.model.layers[0].output.save()
            head = self.model.lm_head.output.save()
        width, vocabulary = self.model.hidden_size, self.model.vocab_size
        first = [value[0] if isinstance(value, tuple) else value for value in (attended, block)]
        assert [value.shape[-1] for value in (*first, head)] == [width, width, vocabulary]
        assert self.model.lm_head._module.in_features == self.module("embed_tokens").embedding_dim

    def test_support_lists_every_value(self) -> None:
        rows = self.expected_rows()
        assert set(self.model.support()) == rows | set(ROOT_ROWS)
        for layer in (*self.blocks, -1):
            assert set(self.model.support(layer=layer)) == rows

    def test_support_gives_the_reasons(self) -> None:
        for value, reason in self.model.support().items():
            if value in ROOT_ROWS:
                expected = self.EXPECTED_UNAVAILABLE.get(value)
                assert (reason is None) == (expected is None), f"{value}: {reason!r}"
                assert expected is None or expected in reason, f"{value}: {reason!r} does not say {expected!r}"
                continue
            reasons = {layer: self.expected_reason(value, layer) for layer in self.blocks}
            if set(reasons.values()) == {None}:
                assert reason is None, f"{value}: {reason}"
                continue
            assert isinstance(reason, dict), f"{value} is expected to be unavailable ({reasons}), and is {reason}"
            assert set(reason) <= {layer for layer, expected in reasons.items() if expected is not None}
            for layer, why in reason.items():
                expected = reasons[layer]
                assert expected in why, f"{value} of block {layer}: {why!r} does not say {expected!r}"
                assert self.model.support(layer=layer)[value] == why
        assert set(self.EXPECTED_UNAVAILABLE) <= set(self.model.support())

    def test_unavailable_values_say_why(self) -> None:
        """On a read and on a write, in a trace and outside, before the model runs; the model works afterwards."""
        for value in self.EXPECTED_UNAVAILABLE:
            reasons = self.model.support()[value]
            for layer, why in (reasons if isinstance(reasons, dict) else {None: reasons}).items():
                host, name = self.host(value, layer)
                if not hasattr(type(host), name) and not isinstance(host, Blocks):  # a value of another kind of block
                    with pytest.raises(AttributeError, match=name):
                        getattr(host, name)
                    continue
                with pytest.raises(Unavailable) as read:
                    getattr(host, name)
                assert why in str(read.value) and name in str(read.value)
                with pytest.raises(Unavailable):
                    hasattr(host, name)
                with pytest.raises(Unavailable), self.model.trace(self.ids):
                    getattr(host, name)
                with pytest.raises(Unavailable), self.model.trace(self.ids):
                    setattr(host, name, self.ids)
        with self.model.trace(self.ids):
            logits = self.model.logits.save()
        assert logits.equal(self.loaded.clean_logits)

    def test_values_are_descriptors_of_the_block(self) -> None:
        for value, reason in self.model.support(layer=self.EDITED).items():
            if not self.on(value, self.EDITED):
                continue
            host, name = self.host(value, self.EDITED)
            if isinstance(host, Blocks):
                assert reason == host.reason(name)
                continue
            assert isinstance(getattr(type(host), name), EProperty)
            assert host.support()[name] == reason

    def test_repr_lists_the_values(self) -> None:
        text = repr(self.model.layers[self.EDITED])
        for value in self.model.support(layer=self.EDITED):
            if not self.on(value, self.EDITED):
                continue
            assert f"({value.rpartition('.')[2]})" in text
        text = repr(self.model)
        for value in ROOT_ROWS:
            assert f"({value})" in text
        for value, why in self.EXPECTED_UNAVAILABLE.items():
            assert value.rpartition(".")[2] in text and why is not None
