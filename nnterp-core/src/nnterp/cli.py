"""The command line: ``nnterp demo``, ``nnterp support`` and ``nnterp families``."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nnterp.plugins import Plugin

DESCRIPTION = "One set of module names and named values for every decoder-only transformer."
CHECKPOINT = "a directory, a hub id, or a name this command prepares itself: smollm2, toy-gpt2, toy-llava"


def parser() -> argparse.ArgumentParser:
    """The argument parser of the ``nnterp`` command."""
    root = argparse.ArgumentParser(prog="nnterp", description=DESCRIPTION)
    root.add_argument("--version", action="version", version=f"nnterp-core {importlib.metadata.version('nnterp-core')}")
    commands = root.add_subparsers(dest="command", required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="look inside a checkpoint: tables here, plots in one HTML page")
    demo.add_argument("checkpoints", nargs="*", default=["smollm2"], metavar="CHECKPOINT", help=CHECKPOINT)
    demo.add_argument("--html", type=Path, default=Path("nnterp-demo.html"), help="where the page goes (%(default)s)")
    demo.add_argument("--no-html", dest="html", action="store_const", const=None, help="write no page")
    demo.add_argument("--device", type=device, help="where to run, such as cuda or cpu")
    demo.add_argument(
        "--dtype", type=dtype, help="the weights' dtype, such as bfloat16; the checkpoint's own by default"
    )

    support = commands.add_parser("support", help="which values a checkpoint has; loads no weights")
    support.add_argument("checkpoint", metavar="CHECKPOINT", help=CHECKPOINT)
    support.add_argument("--layer", type=int, help="one block instead of all")
    support.add_argument("--attn", default="eager", help="attention implementation to ask about (%(default)s)")

    commands.add_parser("families", help="the installed plugins and the model types they serve")
    return root


def device(text: str) -> str:
    """``text`` where torch can put a tensor there; argparse prints the reason where it cannot."""
    import torch

    try:
        torch.empty(1, device=text)
    except (RuntimeError, AssertionError) as error:  # the second from a torch that was built without that backend
        raise argparse.ArgumentTypeError(str(error).splitlines()[0]) from error
    return text


def dtype(text: str) -> str:
    """``text`` where it names a floating-point dtype of torch."""
    import torch

    found = getattr(torch, text, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise argparse.ArgumentTypeError(f"{text!r} is no floating-point dtype of torch, such as float32 or bfloat16")
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the ``nnterp`` command; the exit status, 1 with a message on stderr where the request cannot be met."""
    options = parser().parse_args(arguments)
    return {"demo": demo, "support": support, "families": families}[options.command](options)


def demo(options: argparse.Namespace) -> int:
    if options.html is not None and importlib.util.find_spec("plotly") is None:
        return failed("the page needs plotly: pip install 'nnterp-core[demo]', or leave it out with --no-html")
    quiet()
    from nnterp.demo import run
    from nnterp.demo.prepared import CannotLoad

    chosen = {"device": options.device, "dtype": options.dtype}
    try:
        run(options.checkpoints, options.html, **{name: value for name, value in chosen.items() if value})
    except CannotLoad as error:
        return failed(str(error))
    return 0


def support(options: argparse.Namespace) -> int:
    quiet()
    from nnterp.demo import script
    from nnterp.demo.prepared import CannotLoad, load
    from nnterp.demo.terminal import Terminal

    terminal = Terminal()
    try:
        model = load(options.checkpoint, terminal.step, attn_implementation=options.attn)
    except CannotLoad as error:
        return failed(str(error))
    if options.layer is not None and not -model.num_layers <= options.layer < model.num_layers:
        return failed(f"{options.checkpoint} has {model.num_layers} blocks, no block {options.layer}")
    terminal.show(script.support(model) if options.layer is None else script.block_support(model, options.layer))
    return 0


def families(options: argparse.Namespace) -> int:
    from nnterp import families as found
    from nnterp.demo.terminal import Terminal

    terminal = Terminal()
    plugins = found.plugins()
    rows = [
        (plugin.name, f"{plugin.distribution} {plugin.version}", str(len(served(plugin))), plugin.error or plugin.state)
        for plugin in plugins
    ]
    terminal.table(rows, ("plugin", "distribution", "types", "state"), right=[2])
    for plugin in plugins:
        if served(plugin):
            terminal.heading(plugin.name)
            terminal.paragraph(", ".join(served(plugin)))
    return 0


def served(plugin: Plugin) -> list[str]:
    """The model types and vision wrappers a plugin serves, an engine's behind its name."""
    names = [
        name if engine is None else f"{engine}:{name}" for engine, types in plugin.families.items() for name in types
    ]
    return sorted([*names, *plugin.wrappers])


def quiet() -> None:
    """Leave the terminal to this command: no progress bars or advice from transformers."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def failed(message: str) -> int:
    print(f"nnterp: {message}", file=sys.stderr)
    return 1
