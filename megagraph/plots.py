"""Figures drawn from a run's files alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megagraph.timeline import SPANS, STAGE, STEP, Span, steps


def curves(metrics: list[dict[str, Any]], path: Path) -> None:
    """Training loss per step, and accuracy or micro-F1 per epoch, from the lines of metrics.jsonl."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    steps = [line for line in metrics if "step" in line]
    epochs = [line for line in metrics if "epoch" in line]
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    left.plot([line["step"] for line in steps], [line["loss"] for line in steps], linewidth=0.8)
    left.set(xlabel="step", ylabel="training loss")
    measure = "micro_f1" if any("val_micro_f1" in line for line in epochs) else "accuracy"
    for part, label in (("val", "validation"), ("test", "test")):
        values = [line[f"{part}_{measure}"] for line in epochs]
        right.plot([line["epoch"] for line in epochs], values, marker=".", label=label)
    right.set(xlabel="epoch", ylabel=measure.replace("_f1", "-F1"))
    right.xaxis.set_major_locator(MaxNLocator(integer=True))
    right.legend()
    figure.savefig(path, dpi=120)


def bias(learned: np.ndarray, start: np.ndarray | None, labels: list[str], path: Path) -> None:
    """The learned part of the attention bias [L, H, R] by channel or bucket: a panel per layer, a line per head.

    Args:
        start: [R], where all of it began, dashed.
        labels: of the R channels or buckets.
    """
    _by_layer_and_head(learned, start, labels, "learned part of the bias", path)


def attention(shares: np.ndarray, kinds: list[str], path: Path) -> None:
    """The share of attention [L, H, K] that each kind of pair gets: a panel per layer, a line per head."""
    _by_layer_and_head(shares, None, kinds, "share of attention", path)


def _by_layer_and_head(values: np.ndarray, start: np.ndarray | None, labels: list[str], what: str, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(4, len(values))
    rows = -(-len(values) // columns)
    wide = max(3.0, 0.14 * len(labels))
    figure = Figure(figsize=(1.5 + wide * columns, 0.8 + 2.8 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
    for layer, (panel, heads) in enumerate(zip(panels, values, strict=False)):
        for head, of_head in enumerate(heads):
            panel.plot(of_head, ".-", linewidth=0.8, label=f"head {head}" if layer == 0 else None)
        if start is not None:
            panel.plot(start, "k--", linewidth=0.8, label="start" if layer == 0 else None)
        panel.set_title(f"layer {layer}")
        panel.set_xticks(range(len(labels)), labels, rotation=90)
    for panel in panels[len(values) :]:
        panel.set_visible(False)
    figure.supylabel(what)
    figure.legend(loc="outside right upper", frameon=False)
    figure.savefig(path, dpi=120)


def timeline(spans: list[Span], path: Path, predicted: list[Span] | None = None) -> None:
    """A row per rank: stages as wide bars, what they do inside and what goes on beside them as narrow ones.

    Args:
        predicted: one step, drawn below from the start of every step.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
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
    FigureCanvasAgg(figure)
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
