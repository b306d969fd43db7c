import json
import pickle
import re
import resource
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megagraph.cli import main
from megagraph.data.datasets import load_graph, synthetic_graph
from megagraph.data.graph import Graph, Split
from megagraph.data.header import describe
from megagraph.data.loader import Loader
from megagraph.data.options import BatchOptions
from megagraph.data.prepare import prepare
from megagraph.data.smooth import propagated, with_degrees
from megagraph.data.store import open_store, verify_store, write_store
from tests.data.graphs import random_graphs
from tests.data.stores import change_array, edit_header, header_of, put


@pytest.fixture(scope="module")
def graph():
    """Features with zeros, exact in fp16; a split with an empty part."""
    graph = synthetic_graph(num_nodes=300, in_features=8, seed=0)
    features = np.where(graph.features > 0, np.round(graph.features * 8) / 8, 0).astype(np.float32)
    split = Split(np.arange(200), np.arange(200, 300), np.arange(0))
    fields = {name: getattr(graph, name) for name in ("indptr", "indices", "labels", "num_classes")}
    return Graph(name="mine", features=features, split=split, **fields)


@pytest.fixture(params=["same", "fp32", "fp16", "sparse"])
def stored(request, graph, tmp_path):
    write_store(graph, tmp_path / "store", request.param)
    return open_store(tmp_path / "store")


def rows(graph, nodes):
    out = np.full((len(nodes), graph.in_features), np.nan, np.float32)
    graph.read_features(np.asarray(nodes), out)
    return out


def test_a_store_is_the_graph(stored, graph):
    verify_store(stored.store)
    for name in ("indptr", "indices", "labels"):
        got, want = getattr(stored, name), getattr(graph, name)
        assert got.dtype == want.dtype and (got == want).all() and isinstance(got.base, np.memmap)
    assert (rows(stored, [7, 2, 2, 299]) == graph.features[[7, 2, 2, 299]]).all()
    for part in ("train", "val", "test"):
        assert getattr(stored.split, part).tolist() == getattr(graph.split, part).tolist()
    assert (stored.name, stored.num_classes, stored.in_features) == ("mine", graph.num_classes, 8)
    assert describe(stored.store).startswith(f"mine: 300 nodes, {graph.num_edges // 2:,} undirected edges, 8 features")


@settings(max_examples=40, derandomize=True)
@given(random_graphs(), st.sampled_from(["same", "fp16", "sparse"]))
def test_any_graph_can_be_stored(tmp_path_factory, graph, form):
    folder = tmp_path_factory.mktemp("any") / "store"
    write_store(graph, folder, form)
    stored = open_store(folder)
    for name in ("indptr", "indices", "labels"):
        assert (getattr(stored, name) == getattr(graph, name)).all()
    expected = graph.features.astype(np.float16) if form == "fp16" else graph.features
    assert (rows(stored, np.arange(graph.num_nodes)) == expected).all()


def test_batches_are_those_of_the_graph_and_workers_map_the_files_again(stored, graph):
    def batch(graph):
        return Loader(prepare(graph, BatchOptions()), np.arange(20), batch_size=20, seed=0, shuffle=False).epoch(0)

    for got, want in zip(batch(stored), batch(graph), strict=True):
        assert torch.equal(got.features, want.features) and torch.equal(got.structure, want.structure)
    sent = pickle.dumps(stored)
    again = pickle.loads(sent)
    assert len(sent) < 1000 and (rows(again, range(300)) == graph.features).all()
    assert isinstance(again.indices.base, np.memmap)
    assert (pickle.loads(pickle.dumps(graph)).indices == graph.indices).all()


def test_what_was_replaced_of_a_stored_graph_is_sent_and_checked(stored):
    for changed in (propagated(with_degrees(stored), 2), replace(stored, features=stored.features[:, :0])):
        sent = pickle.dumps(changed)
        again = pickle.loads(sent)
        np.testing.assert_array_equal(rows(again, range(300)), rows(changed, range(300)))
        assert isinstance(again.indices.base, np.memmap) and len(sent) < 4 * 300 * changed.in_features + 4000
        assert pickle.loads(pickle.dumps(again)).in_features == changed.in_features
    with pytest.raises(ValueError, match="at most once in the parts of the split, got node 7 again, in train and val"):
        replace(stored, split=Split(np.arange(8), np.arange(7, 9), np.arange(9, 300)))
    with pytest.raises(ValueError, match=r"expected labels in 0\.\.5, or -1 for unlabelled, got 6\.\.6"):
        replace(stored, labels=np.full(300, stored.num_classes))
    with pytest.raises(ValueError, match=r"expected labels in 0\.\.2, or -1 for unlabelled, got 0\.\.5"):
        replace(stored, num_classes=3)


def test_sparse_and_fp16_tensors_stay_as_they_are():
    x = torch.tensor([[0.0, 2.0], [0.0, 0.0], [1.0, 0.0]])
    data = {"edge_index": torch.tensor([[0, 1], [1, 2]]), "y": torch.tensor([0, 1, 1])}
    for tensor in (x.half(), x.to_sparse()):
        graph = Graph.from_data(SimpleNamespace(x=tensor, **data))
        assert (rows(graph, [2, 0, 1]) == x.numpy()[[2, 0, 1]]).all()
        assert graph.features.dtype == np.float16 if tensor.dtype == torch.half else sp.issparse(graph.features)


