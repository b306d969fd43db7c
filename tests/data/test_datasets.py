import json
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from filelock import FileLock
from hypothesis import given

from megagraph.data.datasets import _SOURCES, load_graph, synthetic_graph
from megagraph.data.graph import PARTS, Graph, Split, random_split
from megagraph.data.store import open_store, write_store
from tests.data.graphs import make_graph, random_graphs


def data(**changes):
    values = {
        "x": torch.ones(4, 2),
        "edge_index": torch.tensor([[0, 1, 2, 2, 0], [1, 0, 1, 2, 1]]),
        "y": torch.tensor([0, 1, 2, -1]),
    }
    return SimpleNamespace(**values | changes)


def masks(mask):
    return {f"{part}_mask": mask for part in PARTS}


def test_from_data_makes_edges_undirected_and_unique():
    graph = Graph.from_data(data())
    assert graph.indptr.tolist() == [0, 1, 3, 4, 4]
    assert graph.indices.tolist() == [1, 0, 2, 1]
    assert (graph.num_nodes, graph.num_edges, graph.in_features, graph.num_classes) == (4, 4, 2, 3)
    assert graph.indptr.dtype == np.int64 and graph.indices.dtype == np.int32
    assert graph.features.dtype == np.float32 and graph.labels.dtype == np.int64
    assert graph.split is None


@given(random_graphs())
def test_adjacency_is_symmetric_sorted_and_without_loops(graph):
    dense = graph.adjacency.toarray()
    assert (dense == dense.T).all() and set(np.unique(dense)) <= {0, 1} and not dense.diagonal().any()
    for start, stop in zip(graph.indptr, graph.indptr[1:], strict=False):
        assert (np.diff(graph.indices[start:stop]) > 0).all()


def test_masks_become_the_split_and_columns_of_labels_are_squeezed():
    parts = {f"{part}_mask": torch.arange(4) == i for i, part in enumerate(PARTS)}
    parts["val_mask"] = parts["val_mask"].float()
    parts["test_mask"] = torch.stack([parts["test_mask"], torch.ones(4, dtype=torch.bool)], dim=1)
    graph = Graph.from_data(data(y=torch.tensor([[0], [1], [1], [0]]), **parts))
    assert [part.tolist() for part in (graph.split.train, graph.split.val, graph.split.test)] == [[0], [1], [2]]
    assert graph.labels.tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float32, torch.float64])
def test_several_labels_of_any_type(dtype):
    y = torch.tensor([[1, 0], [0, 0], [1, 1], [0, 1]]).to(dtype)
    expected = y.numpy().astype(np.int8)
    if dtype.is_floating_point:
        y[1], expected[1] = torch.tensor([float("nan"), -1]), -1
        y[3, 0], expected[3, 0] = float("nan"), -1  # the node has another one that is known
    graph = Graph.from_data(data(y=y))
    assert graph.multi_label and graph.num_classes == 2 and graph.labels.dtype == np.int8
    np.testing.assert_array_equal(graph.labels, expected)
    known = [0, 2, 3] if dtype.is_floating_point else [0, 1, 2, 3]
    split = random_split(graph.labels, seed=0)
    assert sorted(np.concatenate([split.train, split.val, split.test])) == known
    others = Graph.from_data(data(y=y.flip(1)))
    assert others.fingerprint() != graph.fingerprint() and not Graph.from_data(data()).multi_label


def test_the_seed_takes_one_of_several_splits():
    parts = {f"{part}_mask": torch.arange(5)[:, None] == torch.arange(3) + i for i, part in enumerate(PARTS)}
    parts["test_mask"] = torch.arange(5) == 4
    given = data(x=torch.ones(5, 2), y=torch.zeros(5).long(), **parts)
    splits = [Graph.from_data(given, seed=seed).split for seed in range(4)]
    assert [split.train.tolist() for split in splits] == [[0], [1], [2], [0]]
    assert [split.val.tolist() for split in splits] == [[1], [2], [3], [1]]
    assert all(split.test.tolist() == [4] for split in splits)


def test_every_name_is_a_data_set_of_its_library(tmp_path, monkeypatch):
    """Each class is asked for the raw files that the error names."""
    from torch_geometric import datasets
    from torch_geometric.data import InMemoryDataset

    def download(self):
        raise TimeoutError([str(Path(path).relative_to(tmp_path)) for path in self.raw_paths])

    monkeypatch.setattr(InMemoryDataset, "_download", download)
    names = [name for name, source in _SOURCES.items() if source.kind != "ogb"]
    assert len(names) == len(_SOURCES) - 2
    for name in names:
        source = _SOURCES[name]
        assert hasattr(datasets, source.kind)
        with pytest.raises(OSError, match="could not read or download") as error:
            load_graph(name, tmp_path)
        folder, first = source.raw.split(" ")[0].rstrip(",").rsplit("/", 1)
        assert any(path.startswith(f"{folder}/{first}") for path in error.value.__cause__.args[0]), name


