"""Pairs of a whole graph are kept in its store, and are then those that would be made."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch

from megagraph import files
from megagraph.data import cache, pairs
from megagraph.data.datasets import synthetic_graph
from megagraph.data.options import BatchOptions
from megagraph.data.prepare import prepare
from megagraph.data.store import open_store, write_store

OPTIONS = dict(batching="full", bias="bucket", super_nodes=4, top=3)


@pytest.fixture(scope="module")
def graph():
    return synthetic_graph(num_nodes=300, num_classes=3, in_features=4, seed=0)


@pytest.fixture
def store(graph, tmp_path):
    write_store(graph, tmp_path / "store")
    return tmp_path / "store"


@pytest.fixture
def made(monkeypatch):
    """How often pairs are made."""
    calls, make = [], pairs._pairs
    monkeypatch.setattr(pairs, "_pairs", lambda *given: calls.append(given) or make(*given))
    return calls


def lists_of(graph, **changes):
    structure = prepare(graph, BatchOptions(**(OPTIONS | changes))).structure
    return structure.relation.lists | {"index": structure.index, "order": torch.from_numpy(structure.order)}


def kept(store):
    return sorted((store / "cache").glob("pairs*.npy"))


def is_same(found, expected):
    return found.keys() == expected.keys() and all(
        found[name].dtype == x.dtype and torch.equal(found[name], x) for name, x in expected.items()
    )


def test_the_second_start_finds_them(store, graph, made):
    expected = lists_of(graph)
    for _ in range(3):
        assert is_same(lists_of(open_store(store)), expected)
    assert len(made) == 2  # of the graph itself, and of the store once


@pytest.mark.parametrize("changes", [{"hops": 2}, {"top": 4}, {"super_nodes": 9}, {"shuffle_structure": True}])
def test_others_are_made_and_take_their_place(changes, store, graph, made):
    lists_of(open_store(store))
    before = kept(store)
    assert is_same(lists_of(open_store(store), **changes), lists_of(graph, **changes))
    assert len(before) == len(kept(store)) == 6 and not {*before} & {*kept(store)}
    known = files.read_json(store / "cache" / "index.json", "an index")["files"]
    assert {path.name for path in kept(store)} == {name for name in known if name.startswith("pairs")}
    assert len(made) == 3
    lists_of(open_store(store), **changes)
    assert len(made) == 3


def fold(store):
    path = kept(store)[2]
    path.unlink()
    path.mkdir()


def flip(store):
    path = kept(store)[0]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "another number": flip,
    "cut": lambda store: kept(store)[1].write_bytes(kept(store)[1].read_bytes()[:-4]),
    "of another length": lambda store: kept(store)[-1].write_bytes(kept(store)[2].read_bytes()),
    "empty": lambda store: kept(store)[4].write_bytes(b""),
    "gone": lambda store: kept(store)[3].unlink(),
    "a folder": fold,
    "no index": lambda store: (store / "cache" / "index.json").unlink(),
    "nothing": lambda store: shutil.rmtree(store / "cache"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_what_is_damaged_is_made_again(damage, store, made):
    expected = {name: x.clone() for name, x in lists_of(open_store(store)).items()}  # or damage would be seen in them
    damage(store)
    assert is_same(lists_of(open_store(store)), expected)
    assert len(made) == 2


def test_more_than_may_be_are_refused_though_they_are_kept(store, made):
    count = len(lists_of(open_store(store))["columns"])
    with pytest.raises(ValueError, match=f"expected at most {count - 1:,} pairs of nodes, got {count:,} or more"):
        lists_of(open_store(store), max_pairs=count - 1)
    assert len(made) == 1


@pytest.mark.parametrize("room", range(6))
def test_a_full_disk_keeps_none(room, store, graph, made, monkeypatch):
    """Room for so many of the arrays."""
    lists_of(open_store(store), hops=2)
    written, replacing = [], files.replacing

    def until_full(path):
        if path.name.startswith("pairs"):
            if len(written) == room:
                raise OSError(28, "No space left on device")
            written.append(path)
        return replacing(path)

    monkeypatch.setattr(files, "replacing", until_full)
    assert is_same(lists_of(open_store(store)), lists_of(graph))
    assert len(written) == room and not kept(store)
    monkeypatch.undo()
    assert is_same(lists_of(open_store(store)), lists_of(graph)) and len(kept(store)) == 6


def test_what_a_killed_process_left_goes_with_the_others(store, graph):
    lists_of(open_store(store))
    half = kept(store)[0]
    half.rename(f"{half}.partial")
    lists_of(open_store(store), hops=2)
    assert not list((store / "cache").glob("*.partial"))
    write_store(graph, store)  # refused where anything is there that no index names


@pytest.mark.parametrize("room", range(6))
def test_a_store_that_is_replaced_meanwhile_keeps_none(room, store, graph, monkeypatch):
    """By another import, once so many of the arrays are written."""
    other = synthetic_graph(num_nodes=200, num_classes=3, in_features=4, seed=1)
    written, replacing = [], files.replacing

    def until_replaced(path):
        if path.name.startswith("pairs"):
            if len(written) == room:
                write_store(other, store)
            written.append(path)
        return replacing(path)

    monkeypatch.setattr(files, "replacing", until_replaced)
    assert is_same(lists_of(open_store(store)), lists_of(graph))
    assert len(written) > room and not kept(store)
    monkeypatch.undo()
    assert is_same(lists_of(open_store(store)), lists_of(other))
    write_store(graph, store)  # refused where anything is there that no index names


def test_the_lock_of_a_store_that_was_replaced_meanwhile_is_none(store, graph, monkeypatch):
    fcntl = pytest.importorskip("fcntl")
    open_store(store)
    flock = fcntl.flock

    def after_another(descriptor, how):
        monkeypatch.undo()
        write_store(graph, store)
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", after_another)
    with pytest.raises(FileNotFoundError, match="the store was replaced meanwhile"):
        cache.save(store, {"partition-1.npy": np.arange(3)})
    assert not list((store / "cache").glob("*.npy"))


def test_a_folder_that_cannot_be_written_keeps_none(store, graph, made):
    shutil.rmtree(store / "cache")
    (store / "cache").write_text("no folder")
    assert is_same(lists_of(open_store(store)), lists_of(graph))
    assert (store / "cache").read_text() == "no folder"


def test_what_is_written_to_them_stays_here(store):
    found, again = lists_of(open_store(store)), lists_of(open_store(store))
    found["index"][:] = 7
    assert not np.array_equal(found["index"], again["index"]) and is_same(lists_of(open_store(store)), again)
