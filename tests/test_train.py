"""Training, prediction and the command line, on small graphs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch_geometric.data import Data

import megagraph as mg
from megagraph import epochs
from megagraph.data.datasets import synthetic_graph
from megagraph.data.graph import Split
from megagraph.data.store import write_store
from megagraph.dry_run import dry_run
from megagraph.evaluate import choose_split, unread
from megagraph.run import Run
from megagraph.train_step import make_pipeline, schedule
from tests import processes
from tests.processes import Command

SMALL = dict(layers=2, dim=16, ffn_dim=16, heads=2, samples=2, sample_nodes=6, channels=3, epochs=3, batch_size=16)


@pytest.fixture(scope="module")
def graph():
    return synthetic_graph(num_nodes=300, num_classes=3, in_features=16, seed=0)


def config(tmp_path, **changes) -> mg.TrainConfig:
    return mg.TrainConfig(**(SMALL | dict(out=tmp_path / "run", learning_rate=1e-2) | changes))


def losses(folder) -> list[float]:
    lines = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "step" in line]


def rates(folder) -> list[float]:
    return [line["learning_rate"] for line in Run.open(folder).metrics() if "step" in line]


@pytest.mark.parametrize(
    "changes",
    [
        dict(),
        dict(bias="bucket"),
        dict(model="graphormer"),
        dict(embedding="learned", epochs=20, input_dropout=0.2),
        dict(batching="cluster", sequence_nodes=128, super_nodes=8, batch_size=1, epochs=15),
        dict(batching="cluster", bias="projected", sequence_nodes=128, super_nodes=8, batch_size=2, epochs=15),
        dict(dtype="bf16"),
        dict(dtype="fp64"),
        dict(global_tokens=0, input_dropout=0.0, dropout=0.0, attention_dropout=0.0),
    ],
    ids=lambda changes: ",".join(f"{k}={v}" for k, v in changes.items()) or "default",
)
def test_learns_and_predicts_what_it_reported(tmp_path, graph, changes):
    summary = mg.Trainer(config(tmp_path, **changes)).fit(graph)
    folder = tmp_path / "run"
    assert summary.test_accuracy > summary.majority_accuracy + 0.15
    steps = losses(folder)
    assert len(steps) == summary.steps and np.mean(steps[-5:]) < 0.9 * np.mean(steps[:5])
    files = "run.json config.json plan.json model.json metrics.jsonl model.safetensors summary.json curves.png "
    files += "checkpoints provenance.json"
    assert {path.name for path in folder.iterdir()} == set(files.split())
    assert mg.Plan.load(folder / "plan.json") == mg.Plan()
    assert json.loads((folder / "summary.json").read_text())["test_accuracy"] == summary.test_accuracy

    probabilities = mg.predict(folder, graph)
    streamed = mg.predict(folder, graph, tmp_path / "p.npy")
    np.testing.assert_allclose(streamed, probabilities, rtol=1e-6)
    np.testing.assert_array_equal(np.load(tmp_path / "p.npy"), streamed)
    assert isinstance(streamed, np.memmap) and not (tmp_path / "p.npy.partial").exists()
    assert probabilities.shape == (300, 3)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1.0, rtol=1e-5)
    test = choose_split(graph, config(tmp_path)).test  # of it the same is drawn as in the evaluation of the best epoch
    assert (probabilities[test].argmax(axis=1) == graph.labels[test]).mean() == summary.test_accuracy


def test_every_step_and_sequence_drops_others(tmp_path, graph, monkeypatch):
    keys = []

    def recorded(*arguments):
        keys.append(mg.dropout_keys(*arguments))
        return keys[-1]

    monkeypatch.setattr(epochs, "dropout_keys", recorded)
    summary = mg.Trainer(config(tmp_path, epochs=2)).fit(graph)
    assert len(keys) == summary.steps > 2
    every = torch.cat(keys)
    assert len(every.unique()) == len(every)


def test_same_seed_same_losses_for_any_number_of_workers(tmp_path, graph):
    runs = {}
    for name, changes in {"a": {}, "b": {}, "workers": dict(workers=2), "seed": dict(seed=1)}.items():
        mg.Trainer(config(tmp_path, out=tmp_path / name, max_steps=4, **changes)).fit(graph)
        runs[name] = losses(tmp_path / name)
    assert len(runs["a"]) == 4
    assert runs["a"] == runs["b"] == runs["workers"]
    assert runs["a"] != runs["seed"]


@pytest.mark.parametrize("scale", [0.0, 7.0])
def test_biases_learn_at_a_rate_of_their_own_and_do_not_decay(tmp_path, graph, scale):
    """AdamW's first step is of the size of the rate, whatever the gradient; decay takes its share of a weight."""
    started = {}
    make = make_pipeline

    def recorded(model, *arguments):
        started.update({name: parameter.detach().clone() for name, parameter in model.named_parameters()})
        return make(model, *arguments)

    options = dict(bias_lr_scale=scale, max_steps=1, warmup=0.0, weight_decay=0.5, dtype="fp64", clip_norm=1e9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megagraph.train.make_pipeline", recorded)
        mg.Trainer(config(tmp_path, **options)).fit(graph)
    trained = Run.open(tmp_path / "run").weights()
    for name, before in started.items():
        step = trained[name] - (before if "bias_weight" in name else before * (1 - 0.5 * 1e-2))
        rate = 1e-2 * (scale if "bias_weight" in name else 1.0)
        assert step.abs().max() <= rate * (1 + 1e-9), name
        if name != "input_proj.bias":
            assert step.abs().median() >= 0.5 * rate, name


def test_takes_a_pyg_data_object_and_its_split(tmp_path, graph):
    adjacency = graph.adjacency.tocoo()
    data = Data(
        x=torch.from_numpy(graph.features),
        edge_index=torch.from_numpy(np.stack([adjacency.row, adjacency.col])).long(),
        y=torch.from_numpy(graph.labels),
    )
    with pytest.raises(ValueError, match="split must be 'random': graph has no split of its own"):
        mg.Trainer(config(tmp_path, split="public")).fit(data)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(0))
    for name, part in zip(("train", "val", "test"), order.split(100), strict=True):
        data[f"{name}_mask"] = torch.zeros(300, dtype=torch.bool).index_fill_(0, part, True)
    assert mg.Trainer(config(tmp_path, split="public")).fit(data).steps == 3 * -(-100 // 16)


@pytest.mark.parametrize("most", [None, 8], ids=["epochs", "more steps than there are"])
def test_a_batch_without_training_nodes_adds_no_step(tmp_path, graph, caplog, most):
    caplog.set_level("INFO", "megagraph")
    given = replace(graph, split=Split(np.array([7]), np.arange(100, 200), np.arange(200, 300)))
    options = dict(batching="cluster", sequence_nodes=128, super_nodes=8, batch_size=1, split="public", max_steps=most)
    summary = mg.Trainer(config(tmp_path, **options)).fit(given)
    assert summary.steps == summary.epochs == 3  # of three sequences an epoch
    assert dry_run(config(tmp_path, **options), given)["steps"] == 3
    assert rates(tmp_path / "run")[-1] < 0.4 * 1e-2  # it falls to 0 nevertheless
    assert "clusters, edge cut " in caplog.text


def test_the_rate_falls_to_0_by_the_last_step_that_may_be_taken(tmp_path, graph):
    mg.Trainer(config(tmp_path, max_steps=6, warmup=0.0)).fit(graph)
    first, *_, last = rates(tmp_path / "run")
    assert last < 0.2 * first


def test_flags_that_nothing_reads_are_named(tmp_path, graph, caplog):
    idle = dict(sequence_nodes=256, hops=2, max_degree=9, comm="ulysses")
    mg.Trainer(config(tmp_path, max_steps=1, **idle)).fit(graph)
    assert "nothing reads sequence_nodes, hops, max_degree, comm here: hierarchical on ego batches" in caplog.text
    full = dict(batching="full", plan="1,2,1", comm="ulysses")
    assert unread(mg.TrainConfig(batch_size=8, workers=2, **full)) == ["batch_size", "workers"]
    ego = dict(samples=2, sample_nodes=9, candidates=99, epsilon=1e-3, super_ratio=0.2)
    projected = dict(channels=3, power_scope="batch", power_gib=1.0)
    assert unread(mg.TrainConfig(batching="full", **ego, **projected)) == [*ego, *projected]
    others = dict(sequence_nodes=256, hops=2, top=4, max_pairs=99, max_distance=3)
    assert unread(mg.TrainConfig(batching="ego", bias="projected", **others)) == [*others]


def test_a_learned_embedding_needs_no_features(tmp_path, graph):
    bare = replace(graph, features=graph.features[:, :0])
    mg.Trainer(config(tmp_path, embedding="learned", max_steps=2)).fit(bare)
    assert mg.predict(tmp_path / "run", bare).shape == (300, 3)
    with pytest.raises(ValueError, match="expected nodes with features, got none; add some, or pass --emb"):
        mg.Trainer(config(tmp_path, out=tmp_path / "other")).fit(bare)


def test_schedule():
    factors = [schedule(step, 100, 0.1) for step in range(100)]
    assert factors.index(max(factors)) == 10 and factors[10] == 1.0
    assert all(0 < factor <= 1 for factor in factors)
    assert np.allclose(np.diff(factors[:10]), factors[1] - factors[0]) and np.allclose(np.diff(factors[10:]), -1 / 90)
    assert schedule(0, 1, 0.0) == 1.0


def unwritable(tmp_path):
    (tmp_path / "file").write_text("")
    return dict(out=tmp_path / "file" / "run")


def taken(tmp_path):
    run, _ = Run.enter(config(tmp_path))
    run.log(step=0)
    with run.kept():
        return {}


BAD_RUNS = {
    "layers in a string": (dict(layers="4"), ValueError, "layers must be int, got '4'"),
    "layers in a bool": (dict(layers=True), ValueError, "layers must be int, got True"),
    "epochs in a float": (dict(epochs=2.0), ValueError, "epochs must be int, got 2.0"),
    "epochs in NumPy's float": (dict(epochs=np.float32(2)), ValueError, r"epochs must be int, got .*2\.0"),
    "layers in an array": (dict(layers=np.array([2])), ValueError, r"layers must be int, got array\(\[2\]\)"),
    "no clip": (dict(clip_norm=None), ValueError, "clip_norm must be float, got None"),
    "no loaders": (dict(workers=None), ValueError, "workers must be int, got None"),
    "checkpoint in a number": (dict(checkpoint=1), ValueError, "checkpoint must be bool, got 1"),
    "weights in a number": (dict(weights=3), ValueError, "weights must be Path or None, got 3"),
    "no such split": (dict(split="publik"), ValueError, "split must be random or public, got 'publik'"),
    "no such dtype": (dict(dtype="bfloat16"), ValueError, "dtype must be fp32 or bf16 or fp64, got 'bfloat16'"),
    "no such model": (dict(model="gt"), ValueError, "model must be hierarchical or graphormer, got 'gt'"),
    "no such embedding": (dict(embedding="none"), ValueError, "embedding must be features or learned, got 'none'"),
    "plan in an object": (dict(plan=mg.Plan()), ValueError, r"plan must be .*, got a Plan.* with_plan\(it\)"),
    "heads": (dict(heads=3), ValueError, "heads must divide dim = 16, got 3"),
    "initial values": (dict(init="large"), ValueError, "init must be small or xavier, got 'large'"),
    "epochs": (dict(epochs=0), ValueError, "epochs must be at least 1, got 0"),
    "probability": (dict(attention_dropout=1.5), ValueError, r"attention_dropout must be in \[0, 1\), got 1.5"),
    "super ratio": (dict(super_ratio=0.0), ValueError, r"super_ratio must be in \(0, 1\], got 0.0"),
    "clip": (dict(clip_norm=0.0), ValueError, "clip_norm must be above 0"),
    "timeout": (dict(timeout=0.0), ValueError, "timeout must be above 0"),
    "seed": (dict(seed=10**30), ValueError, "seed must be at most 9223372036854775807, got 1000000"),
    "width": (dict(ffn_dim=2147483648), ValueError, "ffn_dim must be at most 2147483647, got 2147483648"),
    "depth": (dict(layers=10**9), ValueError, "layers must be at most 10000, got 1000000000"),
    "channels": (dict(channels=10**6), ValueError, "channels must be at most 1024, got 1000000"),
    "loaders": (dict(workers=10**6), ValueError, "workers must be at most 1024, got 1000000"),
    "endless timeout": (dict(timeout=1e300), ValueError, r"timeout must be at most 1e\+09 seconds, got 1e\+300"),
    "endless wait": (dict(lock_wait=1e300), ValueError, "lock_wait must be at most"),
    "endless time": (dict(time_limit="9" * 400 + "h"), ValueError, "time_limit must be as 3h, .*got '99"),
    "no such arithmetic": (dict(device="meta"), ValueError, "device must be auto, .*nothing is computed on meta"),
    "steps": (dict(max_steps=0), ValueError, "max_steps must be at least 1"),
    "plan": (dict(plan="fast"), ValueError, "plan must be pp,cp,dp, three numbers such as 1,2,3, got 'fast'"),
    "half a plan": (dict(pp=2), ValueError, "pp is a part of --plan auto, got 2 beside --plan 1,1,1"),
    "no memory": (dict(plan="auto", memory_gib=0.0), ValueError, "memory_gib must be above 0, got 0.0"),
    "layers of an unknown plan": (
        dict(plan="auto", stage_layers="1,1"),
        ValueError,
        "stage_layers, shares and stages_per_rank must not be given with",
    ),
    "table of an unknown plan": (dict(plan="auto", embedding="learned"), ValueError, "expected --embedding features"),
    "graphs without a GPU": (dict(cuda_graphs=True), ValueError, "cuda_graphs is for a GPU, got device cpu"),
    "graphs of parts": (
        dict(cuda_graphs=True, microbatches=2),
        ValueError,
        "microbatches must be 1 with cuda_graphs, got 2",
    ),
    "graphs of a plan to be found": (
        dict(cuda_graphs=True, plan="auto"),
        ValueError,
        "plan must be 1,1,1 with cuda_graphs, got auto",
    ),
    "folder in use, plan to be found": (
        lambda tmp_path: taken(tmp_path) | dict(plan="auto"),
        FileExistsError,
        "holds a run already",
    ),
    "plan for more processes": (dict(plan="1,2,1"), ValueError, "= 2, got 1; start them with torchrun --nproc-per-nod"),
    "stage layers": (
        dict(plan="2,1,1", stage_layers="2"),
        ValueError,
        "stage_layers must be 2 numbers such as 1,2, go",
    ),
    "graphormer": (dict(model="graphormer", bias="projected"), ValueError, "bias must be bucket or auto for model gra"),
    "device": (dict(device="tpu9"), ValueError, "device must be auto, cpu or a CUDA device that is here, got 'tpu9'"),
    "data set": (dict(dataset="nosuch"), ValueError, "expected one of synthetic, citeseer,.*got 'nosuch'"),
    "no root": (dict(dataset="cora"), ValueError, "--root"),
    "no file": (dict(dataset="nosuch.npz"), FileNotFoundError, "nosuch.npz"),
    "sequence length": (dict(batching="cluster", sequence_nodes=100), ValueError, "multiple of 128, got 100"),
    "super nodes": (
        dict(batching="cluster", super_nodes=1),
        ValueError,
        "super_nodes must be above global_tokens = 1, got 1",
    ),
    "unwritable folder": (unwritable, OSError, "the run folder .* cannot be written: .*; pass another --out"),
    "folder in use": (taken, FileExistsError, "holds a run already; pass another --out, or remove it"),
}


@pytest.mark.parametrize("case", BAD_RUNS)
def test_bad_run(tmp_path, case):
    changes, error, message = BAD_RUNS[case]
    changes = changes(tmp_path) if callable(changes) else changes
    with pytest.raises(error, match=message):
        mg.Trainer(config(tmp_path, **changes)).fit()
    assert not (tmp_path / "run" / "model.json").exists()


def test_scalars_of_numpy_are_taken():
    """As a sweep over np.arange gives them."""
    sweep = dict(
        layers=np.int64(2),
        heads=np.int64(2),
        batch_size=np.int32(4),
        seed=np.int64(3),
        max_steps=np.uint8(1),
        dropout=np.float32(0.25),
        learning_rate=np.float64(1e-3),
        degree_input=np.bool_(True),
        split=np.str_("public"),
    )
    taken = mg.TrainConfig(**sweep)
    for name, value in sweep.items():
        assert getattr(taken, name) == value and type(getattr(taken, name)) is type(value.item()), name
    model = taken.model_config(in_features=np.int64(8), num_classes=3, bias_size=2)
    assert type(model.in_features) is type(model.layers) is int
    assert mg.TrainConfig.from_json(json.loads(json.dumps(asdict(taken), default=str))) == taken


def test_paths_are_taken_where_words_are(tmp_path):
    plan = mg.Plan(pp=2, num_microbatches=2)
    plan.save(tmp_path / "plan.json")
    taken = mg.TrainConfig(plan=tmp_path / "plan.json", dataset=tmp_path / "graph.npz", out=str(tmp_path), dropout=0)
    assert taken.parallel_plan() == plan and taken.dataset == str(tmp_path / "graph.npz") and taken.out == tmp_path


def test_bad_prediction(tmp_path, graph):
    with pytest.raises(FileNotFoundError, match=r"must be the folder of a run, but it holds no config.json"):
        mg.predict(tmp_path)
    mg.Trainer(config(tmp_path, max_steps=1)).fit(graph)
    with pytest.raises(ValueError, match="trained on 16 features a node, got a graph with 5"):
        mg.predict(tmp_path / "run", replace(graph, features=graph.features[:, :5]))
    mg.Trainer(config(tmp_path, max_steps=1, embedding="learned", out=tmp_path / "learned")).fit(graph)
    other = synthetic_graph(num_nodes=300, num_classes=3, in_features=16, seed=1)
    with pytest.raises(ValueError, match="a vector for every node of the graph it was trained on, and this graph has"):
        mg.predict(tmp_path / "learned", other)


@pytest.mark.parametrize("batching", ["ego", "full"])
def test_a_graph_without_labels_is_predicted_and_not_trained_on(batching, tmp_path, graph):
    mg.Trainer(config(tmp_path, max_steps=1, batching=batching)).fit(graph)
    x, edge_index = torch.from_numpy(graph.features), torch.from_numpy(np.stack(graph.adjacency.nonzero()))
    found = mg.predict(tmp_path / "run", Data(x=x, edge_index=edge_index))
    np.testing.assert_array_equal(found, mg.predict(tmp_path / "run", graph))
    write_store(mg.Graph.from_data(Data(x=x, edge_index=edge_index)), tmp_path / "store")
    np.testing.assert_array_equal(found, mg.predict(tmp_path / "run", dataset=str(tmp_path / "store")))
    with pytest.raises(ValueError, match=r"the train part of the split is empty; .* too few labelled nodes"):
        mg.Trainer(config(tmp_path, out=tmp_path / "other")).fit(Data(x=x, edge_index=edge_index))


def test_a_loss_that_explodes_is_named(tmp_path, graph):
    huge = replace(graph, features=np.full_like(graph.features, 3e38))
    with pytest.raises(FloatingPointError, match=r"the loss of step 0 is nan; lower --learning-rate"):
        mg.Trainer(config(tmp_path)).fit(huge)
    with pytest.raises(FloatingPointError, match=r"after step 1 gave numbers .*, though all weights are: .* features"):
        mg.Trainer(config(tmp_path, max_steps=1, out=tmp_path / "short")).fit(huge)  # its one step was skipped


def test_command_line(tmp_path):
    flags = [word for name, value in SMALL.items() for word in (f"--{name.replace('_', '-')}", value)]
    out = tmp_path / "run"
    command = [sys.executable, "-m", "megagraph", "train", *flags, "--max-steps", 3, "--out", out]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 3
    assert (out / "curves.png").read_bytes()[:4] == b"\x89PNG"
    done = Command("predict", out, "--out", tmp_path / "p.npy").finish()
    assert done.returncode == 0, done.stderr
    assert np.load(tmp_path / "p.npy").shape == (2000, 6)
    assert Command("predict", out, "--out", tmp_path / "p.csv").finish().returncode == 0
    head, *lines = (tmp_path / "p.csv").read_text().splitlines()
    assert head == "node,class," + ",".join(f"probability_{i}" for i in range(6)) and len(lines) == 2000
    found, table = np.load(tmp_path / "p.npy"), np.loadtxt(lines, delimiter=",")
    np.testing.assert_array_equal(table[:, :2], np.stack([np.arange(2000), found.argmax(axis=1)], axis=1))
    np.testing.assert_allclose(table[:, 2:], found, rtol=1e-5)
    assert Command("predict", out, "--out", tmp_path / "p.parquet").finish().returncode == 0
    polars = pytest.importorskip("polars")  # not where the package is tried on a GPU
    columns = polars.read_parquet(tmp_path / "p.parquet")
    assert columns.columns == head.split(",") and columns["node"].to_list() == [*range(2000)]
    assert columns["class"].to_list() == [str(i) for i in found.argmax(axis=1)]
    np.testing.assert_array_equal(columns.select(columns.columns[2:]).to_numpy(), found)
    for place, message in (
        ("p.txt", "out must end in .npy, .csv or .parquet, got"),
        ("no/p.csv", "which is none; make it before"),
    ):
        done = Command("predict", out, "--out", tmp_path / place).finish()
        assert done.returncode == 1 and message in done.stderr and "reading" not in done.stderr
    assert Command("--version").finish().stdout == f"megagraph {mg.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "--dataset", "nosuch"), "megagraph: error: expected one of synthetic"),
        (("train", "--heads", "3"), "heads must divide dim = 128, got 3"),
        (("train", "--layers", "many"), "--layers"),
        (("predict", "nosuch"), "megagraph: error: nosuch must be the folder of a run"),
        (("train", "--plan", "1,2,1"), "pp * cp * dp must equal the number of processes: 1 * 2 * 1 = 2, got 1"),
    ],
)
def test_command_line_errors(arguments, message):
    done = Command(*arguments).finish()
    assert done.returncode not in (0, None)
    assert message in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "words", ["data generate --nodes 20 --edges 30 --features 2 --classes 2 --out", "plot curves nosuch --out"]
)
def test_a_command_for_one_process_is_refused_by_several(words, tmp_path):
    for done in processes.launch(2, *words.split(), tmp_path / "made"):
        assert done.returncode == 1 and "one process for this command, got 2; start it without torchrun" in done.stderr
    assert not list(tmp_path.iterdir())