def test_yelp_has_several_labels_a_node(tmp_path):
    """From raw files as those of PyG, of five nodes."""
    raw = tmp_path / "Yelp" / "raw"
    raw.mkdir(parents=True)
    adjacency, y = sp.csr_array(np.eye(5, k=1)), [[1, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0], [0, 0, 1]]
    arrays = {name: getattr(adjacency, name) for name in ("data", "indices", "indptr", "shape")}
    np.savez(raw / "adj_full.npz", **arrays)
    np.save(raw / "feats.npy", np.ones((5, 2)))
    (raw / "class_map.json").write_text(json.dumps({str(i): labels for i, labels in enumerate(y)}))
    (raw / "role.json").write_text(json.dumps({"tr": [0, 4], "va": [1], "te": [2, 3]}))
    graph = load_graph("yelp", tmp_path)
    assert graph.multi_label and graph.labels.tolist() == y and graph.num_edges == 8
    assert graph.split.test.tolist() == [2, 3]


def test_from_data_takes_a_pyg_data():
    from torch_geometric.data import Data

    assert Graph.from_data(Data(**vars(data())), "mine").name == "mine"
    for x in (torch.ones(2, 1), torch.ones(2, 1).to_sparse()):
        unlabelled = Graph.from_data(Data(x=x, edge_index=torch.tensor([[0], [1]])))
        assert unlabelled.labels.tolist() == [-1, -1] and unlabelled.num_classes == 0


def test_classes_may_be_booleans_and_a_split_must_be_whole(caplog):
    masks = {f"{part}_mask": torch.tensor([True, False, False, False]) for part in ("train", "test")}
    graph = Graph.from_data(data(y=torch.tensor([True, False, True, False]), **masks))
    assert graph.labels.tolist() == [1, 0, 1, 0] and graph.num_classes == 2 and graph.split is None
    said = "the split of graph is left aside: it has train_mask, test_mask, and not one for each of its parts"
    assert said in caplog.messages


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64])
@pytest.mark.parametrize("form", ["to_dense", "to_sparse", "to_sparse_csr"])
def test_features_of_any_dtype(dtype, form):
    x = torch.tensor([[1, 0], [0, 2], [3, 0], [0, 0]], dtype=dtype)
    features = Graph.from_data(data(x=getattr(x, form)())).features
    assert features.dtype == ("float16" if (dtype, form) == (torch.float16, "to_dense") else "float32")
    assert (features if form == "to_dense" else features.toarray()).tolist() == x.tolist()


