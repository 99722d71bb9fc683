"""The demo's HTML page: every plot, what it shows and the code that made it, in one file that loads nothing else."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import singledispatch
from html import escape
from typing import TYPE_CHECKING, Any

from plotly.offline import get_plotlyjs

from nnterp.demo.figures import figures
from nnterp.demo.script import Lens, Patching, Steering, Support
from nnterp.demo.seeing import Seen
from nnterp.demo.wording import conclusion, signed

if TYPE_CHECKING:
    from nnterp.demo import Examined, Section

STYLE = """
:root { --ink: #22304a; --soft: #5d6b85; --line: #e3e8f0; --accent: #2f6fde; --wash: #f6f8fc; }
* { box-sizing: border-box; }
html { scroll-behavior: smooth; scroll-padding-top: 64px; }
body { margin: 0; background: var(--wash); color: var(--ink); font: 16px/1.55 system-ui, "Segoe UI", sans-serif; }
header, main, footer, nav ul { max-width: 1060px; margin: 0 auto; padding: 0 24px; }
header { padding-top: 48px; }
h1 { font-size: 34px; margin: 0 0 8px; letter-spacing: -0.5px; }
header p { color: var(--soft); max-width: 760px; margin: 0 0 24px; }
nav { position: sticky; top: 0; z-index: 5; background: var(--wash); border-bottom: 1px solid var(--line); }
nav ul { display: flex; flex-wrap: wrap; gap: 4px 22px; padding: 10px 24px; list-style: none; font-size: 14px; }
nav a { color: var(--soft); text-decoration: none; }
nav a:hover { color: var(--accent); }
nav .model a { color: var(--ink); font-weight: 600; }
h2 { font-size: 26px; margin: 52px 0 4px; }
h3 { font-size: 20px; margin: 0 0 6px; }
.note, .how, .missing { color: var(--soft); }
.note { margin: 0 0 14px; max-width: 820px; }
.how { font-size: 14.5px; }
.facts { display: flex; flex-wrap: wrap; gap: 8px; margin: 0; padding: 0; list-style: none; font-size: 14px; }
.facts li { background: white; border: 1px solid var(--line); border-radius: 999px; padding: 3px 12px; }
article { background: white; border: 1px solid var(--line); border-radius: 14px; padding: 24px 28px; margin: 22px 0; }
article > p { margin: 0 0 14px; max-width: 820px; }
table { border-collapse: collapse; font-size: 14px; width: 100%; }
th { text-align: left; color: var(--soft); font-weight: 500; }
th, td { padding: 5px 12px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td code { white-space: nowrap; }
code, pre { font: 13px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
details { margin-top: 14px; }
summary { cursor: pointer; color: var(--accent); font-size: 14px; }
pre { background: var(--wash); border: 1px solid var(--line); border-radius: 8px; padding: 14px; overflow-x: auto; }
.no { color: #b4552d; }
.minus { color: #4d5f86; }
.plus { color: #c8621f; }
footer { margin: 40px auto; color: var(--soft); font-size: 14px; }
"""


def page(examined: list[Examined]) -> str:
    """The whole page for some checkpoints, as HTML."""
    links, body = [], []
    for number, checkpoint in enumerate(examined):
        links.append(f'<li class="model"><a href="#m{number}">{escape(checkpoint.name)}</a></li>')
        body.append(f'<h2 id="m{number}">{escape(checkpoint.name)}</h2>')
        if checkpoint.note:
            body.append(f'<p class="note">{escape(checkpoint.note)}</p>')
        facts = "".join(f"<li>{escape(name)} <b>{escape(value)}</b></li>" for name, value in checkpoint.facts.items())
        body.append(f'<ul class="facts">{facts}</ul>')
        for place, section in enumerate(checkpoint.sections):
            anchor = f"m{number}s{place}"
            links.append(f'<li><a href="#{anchor}">{escape(section.title.partition(":")[0])}</a></li>')
            body.append(f'<article id="{anchor}"><h3>{escape(section.title)}</h3>{article(section)}</article>')
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>nnterp demo: {escape(", ".join(checkpoint.name for checkpoint in examined))}</title>
<style>{STYLE}</style>
<script>{get_plotlyjs()}</script>
</head>
<body>
<header>
<h1>Inside a language model, with nnterp</h1>
<p>nnterp gives every decoder-only transformer the same module names and the same named values. Everything on this page
came from one script that names no architecture; under each finding is the function that found it, as it ran.</p>
</header>
<nav><ul>{"".join(links)}</ul></nav>
<main>{"".join(body)}</main>
<footer>Written by <code>nnterp demo</code>. Hover over a plot for its numbers.</footer>
</body>
</html>
"""


def article(section: Section) -> str:
    """What one experiment found: words, plots, tables, and its source."""
    if section.finding is None:
        return f'<p class="missing">Not on this checkpoint: {escape(section.reason)}</p>{source_of(section.experiment)}'
    plots = "".join(
        figure.to_html(full_html=False, include_plotlyjs=False, config={"displayModeBar": False, "responsive": True})
        for figure in figures(section.finding)
    )
    words = f"<p>{escape(conclusion(section.finding)).replace('“ ', '“&nbsp;')}</p>"
    how = f'<p class="how">{escape(reading(section.finding))}</p>' if reading(section.finding) else ""
    return words + how + plots + tables(section.finding) + source_of(section.experiment)


def source_of(experiment: Callable) -> str:
    return f"<details><summary>The code</summary><pre>{escape(inspect.getsource(experiment))}</pre></details>"


@singledispatch
def reading(finding: Any) -> str:
    """How to read the plots, where that does not go without saying."""
    return ""


@reading.register
def _(finding: Lens) -> str:
    return (
        "Each cell is the token that the stream leaving a block (row) at a token (column) projects to, darker for more "
        "probability; a dot stands for a space. The model itself only ever projects the last row."
    )


@reading.register
def _(finding: Patching) -> str:
    return "Each cell is one run with one patch: dark where it turns the answer, pale where it changes nothing."


@reading.register
def _(finding: Seen) -> str:
    return "The photograph, and over it how far the answer falls without each cell: the more, the deeper the colour."


@singledispatch
def tables(finding: Any) -> str:
    """What is better read than seen."""
    return ""


@tables.register
def _(finding: Support) -> str:
    rows = []
    for row in finding.rows:
        where = "yes" if row.blocks is None else f"{row.blocks} of {row.of} blocks"
        where = "no" if row.blocks is None and row.reason else where
        reason = f'<br><span class="no">{escape(row.reason)}</span>' if row.reason else ""
        rows.append(
            f"<tr><td><code>{row.value}</code></td><td><code>{row.axes}</code></td><td>{where}{reason}</td></tr>"
        )
    return f"<table><tr><th>value</th><th>axes</th><th>where</th></tr>{''.join(rows)}</table>"


@tables.register
def _(finding: Steering) -> str:
    rows = []
    for prompt, written in finding.continuations:
        for factor, text in written.items():
            side = "minus" if factor < 0 else "plus" if factor > 0 else ""
            rows.append(
                f'<tr><td>{signed(factor)}</td><td>{escape(prompt)} <b class="{side}">{escape(text)}</b></td></tr>'
            )
    return f"<table><tr><th>factor</th><th>what the model writes</th></tr>{''.join(rows)}</table>"
