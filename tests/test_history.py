"""Curves of runs, from their files."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

import megagraph as mg
from megagraph import plots
from megagraph.data.datasets import synthetic_graph
from megagraph.history import History, names_of, score_limits, smoothed
from megagraph.run import Run
from tests.checkpoint_cases import config, graph, stop_at
from tests.processes import Command


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One that has finished, and one that has been stopped in its second epoch."""
    folder = tmp_path_factory.mktemp("runs")
    finished, stopped = folder / "_$finished$", folder / "stopped"
    mg.Trainer(config(finished)).fit(graph())
    with stop_at(8):
        mg.Trainer(config(stopped, seed=1, learning_rate=1e-3)).fit(graph())
    return finished, stopped


def test_how_a_run_has_gone(runs):
    finished, stopped = (History.of(Run.of(run)) for run in runs)
    summary = Run.open(runs[0]).summary
    assert (len(finished.steps), len(finished.epochs)) == (18, 3) and (len(stopped.steps), len(stopped.epochs)) == (
        8,
        1,
    )
    assert finished.best["epoch"] == summary["best_epoch"] and finished.majority == summary["majority_accuracy"]
    assert finished.metric == "accuracy" and finished.nodes == 20
    assert finished.title == "hierarchical, 3 layers of width 16, ego batches on synthetic"
    steps, losses = finished.losses()
    assert steps.tolist() == [*range(18)] and losses.tolist() == [line["loss"] for line in finished.steps]
    skipped = replace(finished, steps=[finished.steps[0], finished.steps[1] | {"loss": None}, finished.steps[2]])
    assert skipped.losses()[0].tolist() == [0, 2]


