import os
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest

from megagraph.data.coarsen import (
    Quality,
    coarsen,
    keep_strongest,
    merge,
    nearest_parts,
    normalized_adjacency,
    partition,
    quality,
    quotient,
)
from megagraph.data.datasets import synthetic_graph
from megagraph.data.metis import metis
from tests.data.graphs import dense_normalized, make_graph


@pytest.fixture(autouse=True)
def _metis_each_time(monkeypatch):
    monkeypatch.setattr("megagraph.data.coarsen.metis", metis)


@pytest.fixture(scope="module")
def graph():
    return synthetic_graph(num_nodes=300, seed=0)


def test_parts_are_numbered_without_gaps_and_repeatable(graph):
    parts = partition(graph, 40)
    assert parts.dtype == np.int32 and len(parts) == graph.num_nodes
    assert np.unique(parts).tolist() == list(range(parts.max() + 1)) and parts.max() < 40
    assert (partition(graph, 40) == parts).all()


@pytest.mark.parametrize("num_parts", [1, 40])
def test_coarse_graph_is_the_formula(graph, num_parts):
    coarse = coarsen(graph, partition(graph, num_parts))
    one_hot = np.eye(coarse.num_parts)[coarse.membership]
    size = one_hot.sum(axis=0)
    np.testing.assert_allclose(coarse.features, one_hot.T @ graph.features / size[:, None], rtol=1e-5, atol=1e-6)
    scaled = one_hot / np.sqrt(size)
    contracted = scaled.T @ graph.adjacency.toarray() @ scaled + np.eye(coarse.num_parts)
    scale = contracted.sum(axis=1) ** -0.5
    np.testing.assert_allclose(coarse.adjacency.toarray(), scale[:, None] * contracted * scale, rtol=1e-5)
    assert coarse.features.dtype == coarse.adjacency.dtype == np.float32


METIS_FAILS = {
    "killed": ("os.kill(os.getpid(), 9)", "its process ended with exit code -9, -9 where memory ran out"),
    "aborted": ("os.abort()", "its process ended with exit code -6, -9 where memory ran out"),
    "ended": ("os._exit(3)", "its process ended with exit code 3"),
    "error": ("raise MemoryError('no room')", "MemoryError: no room"),
    "no parts": ("return 0, [1, 2]", "RuntimeError: expected the parts of 300 nodes, got 2"),
}


@pytest.fixture
def part_graph(tmp_path, monkeypatch):
    """Put a function of this body in the place of METIS, in whatever process it is imported."""

    def replace(body: str) -> None:
        lines = (
            "import os, pathlib, signal, sys, time",
            "import numpy as np",
            "Options = CSRAdjacency = lambda *_, **__: None",
            "zero_copy_dtype = lambda: np.int64",
            f"def part_graph(num_parts, **_): {body}",
        )
        (tmp_path / "pymetis.py").write_text("\n".join(lines))
        monkeypatch.syspath_prepend(tmp_path)

    return replace


@pytest.mark.parametrize(("body", "message"), METIS_FAILS.values(), ids=METIS_FAILS)
def test_metis_that_fails_is_one_error(body, message, graph, part_graph, capfd):
    """It runs in a process of its own."""
    part_graph(body)
    with pytest.raises(ChildProcessError, match=f"METIS failed: {message}.*; method 'propagation' takes less memory"):
        partition(graph, 40)
    assert capfd.readouterr().err == ""


def test_metis_that_is_gone_is_not_waited_for_though_another_process_has_its_files(graph, part_graph, tmp_path):
    heir = tmp_path / "heir"
    write = f"pathlib.Path({str(heir)!r}).write_text(str(pid))"
    part_graph(f"pid = os.fork(); {write} if pid else time.sleep(60); os.kill(os.getpid(), 9)")
    started = time.monotonic()
    try:
        with pytest.raises(ChildProcessError, match="exit code -9"):
            partition(graph, 40)
    finally:
        os.kill(int(heir.read_text()), signal.SIGKILL)
    assert time.monotonic() - started < 30


def test_an_interrupt_ends_metis(graph, part_graph):
    def interrupt(*_):
        raise KeyboardInterrupt

    part_graph("time.sleep(60)")
    children = set(psutil.Process().children())  # such as multiprocessing's own, of other tests
    before = signal.signal(signal.SIGALRM, interrupt)
    started = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.5)
            partition(graph, 40)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - started < 30 and set(psutil.Process().children()) == children


