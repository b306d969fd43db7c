"""Synthetic graphs of millions of nodes, written as a store: hubs, blocks that a partition can find, classes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import scipy.sparse as sp

from megagraph.data.store import new_store

BLOCK_NODES = 300
_SIZE_SPREAD = 0.2  # blocks differ from their mean size by up to this part
_SHARES = {"block": 0.6, "near": 0.2, "far": 0.2}
_NEAR_BLOCKS = 16
# largest propensities within a block and near it: a hub has its edges everywhere, or it would be joined to all of its
# block many times over
_LARGEST = {"block": 8.0, "near": 64.0}
_PARETO_SHAPE = 1.5  # degrees fall with the power -2.5
_CLASS_SIGNAL = 1.2  # distance of class means from the origin, in standard deviations of one feature
_CHUNK_EDGES = 1 << 24
_CHUNK_NODES = 1 << 16
_MAX_DEGREE = 100


def generate(folder: Path | str, *, nodes: int, edges: int, features: int, classes: int, seed: int = 0) -> None:
    """Write a graph with exactly ``edges`` undirected edges, none twice, no loops; the same for the same arguments.

    A degree-corrected block model on three scales. Blocks of about 300 nodes follow each other, and a class is a run of
    blocks. An edge starts at a node drawn by its propensity (Pareto, exponent 2.5) and ends, drawn by propensity again,
    in the same block (60 %), among the 16 blocks on either side (20 %) or anywhere (20 %). Features are Gaussian
    around a class mean, so noisy that they need the neighbourhood's to tell classes well. Node numbers are shuffled.
    The header notes the number of edges between blocks: the cut that a partition should find.

    Memory: about 28 bytes an edge; features go to disk in chunks.

    Raises:
        ValueError: sizes that leave no room for the blocks or the edges.
        FileExistsError, OSError: as ``new_store``.
    """
    for name, value in (("nodes", nodes), ("features", features), ("classes", classes)):
        if value >= 1 << 31:
            raise ValueError(f"expected {name} below 2^31, got {value}")
    if seed < 0:
        raise ValueError(f"expected a seed of at least 0, got {seed}")
    most = nodes * min(_MAX_DEGREE // 2, (nodes - 1) // 8)
    if classes < 2 or nodes < 8 * classes or features < 1:
        raise ValueError(
            f"expected classes >= 2, nodes >= 8 * classes and features >= 1, got {classes}, {nodes} and {features}"
        )
    if not 1 <= edges <= most:
        raise ValueError(f"expected 1..{most} edges on {nodes} nodes, got {edges}; blocks have no room for more")
    rng = np.random.default_rng(seed)
    num_blocks = max(round(nodes / BLOCK_NODES), 2 * classes)
    size = rng.uniform(1 - _SIZE_SPREAD, 1 + _SIZE_SPREAD, num_blocks)
    starts = np.rint(np.concatenate([[0], np.cumsum(size) / size.sum()]) * nodes).astype(np.int64)
    block = np.repeat(np.arange(num_blocks, dtype=np.int32), np.diff(starts))
    new_id = rng.permutation(nodes).astype(np.int32)
    keys = _edge_keys(starts, block, new_id, edges, rng)

    block_of = np.empty_like(block)
    block_of[new_id] = block
    cut = sum(
        int((block_of[part // nodes] != block_of[part % nodes]).sum())
        for part in np.split(keys, range(_CHUNK_EDGES, len(keys), _CHUNK_EDGES))
    )
    indptr, indices = _both_directions(keys, nodes)
    del keys
    labels = block_of.astype(np.int64) * classes // num_blocks
    with new_store(folder) as writer:
        writer.add("indptr", indptr)
        writer.add("indices", indices)
        del indices
        writer.add("labels", labels)
        chunks = _features(labels, features, classes, rng)
        writer.stream("features", (nodes, features), np.dtype("<f4"), chunks)
        writer.finish(
            name="generated",
            in_features=features,
            num_classes=classes,
            seed=seed,
            blocks=num_blocks,
            edges_between_blocks=cut,
        )


def _edge_keys(
    starts: np.ndarray, block: np.ndarray, new_id: np.ndarray, edges: int, rng: np.random.Generator
) -> np.ndarray:
    """Ascending keys u * V + v, u < v, of unique edges; ``starts`` [blocks + 1] is where blocks begin."""
    nodes, num_blocks = len(block), len(starts) - 1
    propensity = np.minimum((1 - rng.random(nodes)) ** (-1 / _PARETO_SHAPE), np.sqrt(nodes))
    weights = {scale: np.minimum(propensity, _LARGEST.get(scale, np.inf)) for scale in _SHARES}
    mass = {scale: np.concatenate([[0.0], np.cumsum(weight)]) for scale, weight in weights.items()}
    reach = {"block": 0, "near": _NEAR_BLOCKS, "far": num_blocks}

    def draw(count: int) -> np.ndarray:
        """Keys of ``count`` edges, without those from a node to itself."""
        found = []
        counts = rng.multinomial(count, list(_SHARES.values()))
        for scale, number in zip(_SHARES, counts, strict=True):
            weight, total = weights[scale], mass[scale]
            row = np.repeat(np.arange(nodes, dtype=np.int32), rng.multinomial(number, weight / total[-1]))
            blocks = block[row]
            low = total[starts[np.maximum(blocks - reach[scale], 0)]]
            point = total[starts[np.minimum(blocks + reach[scale] + 1, num_blocks)]]
            point -= low
            point *= rng.random(number)
            point += low
            col = np.minimum(np.searchsorted(total, point, side="right") - 1, nodes - 1)
            u, v = new_id[row], new_id[col]
            key = np.minimum(u, v).astype(np.int64) * nodes + np.maximum(u, v)
            found.append(key[u != v])
        return np.concatenate(found)

    keys = np.empty(0, np.int64)
    missing = edges
    while missing > 0:
        wanted = missing + missing // 8 + 16  # some will be there already
        found = [draw(min(_CHUNK_EDGES, wanted - start)) for start in range(0, wanted, _CHUNK_EDGES)]
        keys = np.concatenate([keys, *found])
        del found
        keys.sort()
        keys = keys[np.concatenate([[True], keys[1:] != keys[:-1]])]
        missing = edges - len(keys)
    keep = np.ones(len(keys), bool)
    keep[rng.choice(len(keys), -missing, replace=False)] = False
    return keys[keep]


def _both_directions(keys: np.ndarray, nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Ascending keys of edges -> indptr, indices of the graph in both directions."""
    above = sp.csr_array(
        (
            np.ones(len(keys), bool),
            (keys % nodes).astype(np.int32),
            np.searchsorted(keys, np.arange(nodes + 1) * nodes),
        ),
        shape=(nodes, nodes),
    )
    both = above + above.T.tocsr()
    return both.indptr.astype(np.int64), both.indices.astype(np.int32, copy=False)


def _features(labels: np.ndarray, features: int, classes: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    means = rng.standard_normal((classes, features), np.float32) * np.float32(_CLASS_SIGNAL / np.sqrt(features))
    for start in range(0, len(labels), _CHUNK_NODES):
        part = labels[start : start + _CHUNK_NODES]
        yield means[part] + rng.standard_normal((len(part), features), np.float32)