def test_an_ogb_item_is_a_graph():
    item = ({"node_feat": np.ones((3, 2), np.float32), "edge_index": np.array([[0, 1], [1, 2]])}, np.zeros((3, 1), int))
    assert Graph.from_data(item).num_edges == 4
    several = Graph.from_data((item[0], np.array([[0, 1], [1, 1], [0, 0]])))  # as ogbn-proteins has them
    assert several.labels.tolist() == [[0, 1], [1, 1], [0, 0]]
    for changes, message in (
        ({"node_feat": None}, "expected node_feat of shape .*, got none"),
        ({"edge_feat": np.array([[0.5], [0.7]])}, "expected an unweighted graph, got edge_feat with values of 0.5"),
    ):
        with pytest.raises(ValueError, match=message):
            Graph.from_data((item[0] | changes, item[1]))


def command(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["megagraph", *map(str, arguments)])
    code = 0
    try:
        main()
    except SystemExit as stop:
        code = stop.code
    return code, "".join(capsys.readouterr())


def test_import_info_and_train(tmp_path, monkeypatch, capsys):
    out = tmp_path / "folder" / "store"
    imported = ("data", "import", "synthetic", "--out", out, "--features", "fp16", "--seed", 3)
    assert command(monkeypatch, capsys, *imported)[0] == 0
    assert (open_store(out).labels == load_graph("synthetic", None, 3).labels).all()
    code, said = command(monkeypatch, capsys, "data", "info", out, "--verify")
    assert code == 0 and "64 features (float16), 6 classes" in said and "verified" in said
    assert load_graph(str(out), None).store == out
    assert [path.name for path in out.parent.iterdir()] == ["store"]
    small = ("--samples", 1, "--layers", 1, "--dim", 16, "--heads", 2, "--epochs", 1, "--max-steps", 1)
    assert command(monkeypatch, capsys, "train", "--dataset", out, "--out", tmp_path / "run", *small)[0] == 0


def edited(**changes):
    return lambda store: edit_header(store, lambda header: header.update(changes))


def changed(name, change):
    return lambda store: change_array(store, name, change)


def truncate(store):
    path = store / "indices.npy"
    path.write_bytes(path.read_bytes()[:-4])


def write_other_number(store):
    """The header is as it was."""
    array = np.load(store / "features.npy", mmap_mode="r+")
    array[5, 3] = 0.25
    array.flush()


def one_way(store):
    """Two nodes exchange one neighbour each."""

    def change(indices):
        indices[0] = next(node for node in range(299, 0, -1) if node not in indices[:10])
        indices[: np.load(store / "indptr.npy")[1]].sort()
        return indices

    change_array(store, "indices", change)


def npz(path, **changes):
    adjacency = sp.random_array((30, 30), density=0.2, format="csr", rng=0)
    x = sp.csr_array(np.arange(60, dtype=np.float32).reshape(30, 2) - 30)
    values = {"labels": np.arange(30) % 3}
    for key, matrix in {"adj": adjacency, "attr": x}.items():
        values |= {f"{key}_{part}": getattr(matrix, part) for part in ("data", "indices", "indptr", "shape")}
    values["adj_data"] = np.ones(adjacency.nnz)
    np.savez(path, **values | {key: change(values[key]) for key, change in changes.items()})
    return path


def test_npz_features_keep_their_values(tmp_path):
    graph = load_graph(str(npz(tmp_path / "real.npz")), None)
    assert (graph.features == np.arange(60).reshape(30, 2) - 30).all()


def test_several_labels_of_an_npz_and_of_a_store(tmp_path):
    flags = np.random.default_rng(0).integers(0, 2, (30, 4))
    graph = load_graph(str(npz(tmp_path / "several.npz", labels=lambda _: flags)), None)
    write_store(graph, tmp_path / "store")
    stored = open_store(tmp_path / "store")
    verify_store(tmp_path / "store")
    np.testing.assert_array_equal(stored.labels, flags)
    assert stored.labels.dtype == np.int8 and stored.multi_label and stored.num_classes == 4
    assert "4 labels, several a node, no split" in describe(tmp_path / "store")


def opening(harm, *flags):
    """``data info`` of a store that has been harmed."""

    def arguments(folder):
        harm(folder / "store")
        return "info", folder / "store", *flags

    return arguments


def importing(*flags, **changes):
    """``data import`` of a file with these changes over a good store."""
    return lambda folder: ("import", npz(folder / "bad.npz", **changes), "--out", folder / "store", *flags)


def importing_over_other_things(folder):
    (folder / "thesis").mkdir()
    (folder / "thesis" / "thesis.txt").touch()
    return "import", "synthetic", "--out", folder / "thesis"


def importing_where_files_may_not_grow(folder):
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    return "import", "synthetic", "--out", folder / "store"