def torchrun(processes, *arguments) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes, *arguments]
    paths = [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    return subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=600, env=environment)


@pytest.fixture(scope="module")
def graph_file(tmp_path_factory, graph):
    path = tmp_path_factory.mktemp("graph") / "graph.npz"
    parts = {"adj": graph.adjacency, "attr": sp.csr_array(graph.features)}
    names = ("data", "indices", "indptr", "shape")
    arrays = {f"{part}_{name}": getattr(matrix, name) for part, matrix in parts.items() for name in names}
    np.savez(path, **arrays, labels=graph.labels)
    return path


@pytest.mark.parametrize(
    ("flags", "changes"),
    [
        ("--plan 1,2,1", {}),
        (
            "--plan 2,1,1 --stage-layers 1,1 --microbatches 4 --workers 1",
            dict(embedding="learned", model="graphormer"),
        ),
        (
            "--plan 1,2,1 --comm halo",
            dict(batching="full", hops=2, propagate=1, degree_input=True, label_input=0.4, partitions=3),
        ),
        ("--plan 2,1,1", dict(batching="full", partitions=2, evaluate_every=2)),
        ("--plan 1,2,1 --comm ulysses --shard", dict(batching="cluster", sequence_nodes=128)),
    ],
)
def test_several_processes_equal_one(tmp_path, graph_file, flags, changes):
    """Two epochs: training goes on after an evaluation."""
    small = SMALL | changes | dict(dataset=str(graph_file), epochs=2, batch_size=64, learning_rate=1e-2, device="cpu")
    one = mg.Trainer(config(tmp_path, **small, out=tmp_path / "one")).fit()
    told = [word for name, value in small.items() for word in (f"--{name.replace('_', '-')}", value)]
    words = ["train", *(word for word in told if word is not True), *flags.split(), "--out", tmp_path / "several"]
    if flags == "--plan 1,2,1":
        done = torchrun(2, "-m", "megagraph", *words)
    else:
        done, other = processes.launch(2, *words)
        assert other.returncode == 0 and not other.stdout
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    np.testing.assert_allclose(losses(tmp_path / "several"), losses(tmp_path / "one"), rtol=1e-5)
    several = json.loads(done.stdout)
    for name in ("test_accuracy", "best_val_accuracy", "steps", "parameters", "bias_changed_classes"):
        assert several[name] == getattr(one, name)
    for name in ("bias_correlation", "bias_norm", "bias_start_norm"):
        assert several[name] == pytest.approx(getattr(one, name), rel=1e-4)
    files = [{path.name for path in (tmp_path / run).iterdir()} for run in ("one", "several")]
    assert files[0] == files[1]
    np.testing.assert_allclose(*(mg.predict(tmp_path / run) for run in ("several", "one")), atol=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; bench/gpu.sh --check runs it")
@pytest.mark.parametrize(
    "flags",
    [
        "--plan 2,1,1 --microbatches 4 --schedule 1f1b",
        "--plan 2,2,1 --microbatches 2",
        "--plan 2,1,2 --microbatches 2 --checkpoint",
    ],
)
def test_a_pipeline_whose_stages_share_a_gpu(tmp_path, graph_file, flags):
    small = SMALL | dict(dataset=str(graph_file), batch_size=64, device="cuda:0")
    mg.Trainer(config(tmp_path, **small, out=tmp_path / "one")).fit()
    words = [word for name, value in small.items() for word in (f"--{name.replace('_', '-')}", value)]
    words += ["--learning-rate", 1e-2, *flags.split(), "--out", tmp_path / "several"]
    done = torchrun(2 if "2,1,1" in flags else 4, "-m", "megagraph", "train", *words)
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(losses(tmp_path / "several"), losses(tmp_path / "one"), rtol=1e-4)


@pytest.mark.slow
def test_a_script_may_train_twice(tmp_path, graph_file):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, time\n"
        "import megagraph as mg\n"
        "for run in range(2):\n"
        "    time.sleep(2 * int(os.environ['RANK']) * run)\n"
        f"    config = mg.TrainConfig(dataset={str(graph_file)!r}, plan='1,1,2', max_steps=1, samples=2, layers=1,\n"
        f"                            device='cpu', out={str(tmp_path)!r} + f'/run{{run}}')\n"
        "    mg.Trainer(config).fit()\n"
    )
    done = torchrun(2, script)
    assert done.returncode == 0, done.stderr
    assert all(json.loads((tmp_path / f"run{i}" / "summary.json").read_text())["steps"] == 1 for i in range(2))


