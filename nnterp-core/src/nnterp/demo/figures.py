"""The plots of the demo's page, one or more per finding, with plotly."""

from __future__ import annotations

import base64
import io
from collections.abc import Sized
from functools import singledispatch
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from nnterp.demo.script import Induction, Lens, Patching, Steering, TopTokens
from nnterp.demo.seeing import Seen
from nnterp.demo.wording import quoted

INK, PALE, ACCENT, CONTRAST = "#22304a", "#e7ebf2", "#2f6fde", "#e07b39"
SCALE = [[0, "#f4f6fa"], [0.15, "#dbe7fb"], [0.5, "#7fa9ee"], [1, "#1d4fb4"]]


@singledispatch
def figures(finding: Any) -> list[go.Figure]:
    """The plots of a finding; none where words and tables say it all."""
    return []


def visible(token: str) -> str:
    """A token as an axis label or in a cell: a leading space as a low line, a line break as its sign."""
    return token.replace(" ", "·").replace("\n", "⏎") or "∅"


def numbered(tokens: list[str]) -> list[str]:
    """Axis labels that stay apart where a token occurs twice: a label is unique by what a reader does not see."""
    return [visible(token) + "\u200b" * tokens[:i].count(token) for i, token in enumerate(tokens)]


def spacing(blocks: Sized) -> int:
    """Blocks between two labels of an axis: about ten labels, and none between two blocks."""
    return max(1, len(blocks) // 10)


def laid_out(figure: go.Figure, height: int, **layout: Any) -> go.Figure:
    figure.update_layout(
        height=height,
        margin={"l": 70, "r": 20, "t": 30, "b": 60},
        font={"family": "system-ui, sans-serif", "size": 13, "color": INK},
        plot_bgcolor="white",
        paper_bgcolor="rgba(0,0,0,0)",
        showlegend=False,
    )
    figure.update_xaxes(gridcolor=PALE, zeroline=False)
    figure.update_yaxes(gridcolor=PALE, zeroline=False)
    figure.update_layout(**layout)
    return figure


@figures.register
def _(finding: TopTokens) -> list[go.Figure]:
    columns = len(finding.predictions)
    titles = [f"{prompt} …" for prompt, _ in finding.predictions]
    figure = make_subplots(rows=(columns + 1) // 2, cols=2, subplot_titles=titles, horizontal_spacing=0.16)
    for place, (_, tokens) in enumerate(finding.predictions):
        bars = go.Bar(
            x=list(tokens.values())[::-1],
            y=[quoted(token) for token in tokens][::-1],
            orientation="h",
            marker_color=ACCENT,
            hovertemplate="%{y}: %{x:.3f}<extra></extra>",
        )
        figure.add_trace(bars, row=place // 2 + 1, col=place % 2 + 1)
    figure.update_xaxes(range=[0, 1], tickformat=".0%")
    return [laid_out(figure, 250 * ((columns + 1) // 2), margin={"l": 90, "r": 20, "t": 40, "b": 30})]


@figures.register
def _(finding: Lens) -> list[go.Figure]:
    blocks = list(range(len(finding.best)))
    grid = go.Heatmap(
        z=finding.confidence.tolist(),
        x=numbered(finding.tokens),
        y=blocks,
        text=[[visible(token)[:9] for token in row] for row in finding.best],
        customdata=[[quoted(token) for token in row] for row in finding.best],
        texttemplate="%{text}",
        textfont={"size": 11},
        colorscale=SCALE,
        zmin=0,
        zmax=1,
        xgap=2,
        ygap=1,
        colorbar={"title": "probability", "thickness": 12, "tickformat": ".0%"},
        hovertemplate="after block %{y}, at %{x}<br>%{customdata}: %{z:.1%}<extra></extra>",
    )
    tokens = laid_out(
        go.Figure(grid),
        max(320, 90 + 21 * len(blocks)),
        xaxis={"title": "token the stream belongs to", "side": "top"},
        yaxis={"title": "block", "autorange": "reversed", "dtick": spacing(blocks)},
        margin={"l": 60, "r": 20, "t": 70, "b": 20},
    )
    answer = quoted(finding.answer)
    climb = make_subplots(
        rows=1, cols=2, subplot_titles=[f"rank of {answer} in the vocabulary (log scale)", f"probability of {answer}"]
    )
    line = {"color": ACCENT, "width": 3}
    climb.add_trace(
        go.Scatter(
            x=blocks,
            y=finding.answer_rank,
            mode="lines+markers",
            line=line,
            hovertemplate="block %{x}: rank %{y}<extra></extra>",
        ),
        row=1,
        col=1,
    )
    climb.add_trace(
        go.Scatter(
            x=blocks,
            y=finding.answer_prob,
            mode="lines+markers",
            line=line,
            hovertemplate="block %{x}: %{y:.1%}<extra></extra>",
        ),
        row=1,
        col=2,
    )
    climb.update_yaxes(type="log", autorange="reversed", dtick=1, tickformat=",d", row=1, col=1)
    climb.update_yaxes(range=[0, 1], tickformat=".0%", row=1, col=2)
    climb.update_xaxes(title="block", dtick=spacing(blocks))
    return [tokens, laid_out(climb, 300)]


@figures.register
def _(finding: Induction) -> list[go.Figure]:
    scores = go.Heatmap(
        z=finding.scores.tolist(),
        x=list(range(finding.scores.shape[1])),
        y=finding.blocks,
        colorscale=SCALE,
        zmin=0,
        zmax=1,
        xgap=1,
        ygap=1,
        colorbar={"title": "score", "thickness": 12},
        hovertemplate="block %{y}, head %{x}: %{z:.2f}<extra></extra>",
    )
    found = laid_out(
        go.Figure(scores),
        max(260, 90 + 15 * len(finding.blocks)),
        xaxis={"title": "head", "dtick": 1},
        yaxis={"title": "block", "autorange": "reversed", "dtick": spacing(finding.blocks)},
    )
    labels = numbered(finding.tokens)
    pattern = go.Heatmap(
        z=finding.pattern.tolist(),
        x=labels,
        y=labels,
        colorscale=SCALE,
        zmin=0,
        zmax=1,
        showscale=False,
        hovertemplate="from %{y} to %{x}: %{z:.2f}<extra></extra>",
    )
    figure = laid_out(
        go.Figure(pattern),
        720,
        xaxis={"title": "attends to", "tickfont": {"size": 10}, "tickangle": -60, "side": "bottom"},
        yaxis={"title": "token", "autorange": "reversed", "tickfont": {"size": 10}},
        margin={"l": 110, "r": 20, "t": 20, "b": 110},
    )
    half = len(labels) / 2 - 0.5
    for axis in (
        {"x0": half, "x1": half, "y0": -0.5, "y1": len(labels) - 0.5},
        {"y0": half, "y1": half, "x0": -0.5, "x1": len(labels) - 0.5},
    ):
        figure.add_shape(type="line", line={"color": CONTRAST, "width": 1.5, "dash": "dot"}, **axis)
    return [found, figure]


@figures.register
def _(finding: Patching) -> list[go.Figure]:
    grid = go.Heatmap(
        z=finding.share.tolist(),
        x=numbered(finding.tokens),
        y=list(range(len(finding.share))),
        colorscale=SCALE,
        zmin=0,
        zmax=1,
        xgap=2,
        ygap=1,
        colorbar={"title": f"share of<br>{finding.source_answer}", "thickness": 12, "tickformat": ".0%"},
        hovertemplate="block %{y}, patched at %{x}<br>share: %{z:.1%}<extra></extra>",
    )
    patched = laid_out(
        go.Figure(grid),
        max(320, 110 + 16 * len(finding.share)),
        xaxis={"title": "position that gets the other prompt's stream"},
        yaxis={"title": "after block", "autorange": "reversed", "dtick": spacing(finding.share)},
    )
    if finding.heads is None:
        return [patched]
    heads = list(range(len(finding.heads.share)))
    bars = go.Figure(
        [
            go.Bar(
                x=heads,
                y=finding.heads.attention.tolist(),
                name=f"attention to {quoted(finding.tokens[finding.subject])}",
                marker_color="#b9c6dd",
            ),
            go.Bar(
                x=heads,
                y=finding.heads.share.tolist(),
                name=f"share of {finding.source_answer} when patched",
                marker_color=ACCENT,
            ),
        ]
    )
    axis = {"title": f"head of block {finding.heads.layer}", "dtick": 1}
    return [
        patched,
        laid_out(
            bars,
            280,
            xaxis=axis,
            yaxis={"range": [0, 1], "tickformat": ".0%"},
            showlegend=True,
            legend={"orientation": "h", "y": 1.15},
        ),
    ]


@figures.register
def _(finding: Steering) -> list[go.Figure]:
    curve = go.Scatter(
        x=finding.factors,
        y=finding.bright_share,
        mode="lines+markers",
        line={"color": CONTRAST, "width": 3},
        hovertemplate="factor %{x}: %{y:.1%}<extra></extra>",
    )
    return [
        laid_out(
            go.Figure(curve),
            300,
            xaxis={"title": "factor of the direction"},
            yaxis={"title": "share of bright words", "range": [-0.02, 1.02], "tickformat": ".0%"},
        )
    ]


@figures.register
def _(finding: Seen) -> list[go.Figure]:
    encoded = io.BytesIO()
    finding.image.save(encoded, format="PNG")
    picture = f"data:image/png;base64,{base64.b64encode(encoded.getvalue()).decode()}"
    rows, columns = finding.effect.shape
    heat = go.Heatmap(
        z=finding.effect.clamp(min=0).tolist(),
        x0=0.5,
        y0=0.5,
        colorscale=[[0, "rgba(224,123,57,0)"], [1, "rgba(224,123,57,0.85)"]],
        colorbar={"title": "nats", "thickness": 12},
        hovertemplate="row %{y}, column %{x}: %{z:.2f} nats<extra></extra>",
    )
    figure = laid_out(
        go.Figure(heat),
        520,
        xaxis={"range": [0, columns], "visible": False, "constrain": "domain"},
        yaxis={"range": [rows, 0], "visible": False, "scaleanchor": "x", "scaleratio": columns / rows},
        margin={"l": 20, "r": 20, "t": 20, "b": 20},
    )
    place = {"xref": "x", "yref": "y", "x": 0, "y": 0, "sizex": columns, "sizey": rows, "sizing": "stretch"}
    figure.add_layout_image(source=picture, layer="below", **place)
    return [figure]
