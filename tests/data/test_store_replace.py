"""``data import --out`` over what is there: a store of ours is replaced, what others wrote is not touched."""

import os
import shutil
import signal

import numpy as np
import pytest

from megagraph import files
from megagraph.data.coarsen import partition
from megagraph.data.datasets import load_graph, synthetic_graph
from megagraph.data.generate import generate
from megagraph.data.graph import Graph
from megagraph.data.store import new_store, open_store, verify_store, write_store

GENERATED = {"nodes": 500, "edges": 5000, "features": 2, "classes": 3}


@pytest.fixture(scope="module")
def graph():
    return synthetic_graph(num_nodes=300, in_features=8, seed=0)


def everything(folder):
    """What everything below a folder is: contents, where a link points to, or a folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        kind = os.readlink(path) if path.is_symlink() else None if path.is_dir() else path.read_bytes()
        found[path.relative_to(folder).as_posix()] = kind
    return found


def store_with_cache(folder, graph):
    write_store(graph, folder)
    partition(open_store(folder), 20)
    return folder


def header_of_something_else(folder, graph):
    folder.mkdir()
    (folder / "header.json").write_text('{"title": 1}')
    (folder / "thesis.tex").write_text("precious")


def header_with_our_checksum(folder, graph):
    folder.mkdir()
    files.write_json(folder / "header.json", {"format": "something else", "version": 2, "arrays": {}})


def header_that_names_other_files(folder, graph):
    write_store(graph, folder)
    (folder.parent / "precious.npy").write_text("precious")
    header = files.read_json(folder / "header.json", "a header")
    header["arrays"]["../precious"] = header["arrays"]["labels"]
    files.write_json(folder / "header.json", header)


def index_that_names_other_files(folder, graph):
    store_with_cache(folder, graph)
    (folder.parent / "precious.npy").write_text("precious")
    index = files.read_json(folder / "cache" / "index.json", "an index")
    index["files"]["../../precious.npy"] = "0" * 32
    files.write_json(folder / "cache" / "index.json", index)


def store_with(name):
    def make(folder, graph):
        store_with_cache(folder, graph)
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("precious")

    return make


def store_with_link(name):
    def make(folder, graph):
        store_with_cache(folder, graph)
        (folder / name).rename(folder.parent / "elsewhere")
        (folder / name).symlink_to(folder.parent / "elsewhere")

    return make


def store_that_is_damaged(folder, graph):
    write_store(graph, folder)
    text = (folder / "header.json").read_text()
    (folder / "header.json").write_text(text.replace("synthetic", "synthetik"))


FOREIGN = {
    "header of something else": (header_of_something_else, r"got header\.json, thesis\.tex \(expected the header"),
    "header with our checksum": (
        header_with_our_checksum,
        r"got header\.json .*with the format 'MegaGraph graph store'",
    ),
    "header that names other files": (
        header_that_names_other_files,
        r"got cache, features\.npy, header\.json and 3 more",
    ),
    "index that names other files": (index_that_names_other_files, r"got cache/index\.json, cache/lock, cache/part"),
    "store with a README": (store_with("README.md"), r"nothing else, got README\.md; name another folder"),
    "store with a file in its cache": (store_with("cache/notes.txt"), r"nothing else, got cache/notes\.txt; name"),
    "store with a folder": (store_with("figures/one.png"), r"nothing else, got figures/one\.png; name"),
    "store with a linked array": (store_with_link("indices.npy"), r"nothing else, got indices\.npy; name"),
    "store with a linked cache": (store_with_link("cache"), r"nothing else, got cache; name"),
    "store that is damaged": (store_that_is_damaged, r"got cache, .*header\.json, which has changed"),
    "a file": (lambda folder, graph: folder.write_text("precious"), "nothing else, got out; name another folder"),
    "folders": (lambda folder, graph: (folder / "empty" / "deep").mkdir(parents=True), "got empty; name"),
}


@pytest.mark.parametrize(("make", "message"), FOREIGN.values(), ids=FOREIGN)
def test_what_others_wrote_is_not_touched(make, message, graph, tmp_path):
    make(tmp_path / "out", graph)
    before = everything(tmp_path)
    with pytest.raises(FileExistsError, match=message) as raised:
        write_store(graph, tmp_path / "out")
    assert str(raised.value).startswith(f"expected {tmp_path / 'out'} to be free, empty or a graph store and nothing")
    with pytest.raises(FileExistsError):
        generate(tmp_path / "out", **GENERATED)
    assert everything(tmp_path) == before


def test_a_file_that_comes_meanwhile_is_not_touched(graph, tmp_path):
    store = store_with_cache(tmp_path / "out", graph)
    with pytest.raises(FileExistsError, match=r"got thesis\.txt"), new_store(store) as writer:
        for name in ("indptr", "indices", "labels", "features"):
            writer.add(name, getattr(graph, name))
        writer.finish(name="new", in_features=graph.in_features, num_classes=graph.num_classes)
        (store / "thesis.txt").write_text("precious")
        before = everything(store)
    assert everything(store) == before and [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_is_no_graph_replaces_no_store(graph, tmp_path):
    store = store_with_cache(tmp_path / "out", graph)
    before = everything(tmp_path)
    fields = {name: getattr(graph, name).copy() for name in ("indptr", "indices", "labels", "features")}
    fields["features"][7, 3] = np.nan
    with pytest.raises(ValueError, match=rf"got nan in feature 3 of node 7 of {store}/features\.npy; clean it"):
        write_store(Graph(name="mine", num_classes=graph.num_classes, **fields), store)
    with pytest.raises(FileNotFoundError, match=r"without header\.json"), new_store(store) as writer:
        writer.add("labels", graph.labels)
    assert everything(tmp_path) == before


def test_a_store_is_replaced_with_its_cache_and_what_a_killed_process_left(graph, tmp_path):
    store = store_with_cache(tmp_path / "out", graph)
    (store / "header.json.partial").write_text("half")
    (store / "cache" / "index.json.partial").write_text("half")
    generate(store, **GENERATED)
    verify_store(store)
    assert open_store(store).num_nodes == 500
    assert sorted(path.name for path in store.iterdir()) == [
        "cache",
        "features.npy",
        "header.json",
        "indices.npy",
        "indptr.npy",
        "labels.npy",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_store_is_replaced_whose_cache_got_no_index(graph, tmp_path, monkeypatch):
    """As on a full disk; a process that is killed may leave half of one."""
    store = store_with_cache(tmp_path / "out", graph)
    shutil.rmtree(store / "cache")
    with monkeypatch.context() as full:
        full.setattr(files, "write_json", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        open_store(store)
    assert [path.name for path in (store / "cache").iterdir()] == ["lock"]
    (store / "cache" / "index.json.partial").write_text("half")
    generate(store, **GENERATED)
    assert open_store(store).num_nodes == 500 and [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_empty_folder_is_free(graph, tmp_path):
    (tmp_path / "out").mkdir()
    write_store(graph, tmp_path / "out")
    assert open_store(tmp_path / "out").num_nodes == 300 and [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("there", [True, False], ids=["to a store", "to nothing yet"])
def test_a_link_stays_and_what_it_points_to_is_replaced(there, graph, tmp_path):
    store = tmp_path / "disk" / "store"
    store.parent.mkdir()
    if there:
        store_with_cache(store, graph)
    (tmp_path / "link").symlink_to(store)
    generate(tmp_path / "link", **GENERATED)
    assert (tmp_path / "link").is_symlink() and not store.is_symlink() and open_store(store).num_nodes == 500
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "link"]
    assert [path.name for path in store.parent.iterdir()] == ["store"]


def test_a_process_that_is_killed_leaves_the_store_as_it_was(graph, tmp_path):
    store = store_with_cache(tmp_path / "out", graph)
    before = everything(store)
    if (child := os.fork()) == 0:
        with new_store(store) as writer:
            writer.add("labels", np.zeros(10, np.int64))
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1]) and everything(store) == before
    write_store(graph, store)
    assert load_graph(str(store), None).num_edges == graph.num_edges
