"""How good predictions are said to be."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import megagraph as mg
from megagraph import ablation, evaluate
from megagraph.data.datasets import synthetic_graph
from megagraph.data.graph import Graph, random_split
from megagraph.data.names import Column, Ids, Names
from megagraph.data.store import write_store
from megagraph.evaluate import choose_split
from megagraph.objective import roc_auc, same_answer
from megagraph.run import Run

SMALL = dict(layers=1, dim=8, ffn_dim=8, heads=2, samples=1, sample_nodes=4, channels=2, epochs=6, batch_size=32)


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=30))
def test_roc_auc_is_the_share_of_pairs_in_the_right_order(nodes):
    scores, positive = (np.array(x) for x in zip(*nodes, strict=True))
    probabilities = np.stack([1 - scores / 5, scores / 5], axis=1).astype(np.float32)
    pairs = [(p > n) + 0.5 * (p == n) for p in scores[positive] for n in scores[~positive]]
    found = roc_auc(probabilities, positive.astype(np.int64), np.arange(len(nodes)))
    assert found == (pytest.approx(np.mean(pairs)) if pairs else None)


def test_roc_auc_is_of_the_nodes_asked_for_and_of_two_classes():
    probabilities, labels = np.array([[0.9, 0.1], [0.2, 0.8], [0.1, 0.9]], np.float32), np.array([0, 1, 0])
    assert roc_auc(probabilities, labels, np.array([0, 1])) == 1.0
    assert roc_auc(probabilities, labels, np.array([1, 2])) == 0.0
    assert roc_auc(np.ones((3, 3), np.float32), labels, np.arange(3)) is None


def test_the_metric_chooses_the_best_epoch(tmp_path, caplog):
    caplog.set_level("INFO", "megagraph")
    graph = synthetic_graph(num_nodes=300, num_classes=2, in_features=8, seed=2)
    summaries = {}
    for metric in ("accuracy", "roc_auc"):
        config = mg.TrainConfig(metric=metric, out=tmp_path / metric, learning_rate=0.02, **SMALL)
        summary = summaries[metric] = mg.Trainer(config).fit(graph)
        lines = [json.loads(line) for line in (tmp_path / metric / "metrics.jsonl").read_text().splitlines()]
        best = max((line for line in lines if "epoch" in line), key=lambda line: line[f"val_{metric}"])
        assert summary.best_epoch == best["epoch"]
        assert f"validation {metric} {best[f'val_{metric}']:.4f}  test" in caplog.text
        assert summary.test_roc_auc == best["test_roc_auc"] and summary.test_accuracy == best["test_accuracy"]
        assert summary.best_val_roc_auc == best["val_roc_auc"] > 0.5
    assert summaries["accuracy"].best_epoch != summaries["roc_auc"].best_epoch  # else this test sees nothing


@pytest.mark.parametrize("label_input", [0.0, 0.5])
def test_nodes_without_a_label_do_not_count(tmp_path, label_input):
    """Though a part of the split names them."""
    graph = synthetic_graph(num_nodes=120, num_classes=2, in_features=8)
    split = random_split(graph.labels, 0)
    labels, unknown = graph.labels.copy(), np.concatenate([split.train[::3], split.val[::2], split.test[::2]])
    labels[unknown] = -1
    given = replace(graph, labels=labels, split=split)
    options = dict(layers=1, dim=16, heads=2, batching="full", epochs=8, label_input=label_input, learning_rate=1e-2)
    config = mg.TrainConfig(**options, split="public", metric="roc_auc", out=tmp_path / "run")
    summary = mg.Trainer(config).fit(given)
    known = np.setdiff1d(split.test, unknown)
    right = mg.predict(tmp_path / "run", given).argmax(axis=1) == graph.labels
    assert summary.test_accuracy == right[known].mean() and summary.majority_accuracy in (
        (labels[known] == 0).mean(), (labels[known] == 1).mean()
    )  # fmt: skip
    (start,) = Run.open(tmp_path / "run").starts
    assert start["data"]["test_nodes"] == len(known)


def test_a_metric_that_cannot_be_is_refused(tmp_path):
    config = mg.TrainConfig(metric="roc_auc", out=tmp_path / "run")
    three = synthetic_graph(num_nodes=60, num_classes=3)
    message = "metric must be accuracy unless .* synthetic has 3, and 3 of them in the train part"
    with pytest.raises(ValueError, match=message):
        mg.Trainer(config).fit(three)
    labels = np.zeros(60, np.int64)
    labels[choose_split(three, mg.TrainConfig()).train[0]] = 1
    edges = np.stack([np.arange(59), np.arange(1, 60)])
    with pytest.raises(ValueError, match="test has 2, and 1 of them in the val part"):
        choose_split(Graph.from_arrays("test", np.ones((60, 1)), edges, labels), config)
    several = Graph.from_arrays("test", np.ones((60, 1)), edges, np.tile([1.0, np.nan], (60, 1)))
    for metric, refused in {"accuracy": "metric must be micro_f1, ", "roc_auc": "roc_auc has nothing to tell"}.items():
        with pytest.raises(ValueError, match=refused):
            choose_split(several, mg.TrainConfig(metric=metric))
    assert len(choose_split(several, mg.TrainConfig(metric="average_precision")).test) == 12
    with pytest.raises(ValueError, match="the train part of the split is empty; test has too few labelled nodes"):
        choose_split(replace(several, labels=np.full((60, 2), -1, np.int8)), mg.TrainConfig())


@pytest.mark.parametrize("embedding", ["features", "learned"])
def test_weights_in_double_precision_are_not_rounded(tmp_path, embedding):
    graph, options = synthetic_graph(num_nodes=60, in_features=4), SMALL | {"max_steps": 1, "warmup": 0.0}
    mg.Trainer(mg.TrainConfig(dtype="fp64", embedding=embedding, out=tmp_path / "run", **options)).fit(graph)
    opened = evaluate.open_run(tmp_path / "run", graph, {}).pipeline.state_dict()
    torch.testing.assert_close(opened, Run.open(tmp_path / "run").weights(), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["one class", "named", "no label", "labels"])
def test_who_answers_the_same_for_everyone_is_told_so_once(tmp_path, kind, monkeypatch, caplog):
    graph = synthetic_graph(num_nodes=120, num_classes=3, in_features=8, seed=2)
    if kind == "named":
        names = Names(ids=Ids.of([str(i) for i in range(120)]), classes=("red", "green", "blue"), columns=())
        graph = replace(graph, names=names)
    elif kind != "one class":
        graph = replace(graph, labels=np.eye(3, dtype=np.int8)[graph.labels])
    said = {"one class": "class 1", "named": "class green", "no label": "no label", "labels": "label 0, label 2"}[kind]
    forced = {"no label": [-9.0, -9, -9], "labels": [9.0, -9, 9]}.get(kind, [0.0, 9, 0])
    message = f"the model answers {said} for every validation and test node; "
    mg.Trainer(mg.TrainConfig(out=tmp_path / "real", learning_rate=0.02, **SMALL)).fit(graph)
    assert not [text for text in caplog.messages if "the model answers" in text] or kind == "no label"
    caplog.clear()
    real = evaluate.probabilities_of
    monkeypatch.setattr(
        evaluate, "probabilities_of", lambda scores, **kind: real(scores * 0 + scores.new_tensor(forced), **kind)
    )
    mg.Trainer(mg.TrainConfig(out=tmp_path / "run", **SMALL)).fit(graph)
    assert len([text for text in caplog.messages if text.startswith(message)]) == 1
    caplog.clear()
    ablation.evaluate(tmp_path / "run", graph)
    assert [text.startswith(message) for text in caplog.messages] == [True]


def test_nodes_that_are_all_the_same_may_be_answered_the_same():
    graph = synthetic_graph(num_nodes=60, num_classes=3)
    nodes, answers = np.flatnonzero(graph.labels == 1), np.ones(60, np.int64)
    assert same_answer(answers, graph, nodes) is None
    assert same_answer(answers, graph, np.arange(60)).startswith("the model answers class 1 for every")
    assert same_answer(np.arange(60) % 3, graph, np.arange(60)) is None


OTHERS = "expected the graph that the run was trained on, synthetic with the fingerprint .*, got synthetic with "


@pytest.mark.parametrize("use", [mg.predict, ablation.evaluate])
def test_a_store_that_has_changed_since_is_asked_for(tmp_path, use):
    """Training nodes of the run would be test nodes."""
    graph, store = synthetic_graph(num_nodes=120, num_classes=3, in_features=8), str(tmp_path / "store")
    write_store(graph, store)
    mg.Trainer(mg.TrainConfig(out=tmp_path / "run", dataset=store, **SMALL | {"max_steps": 1})).fit()
    use(tmp_path / "run")
    order = np.random.default_rng(0).permutation(120)
    edges = np.argsort(order)[np.stack(graph.adjacency.nonzero())]
    write_store(Graph.from_arrays("synthetic", graph.features[order], edges, graph.labels[order]), store)
    with pytest.raises(ValueError, match=f"{OTHERS}.* from {store}: .* or this one, --dataset {store}$"):
        use(tmp_path / "run")
    use(tmp_path / "run", dataset=store)  # on purpose
    use(tmp_path / "run", graph)


@pytest.mark.parametrize("use", [mg.predict, ablation.evaluate])
def test_a_graph_that_was_handed_over_is_asked_for(tmp_path, use):
    graph = synthetic_graph(in_features=64, seed=1)
    mg.Trainer(mg.TrainConfig(out=tmp_path / "run", **SMALL | {"max_steps": 1})).fit(graph)
    with pytest.raises(ValueError, match=f"{OTHERS}.* from synthetic: .* that was handed over; pass that graph"):
        use(tmp_path / "run")
    use(tmp_path / "run", graph)
    use(tmp_path / "run", seed=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(channels=3), "channels must stay 2, as the model was trained with it, got 3"),
        (dict(model="graphormer"), "model must stay 'hierarchical'"),
        (dict(batching="cluster"), "batching must stay 'ego'"),
        (dict(bias="bucket"), "bias must stay 'projected'"),
        (dict(global_tokens=0), "global_tokens must stay 1"),
        (dict(layers=9), "layers must stay "),
        (dict(nonsense=1), "expected fields of TrainConfig to change, got nonsense"),
        (dict(samples=1, bias="projected", batch_size=7, super_nodes=3, hops=2, dropout=0.1, init="xavier"), None),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_what_the_weights_know_stays(trained, changes, message):
    run, graph = trained
    if message is None:
        assert mg.predict(run, graph, **changes).shape == (60, graph.num_classes)
        return
    with pytest.raises(ValueError, match=message):
        mg.predict(run, graph, **changes)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    graph, run = synthetic_graph(num_nodes=60, in_features=4), tmp_path_factory.mktemp("trained") / "run"
    mg.Trainer(mg.TrainConfig(out=run, **SMALL | {"max_steps": 1})).fit(graph)
    return run, graph


def test_classes_and_columns_that_are_called_otherwise(tmp_path, caplog):
    graph = synthetic_graph(num_nodes=120, num_classes=2, in_features=2)
    columns = tuple(Column(name=name, kind="number") for name in ("age", "height"))
    known = Names(ids=Ids.of([str(i) for i in range(120)]), classes=("cat", "dog"), columns=columns)
    mg.Trainer(mg.TrainConfig(out=tmp_path / "run", **SMALL | {"max_steps": 1})).fit(replace(graph, names=known))
    for classes in (("cat", "dog"), ()):
        mg.predict(tmp_path / "run", replace(graph, names=replace(known, classes=classes)))
    for classes in (("ant", "cat"), ("ant", "cat", "dog")):
        other = replace(graph, num_classes=len(classes), names=replace(known, classes=classes))
        with pytest.raises(ValueError, match=f"with the classes of synthetic, .*, got {', '.join(classes)}; import it"):
            mg.predict(tmp_path / "run", other)
    assert "--like" not in caplog.text
    mg.predict(tmp_path / "run", replace(graph, names=replace(known, columns=columns[::-1])))
    assert "features of synthetic are made of other columns than those of synthetic" in caplog.text
