"""What a suite states where not all blocks are alike, and `FamilySuite`'s statements about blocks there."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from nnterp.components.standard import NoSuchName
from nnterp.testing.comparing import ULPS_AFTER_MODEL, assert_close, assert_same
from nnterp.testing.facts import ROOT_VALUES, Facts

ATTENTION_SIZES = ("num_heads", "num_kv_heads", "head_dim")


class BlockKinds(Facts):
    """The facts of a family whose blocks have different modules; a layout can replace each.

    Attributes:
        BLOCKS: Which blocks have a module, by its standard name, or serve a value of the block, where not every one
            does: ``{"linear_attn": (0, 2), "self_attn": (1, 3)}``; ``()`` for what none has.
        ELSEWHERE: Part of the reason on the blocks that do not serve a value of `BLOCKS`, where that is not a missing
            module.
        ULPS_UNDER_SDPA: How far SDPA's rounding may move a value, in units of the dtype's precision.
    """

    BLOCKS: dict[str, tuple[int, ...]] = {}
    ELSEWHERE: dict[str, str] = {}
    ULPS_UNDER_SDPA: float = ULPS_AFTER_MODEL

    @pytest.fixture(autouse=True)
    def block_of_the_value(self, layout: str, request: Any) -> None:
        """A test that takes a value tries its edits on a block that has it."""
        value = request.node.callspec.params.get("value")
        if value is not None:
            self.EDITED = self.block_of(value)

    @classmethod
    def has(cls, layout: str, value: str) -> bool:
        blocks = cls.facts_of(layout).get("BLOCKS", cls.BLOCKS)
        where = blocks.get(value, blocks.get(value.rpartition(".")[0]))
        return where != () and super().has(layout, value)

    def on(self, value: str, layer: int) -> bool:
        where = self.BLOCKS.get(value, self.BLOCKS.get(value.rpartition(".")[0] or value))
        return (where is None or layer in where) and super().on(value, layer)

    def block_of(self, value: str) -> int:
        layers = [layer for layer in (self.EDITED, *self.blocks) if self.on(value, layer)]
        return layers[0] if layers else self.EDITED

    def kind(self, host: str, layer: int) -> type | None:
        return super().kind(host, layer) if not host or self.on(host, layer) else None

    def expected_reason(self, value: str, layer: int) -> str | None:
        host = value.rpartition(".")[0]
        if not self.on(value, layer):
            return self.ELSEWHERE.get(value, f"no {host} module" if host else "")
        return super().expected_reason(value, layer)

    def all_mixers(self) -> list[str]:
        """The standard paths of what mixes tokens in some block."""
        return list(self.ATTENTIONS)

    def mixers(self, layer: int) -> list[str]:
        return [host for host in self.all_mixers() if self.on(host, layer)]

    def mid_sum(self, block_values: Callable[[str], Tensor]) -> Tensor:
        before = [value for value in self.contributions() if not value.startswith("mlp")]
        return sum(block_values(part) for part in before) + block_values("layer_input")

    def with_host(self, host: str) -> list[int]:
        """The blocks that have the module at a standard path."""
        if self.native(f"layers.0.{host}") is None:
            return []
        return [layer for layer in self.blocks if self.on(host, layer)]

    @property
    def SIZES(self) -> tuple[str, ...]:  # noqa: N802
        attention = ATTENTION_SIZES if self.with_host(self.ATTENTIONS[0]) else ()
        feed_forward = ("intermediate_size",) if self.with_host("mlp") else ()
        return ("num_layers", "hidden_size", "vocab_size", *attention, *feed_forward)

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

    def test_a_value_of_another_kind_of_block(self) -> None:
        """A mixer asked of a block that has none, and attention of one that has a mixer, by name at the user's line."""
        pairs = [(host, layer) for host in self.all_mixers() for layer in self.blocks]
        for host, layer in [pair for pair in pairs if pair[1] not in self.with_host(pair[0])]:
            with pytest.raises(NoSuchName, match=f"no {host} module"), self.model.trace(self.ids):
                getattr(self.model.layers[layer], host).attention_output.save()
        with self.model.trace(self.ids):
            logits = self.model.logits.save()
        assert_same(logits, self.loaded.clean_logits)

    def test_blocks_by_what_they_have(self) -> None:
        assert self.model.attention_layers == self.with_host("self_attn")
        assert self.model.cross_attention_layers == [
            i for i in self.with_host("cross_attn") if self.on("cross_attn", i)
        ]
        assert self.model.mlp_layers == self.with_host("mlp")
        assert self.model.linear_attention_layers == []
        assert self.model.moe_layers == self.mixtures()

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

    # -- other ways of running ----------------------------------------------------------------------------------------

    def test_cache_and_get(self) -> None:
        model, layer = self.model, self.EDITED
        block = model.layers[layer]
        with model.trace(self.ids) as tracer:
            cache = tracer.cache(modules=[block, *(self.envoy(block, host) for host in self.mixers(layer))])
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
            assert_close(read, self.everything[place], self.ULPS_UNDER_SDPA)
        self.assigned_as_bare(values, model, bare, ULPS_AFTER_MODEL)
