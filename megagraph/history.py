"""What figures and reports say of a run: how it went, and what was trained on what, from its files alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megagraph import files
from megagraph.config import TrainConfig
from megagraph.objective import OF_CLASSES, OF_LABELS
from megagraph.run import Run


@dataclass(frozen=True, kw_only=True, eq=False)
class History:
    """How a run has gone so far.

    Args:
        name: of the run among others.
        title: what was trained on what.
        steps, epochs: lines of metrics.jsonl.
        metric: by which the best epoch is chosen, such as "accuracy".
        nodes: of the smaller one of the validation and the test part.
        majority: that of always giving the same answer; ``None`` where the metric has none.
    """

    name: str
    title: str
    steps: list[dict[str, Any]]
    epochs: list[dict[str, Any]]
    metric: str
    nodes: int
    majority: float | None = None

    @classmethod
    def of(cls, run: Run, name: str | None = None) -> History:
        """The history of a run, under way or finished.

        Raises:
            FileNotFoundError, ValueError: a file of the run is missing or damaged.
        """
        config, graph = run.config, graph_of(run)
        epochs, steps = run.progress(whole=True)
        metric: str = config.metric
        if metric == "auto":
            metric = (OF_LABELS if graph.several_labels else OF_CLASSES)[0]
        return cls(
            name=run.folder.name if name is None else name,
            title=f"{model_of(config)} on {graph.name}",
            steps=[dict(line) for line in steps],
            epochs=[dict(line) for line in epochs],
            metric=metric,
            majority=getattr(graph, f"majority_{metric}", None),
            nodes=min(graph.val_nodes, graph.test_nodes),
        )

    @property
    def best(self) -> dict[str, Any] | None:
        """The epoch whose weights are kept."""
        measured = (line for line in self.epochs if line.get(f"val_{self.metric}") is not None)
        return max(measured, key=lambda line: line[f"val_{self.metric}"], default=None)  # the first of equals

    def losses(self) -> tuple[np.ndarray, np.ndarray]:
        """Steps that were not skipped, and the loss of each."""
        kept = [(line["step"], line["loss"]) for line in self.steps if line["loss"] is not None]
        steps, losses = zip(*kept, strict=True) if kept else ((), ())
        return np.array(steps, np.int64), np.array(losses, np.float64)


@dataclass(frozen=True, kw_only=True)
class GraphFacts:
    """What a run keeps of its graph.

    Args:
        path: absolute; none where the graph was made, or handed over.
        edges: undirected.
        majority_accuracy, majority_micro_f1: of always giving the same answer, on the test nodes.
        fingerprint: of ``Graph.fingerprint``.
        class_names, columns: digests of what classes are called, and of columns and how features are made of them, of
            a graph from tables.
    """

    name: str
    path: str | None
    nodes: int
    edges: int
    features: int
    classes: int
    several_labels: bool
    train_nodes: int
    val_nodes: int
    test_nodes: int
    fingerprint: str
    majority_accuracy: float | None = None
    majority_micro_f1: float | None = None
    class_names: str | None = None
    columns: str | None = None

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.nodes:,} nodes, {self.edges:,} edges, {self.features:,} features, {self.classes:,} "
            f"{'labels, several a node' if self.several_labels else 'classes'}; {self.train_nodes:,} nodes to train, "
            f"{self.val_nodes:,} to validate, {self.test_nodes:,} to test"
        )


def graph_of(run: Run) -> GraphFacts:
    """What the last start says of the graph.

    Raises:
        FileNotFoundError, ValueError: the file is missing, or not as we write it.
    """
    said = [start["data"] for start in run.starts if "data" in start]
    return files.typed(GraphFacts, said[-1] if said else None, "the graph of a run")


def model_of(config: TrainConfig) -> str:
    """A model in a few words."""
    return f"{config.model}, {config.layers} layers of width {config.dim}, {config.batching} batches"


def names_of(folders: Sequence[Path]) -> list[str]:
    """What to call runs beside each other: their folders' names, or their whole paths where two have the same."""
    names = [folder.resolve().name for folder in folders]
    return names if len({*names}) == len(names) else [str(folder) for folder in folders]


def smoothed(values: np.ndarray) -> np.ndarray:
    """Centred means over a twenty-fifth of all values, fewer at the ends."""
    if not len(values):
        return values
    half = len(values) // 50
    sums, at = np.concatenate([[0.0], np.cumsum(values)]), np.arange(len(values))
    low, high = np.maximum(at - half, 0), np.minimum(at + half + 1, len(values))
    return (sums[high] - sums[low]) / (high - low)


def score_limits(values: Sequence[float], nodes: int) -> tuple[float, float]:
    """Limits of an axis of scores from 0 to 1: wide enough that what chance does to ``nodes`` looks like what it is.

    At least a tenth, or four standard errors of such a part.
    """
    least = max(0.1, 2.0 / max(nodes, 1) ** 0.5)
    low, high = min(values, default=0.0), max(values, default=1.0)
    room = max(least - (high - low), 0.1 * (high - low)) / 2
    low, high = low - room, high + room
    shift = max(-0.02 - low, 0.0) - max(high - 1.02, 0.0)  # what is out of reach is not shown
    return max(low + shift, -0.02), min(high + shift, 1.02)
