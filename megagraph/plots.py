"""Figures drawn from a run's files alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from megagraph.data.start import bias_labels
from megagraph.history import History, score_limits, smoothed
from megagraph.run import Run
from megagraph.timeline import SPANS, STAGE, STEP, Span, steps


def curves(runs: Sequence[History], path: Path | BinaryIO, *, columns: int = 3) -> None:
    """Loss, validation and test scores, and learning rate of one run or of several.

    Args:
        path: image to write; a PNG into an open file.
        columns: panels beside each other, 3 or 1.
    """
    figure, panels = _figure(columns)
    colors = _colors(len(runs))
    for i, run in enumerate(runs):
        _draw_run(panels, run, colors(i), alone=len(runs) == 1)
    loss, score, rate = panels
    metrics = {run.metric for run in runs}
    metric = metrics.pop().replace("_f1", "-F1").replace("_", " ") if len(metrics) == 1 else "score"
    loss.set(xlabel="step", ylabel="training loss")
    rate.set(xlabel="step", ylabel="learning rate", ylim=(0, None))
    score.set(xlabel="epoch", ylabel=metric)
    from matplotlib.ticker import MaxNLocator

    for panel in panels:
        panel.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))  # one step has one number
    majorities = {run.majority for run in runs if run.majority is not None}
    for majority in majorities:
        score.axhline(majority, color="0.4", linestyle=":", label="majority")
    shown = [line.get(f"{part}_{run.metric}") for run in runs for line in run.epochs for part in ("val", "test")]
    scores = [x for x in (*shown, *majorities) if x is not None]
    score.set_ylim(*score_limits(scores, min(run.nodes for run in runs)))
    handles, labels = score.get_legend_handles_labels()
    first = {label: handle for handle, label in zip(reversed(handles), reversed(labels), strict=True)}
    shown_by = [*reversed(first.values())], [*reversed(first)]
    figure.legend(*shown_by, loc="outside lower center", ncols=2 * columns, fontsize="small", frameon=False)
    figure.suptitle(_text(runs[0].title) if len(runs) == 1 else f"{len(runs)} runs", fontsize="medium")
    figure.savefig(path, dpi=120)


def _figure(columns: int) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    rows = 3 // columns
    figure = Figure(figsize=(4.2 * columns + 0.4 * rows, 3.1 * rows + 0.4), layout="constrained")
    return figure, figure.subplots(rows, columns).ravel()


def _colors(number: int) -> Any:
    """Colours of lines 0, 1, ..., no two alike."""
    from matplotlib import colormaps

    return colormaps["tab10"] if number <= 10 else colormaps["viridis"].resampled(number)


def _draw_run(panels: Any, run: History, color: Any, *, alone: bool) -> None:
    """A run has a colour, and alone validation and test have one each."""
    loss, score, rate = panels
    other = "C1" if alone else color
    steps, losses = run.losses()
    rates = [line["learning_rate"] for line in run.steps]
    loss.plot(steps, losses, color=color, linewidth=0.6, alpha=0.3)
    loss.plot(steps, smoothed(losses), ".-" if len(steps) == 1 else "-", color=color, linewidth=1.4)
    rate.plot([line["step"] for line in run.steps], rates, ".-" if len(rates) == 1 else "-", color=color)
    epochs = [line["epoch"] for line in run.epochs]
    for part, name, style, tint in (("val", "validation", ".-", color), ("test", "test", ".--", other)):
        values = [np.nan if (x := line.get(f"{part}_{run.metric}")) is None else x for line in run.epochs]
        label = name if alone else f"{_text(run.name)}, {name}"
        score.plot(epochs, values, style, color=tint, linewidth=1.2, markersize=4, label=label)
    if (best := run.best) is not None:
        label = f"best epoch, {best['epoch']}" if alone else "best epoch"
        at = best["epoch"], best[f"val_{run.metric}"]
        score.plot(*at, "*", color=color, markeredgecolor="k", markersize=12, label=label, zorder=3)


def _text(given: str) -> str:
    """What matplotlib draws as it is: no formula, and a name that the legend does not leave out."""
    escaped = given.replace("\\", "\N{FULLWIDTH REVERSE SOLIDUS}").replace("$", r"\$")
    return f" {escaped}" if escaped.startswith("_") else escaped


def bias_of(run: Run, path: Path | BinaryIO) -> None:
    """The learned part of the bias of a run's weights, of its best epoch so far."""
    model, weights = run.model_config, run.weights()
    found = [weights.get(f"layers.{layer}.bias_weight") for layer in range(model.layers)]
    if any(x is None for x in found):
        raise ValueError(f"expected the biases of {model.layers} layers in {run.folder}, got those of fewer")
    learned = np.stack([x.double() for x in found if x is not None])
    start = np.array(model.bias_start) if model.bias_start else None
    bias(learned, start, bias_labels(run.config.batch_options), path)