BAD_INPUT = {
    "truncated": (opening(truncate), r"expected .*indices\.npy of \d+ bytes, got \d+; import the graph again"),
    "file missing": (
        opening(lambda store: (store / "labels.npy").unlink()),
        r"expected .*labels\.npy of 2528 bytes, got 0",
    ),
    "no header": (
        opening(lambda store: (store / "header.json").unlink()),
        r"expected a graph store, got .* without header\.json",
    ),
    "empty header": (
        opening(lambda store: (store / "header.json").write_text("{}")),
        r"expected the header of a graph store as it was written, got .*header\.json, which has changed",
    ),
    "header by hand": (
        opening(lambda store: (store / "header.json").write_text(json.dumps(header_of(store) | {"in_features": 9}))),
        r"expected the header of a graph store as it was written, got .*header\.json, which has changed",
    ),
    "version": (opening(edited(version=3)), "expected a graph store of version 2, got 3"),
    "no arrays": (opening(edited(arrays={})), "expected the arrays features, indices, indptr, labels in .*, got ''"),
    "features not matching nodes": (
        opening(changed("features", lambda x: x[:-1])),
        r"expected features of shape \[300, 8\] in .*header\.json, got \[299, 8\]; import",
    ),
    "dtype": (
        opening(changed("features", np.float64)),
        r"expected features of dtype <f4 or <f2 in .*header\.json, got '<f8'",
    ),
    "pointer end": (
        opening(changed("indptr", put(-1, 5)), "--verify"),
        r"indptr\.npy to go from 0 to \d+, got 0\.\.5",
    ),
    "checksum": (opening(write_other_number, "--verify"), r"expected .*features\.npy with the checksum \w+, got \w+"),
    "edge out of range": (
        opening(changed("indices", put(-1, 300)), "--verify"),
        r"expected the columns of a row in 0\.\.299, ascending, none its own, got 300 in row 299 of .*indices\.npy",
    ),
    "one direction": (opening(one_way, "--verify"), "expected both directions of every edge"),
    "NaN features": (
        opening(changed("features", put((17, 6), np.nan)), "--verify"),
        r"expected finite features, got nan in feature 6 of node 17 of .*features\.npy",
    ),
    "imported edge out of range": (
        importing(adj_indices=put(3, 30)),
        r"bad\.npz: expected adj to be a CSR matrix, got one that is none: indices must be < 30",
    ),
    "imported NaN features": (
        importing(attr_data=put(1, np.nan)),
        r"bad\.npz: expected finite features, got nan in feature 1 of node 0",
    ),
    "imported features not matching nodes": (
        importing(adj_shape=lambda _: (31, 31), adj_indptr=lambda x: np.append(x, x[-1]), adj_indices=put(3, 30)),
        r"expected adj of shape \[30, 30\], as attr has 30 rows, got \[31, 31\]",
    ),
    "imported labels": (importing(labels=lambda x: x[:-1]), r"expected labels of shape \[30\], got \[29\]"),
    "imported columns of classes": (
        importing(labels=lambda x: np.stack([x, x], 1)),
        r"bad\.npz: expected several labels a node of shape \[30, 2\] to be 0 or 1, .* got 2 in label 0 of node 2",
    ),
    "imported weights": (
        importing(adj_data=put(0, 2.5)),
        r"expected an unweighted graph, got adj_data with values of 1\.\.2\.5",
    ),
    "too large for fp16": (
        importing("--features", "fp16", attr_data=put(0, -1e5)),
        "expected features of at most 65504 for fp16, got 100000",
    ),
    "file-size limit": (
        importing_where_files_may_not_grow,
        r"could not write features\.npy of 512,000 bytes into .*: File too large; make room",
    ),
    "folder taken": (
        importing_over_other_things,
        r"thesis to be free, empty or a graph store and nothing else, got thesis\.txt; name another folder",
    ),
}


@pytest.fixture
def file_size_limit():
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("file_size_limit")
@pytest.mark.parametrize(("bad", "message"), BAD_INPUT.values(), ids=BAD_INPUT)
def test_bad_input_is_refused_and_changes_nothing(bad, message, graph, tmp_path, monkeypatch, capsys):
    def contents():
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and "cache" not in path.parts}

    write_store(graph, tmp_path / "store")
    arguments = bad(tmp_path)
    if "--verify" in arguments:
        describe(tmp_path / "store")  # does not read that far
    before = contents()
    code, said = command(monkeypatch, capsys, "data", *arguments)
    assert code == 1 and re.search(message, said) and "Traceback" not in said
    assert contents() == before


@pytest.mark.parametrize("key", ["edge_weight", "edge_attr"])
def test_weighted_edges_are_refused(key):
    data = {"x": torch.ones(3, 2), "edge_index": torch.tensor([[0, 1], [1, 2]]), "y": torch.tensor([0, 1, 1])}
    with pytest.raises(ValueError, match=f"expected an unweighted graph, got data.{key} with values of 1..3"):
        Graph.from_data(SimpleNamespace(**data, **{key: torch.tensor([1.0, 3.0])}))
    assert Graph.from_data(SimpleNamespace(**data, **{key: torch.ones(2, 1)})).num_edges == 4
