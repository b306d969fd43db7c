"""Figures drawn from a run's files alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def curves(metrics: list[dict[str, Any]], path: Path) -> None:
    """Training loss per step and accuracy per epoch, from the lines of metrics.jsonl."""
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
    for part, label in (("val_accuracy", "validation"), ("test_accuracy", "test")):
        right.plot([line["epoch"] for line in epochs], [line[part] for line in epochs], marker=".", label=label)
    right.set(xlabel="epoch", ylabel="accuracy")
    right.xaxis.set_major_locator(MaxNLocator(integer=True))
    right.legend()
    figure.savefig(path, dpi=120)
