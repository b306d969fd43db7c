"""What is trained and how good it is: one class a node, or several labels, each with a probability of its own.

Labels [V] of classes or [V, C] of 0 and 1 say which; -1 is not known and does not count. For F1 a node is given the
labels of a probability of at least 1/2. Means over labels leave out those of which nothing is known, that of average
precision also those that nobody has, that of ROC AUC those that all have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from megagraph.data.graph import Graph, Split

OF_CLASSES = ("accuracy", "roc_auc")
OF_LABELS = ("micro_f1", "macro_f1", "average_precision", "roc_auc")
SOMETIMES = ("average_precision", "roc_auc")  # None where nothing is to be told apart
METRICS = tuple(dict.fromkeys((*OF_CLASSES, *OF_LABELS)))
Measures = dict[str, float | None]  # val_METRIC and test_METRIC


def loss_sum(scores: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy, or of several labels a node binary cross entropy, summed over the labels that count.

    Divided by their number in the global batch it is the loss.

    Args:
        scores: [b, T, classes]
        labels: [b, T], or several a node [b, T, classes]; -1 = does not count.
    """
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if labels.ndim < scores.ndim:
        scores = scores.flatten(0, 1)
        return nn.functional.cross_entropy(scores, labels.flatten(), ignore_index=-1, reduction="sum")
    targets, counts = labels.clamp(min=0).to(scores.dtype), (labels >= 0).to(scores.dtype)
    return nn.functional.binary_cross_entropy_with_logits(scores, targets, counts, reduction="sum")


def probabilities_of(scores: Tensor, *, multi_label: bool) -> Tensor:
    """Probability of each class [..., classes], in fp32."""
    return scores.float().sigmoid() if multi_label else scores.float().softmax(dim=-1)


def predicted(probabilities: np.ndarray, *, multi_label: bool) -> np.ndarray:
    """The most probable class int64 [V], or which labels bool [V, C]."""
    return probabilities >= 0.5 if multi_label else probabilities.argmax(axis=1)


def accuracy(probabilities: np.ndarray, labels: np.ndarray, nodes: np.ndarray) -> float:
    """Part of ``nodes`` whose most probable class is the label."""
    return float((probabilities[nodes].argmax(axis=1) == labels[nodes]).mean())


def f1(probabilities: np.ndarray, labels: np.ndarray, nodes: np.ndarray) -> tuple[float, float]:
    """F1 of all labels of ``nodes`` together (micro), and the mean over labels of that of each (macro)."""
    given, known = probabilities[nodes] >= 0.5, labels[nodes]
    hits = (given & (known == 1)).sum(axis=0)
    sizes = (given & (known >= 0)).sum(axis=0) + (known == 1).sum(axis=0)  # 2 TP + FP + FN
    each = 2 * hits / np.maximum(sizes, 1)
    there = (known >= 0).any(axis=0)
    return float(2 * hits.sum() / max(sizes.sum(), 1)), float(each[there].mean()) if there.any() else 0.0


def average_precision(probabilities: np.ndarray, labels: np.ndarray, nodes: np.ndarray) -> float | None:
    """Average precision, mean over labels: mean over positives of the precision among what is as probable or more."""

    def of(scores: np.ndarray, positive: np.ndarray) -> float | None:
        if not positive.any():
            return None
        order = np.argsort(-scores)
        ends = np.append(np.flatnonzero(np.diff(scores[order])), len(order) - 1)  # equal ones count at once
        hits = positive[order].cumsum()[ends]
        return float((hits / (ends + 1) * np.diff(hits, prepend=0)).sum() / hits[-1])

    return _mean_over_labels(of, probabilities, labels, nodes)


