"""Numbers of a store are used once they have been checked; that they were is remembered until a file changes."""

import multiprocessing
import os
import pickle
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest

from megagraph import files
from megagraph.data import store as store_module
from megagraph.data.cache import checked
from megagraph.data.check import check_arrays
from megagraph.data.coarsen import partition
from megagraph.data.datasets import load_graph, synthetic_graph
from megagraph.data.graph import Graph, Split
from megagraph.data.header import describe, read_header
from megagraph.data.store import open_store, verify_store, write_store
from megagraph.data.traversal import misplaced
from tests.data.stores import change_array, edit_header, put

NODES, CLASSES, FEATURES = 300, 6, 8


@pytest.fixture(scope="module")
def graph():
    graph = synthetic_graph(num_nodes=NODES, num_classes=CLASSES, in_features=FEATURES, seed=0)
    features = np.maximum(graph.features, 0)
    split = Split(np.arange(200), np.arange(200, 300), np.arange(0))
    fields = {name: getattr(graph, name) for name in ("indptr", "indices", "labels", "num_classes")}
    return Graph(name="mine", features=features, split=split, **fields)


@pytest.fixture
def store(graph, tmp_path):
    write_store(graph, tmp_path / "store")
    return tmp_path / "store"


def swap_two(indices):
    indices[[0, 1]] = indices[[1, 0]]
    return indices


def loop(indices):
    indices[0] = 0
    return indices


WRONG = {
    "row starts that fall": ("indptr", put(100, 0), r"got a smaller one at 100 of .*indptr\.npy"),
    "row starts below 0": ("indptr", put(1, -5), r"got a smaller one at 1 of .*indptr\.npy"),
    "row starts beyond the end": ("indptr", put(100, 1 << 40), r"got a smaller one at 101 of .*indptr\.npy"),
    "first row start": ("indptr", put(0, 1), r"indptr\.npy to go from 0 to \d+, got 1\.\."),
    "a negative node": ("indices", put(1267, -1), r"0\.\.299, ascending, none its own, got -1 in row \d+ of .*indices"),
    "a node that is not there": ("indices", put(7, NODES), r"got 300 in row \d+ of .*indices\.npy"),
    "two nodes that fall": ("indices", swap_two, r"got \d+ in row 0 of .*indices\.npy"),
    "a node twice": ("indices", lambda x: put(1, x[0])(x), r"got \d+ in row 0 of .*indices\.npy"),
    "a self loop": ("indices", loop, r"got 0 in row 0 of .*indices\.npy"),
    "a class that is not there": ("labels", put(3, CLASSES), r"expected .*labels\.npy in -1\.\.5, got 0\.\.6"),
    "a class below -1": ("labels", put(3, -2), r"expected .*labels\.npy in -1\.\.5, got -2\.\.5"),
    "a split beyond the nodes": ("val", put(-1, NODES), r"expected .*val\.npy in 0\.\.299, got 200\.\.300"),
    "a negative split": ("train", put(0, -1), r"expected .*train\.npy in 0\.\.299, got -1\.\.199"),
    "NaN": ("features", put((17, 6), np.nan), r"got nan in feature 6 of node 17 of .*features\.npy; clean it"),
    "infinity": ("features", put((299, 7), -np.inf), r"got -inf in feature 7 of node 299 of .*features\.npy"),
}
WRONG_SPARSE = {
    "row starts that fall": ("features_indptr", put(100, 0), r"smaller one at 100 of .*features_indptr\.npy"),
    "a feature that is not there": ("features_indices", put(9, FEATURES), r"in 0\.\.7, ascending, got 8 in row \d"),
    "a negative feature": ("features_indices", put(9, -1), r"got -1 in row \d of .*features_indices\.npy"),
    "two features that fall": ("features_indices", swap_two, r"got \d in row 0 of .*features_indices\.npy"),
}