def test_processes_that_find_raw_files_only_do_not_disturb_each_other(tmp_path, data_root):
    raw = tmp_path / "data" / "Cora" / "raw"
    shutil.copytree(data_root / "Cora" / "raw", raw)
    flags = "--dataset cora --plan 1,1,2 --max-steps 1 --samples 1 --layers 1 --device cpu"
    for done in processes.launch(2, "train", *flags.split(), "--root", tmp_path / "data", "--out", tmp_path / "run"):
        assert done.returncode == 0, done.stderr
    assert (raw.parent / "processed").exists()


def test_a_bad_plan_ends_all_processes_with_its_error():
    for done in processes.launch(2, "train", "--plan", "1,3,1", "--device", "cpu"):
        assert done.returncode == 1
        assert done.stderr.count("megagraph: error: pp * cp * dp must equal the number of processes: 1 * 3 * 1") == 1


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--seed", ("0", "1")), "seed is 0 on rank 0 and 1 on rank 1"),
        (("--plan", ("1,2,1", "1,3,1")), "plan is '1,2,1' on rank 0 and '1,3,1' on rank 1"),
        (("--heads", ("8", "3")), "rank 1: heads must divide dim = 128, got 3"),
        (("--layers", ("many", "4")), "rank 0: cannot read the command line"),
    ],
    ids=["seed", "plan", "bad on one rank", "no number"],
)
def test_different_configurations_are_named_on_every_rank(tmp_path, flags, expected):
    name, values = flags
    common = ("train", "--plan", "1,2,1", "--device", "cpu", "--out", tmp_path / "run")
    for done in processes.launch_each([(*common, name, value) for value in values]):
        assert done.returncode == 1
        assert "megagraph: error: " in done.stderr and re.search(expected, done.stderr)
    assert not (tmp_path / "run").exists()


def test_every_rank_starts_from_the_same_weights(tmp_path):
    small = dict(layers=1, dim=16, heads=2, batching="cluster", sequence_nodes=128, batch_size=2)
    for seed in (0, 1):
        mg.Trainer(mg.TrainConfig(**small, max_steps=1, seed=seed, out=tmp_path / str(seed))).fit()
    first, second, lost = (tmp_path / name / "model.safetensors" for name in "01x")
    flags = [word for name, value in small.items() for word in (f"--{name.replace('_', '-')}", value)]
    words = ("train", *flags, "--plan", "1,1,2", "--timeout", 60, "--resume", "auto", "--out", tmp_path / "run")

    def start(steps, *weights):
        return processes.launch_each([(*words, "--max-steps", steps, "--weights", path) for path in weights])

    for done in start(1, first, second):
        assert done.returncode == 1 and "the weights to start from must be the same on every rank" in done.stderr
    assert [done.returncode for done in start(1, first, first)] == [0, 0]
    for done in start(2, first, lost):  # of a run that goes on the checkpoint has its own
        assert done.returncode == 0, done.stderr