def test_curves_show_what_is_in_the_files(runs, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    histories = [History.of(Run.of(run)) for run in runs]
    plots.curves(histories[:1], tmp_path / "one.png")
    plots.curves(histories, tmp_path / "two.png", columns=1)
    one, two = drawn
    finished = histories[0]
    loss, score, rate = one.axes
    raw, mean = loss.lines
    np.testing.assert_array_equal(raw.get_ydata(), finished.losses()[1])
    assert raw.get_alpha() < 1 and len(mean.get_ydata()) == 18
    np.testing.assert_array_equal(rate.lines[0].get_ydata(), [line["learning_rate"] for line in finished.steps])
    named = {line.get_label(): line for line in score.lines}
    assert named.keys() == {"validation", "test", f"best epoch, {finished.best['epoch']}", "majority"}
    for part, label in (("val", "validation"), ("test", "test")):
        np.testing.assert_array_equal(named[label].get_ydata(), [line[f"{part}_accuracy"] for line in finished.epochs])
    star = named[f"best epoch, {finished.best['epoch']}"]
    assert (*star.get_xdata(), *star.get_ydata()) == (finished.best["epoch"], finished.best["val_accuracy"])
    assert {*named["majority"].get_ydata()} == {finished.majority}
    low, high = score.get_ylim()
    assert high - low >= 2 / 20**0.5 - 1e-9 and score.get_ylabel() == "accuracy"
    assert one.get_suptitle() == finished.title
    legend = [text.get_text() for text in two.legends[0].get_texts()]
    assert legend[:2] == [r" _\$finished\$, validation", r" _\$finished\$, test"] and "stopped, test" in legend
    assert legend.count("best epoch") == 1 and two.get_suptitle() == "2 runs"


def test_every_panel_of_layers_has_its_kinds_and_every_head_a_colour(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    values, kinds = np.random.default_rng(0).random((6, 40, 25)), [f"kind {i}" for i in range(25)]
    plots.attention(values, kinds, tmp_path / "attention.png")
    (figure,) = drawn
    panels = [panel for panel in figure.axes if panel.get_visible()]
    assert [panel.xaxis.get_tick_params()["labelbottom"] for panel in panels] == 2 * [False] + 4 * [True]
    assert len({to_rgba(line.get_color()) for line in panels[0].lines}) == 40
    figure.draw_without_rendering()
    places = [label.get_window_extent() for label in panels[-1].get_xticklabels()]
    assert all(left.x1 <= right.x0 for left, right in pairwise(places))
    legend = figure.legends[0].get_window_extent()
    assert legend.y0 >= 0 and legend.x1 <= figure.bbox.x1


def test_of_several_labels_or_two_classes(tmp_path):
    """By what the best epoch is chosen; always the same answer has no ROC AUC."""
    two = synthetic_graph(num_nodes=100, num_classes=2, in_features=8)
    mg.Trainer(config(tmp_path / "two", epochs=1, metric="roc_auc")).fit(two)
    several = replace(two, labels=np.stack([two.labels, 1 - two.labels], axis=1).astype(np.int8))
    summary = mg.Trainer(config(tmp_path / "several", epochs=1)).fit(several)
    found = [History.of(Run.of(tmp_path / name)) for name in ("two", "several")]
    assert [run.metric for run in found] == ["roc_auc", "micro_f1"]
    assert [run.majority for run in found] == [None, summary.majority_micro_f1]
    (tmp_path / "several" / "metrics.jsonl").unlink()
    assert History.of(Run.of(tmp_path / "several")).metric == "micro_f1"  # before the first epoch has ended, too


def test_every_run_of_many_has_a_colour(runs, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    plots.curves([History.of(Run.of(runs[0]), f"run {i}") for i in range(12)], tmp_path / "twelve.png")
    assert len({to_rgba(line.get_color()) for line in drawn[0].axes[2].lines}) == 12


def test_one_step_is_seen_and_has_a_whole_number(runs, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    whole = History.of(Run.of(runs[0]))
    plots.curves([replace(whole, steps=whole.steps[:1], epochs=whole.epochs[:1])], tmp_path / "one.png")
    loss, score, rate = drawn[0].axes
    for panel in (loss, score, rate):
        low, high = panel.get_xlim()
        assert [tick for tick in panel.get_xticks() if low <= tick <= high] == [0]
    assert loss.lines[1].get_marker() == rate.lines[0].get_marker() == "."


def test_the_command(runs, tmp_path):
    for arguments, path in (((runs[0],), runs[0] / "curves.png"), ((*runs, "--out", tmp_path / "x.png"), None)):
        done = Command("plot", "curves", *arguments).finish()
        path = path or tmp_path / "x.png"
        assert (done.returncode, done.stdout) == (0, f"{path}\n"), done.stderr
        assert path.read_bytes()[:4] == b"\x89PNG"
    done = Command("plot", "curves", *runs, "--out", runs[1] / "checkpoints" / "x.png").finish()
    assert done.returncode == 1 and "is a file of the run; pass another --out" in done.stderr
    done = Command("plot", "curves", tmp_path).finish()
    assert done.returncode == 1 and "must be the folder of a run" in done.stderr and "Traceback" not in done.stderr


def test_smoothed_is_the_mean_around_each():
    values = np.random.default_rng(0).normal(size=101)
    expected = [values[max(0, i - 2) : i + 3].mean() for i in range(101)]
    np.testing.assert_allclose(smoothed(values), expected)
    np.testing.assert_array_equal(smoothed(values[:3]), values[:3])
    assert len(smoothed(values[:0])) == 0


@pytest.mark.parametrize("nodes", [20, 100_000])
@pytest.mark.parametrize("values", [(), (0.0,), (1.0,), (0.7, 0.702), (0.1, 0.95), (0.0, 1.0)])
def test_two_nodes_make_no_trend(values, nodes):
    low, high = score_limits(values, nodes)
    assert all(low < value < high for value in values) and -0.02 <= low < high <= 1.02
    assert high - low >= min(max(0.1, 2 / nodes**0.5), 1.0) - 1e-9


def test_runs_are_called_by_their_folders():
    assert names_of([Path("a/x"), Path("b/y")]) == ["x", "y"]
    assert names_of([Path("a/x"), Path("b/x")]) == [str(Path("a/x")), str(Path("b/x"))]