@pytest.mark.parametrize(("name", "change", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_number_is_found_whatever_the_checksums_say(name, change, message, store):
    open_store(store)
    change_array(store, name, change)
    describe(store)  # reads no arrays
    for _ in range(2):  # what was refused is not remembered
        with pytest.raises(ValueError, match=message):
            load_graph(str(store), None)


@pytest.mark.parametrize("value", [2, -2])
def test_a_wrong_number_of_several_labels_is_found(value, graph, tmp_path):
    several = replace(graph, labels=np.eye(CLASSES, dtype=np.int8)[graph.labels])
    write_store(several, tmp_path / "store")
    open_store(tmp_path / "store")
    change_array(tmp_path / "store", "labels", put((3, 5), value))
    with pytest.raises(ValueError, match=r"expected .*labels\.npy in -1\.\.1, got -?\d\.\.\d"):
        open_store(tmp_path / "store")
    edit_header(tmp_path / "store", lambda header: header.update(num_classes=5))
    with pytest.raises(
        ValueError, match=r"expected labels of shape \[300, 5\] in .*, got \[300, 6\]; import the graph"
    ):
        open_store(tmp_path / "store")


@pytest.mark.parametrize(("name", "change", "message"), WRONG_SPARSE.values(), ids=WRONG_SPARSE)
def test_a_wrong_number_of_sparse_features_is_found(name, change, message, graph, tmp_path):
    write_store(graph, tmp_path / "store", "sparse")
    open_store(tmp_path / "store")
    change_array(tmp_path / "store", name, change)
    with pytest.raises(ValueError, match=message):
        open_store(tmp_path / "store")


def test_a_nan_of_fp16_and_of_sparse_features_has_a_place(graph, tmp_path):
    for form, name, position in (("fp16", "features", (17, 6)), ("sparse", "features_data", 30)):
        write_store(graph, tmp_path / form, form)
        change_array(tmp_path / form, name, put(position, np.nan))
        node, feature = position if form == "fp16" else [x[30] for x in np.nonzero(graph.features)]
        with pytest.raises(ValueError, match=rf"got nan in feature {feature} of node {node} of .*{name}\.npy"):
            open_store(tmp_path / form)


@pytest.mark.parametrize("chunk", [1, 2, 7, 1000])
@pytest.mark.parametrize("where", [0, 1, 5, 6, 7, 11, None])
def test_chunks_of_rows_are_checked_as_one(chunk, where):
    starts = np.array([0, 0, 0, 3, 3, 6, 7, 7, 12, 12], np.int64)
    columns = np.array([0, 1, 8, 2, 6, 7, 0, 0, 1, 2, 3, 6], np.int32)
    if where is not None:
        columns[where] = np.repeat(np.arange(9), np.diff(starts))[where]  # a loop, in order or not
    row, previous, found = 0, -1, None
    for first in range(0, len(columns), chunk):
        part = columns[first : first + chunk]
        row, at = misplaced(starts, part, first, row, previous, 9, False)
        if at >= 0:
            found = first + at
            break
        previous = int(part[-1])
    assert found == where


def count_checks(monkeypatch):
    checks = []

    def check(folder, *arguments):
        checks.append(folder)
        check_arrays(folder, *arguments)

    monkeypatch.setattr(store_module, "check_arrays", check)
    return checks


def test_a_check_is_remembered_until_a_file_changes(store, monkeypatch):
    checks = count_checks(monkeypatch)
    open_store(store)
    assert len(checks) == 0  # since it was written
    verify_store(store)
    assert len(checks) == 1
    for path in sorted(store.glob("*.npy")):
        before = len(checks)
        path.write_bytes(path.read_bytes())
        open_store(store)
        open_store(store)
        assert len(checks) == before + 1, path
    content, times = (store / "labels.npy").read_bytes(), (store / "labels.npy").stat()
    (store / "labels.npy").write_bytes(content[:-8] + bytes(8))
    os.utime(store / "labels.npy", ns=(times.st_atime_ns, times.st_mtime_ns))  # as rsync and tar set it
    with pytest.raises(ValueError, match=r"expected .*labels\.npy with the checksum"):
        open_store(store)
    edit_header(store, lambda header: header.update(num_classes=5))
    (store / "labels.npy").write_bytes(content)
    with pytest.raises(ValueError, match=r"expected .*labels\.npy in -1\.\.4, got 0\.\.5"):
        open_store(store)


def test_what_is_as_young_as_a_tick_of_the_clock_of_files_is_not_remembered(store, monkeypatch):
    """It may still change without having another time; a check waits for the next tick."""
    monkeypatch.setattr(store_module, "_TICK_NS", 10**12)
    waits = []
    monkeypatch.setattr(store_module.time, "sleep", waits.append)
    (store / "labels.npy").write_bytes((store / "labels.npy").read_bytes())
    (store / "cache" / "index.json").unlink()
    open_store(store)
    assert len(waits) == 1 and 0 < waits[0] <= 1000 and checked(store) is None
    monkeypatch.undo()
    open_store(store)
    assert checked(store) is not None


def test_a_store_whose_cache_cannot_be_written_is_checked_each_time(store, graph, monkeypatch):
    shutil.rmtree(store / "cache")
    (store / "cache").write_text("no folder")
    checks = count_checks(monkeypatch)
    expected = partition(graph, 20)
    for _ in range(2):
        assert (partition(open_store(store), 20) == expected).all()
    assert len(checks) == 2 and (store / "cache").read_text() == "no folder"


def test_nothing_is_written_through_links(store, graph, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    shutil.rmtree(store / "cache")
    (store / "cache").symlink_to(tmp_path / "elsewhere")
    partition(open_store(store), 20)
    assert not list((tmp_path / "elsewhere").iterdir())
    (store / "cache").unlink()
    (store / "cache").mkdir()
    (tmp_path / "precious").write_text("precious")
    for name in ("lock", "index.json.partial", "index.json"):
        (store / "cache" / name).symlink_to(tmp_path / "precious")
    partition(open_store(store), 20)
    (store / "cache" / "lock").unlink()
    partition(open_store(store), 20)
    assert (tmp_path / "precious").read_text() == "precious" and checked(store)


def kept(store):
    (path,) = (store / "cache").glob("partition-*.npy")
    return path


def keep_instead(store, parts):
    """Another partition, with the right checksum."""
    with_head = kept(store).read_bytes()[: -4 * NODES] + parts.astype("<i4").tobytes()
    kept(store).write_bytes(with_head)
    index = files.read_json(store / "cache" / "index.json", "an index")
    index["files"][kept(store).name] = files.checksum(kept(store))
    files.write_json(store / "cache" / "index.json", index)


BAD_PARTS = {
    "negative": lambda store, parts: keep_instead(store, np.where(parts == 3, -1, parts)),
    "too many": lambda store, parts: keep_instead(store, np.where(parts == 3, 1 << 28, parts)),
    "an empty one": lambda store, parts: keep_instead(store, np.where(parts == 3, 4, parts)),
    "another checksum": lambda store, parts: kept(store).write_bytes(kept(store).read_bytes()[:-4] + b"\1\0\0\0"),
    "cut": lambda store, parts: kept(store).write_bytes(kept(store).read_bytes()[:-4]),
    "no index": lambda store, parts: (store / "cache" / "index.json").unlink(),
    "an index of something else": lambda store, parts: files.write_json(store / "cache" / "index.json", {"files": []}),
}


@pytest.mark.parametrize("damage", BAD_PARTS.values(), ids=BAD_PARTS)
@pytest.mark.parametrize("method", ["metis", "propagation"])
def test_a_bad_partition_in_the_cache_is_computed_again(method, damage, store):
    expected = partition(open_store(store), 20, method)
    good = kept(store).read_bytes()
    damage(store, expected)
    assert (partition(open_store(store), 20, method) == expected).all()
    assert kept(store).read_bytes() == good and partition(open_store(store), 20, method).flags.writeable


def use(folder, ready, results):
    ready.wait()
    graph = open_store(folder)
    results.put([partition(graph, parts).tobytes() for parts in (20, 10)])


def test_processes_open_a_store_at_once(store, graph):
    context = multiprocessing.get_context("fork")
    expected = [partition(graph, parts).tobytes() for parts in (20, 10)]
    for _ in range(3):
        ready, results = context.Barrier(6), context.Queue()
        workers = [context.Process(target=use, args=(store, ready, results)) for _ in range(6)]
        for worker in workers:
            worker.start()
        assert all(results.get(timeout=600) == expected for _ in workers)
        for worker in workers:
            worker.join()
    assert not list((store / "cache").glob("*.partial")) and checked(store) is not None
    assert len(files.read_json(store / "cache" / "index.json", "an index")["files"]) == 2
    write_store(graph, store)  # all that is there is known


def test_a_graph_knows_its_source_again(store, graph, tmp_path):
    stored = open_store(store)
    fingerprints = {graph.fingerprint(), stored.fingerprint()}
    assert all(re.fullmatch("[0-9a-f]{32}", found) for found in fingerprints)
    write_store(graph, tmp_path / "again")
    assert open_store(tmp_path / "again").fingerprint() == stored.fingerprint() == open_store(store).fingerprint()
    same = {name: getattr(graph, name).copy() for name in ("indptr", "indices", "labels", "features")}
    assert Graph(name="x", num_classes=CLASSES, split=graph.split, **same).fingerprint() == graph.fingerprint()

    def changed(array, position, value):
        array = array.copy()
        array[position] = value
        return array

    for fields in (
        {"features": changed(graph.features, (3, 4), 0.5)},
        {"labels": changed(graph.labels, 5, -1)},
        {"split": None},
        {"split": Split(graph.split.val, graph.split.train, graph.split.test)},
        {"num_classes": CLASSES + 1},
        {"indices": graph.indices[::-1].copy()},
    ):
        values = {"num_classes": CLASSES, "split": graph.split, **same, **fields}
        other = Graph(name="mine", **values)
        fingerprints.add(other.fingerprint())
        if "indices" not in fields:
            write_store(other, tmp_path / "other")
            fingerprints.add(open_store(tmp_path / "other").fingerprint())
    assert len(fingerprints) == 2 + 6 + 5


def test_the_fingerprint_of_a_store_is_that_of_what_was_opened(store, graph):
    """Not of what takes its place, whose partitions would be mixed up with these."""
    opened = open_store(store)
    before = opened.fingerprint()
    write_store(synthetic_graph(num_nodes=NODES, seed=1), store)
    assert opened.fingerprint() == before != open_store(store).fingerprint()
    assert read_header(store)["name"] == "synthetic"
    with pytest.raises(ValueError, match=f"expected the graph {before} in .*store, got .*imported there since; start"):
        pickle.loads(pickle.dumps(opened))  # as a loader's worker gets it
