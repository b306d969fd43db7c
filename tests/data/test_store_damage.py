"""Whatever is damaged in a store: it is refused with one clear error, or the graph is exactly the same."""

import re
import shutil

import numpy as np
import pytest

from megagraph.data.coarsen import partition
from megagraph.data.datasets import load_graph, synthetic_graph
from megagraph.data.graph import Graph, Split
from megagraph.data.store import write_store

CASES, PARTS = 120, 20  # cases of every parameter


def make(folder, form, seed=0):
    graph = synthetic_graph(num_nodes=200, in_features=8, seed=seed)
    features = np.maximum(graph.features, 0).astype(np.float32)
    fields = {name: getattr(graph, name) for name in ("indptr", "indices", "labels", "num_classes")}
    split = Split(np.arange(0, 100), np.arange(100, 150), np.arange(150, 200))
    write_store(Graph(name="mine", features=features, split=split, **fields), folder, form)


def use(store):
    """All that is in a store, and its partitions."""
    graph = load_graph(str(store), None)
    features = np.empty((graph.num_nodes, graph.in_features), np.float32)
    graph.read_features(np.arange(graph.num_nodes), features)
    split = [getattr(graph.split, part) for part in ("train", "val", "test")]
    parts = [partition(graph, PARTS, method) for method in ("metis", "propagation")]
    arrays = [graph.indptr, graph.indices, graph.labels, features, *split, *parts]
    return [graph.name, graph.num_classes, *((array.dtype.str, array.shape, array.tobytes()) for array in arrays)]


def flip(rng, paths, other):
    path = rng.choice(paths)
    content = bytearray(path.read_bytes())
    content[rng.integers(len(content))] ^= 1 << rng.integers(8)
    path.write_bytes(content)


def put_a_number(rng, paths, other):
    """Into a mapped array, as a program would that takes the file for its own."""
    path = rng.choice([path for path in paths if path.suffix == ".npy"])
    array = np.load(path, mmap_mode="r+").reshape(-1)
    limits = np.finfo(array.dtype) if array.dtype.kind == "f" else np.iinfo(array.dtype)
    values = [-1, 0, 1, 5, 199, 200, limits.max, limits.min, np.nan if array.dtype.kind == "f" else 7]
    array[rng.integers(len(array))] = rng.choice(np.array(values, array.dtype))
    array.flush()


def cut(rng, paths, other):
    path = rng.choice(paths)
    content = path.read_bytes()
    path.write_bytes(content[: rng.integers(len(content))])


def delete(rng, paths, other):
    rng.choice(paths).unlink()


def swap(rng, paths, other):
    """Two files of the store, or one with that of another store."""
    one, two = rng.choice(paths, 2, replace=False)
    if rng.integers(2) and (two := other / one.name).exists():
        one.write_bytes(two.read_bytes())
        return
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)


def append(rng, paths, other):
    with rng.choice(paths).open("ab") as file:
        file.write(rng.bytes(rng.integers(1, 100)))


def clear(rng, paths, other):
    path = rng.choice(paths)
    content = bytearray(path.read_bytes())
    start = rng.integers(len(content))
    length = min(len(content) - start, 64)
    content[start : start + length] = bytes(length)
    path.write_bytes(content)


DAMAGE = (flip, flip, put_a_number, put_a_number, cut, delete, swap, append, clear)


@pytest.mark.parametrize("form", ["same", "sparse"])
@pytest.mark.parametrize(
    "kept", [pytest.param(True, marks=pytest.mark.slow), False], ids=["partitions kept", "no cache"]
)
def test_damage_is_refused_or_changes_nothing(form, kept, tmp_path):
    store, other = tmp_path / "store", tmp_path / "other"
    make(store, form)
    make(other, form, seed=1)
    expected = use(store)
    rng = np.random.default_rng(0)
    refused = same = 0
    for case in range(CASES):
        if not kept:
            shutil.rmtree(store / "cache", ignore_errors=True)
        elif case % 2:
            use(store)  # what was written back has been seen, and is remembered
        paths = np.array(sorted(path for path in store.rglob("*") if path.is_file() and path.stat().st_size))
        before = {path: path.read_bytes() for path in paths}
        damage = rng.choice(DAMAGE)
        damage(rng, paths, other)
        changed = [path for path in paths if not path.exists() or path.read_bytes() != before[path]]
        try:
            assert use(store) == expected, (damage, changed)
            same += 1
        except (ValueError, FileNotFoundError) as error:
            assert any(path.parent == store for path in changed), "what is in the cache is made again"
            assert re.search(r"expected .*(got|without)", str(error)), (damage, changed, error)
            assert str(store) in str(error) and "\n" not in str(error), (damage, changed, error)
            refused += 1
        for path, content in before.items():
            if not path.exists() or path.read_bytes() != content:
                path.write_bytes(content)
    assert use(store) == expected and refused + same == CASES and refused > CASES // 3