def bias(learned: np.ndarray, start: np.ndarray | None, labels: list[str], path: Path | BinaryIO) -> None:
    """The learned part of the attention bias [L, H, R] by channel or bucket: a panel per layer, a line per head.

    Args:
        start: [R], where all of it began, dashed.
        labels: of the R channels or buckets.
    """
    _by_layer_and_head(learned, start, labels, "learned part of the bias", path)


def attention(shares: np.ndarray, kinds: list[str], path: Path) -> None:
    """The share of attention [L, H, K] that each kind of pair gets: a panel per layer, a line per head."""
    _by_layer_and_head(shares, None, kinds, "share of attention", path)


def _by_layer_and_head(
    values: np.ndarray, start: np.ndarray | None, labels: list[str], what: str, path: Path | BinaryIO
) -> None:
    from matplotlib.figure import Figure

    columns, num_heads = min(4, len(values)), values.shape[1]
    rows = -(-len(values) // columns)
    wide = max(3.0, 0.15 * len(labels))
    beside = -(-(num_heads + 1) // (14 * rows))  # columns of the legend
    figure = Figure(figsize=(0.3 + 1.2 * beside + wide * columns, 0.8 + 2.8 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
    colors = _colors(num_heads)
    for layer, (panel, heads) in enumerate(zip(panels, values, strict=False)):
        for head, of_head in enumerate(heads):
            label = f"head {head}" if layer == 0 else None
            panel.plot(of_head, ".-", color=colors(head), linewidth=0.8, label=label)
        if start is not None:
            panel.plot(start, "k--", linewidth=0.8, label="start" if layer == 0 else None)
        panel.set_title(f"layer {layer}")
        panel.set_xticks(range(len(labels)), labels, rotation=90, fontsize="small")
        panel.tick_params(labelbottom=layer + columns >= len(values))  # also where nothing is below
    for panel in panels[len(values) :]:
        panel.set_visible(False)
    figure.supylabel(what)
    figure.legend(loc="outside right upper", ncols=beside, frameon=False)
    figure.savefig(path, dpi=120)


def timeline(spans: list[Span], path: Path | BinaryIO, predicted: list[Span] | None = None) -> None:
    """A row per rank: stages as wide bars, what they do inside and what goes on beside them as narrow ones.

    Args:
        predicted: one step, drawn below from the start of every step.
    """
    from matplotlib.figure import Figure

    ranks = sorted({span.rank for span in spans})
    whole = [span for step in steps(spans) for span in step]
    origin, end = min(span.start for span in whole), max(span.stop for span in whole)
    parts = {"traced": spans}
    if predicted is not None:
        parts["predicted"] = [
            replace(span, start=start + span.start, stop=start + span.stop)
            for start in (min(span.start for span in step) for step in steps(spans))
            for span in predicted
        ]
        end = max(end, *(span.stop for span in parts["predicted"]))
    figure = Figure(figsize=(11, 1.5 + 0.6 * len(ranks) * len(parts)), layout="constrained")
    panels = figure.subplots(len(parts), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (title, of_part) in zip(panels, parts.items(), strict=True):
        _rows_of_ranks(axes, of_part, ranks, origin, end)
        if predicted is not None:
            axes.set_title(title, fontsize="medium")
    for i, name in enumerate(SPANS):
        if any(span.name == name for of_part in parts.values() for span in of_part):
            panels[0].broken_barh([], (0, 0), color=f"C{i}", label=name)
    panels[-1].set(xlabel="milliseconds", xlim=(0, (end - origin) * 1e3))
    figure.legend(loc="outside upper center", ncols=len(SPANS), frameon=False)
    figure.savefig(path, dpi=120)


def _rows_of_ranks(axes: Any, spans: list[Span], ranks: list[int], origin: float, end: float) -> None:
    for i, name in enumerate(SPANS):
        for rank in ranks:
            own = [s for s in spans if s.name == name and s.rank == rank and s.stop > origin and s.start < end]
            bars = [((s.start - origin) * 1e3, (s.stop - s.start) * 1e3) for s in own]
            low, height = (-0.4, 0.8) if name in STAGE else (-0.2, 0.4)
            axes.broken_barh(bars, (rank + low, height), color=f"C{i}", linewidth=0)
    for span in spans:
        if span.name == STEP:
            axes.vlines((span.start - origin) * 1e3, span.rank - 0.5, span.rank + 0.5, color="0.3", linewidth=0.8)
    axes.set(ylabel="rank", yticks=ranks)
    axes.invert_yaxis()
