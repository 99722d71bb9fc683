"""What a suite states where not all blocks are alike, and `FamilySuite`'s statements about blocks as they hold there."""

from typing import Any

import pytest

from nnterp.testing.comparing import ULPS_AFTER_MODEL
from nnterp.testing.facts import Facts

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

    def mixers(self, layer: int) -> list[str]:
        return [host for host in self.ATTENTIONS if self.on(host, layer)]

    def with_host(self, host: str) -> list[int]:
        """The blocks that have the module at a standard path."""
        if self.native(f"layers.0.{host}") is None:
            return []
        return [layer for layer in self.blocks if self.on(host, layer)]

    def with_attention(self) -> list[int]:
        """The blocks that have one of `ATTENTIONS`."""
        return [layer for layer in self.blocks if any(layer in self.with_host(host) for host in self.ATTENTIONS)]

    @property
    def SIZES(self) -> tuple[str, ...]:  # noqa: N802
        attention = ATTENTION_SIZES if self.with_attention() else ()
        feed_forward = ("intermediate_size",) if self.with_host("mlp") else ()
        return ("num_layers", "hidden_size", "vocab_size", *attention, *feed_forward)
