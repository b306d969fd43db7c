"""The loss and the measures of one class and of several labels a node, against their definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megagraph.data.graph import Split
from megagraph.objective import (
    METRICS,
    OF_LABELS,
    average_precision,
    choose_metric,
    f1,
    loss_sum,
    measures,
    of_the_majority,
    predicted,
    probabilities_of,
    roc_auc,
)

KNOWN = st.integers(-1, 1)


@st.composite
def labelled(draw):
    """Probabilities in eighths, so that some are equal and some are 1/2, labels, and nodes in any order."""
    nodes, labels = draw(st.integers(1, 8)), draw(st.integers(2, 4))
    entries = st.lists(st.tuples(st.integers(0, 8), KNOWN), min_size=nodes * labels, max_size=nodes * labels)
    eighths, known = np.array(draw(entries)).T.reshape(2, nodes, labels)
    some = draw(st.lists(st.integers(0, nodes - 1), min_size=1, unique=True))
    return (eighths / 8).astype(np.float32), known.astype(np.int8), np.array(some)


def columns(probabilities, known, nodes):
    """Pairs (probability, whether it is there) of each label, of the nodes that know."""
    for p, own in zip(probabilities[nodes].T, known[nodes].T, strict=True):
        yield [(float(x), label == 1) for x, label in zip(p, own, strict=True) if label >= 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_loss_of_several_labels_is_minus_the_logarithm_of_their_probabilities(dtype):
    generator = torch.Generator().manual_seed(0)
    scores = (3 * torch.randn(5, 4, 3, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_()
    labels = torch.randint(-1, 2, (5, 4, 3), generator=generator, dtype=torch.int8)
    loss = loss_sum(scores, labels)
    (gradient,) = torch.autograd.grad(loss, scores)
    p = 1 / (1 + torch.exp(-scores.detach().double()))
    expected = -(torch.log(p)[labels == 1].sum() + torch.log(1 - p)[labels == 0].sum())
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    precision = 1e-12 if dtype == torch.float64 else 1e-6
    torch.testing.assert_close(loss.double(), expected, rtol=precision, atol=0)
    slope = torch.where(labels >= 0, p - labels, 0.0)  # of the logistic loss
    rounding = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 4e-3}[dtype]
    torch.testing.assert_close(gradient.double(), slope, rtol=rounding, atol=rounding)


def test_loss_of_one_class_is_cross_entropy():
    scores, labels = torch.randn(2, 3, 5, dtype=torch.float64), torch.tensor([[1, -1, 4], [-1, 0, 0]])
    logs = scores - scores.exp().sum(dim=-1, keepdim=True).log()
    expected = -sum(logs[i, j, labels[i, j]] for i in range(2) for j in range(3) if labels[i, j] >= 0)
    torch.testing.assert_close(loss_sum(scores, labels), expected)


@pytest.mark.parametrize("multi_label", [False, True])
def test_probabilities_and_predictions(multi_label):
    scores = torch.tensor([[[0.0, 2.0, -1.0]]], dtype=torch.bfloat16)
    found = probabilities_of(scores, multi_label=multi_label)
    e = torch.tensor([[[0.0, 2.0, -1.0]]]).exp()
    torch.testing.assert_close(found, e / (1 + e) if multi_label else e / e.sum())
    expected = [[True, True, False]] if multi_label else [1]
    assert predicted(found[0].numpy(), multi_label=multi_label).tolist() == expected


@given(labelled())
def test_f1_is_the_harmonic_mean_of_precision_and_recall(case):
    hits, given_, there, each = 0, 0, 0, []
    for pairs in columns(*case):
        counts = sum(p >= 0.5 and y for p, y in pairs), sum(p >= 0.5 for p, _ in pairs), sum(y for _, y in pairs)
        hits, given_, there = hits + counts[0], given_ + counts[1], there + counts[2]
        if pairs:
            each.append(_f1(*counts))
    micro, macro = f1(*case)
    assert micro == pytest.approx(_f1(hits, given_, there))
    assert macro == pytest.approx(np.mean(each) if each else 0.0)


def _f1(hits, given_, there):
    if hits == 0:
        return 0.0
    precision, recall = hits / given_, hits / there
    return 2 * precision * recall / (precision + recall)


@given(labelled())
def test_average_precision_is_the_mean_precision_at_each_positive(case):
    each = []
    for pairs in columns(*case):
        precisions = [
            sum(y for q, y in pairs if q >= p) / sum(q >= p for q, _ in pairs) for p, positive in pairs if positive
        ]
        if precisions:
            each.append(np.mean(precisions))
    assert average_precision(*case) == (pytest.approx(np.mean(each)) if each else None)


@given(labelled())
def test_roc_auc_of_several_labels_is_the_mean_over_them(case):
    each = []
    for pairs in columns(*case):
        wins = [(p > q) + 0.5 * (p == q) for p, y in pairs if y for q, z in pairs if not z]
        if wins:
            each.append(np.mean(wins))
    assert roc_auc(*case) == (pytest.approx(np.mean(each)) if each else None)


def test_measures_are_of_each_part():
    labels = np.array([[1, 0], [1, 1], [0, 1], [-1, 1]], np.int8)
    probabilities = np.array([[0.9, 0.6], [0.8, 0.7], [0.6, 0.2], [0.1, 0.9]], np.float32)
    split = Split(np.array([0, 1, 2]), np.array([0, 1]), np.array([2, 3]))
    found = measures(probabilities, labels, split)
    assert set(found) == {f"{part}_{name}" for part in ("val", "test") for name in OF_LABELS}
    assert found["val_micro_f1"] == pytest.approx(6 / 7) and found["test_micro_f1"] == pytest.approx(1 / 2)
    assert found["val_roc_auc"] == 1.0 and found["test_roc_auc"] is None  # no label of both kinds
    assert found["val_average_precision"] == 1.0 and found["test_average_precision"] == 1.0
    # two of three training nodes have each label, and so both are given: of 3 known ones 2 are there
    assert of_the_majority(labels, 2, split) == {"majority_micro_f1": pytest.approx(4 / 5)}
    assert of_the_majority(np.array([2, 2, -1, 2]), 3, split) == {"majority_accuracy": 0.5}


def test_a_metric_is_of_its_kind_of_labels():
    one, several = np.zeros(3, np.int64), np.zeros((3, 2), np.int8)
    assert (choose_metric("auto", one), choose_metric("auto", several)) == ("accuracy", "micro_f1")
    allowed = {name: [name in ("accuracy", "roc_auc"), name != "accuracy"] for name in METRICS}
    for name, right in allowed.items():
        for labels, fits in zip((one, several), right, strict=True):
            if fits:
                assert choose_metric(name, labels) == name
            else:
                with pytest.raises(ValueError, match=f"metric must be .* or auto for .* a node, got {name}"):
                    choose_metric(name, labels)