NAN_ROW = torch.tensor([[1.0], [float("inf")], [float("nan")], [0.0]])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": [[1.0]] * 4}, "expected data.x to be a tensor, got list"),
        ({"y": [0, 1, 0, 1]}, "expected data.y to be a tensor, got list"),
        (
            {"edge_index": None},
            "expected data.edge_index to be a tensor, got NoneType of a SimpleNamespace; a graph needs",
        ),
        ({"x": torch.ones(0, 2), "y": torch.ones(0).long(), "edge_index": torch.ones(2, 0).long()}, "empty graph"),
        ({"edge_index": torch.ones(2, 3).long()}, "expected a graph with edges, got none"),
        ({"edge_index": torch.tensor([[0, 1], [1, 4]])}, "expected edge_index in 0..3, got 0..4"),
        ({"edge_index": torch.tensor([[0, -1], [1, 2]])}, "expected edge_index in 0..3, got -1..2"),
        ({"edge_index": torch.ones(3, 2).long()}, "expected an integer edge_index of shape [2, E]"),
        ({"edge_index": torch.ones(2, 2)}, "expected an integer edge_index of shape [2, E], got float32"),
        ({"x": torch.ones(4)}, "expected x of shape [V, d_in], got [4]"),
        ({"x": torch.ones(4, 2) * 1j}, "expected x of real numbers, got complex64; pass real and imaginary part"),
        ({"x": (torch.ones(4, 2) * 1j).to_sparse()}, "expected x of real numbers, got complex64"),
        ({"x": torch.ones(5, 2)}, "expected labels of shape [5], got [4]"),
        ({"x": NAN_ROW}, "expected finite features, got inf in feature 0 of node 1; clean that row"),
        ({"y": torch.arange(12).view(4, 3)}, "to be 0 or 1, or -1 or NaN where not known, got 2 in label 2 of node 0"),
        ({"y": torch.full((4, 2), 0.25)}, "of shape [4, 2] to be 0 or 1, or -1 or NaN where not known, got 0.25 in"),
        ({"y": torch.zeros(4, 2, 2)}, "expected labels of shape [V], or [V, C] for several a node, got [4, 2, 2]"),
        (
            {"y": torch.zeros(4, 2, dtype=torch.complex64)},
            "several labels a node as numbers or booleans, got complex64",
        ),
        ({"y": torch.zeros(5, 2)}, "expected labels of shape [4, 2], got [5, 2]"),
        (
            {"y": torch.ones(4)},
            "expected integer labels, got float32; number the classes 0, 1, ... and use -1 for none.",
        ),
        ({"y": torch.tensor([0, 1, -2, 1])}, "expected labels in 0..1, or -1 for unlabelled, got -2..1"),
        (masks(torch.ones(5, dtype=torch.bool)), "expected data.train_mask of shape [4], or [4, n] for n splits"),
        (masks(torch.ones(3, dtype=torch.bool)), "of shape [4], or [4, n] for n splits, true or false, got bool [3];"),
        (masks(torch.ones(4, 0)), "true or false, got float32 [4, 0]; of node ids make a mask"),
        (masks(torch.arange(4)), "true or false, got int64 [4]; of node ids make a mask"),
        (masks(torch.tensor([False, True, False, False])), "got node 1 again, in train and val and test"),
    ],
)
def test_bad_data_is_refused(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Graph.from_data(data(**changes))


def test_a_graph_without_features():
    from torch_geometric.data import Data

    graph = Graph.from_data(Data(edge_index=torch.tensor([[0], [1]]), num_nodes=3, y=torch.tensor([0, 1, -1])))
    assert graph.features.shape == (3, 0) and graph.num_edges == 2 and graph.labels.tolist() == [0, 1, -1]


def test_graph_refuses_labels_and_features_that_do_not_fit():
    graph = make_graph(4, [(0, 1)])
    fields = {"name": "g", "indptr": graph.indptr, "indices": graph.indices}
    with pytest.raises(ValueError, match=r"expected labels in 0\.\.1, .* got 0\.\.2"):
        Graph(**fields, features=graph.features, labels=graph.labels, num_classes=2)
    with pytest.raises(ValueError, match="expected several labels a node as int8, got int64; convert them"):
        Graph(**fields, features=graph.features, labels=np.ones((4, 3), np.int64), num_classes=3)
    with pytest.raises(ValueError, match=r"expected features of shape \[4, d_in\], got \[3, 4\]"):
        Graph(**fields, features=graph.features[:3], labels=graph.labels, num_classes=3)


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ([0, 4], "expected the train part of the split in 0..3, got 0..4; name nodes of this graph"),
        ([-1], "expected the train part of the split in 0..3, got -1..-1"),
        ([0, 3], "at most once in the parts of the split, got node 3 again, in train and test; leave it in one"),
        ([0, 0], "expected every node at most once in the parts of the split, got node 0 again, in train"),
        ([True, False, False, False], "expected node ids [n], integers, in the train part of the split, got bool [4]"),
        ([0.0], "in the train part of the split, got float64 [1]; np.flatnonzero makes them of a mask"),
        ([[0]], "in the train part of the split, got int64 [1, 1]"),
    ],
)
def test_bad_splits_are_refused(train, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        replace(make_graph(4, [(0, 1)]), split=Split(train, [2], [3]))


def test_a_split_of_any_integers_is_kept_sorted(tmp_path):
    graph = replace(make_graph(5, [(0, 1)]), split=Split([3, 0], np.array([4, 1], np.int32), torch.tensor([2])))
    write_store(graph, tmp_path / "store")
    for split in (graph.split, open_store(tmp_path / "store").split):
        assert [getattr(split, part).tolist() for part in PARTS] == [[0, 3], [1, 4], [2]]
    assert replace(graph, split=Split([], [], [])).split.test.dtype == np.int64


def test_split_partitions_the_labelled_nodes():
    labels = np.arange(100) % 4 - 1
    split = random_split(labels, seed=3)
    parts = (split.train, split.val, split.test)
    assert [len(part) for part in parts] == [45, 15, 15]
    assert sorted(np.concatenate(parts)) == np.flatnonzero(labels >= 0).tolist()
    assert all((np.diff(part) > 0).all() for part in parts)
    assert (random_split(labels, seed=3).train == split.train).all()
    assert not np.array_equal(random_split(labels, seed=4).train, split.train)


def test_synthetic_graph_needs_its_edges():
    """Class means of a node and its neighbours tell more than those of the node alone."""
    graph = synthetic_graph(seed=1)
    degree = np.diff(graph.indptr)
    row = np.repeat(np.arange(graph.num_nodes), degree)
    assert 0.7 < (graph.labels[row] == graph.labels[graph.indices]).mean() < 0.9
    assert 6 < degree.mean() < 9 and degree.max() > 5 * degree.mean()
    again = synthetic_graph(seed=1)
    assert (again.indices == graph.indices).all() and (again.features == graph.features).all()

    def nearest_mean_accuracy(features):
        split = random_split(graph.labels, seed=0)
        train, test = split.train, split.test
        means = np.stack([features[train][graph.labels[train] == c].mean(axis=0) for c in range(6)])
        guess = ((features[test, None] - means) ** 2).sum(axis=-1).argmin(axis=1)
        return (guess == graph.labels[test]).mean()

    alone = nearest_mean_accuracy(graph.features)
    together = nearest_mean_accuracy(graph.adjacency @ (graph.adjacency @ graph.features) / (degree + 1)[:, None])
    assert alone < 0.6 and together > alone + 0.15


@pytest.mark.parametrize("sizes", [{"num_classes": 1}, {"num_nodes": 3}])
def test_synthetic_graph_refuses_sizes(sizes):
    with pytest.raises(ValueError, match="expected 2 <= num_classes <= num_nodes"):
        synthetic_graph(**sizes)


@pytest.mark.parametrize(
    ("dataset", "error", "message"),
    [
        ("citseer", ValueError, r"expected one of synthetic, citeseer, .*, got 'citseer'; did you mean 'citeseer'\?"),
        ("xyzzy", ValueError, "got 'xyzzy'$"),
        ("CiteSeer", ValueError, "expected a folder for CiteSeer, got none; name it with --root"),
        ("citeseer", ValueError, "expected a folder for citeseer, got none; name it with --root"),
        ("nowhere/to/be/found.npz", FileNotFoundError, "nowhere/to/be/found.npz"),
    ],
)
def test_load_graph_refuses(dataset, error, message):
    with pytest.raises(error, match=message):
        load_graph(dataset, None)


@pytest.mark.parametrize("name", ["synthetic", "cora"])
def test_a_store_that_is_called_like_a_data_set_is_neither(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_store(synthetic_graph(num_nodes=30), tmp_path / name)
    with pytest.raises(ValueError, match=f"expected a data set or a store, got {name}, which is both"):
        load_graph(name, None)
    assert load_graph(f"./{name}", None).num_nodes == 30


def test_load_graph_names_the_keys_an_npz_lacks(tmp_path):
    np.savez(tmp_path / "bad.npz", labels=np.zeros(3))
    with pytest.raises(ValueError, match=r"expected .*bad\.npz to hold adj_data, .* labels; .* named 'adj_data"):
        load_graph(str(tmp_path / "bad.npz"), None)


def test_a_failed_download_names_the_files(tmp_path, monkeypatch):
    from torch_geometric.datasets import Planetoid

    def download(self):
        raise TimeoutError("no network")

    monkeypatch.setattr(Planetoid, "download", download)
    with pytest.raises(OSError, match=r"could not read or download cora: no network.*Cora/raw/ind\.cora\.x") as info:
        load_graph("cora", tmp_path)
    assert isinstance(info.value.__cause__, TimeoutError)


def test_who_reads_a_data_set_meanwhile_waits(tmp_path, data_root):
    """Raw files that two runs find at once: the second would read what the first has half written."""
    shutil.copytree(data_root / "Cora" / "raw", tmp_path / "Cora" / "raw")
    with ThreadPoolExecutor() as pool:
        with FileLock(tmp_path / ".lock"):
            loaded = pool.submit(load_graph, "cora", tmp_path)
            wait([loaded], timeout=3)
            assert loaded.running() and not (tmp_path / "Cora" / "processed").exists()
        assert loaded.result().num_nodes == 2708
    with FileLock(tmp_path / ".lock", timeout=0):  # nobody has it any more
        pass


def test_ogb_is_asked_for_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "ogb", None)
    with pytest.raises(ImportError, match=r"pip install 'megagraph\[ogb\]'"):
        load_graph("ogbn-arxiv", Path("anywhere"))


@pytest.mark.parametrize(
    ("dataset", "nodes", "edges", "features", "classes", "train"),
    [
        ("cora", 2708, 10556, 1433, 7, 140),
        ("citeseer", 3327, 9104, 3703, 6, 120),
        ("computers", 13752, 491722, 767, 10, None),
        ("tolokers", 11758, 1038000, 10, 2, 5879),
        ("wordnet30/raw/wordnet30.npz", 117659, 367578, 512, 45, None),
    ],
)
def test_raw_files_load(data_root, dataset, nodes, edges, features, classes, train):
    graph = load_graph(str(data_root / dataset) if dataset.endswith(".npz") else dataset, data_root)
    assert (graph.num_nodes, graph.num_edges, graph.in_features, graph.num_classes) == (nodes, edges, features, classes)
    assert graph.split is None if train is None else isinstance(graph.split, Split) and len(graph.split.train) == train