@pytest.mark.parametrize("asked", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_all_processes_of_a_job_leaves_metis_to_its_parent(asked, graph, part_graph):
    part_graph(f"return os.kill(os.getpid(), {int(asked)}) or (0, np.arange(300) % num_parts)")
    assert (partition(graph, 40) == np.arange(300) % 40).all()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it goes on to its end")
def test_metis_ends_with_its_parent(graph, part_graph, tmp_path):
    part_graph(f"pathlib.Path({str(tmp_path / 'child')!r}).write_text(str(os.getpid())) and time.sleep(60)")
    code = (
        "from megagraph.data.coarsen import partition; from megagraph.data.datasets import synthetic_graph; "
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); partition(synthetic_graph(num_nodes=300, seed=0), 40)"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as parent:
        wait_for((tmp_path / "child").is_file)
        wait_for(lambda: (tmp_path / "child").read_text())
        parent.kill()
    child = int((tmp_path / "child").read_text())
    wait_for(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE)


def wait_for(condition):
    deadline = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_no_more_parts_than_nodes_is_fine():
    graph = make_graph(5, [(0, 1), (1, 2)])
    assert coarsen(graph, partition(graph, 5)).num_parts <= 5


@pytest.mark.parametrize("num_parts", [0, 6])
def test_part_counts_are_checked(num_parts):
    with pytest.raises(ValueError, match=f"expected 1 <= num_parts <= 5 nodes, got {num_parts}"):
        partition(make_graph(5, [(0, 1)]), num_parts)


def test_normalized_adjacency_is_the_formula(graph):
    normalized = normalized_adjacency(graph.adjacency)
    np.testing.assert_allclose(normalized.toarray(), dense_normalized(graph.adjacency), rtol=1e-6)
    assert normalized.has_sorted_indices and normalized.dtype == np.float32


def test_super_nodes_are_whole_clusters_and_balanced(graph):
    clusters = partition(graph, 40)
    edges = quotient(graph, clusters)
    merged, between = merge(graph, clusters, edges, 6)
    assert (between.toarray() == quotient(graph, merged).toarray()).all() and between.has_sorted_indices
    assert merged.dtype == np.int32 and np.unique(merged).tolist() == list(range(merged.max() + 1))
    assert 4 <= merged.max() + 1 <= 6
    assert len({*zip(clusters, merged, strict=True)}) == clusters.max() + 1
    assert np.bincount(merged).max() < 1.5 * np.bincount(merged).mean()
    assert merge(graph, clusters, edges, 40) == (clusters, edges)


def test_a_cut_of_the_cluster_graph_counts_edges(graph):
    """Clusters that hang together by many edges are merged, whatever the number of clusters they touch."""
    pairs = [(a, b) for a in range(12) for b in range(a)]
    rng = np.random.default_rng(0)
    edges = [
        (8 * a + rng.integers(8), 8 * b + rng.integers(8)) for a, b in pairs for _ in range(1 + 9 * (a // 6 == b // 6))
    ]
    clusters = np.arange(96) // 8
    graph = make_graph(96, edges)
    merged, _ = merge(graph, clusters, quotient(graph, clusters), 2)
    assert len(np.unique(merged[:48])) == len(np.unique(merged[48:])) == 1


@pytest.mark.parametrize("num_parts", [1, 7, 100])
def test_quotient_counts_edges(graph, num_parts):
    parts = partition(graph, num_parts)
    one_hot = np.eye(parts.max() + 1)[parts]
    np.testing.assert_array_equal(quotient(graph, parts).toarray(), one_hot.T @ graph.adjacency.toarray() @ one_hot)


@pytest.mark.parametrize("count", [1, 3, 100])
def test_the_strongest_entries_of_a_row_or_a_column_are_kept(graph, count):
    matrix = coarsen(graph, partition(graph, 30)).adjacency
    dense = matrix.toarray()
    others = dense - np.diag(np.diag(dense))
    least = np.sort(others, axis=1)[:, ::-1][:, min(count, len(dense)) - 1]
    strong = others >= least[:, None]
    kept = (others > 0) & (strong | strong.T)
    expected = np.where(kept, dense, 0) + np.diag(np.diag(dense))
    got = keep_strongest(matrix, count)
    assert got.has_sorted_indices and ((got > 0) != (got > 0).T).nnz == 0
    assert ((got.toarray() == expected) | (got.toarray() == 0)).all()  # of equal entries some are left out
    assert ((got.toarray() > 0).sum(axis=1) >= np.minimum(count + 1, (dense > 0).sum(axis=1))).all()
    near = nearest_parts(matrix, count + 1)
    for part, row in enumerate(near):
        real = row[row >= 0]
        assert real[0] == part and len(real) == min(count + 1, (dense[part] > 0).sum()) == len(set(real))
        assert (np.diff(others[part, real[1:]]) <= 0).all() and (row[len(real) :] == -1).all()
        assert len(real) == 1 or others[part, real[-1]] >= least[part]


def test_quality_is_what_it_says():
    graph = make_graph(5, [(0, 1), (1, 2), (2, 3), (3, 4)])  # classes 0 1 2 0 1
    parts = np.array([0, 0, 1, 1, 1])
    assert quality(graph, parts) == Quality(parts=2, edge_cut=0.25, balance=1.2, homophily=0.4)
    assert quality(graph, parts, quotient(graph, parts)) == quality(graph, parts)
    assert (
        str(quality(graph, parts)) == "2 clusters, edge cut 25.0%, largest 1.20 times the mean, label homophily 40.0%"
    )
