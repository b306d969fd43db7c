"""What is left out of a trained model, against the model computed without it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

import megagraph as mg
from megagraph import files
from megagraph.ablation import Part, evaluate
from megagraph.cli import main
from megagraph.data.datasets import synthetic_graph
from megagraph.evaluate import batches, choose_split, make_loader, make_model
from megagraph.objective import accuracy
from megagraph.run import Run

SMALL = dict(layers=2, dim=16, ffn_dim=16, heads=2, samples=3, sample_nodes=6, channels=3, epochs=1, batch_size=16)
RUNS = {
    "ego": dict(global_tokens=2, bias_lr_scale=50.0, epochs=3),
    "buckets": dict(model="graphormer", super_nodes=3),
    "cluster": dict(batching="cluster", bias="projected", sequence_nodes=128, super_nodes=8, batch_size=2, epochs=5),
    "learned": dict(embedding="learned", epochs=3),
    "full": dict(batching="full", label_input=0.5, super_nodes=2, global_tokens=0, epochs=60),
}
LACKS = {name: {"convolution", "labels"} for name in RUNS}
LACKS["full"] = {"convolution", "samples", "global_token", "super_nodes"}  # the last: tests/data/test_full.py
LACKS["cluster"] |= {"samples"}


@pytest.fixture(scope="module")
def graph():
    return synthetic_graph(num_nodes=240, num_classes=3, in_features=16, seed=0)


@pytest.fixture(scope="module")
def runs(graph, tmp_path_factory):
    """The folder and the summary of each."""
    trained = {}
    at_end = dict(learning_rate=1e-2, evaluate_every=60)  # the weights that are kept are the last ones
    for name, changes in RUNS.items():
        out = tmp_path_factory.mktemp("runs") / name
        trained[name] = (
            out,
            mg.Trainer(mg.TrainConfig(**(SMALL | changes | at_end | dict(out=out)))).fit(graph),
        )
    return trained


def without(run, graph, part):
    """Probabilities of all nodes by a model made anew, on batches cut down by hand."""
    config, weights = run.config, run.weights()
    if part == "samples":
        config = replace(config, samples=1)
    model = make_model(config, run.model_config)
    table = weights.pop("node_table", None)
    model.load_state_dict(weights)
    for layer in model.layers.values():
        start = torch.tensor(run.model_config.bias_start)
        if part in ("bias", "initial"):
            layer.bias_weight.data = start.repeat(config.heads, 1) if part == "initial" else 0 * layer.bias_weight.data
    split = choose_split(graph, config)
    loader = make_loader(config, batches(config, graph), np.concatenate([split.val, split.test]))
    total = np.zeros((graph.num_nodes, graph.num_classes))
    for batch in loader.epoch(0):
        inputs = batch.model_inputs()
        if table is not None:
            inputs["features"] = table[batch.node_ids]
        if part == "features":
            inputs["features"] = 0 * inputs["features"]
        if part == "labels":
            inputs["features"] = torch.cat([batch.features[:, :16], torch.zeros(len(batch.features), 3)], dim=1)
        tokens = batch.num_nodes - config.global_tokens
        if part == "super_nodes":  # the sequence without these columns and rows
            keep = [*range(batch.layout.num_nodes), *range(tokens, batch.num_nodes)]
            inputs["structure"] = batch.structure[..., keep, :][..., keep].contiguous()
            inputs["key_padding_mask"] = batch.key_padding_mask[:, keep]
            inputs["node_index"] = batch.node_index[:, : batch.layout.num_nodes]
            inputs["layout"] = None
        if part == "global_token":
            model.register_parameter("global_tokens", None)
            inputs["structure"] = batch.structure[..., :tokens, :tokens].contiguous()
            inputs["key_padding_mask"] = batch.key_padding_mask[:, :tokens]
            inputs["layout"] = None
        with torch.no_grad():
            votes = model.eval()(**inputs).softmax(-1)
        real = batch.target_nodes >= 0
        np.add.at(total, batch.target_nodes[real].numpy(), votes[real].double().numpy())
    return total / np.maximum(total.sum(axis=1, keepdims=True), 1e-9)


@pytest.mark.parametrize("name", RUNS)
def test_without_a_part(runs, graph, name):
    folder, summary = runs[name]
    parts = [part for part in get_args(Part) if part not in LACKS[name]]
    results = evaluate(folder, graph, ablate=parts)
    run = Run.open(folder)
    split = choose_split(graph, run.config)
    nodes = np.concatenate([split.val, split.test])
    whole = without(run, graph, "nothing")
    assert results["whole"] == {"val_accuracy": summary.best_val_accuracy, "test_accuracy": summary.test_accuracy}
    assert list(results) == ["whole", *parts]
    effects = []
    for part in parts:
        expected = without(run, graph, part)
        changed = (expected.argmax(1) != whole.argmax(1))[nodes].mean()
        assert results[part] == {
            "val_accuracy": accuracy(expected, graph.labels, split.val),
            "test_accuracy": accuracy(expected, graph.labels, split.test),
            "changed_classes": pytest.approx(changed),
        }
        effects.append(np.abs(expected - whole)[nodes].max())
    assert min(effects) > 1e-4, "a part that does nothing"
    assert results["features"]["changed_classes"] > 0.1


@pytest.mark.parametrize("name", RUNS)
def test_the_summary_says_what_the_bias_does(runs, graph, name):
    folder, summary = runs[name]
    run = Run.open(folder)
    start = run.model_config.bias_start
    np.testing.assert_allclose(summary.bias_start_norm, np.sqrt(np.mean(np.square(start))))
    changed = evaluate(folder, graph, ablate=["bias"])["bias"]["changed_classes"]
    assert summary.bias_changed_classes == pytest.approx(changed)
    learned = np.stack([x.double().numpy() for name, x in run.weights().items() if "bias_weight" in name])
    np.testing.assert_allclose(summary.bias_norm, np.sqrt(np.mean(learned**2)))
    both = np.corrcoef(learned.ravel(), np.tile(start, (*learned.shape[:2], 1)).ravel())
    np.testing.assert_allclose(summary.bias_correlation, both[0, 1])


def test_command_line(runs, graph, monkeypatch, capsys):
    folder, _ = runs["ego"]
    monkeypatch.setattr("megagraph.evaluate.load_graph", lambda *_, **__: graph)
    monkeypatch.setattr("sys.argv", ["megagraph", "evaluate", str(folder), "--ablate", "bias", "global_token"])
    main()
    results = json.loads(capsys.readouterr().out)
    assert results == evaluate(folder, graph, ablate=["bias", "global_token"])


def test_of_several_processes_the_first_says_and_writes_what_comes_out(runs, graph, monkeypatch, capsys):
    folder, _ = runs["ego"]
    monkeypatch.setattr("megagraph.evaluate.load_graph", lambda *_, **__: graph)
    monkeypatch.setattr("megagraph.parallel.mesh.rank", lambda: 1)
    for command in ("evaluate", "predict"):
        monkeypatch.setattr("sys.argv", ["megagraph", command, str(folder)])
        main()
        assert not capsys.readouterr().out
    assert not (folder / "probabilities.npy").exists()


@pytest.mark.parametrize("name", RUNS)
def test_a_picture_of_the_bias(runs, name, monkeypatch, capsys):
    """A line per head, through the weights of the run, and one for where they started."""
    folder, _ = runs[name]
    figures = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kw: figures.append(self) or save(self, *args, **kw))
    monkeypatch.setattr("sys.argv", ["megagraph", "plot", "bias", str(folder), "--out", str(folder) + ".png"])
    main()
    path = Path(capsys.readouterr().out.strip())
    assert path.name == f"{name}.png" and path.read_bytes().startswith(b"\x89PNG")
    run = Run.open(folder)
    weights = run.weights()
    for layer, panel in enumerate(figures[0].axes):
        *heads, start = (line.get_ydata() for line in panel.lines)
        np.testing.assert_array_equal(heads, weights[f"layers.{layer}.bias_weight"])
        np.testing.assert_array_equal(start, run.model_config.bias_start)
        assert len(panel.get_xticklabels()) == run.model_config.bias_size


@pytest.mark.parametrize(
    ("name", "part", "changes", "message"),
    [
        ("ego", "heads", {}, "ablate must be some of bias, initial, .*, samples, got 'heads'"),
        ("cluster", "samples", {}, "without 'samples': a target has one sequence already"),
        ("ego", "samples", {"samples": 1}, "without 'samples': a target has one sequence already"),
        ("ego", "labels", {}, "without 'labels': its input has none"),
    ],
)
def test_refused(runs, graph, name, part, changes, message):
    with pytest.raises(ValueError, match=message):
        evaluate(runs[name][0], graph, ablate=[part], **changes)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("global_token", "without 'global_token': it has no global tokens"),
        ("initial", "'initial': its bias started at random"),
    ],
)
def test_refused_where_a_run_has_none(tmp_path, graph, part, message):
    changes = dict(global_tokens=0, super_nodes=1, max_steps=1)
    mg.Trainer(mg.TrainConfig(**(SMALL | changes | dict(out=tmp_path / "run")))).fit(graph)
    path = tmp_path / "run" / "model.json"
    files.write_json(path, files.read_json(path, "sizes") | {"bias_start": []})
    with pytest.raises(ValueError, match=message):
        evaluate(tmp_path / "run", graph, ablate=[part])
