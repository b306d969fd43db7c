"""One pass over the arrays of a graph store, before any number in them is used: checksums, ranges and order.

Files are read in chunks, not mapped: what the disk cannot give is an OSError then, and the pass takes no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from megagraph.data.cache import npy_head
from megagraph.data.graph import first_infinite

_CHUNK_BYTES = 1 << 20

_Rule = Callable[[int, np.ndarray], None]  # position of the first entry, some entries -> raises what is wrong


def check_arrays(
    folder: Path, header: dict[str, Any], opened: Mapping[str, BufferedReader], arrays: Mapping[str, Any]
) -> None:
    """Read all of a store once.

    Args:
        opened: the files of ``header``, by name.
        arrays: the same, mapped.

    Raises:
        ValueError: names the file and what is wrong with it.
        OSError: a file cannot be read.
    """
    nodes = len(arrays["indptr"]) - 1
    for name in sorted(header["arrays"], key=lambda name: not name.endswith("indptr")):  # others need the row starts
        path = folder / f"{name}.npy"
        rule: _Rule
        if name in ("indptr", "features_indptr", "ids_indptr"):
            of = "ids" if name == "ids_indptr" else name.replace("indptr", "indices")
            rule = _starts(path, arrays[name], len(arrays[of]))
        elif name == "indices":
            rule = _columns(path, arrays["indptr"], nodes, loops=False)
        elif name == "features_indices":
            rule = _columns(path, arrays["features_indptr"], header["in_features"], loops=True)
        elif name == "features":
            rule = _finite(path, lambda entry: divmod(entry, header["in_features"]))
        elif name == "features_data":
            rule = _finite(path, lambda entry: _row_and_column(arrays, entry))
        elif name == "ids":
            rule = _anything
        elif name == "labels":
            rule = _range(path, -1, 1 if arrays[name].ndim == 2 else header["num_classes"] - 1)
        else:
            rule = _range(path, 0, nodes - 1)
        _read(path, opened[name], header["arrays"][name], rule)


def _read(path: Path, file: BufferedReader, expected: dict[str, Any], rule: _Rule) -> None:
    dtype = np.dtype(expected["dtype"])
    head = npy_head(tuple(expected["shape"]), dtype)
    file.seek(0)
    if (got := file.read(len(head))) != head:
        raise ValueError(f"expected {path} to begin with {head!r}, got {got!r}; import the graph again")
    digest = xxhash.xxh3_128(head)
    chunk = np.empty(_CHUNK_BYTES // dtype.itemsize, dtype)
    as_bytes, first = memoryview(chunk.view(np.uint8)), 0  # type: ignore[arg-type]  # numpy's stubs
    while size := file.readinto(as_bytes):
        digest.update(as_bytes[:size])
        entries = chunk[: size // dtype.itemsize]
        if len(entries):
            rule(first, entries)
        first += len(entries)
    if digest.hexdigest() != expected["xxh3"]:
        raise ValueError(
            f"expected {path} with the checksum {expected['xxh3']}, got {digest.hexdigest()}: it is damaged or has "
            "changed; import the graph again"
        )


def _anything(_: int, entries: np.ndarray) -> None:
    """The rule that takes anything: entries are read for the checksum alone."""


def _range(path: Path, low: int, high: int) -> _Rule:
    def rule(_: int, entries: np.ndarray) -> None:
        if not low <= entries.min() <= entries.max() <= high:
            raise ValueError(
                f"expected {path} in {low}..{high}, got {entries.min()}..{entries.max()}; import the graph again"
            )

    return rule


def _starts(path: Path, starts: np.ndarray, stop: int) -> _Rule:
    if starts[0] != 0 or starts[-1] != stop:
        raise ValueError(f"expected {path} to go from 0 to {stop}, got {starts[0]}..{starts[-1]}; import it again")
    previous = 0

    def rule(first: int, entries: np.ndarray) -> None:
        nonlocal previous
        falls = np.flatnonzero(entries[1:] < entries[:-1]) + 1
        if entries[0] < previous or len(falls):
            at = first + int(falls[0]) if entries[0] >= previous else first
            raise ValueError(f"expected row starts that ascend, got a smaller one at {at} of {path}; import it again")
        previous = int(entries[-1])

    return rule


def _columns(path: Path, starts: np.ndarray, num_columns: int, *, loops: bool) -> _Rule:
    """A rule: columns are in range and ascend in every row, own ones only with ``loops``; row starts are right."""
    from megagraph.data.traversal import misplaced  # numba takes a second to import

    row, previous = 0, -1

    def rule(first: int, entries: np.ndarray) -> None:
        nonlocal row, previous
        row, at = misplaced(starts, entries, first, row, previous, num_columns, loops)
        if at >= 0:
            raise ValueError(
                f"expected the columns of a row in 0..{num_columns - 1}, ascending{'' if loops else ', none its own'}, "
                f"got {entries[at]} in row {row} of {path}; import the graph again"
            )
        previous = int(entries[-1])

    return rule


def _finite(path: Path, place: Callable[[int], tuple[int, int]]) -> _Rule:
    def rule(first: int, entries: np.ndarray) -> None:
        if (at := first_infinite(entries)) is not None:
            node, feature = place(first + at)
            raise ValueError(
                f"expected finite features, got {entries[at]} in feature {feature} of node {node} of {path}; clean it "
                "and import the graph again"
            )

    return rule


def _row_and_column(arrays: Mapping[str, np.ndarray], entry: int) -> tuple[int, int]:
    row = np.searchsorted(arrays["features_indptr"], entry, side="right") - 1
    return int(row), int(arrays["features_indices"][entry])
