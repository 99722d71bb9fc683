"""Blocks that a model passes by: the stream is served at them all the same.

A model may call some of its blocks in some runs only (Mllama's cross-attention blocks, where no image was given). Their
insides are not computed then, and nothing in them is served. The stream goes past them, and is what a block that adds
nothing is called with and returns: it is served as both, so a script that goes over all blocks finds a stream at each,
whose edits reach the blocks behind it.
"""

import ast
from collections.abc import Mapping
from typing import Any

from nnsight.intervention.source import NO_SKIP, STATE
from torch import Tensor, nn

from nnterp.components.definitions import CannotTap, bodies, calls, parsed
from nnterp.components.taps import HELPERS, Rule, ServeAssign

PASS = "__pass_by__"


def pass_by(block: nn.Module, hidden: Tensor) -> Tensor:
    """What leaves ``block``, which is not called, where ``hidden`` comes to it: that, as the trace leaves it."""
    state = block.__dict__.get(STATE)
    interleaver, _, locations = state.active() if state is not None else (None, None, ())
    if interleaver is None:
        return hidden
    entering, skip, leaving = locations
    (hidden, *_), _ = interleaver.handle(entering, ((hidden,), {}))
    instead = interleaver.handle(skip, NO_SKIP)
    return interleaver.handle(leaving, hidden if instead is NO_SKIP else instead)


HELPERS[PASS] = pass_by


def passed_by(blocks: str = "layers") -> Rule:
    """Serve the stream at those of ``blocks`` that the loop over them goes past with ``continue``.

    A rule that serves no location of the model itself: it stands among its ``TAPS`` under any name.
    """

    def apply(definition: ast.FunctionDef, name: str, natives: Mapping[str, str]) -> None:
        native = natives.get(blocks, blocks)
        for loop in (node for node in ast.walk(definition) if isinstance(node, ast.For)):
            if not any(isinstance(node, ast.Attribute) and node.attr == native for node in ast.walk(loop.iter)):
                continue
            block = [node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)][-1]
            streams = [
                call.args[0].id for call in calls(loop, block) if call.args and isinstance(call.args[0], ast.Name)
            ]
            passes = [(body, each) for body in bodies(loop) for each in body if isinstance(each, ast.Continue)]
            if streams and passes:
                for body, statement in passes:
                    body.insert(body.index(statement), passing(block, streams[0], statement))
                return
        raise CannotTap(f"no loop over self.{native} in {definition.name} goes past one with a stream")

    return apply


def passing(block: str, stream: str, at: ast.stmt) -> ast.stmt:
    """The statement ``stream = pass_by(block, stream)``, placed where ``at`` is."""
    call: Any = parsed(f"{PASS}({block}, {stream})", at)
    return ast.fix_missing_locations(ast.copy_location(ServeAssign([ast.Name(stream, ast.Store())], call), at))