def roc_auc(probabilities: np.ndarray, labels: np.ndarray, nodes: np.ndarray) -> float | None:
    """How often one of ``nodes`` of class 1 gets more of that class than one of class 0, equal ones counted by half; of
    several labels the mean over those that some have and some have not.

    ``None`` where that cannot be said: other numbers of classes, or only one of them among the nodes.
    """

    def of(scores: np.ndarray, positive: np.ndarray) -> float | None:
        if positive.all() or not positive.any():
            return None
        from scipy.stats import mannwhitneyu  # slow to import, and few runs ask for it

        scores = scores.astype(np.float64)
        wins = mannwhitneyu(scores[positive], scores[~positive], method="asymptotic").statistic
        return float(wins / (positive.sum() * (~positive).sum()))

    if labels.ndim == 2:
        return _mean_over_labels(of, probabilities, labels, nodes)
    return of(probabilities[nodes, -1], labels[nodes] == 1) if probabilities.shape[1] == 2 else None


def _mean_over_labels(
    of: Callable[[np.ndarray, np.ndarray], float | None],
    probabilities: np.ndarray,
    labels: np.ndarray,
    nodes: np.ndarray,
) -> float | None:
    """Mean over labels of ``of``, given scores of the ``nodes`` where a label is known, and whether they have it."""
    found = []
    for label in range(labels.shape[1]):
        own = labels[nodes, label]
        found.append(of(probabilities[nodes[own >= 0], label], own[own >= 0] == 1))
    said = [value for value in found if value is not None]
    return float(np.mean(said)) if said else None


def measures(probabilities: np.ndarray, labels: np.ndarray, split: Split) -> Measures:
    """Measures of predictions fp32 [V, classes] on the validation and test nodes."""
    found: Measures = {}
    for part in ("val", "test"):
        of = probabilities, labels, getattr(split, part)
        if labels.ndim == 1:
            found[f"{part}_accuracy"] = accuracy(*of)
        else:
            found[f"{part}_micro_f1"], found[f"{part}_macro_f1"] = f1(*of)
            found[f"{part}_average_precision"] = average_precision(*of)
        found[f"{part}_roc_auc"] = roc_auc(*of)
    return found


def same_answer(answers: np.ndarray, graph: Graph, nodes: np.ndarray) -> str | None:
    """A warning where a model answers the same for all ``nodes``, as ``predicted`` has it, and their labels differ."""
    given, known = answers[nodes], graph.labels[nodes]
    if (given != given[0]).any() or (known == known[0]).all():
        return None
    named = None if graph.names is None else graph.names.classes

    def name(number: int) -> str:
        kind = "label" if graph.multi_label else "class"
        return f"{kind} {number if named is None or number >= len(named) else named[number]}"

    chosen = np.flatnonzero(given[0]) if graph.multi_label else [given[0]]
    what = ", ".join(name(int(number)) for number in chosen) or "no label"
    return (
        f"the model answers {what} for every validation and test node; what helps may be to train longer, another "
        "--learning-rate, features of another scale, or more labelled nodes of the other classes"
    )


def of_the_majority(labels: np.ndarray, num_classes: int, split: Split) -> dict[str, Any]:
    """majority_accuracy on the test nodes, or majority_micro_f1, of always giving the largest class of the training
    nodes, or the labels that at least half of them have."""
    known, every = labels[split.train], (len(labels), num_classes)
    if labels.ndim == 1:
        counts = np.bincount(known[known >= 0], minlength=num_classes)
        return {"majority_accuracy": accuracy(np.broadcast_to(counts, every), labels, split.test)}
    shares = (known == 1).sum(axis=0) / np.maximum((known >= 0).sum(axis=0), 1)
    return {"majority_micro_f1": f1(np.broadcast_to(shares, every), labels, split.test)[0]}


def choose_metric(wanted: str, labels: np.ndarray) -> str:
    """By what the best epoch is chosen, as ``--metric`` says.

    Raises:
        ValueError: it is for the other kind of labels.
    """
    kind, known = ("several labels a node", OF_LABELS) if labels.ndim == 2 else ("one class a node", OF_CLASSES)
    if wanted == "auto":
        return known[0]
    if wanted not in known:
        raise ValueError(f"metric must be {', '.join(known)} or auto for {kind}, got {wanted}")
    return wanted
