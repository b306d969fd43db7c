"""Graph store: a folder of arrays that are mapped into memory instead of read, and a header that describes them.

    FOLDER/header.json      version, sizes, and of every array its shape, dtype, bytes and sha256
           indptr.npy       [V + 1]    int64
           indices.npy      [E]        int32
           features.npy     [V, d_in]  float32 or float16; or features_{indptr,indices,data}.npy, a CSR matrix
           labels.npy       [V]        int64
           {train,val,test}.npy        int64, where the data set has a split of its own
           cache/           what was computed from the graph (megagraph.data.coarsen)

A store is written into a temporary folder beside it and moved into place when it is complete.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import scipy.sparse as sp

from megagraph.data.datasets import Graph, Split, check_finite

_VERSION = 1
_CHUNK_ROWS = 1 << 16
_CHUNK_BYTES = 1 << 24
_PARTS = ("train", "val", "test")
_DTYPES = {
    "indptr": ("<i8",),
    "indices": ("<i4",),
    "labels": ("<i8",),
    **{part: ("<i8",) for part in _PARTS},
    "features": ("<f4", "<f2"),
    "features_indptr": ("<i4", "<i8"),
    "features_indices": ("<i4", "<i8"),
    "features_data": ("<f4",),
}

FeatureForm = Literal["same", "fp32", "fp16", "sparse"]


class StoreWriter:
    """Adds arrays to a store that is being made, and keeps their checksums."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._arrays: dict[str, dict[str, Any]] = {}

    def add(self, name: str, array: np.ndarray) -> None:
        """Write an array, its dtype being one that the store has for it."""
        dtype = array.dtype.newbyteorder("<")
        assert dtype.str in _DTYPES[name], (name, dtype)
        rows = max(_CHUNK_BYTES * len(array) // max(array.nbytes, 1), 1)
        chunks = (array[start : start + rows] for start in range(0, len(array), rows))
        self.stream(name, array.shape, dtype, chunks)

    def stream(self, name: str, shape: tuple[int, ...], dtype: np.dtype, chunks: Iterable[np.ndarray]) -> None:
        """Write an array that comes in chunks of rows.

        Raises:
            OSError: the disk is full, or a file may not grow this large.
        """
        digest = hashlib.sha256()
        path = self._folder / f"{name}.npy"
        try:
            with path.open("wb") as file:
                described = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
                head = io.BytesIO()
                np.lib.format.write_array_header_2_0(head, described)
                contents = (np.ascontiguousarray(chunk, dtype).reshape(-1).view(np.uint8).data for chunk in chunks)
                for data in itertools.chain([head.getbuffer()], contents):
                    file.write(data)
                    digest.update(data)
        except OSError as error:
            size = int(np.prod(shape)) * dtype.itemsize
            raise OSError(
                f"could not write {path.name} of {size:,} bytes into {path.parent.parent}: {error.strerror}; "
                "make room, or raise the limit on the size of a file (ulimit -f)"
            ) from error
        self._arrays[name] = {
            "shape": list(shape),
            "dtype": dtype.str,
            "bytes": path.stat().st_size,
            "sha256": digest.hexdigest(),
        }

    def finish(self, *, name: str, in_features: int, num_classes: int, **notes: Any) -> None:
        """Write the header, without which the folder is no store; ``notes`` are for ``describe``."""
        header = {"version": _VERSION, "name": name, "in_features": in_features, "num_classes": num_classes}
        header |= {"notes": notes, "arrays": self._arrays}
        (self._folder / "header.json").write_text(json.dumps(header, indent=1) + "\n")


@contextmanager
def new_store(folder: Path | str) -> Iterator[StoreWriter]:
    """Make a store, or replace one; after an error the previous one is as it was.

    Raises:
        FileExistsError: there is something else at ``folder``.
    """
    folder = Path(folder).absolute()
    if folder.exists() and not (folder / "header.json").is_file():
        raise FileExistsError(f"expected {folder} to be free or a graph store, got something else; name another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    made, previous = temporary / "made", temporary.with_name(f"{temporary.name}-previous")
    try:
        made.mkdir()
        yield StoreWriter(made)
        if folder.exists():
            folder.rename(previous)
        try:
            made.rename(folder)
        except OSError:
            if previous.exists():
                previous.rename(folder)
            raise
        shutil.rmtree(previous, ignore_errors=True)
    finally:
        shutil.rmtree(temporary)


def write_store(graph: Graph, folder: Path | str, features: FeatureForm = "same") -> None:
    """Write a graph as a store; ``features`` changes how they are kept.

    Raises:
        ValueError: features too large for fp16.
        FileExistsError, OSError: the folder is taken, or cannot be written.
    """
    with new_store(folder) as writer:
        writer.add("indptr", graph.indptr)
        writer.add("indices", graph.indices)
        writer.add("labels", graph.labels)
        _add_features(writer, graph, features)
        if graph.split is not None:
            for part in _PARTS:
                writer.add(part, getattr(graph.split, part))
        writer.finish(name=graph.name, in_features=graph.in_features, num_classes=graph.num_classes)


def _add_features(writer: StoreWriter, graph: Graph, form: FeatureForm) -> None:
    if form == "sparse" or (form == "same" and isinstance(graph.features, sp.csr_array)):
        sparse = sp.csr_array(graph.features, dtype=np.float32)
        sparse.sum_duplicates()  # sorts every row too
        for name in ("indptr", "indices", "data"):
            writer.add(f"features_{name}", getattr(sparse, name))
        return
    given = graph.features.dtype if form == "same" else {"fp32": np.float32, "fp16": np.float16}[form]
    dtype = np.dtype(given).newbyteorder("<")

    def chunks() -> Iterator[np.ndarray]:
        for start in range(0, graph.num_nodes, _CHUNK_ROWS):
            nodes = np.arange(start, min(start + _CHUNK_ROWS, graph.num_nodes))
            rows = np.empty((len(nodes), graph.in_features), np.float32)
            graph.read_features(nodes, rows)
            largest = np.abs(rows).max(initial=0)
            if dtype == np.float16 and largest > np.finfo(np.float16).max:
                raise ValueError(f"expected features of at most 65504 for fp16, got {largest:g}; keep fp32")
            yield rows.astype(dtype)

    writer.stream("features", (graph.num_nodes, graph.in_features), dtype, chunks())


def read_header(folder: Path | str) -> dict[str, Any]:
    """The header of a store, with the sizes of all files checked."""
    folder = Path(folder)
    try:
        header = json.loads((folder / "header.json").read_text())
        version, arrays, _ = header["version"], header["arrays"], header["notes"]
    except FileNotFoundError as error:
        raise FileNotFoundError(f"expected a graph store, got {folder} without header.json") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"expected the header of a graph store, got {folder}/header.json: {error!r}") from error
    if version != _VERSION:
        raise ValueError(f"expected a graph store of version {_VERSION}, got {version} in {folder}; import it again")
    for name, array in arrays.items():
        path = folder / f"{name}.npy"
        size = path.stat().st_size if path.is_file() else 0
        if size != array["bytes"]:
            raise ValueError(f"expected {path} of {array['bytes']} bytes, got {size}; import the graph again")
    return header


def open_store(folder: Path | str) -> Graph:
    """Map a store into memory; checks header, sizes, dtypes and the ends of pointers, and reads no more than that.

    Raises:
        FileNotFoundError, ValueError: no store, or one that is not as its header says.
    """
    folder = Path(folder).absolute()
    header = read_header(folder)
    arrays = {name: _map(folder, name, expected) for name, expected in header["arrays"].items()}
    sparse = "features_indptr" in arrays
    needed = {"indptr", "indices", "labels"}
    needed |= {"features_indptr", "features_indices", "features_data"} if sparse else {"features"}
    if not needed <= set(arrays):
        raise ValueError(f"expected {folder} to hold {', '.join(sorted(needed))}, got {', '.join(sorted(arrays))}")
    _check_ends(folder, arrays["indptr"], arrays["indices"], "indptr")
    features: Any = arrays.get("features")
    if sparse:
        _check_ends(folder, arrays["features_indptr"], arrays["features_indices"], "features_indptr")
        parts = tuple(arrays[f"features_{name}"] for name in ("data", "indices", "indptr"))
        features = sp.csr_array((len(arrays["features_indptr"]) - 1, header["in_features"]), dtype=np.float32)
        features.data, features.indices, features.indptr = parts  # the constructor would read them all
    split = Split(*(arrays[part] for part in _PARTS)) if all(part in arrays for part in _PARTS) else None
    return Graph(
        name=header["name"],
        indptr=arrays["indptr"],
        indices=arrays["indices"],
        features=features,
        labels=arrays["labels"],
        num_classes=header["num_classes"],
        split=split,
        store=folder,
    )


def _map(folder: Path, name: str, expected: dict[str, Any]) -> np.ndarray:
    path = folder / f"{name}.npy"
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    allowed = _DTYPES[name]
    if array.dtype.str != expected["dtype"] or array.dtype.str not in allowed or list(array.shape) != expected["shape"]:
        raise ValueError(
            f"expected {path} of dtype {' or '.join(allowed)} and shape {expected['shape']}, "
            f"got {array.dtype.str} and {list(array.shape)}; import the graph again"
        )
    return np.asarray(array)  # the map itself, without memmap's cost at every slice


def _check_ends(folder: Path, indptr: np.ndarray, indices: np.ndarray, name: str) -> None:
    if len(indptr) < 2 or indptr[0] != 0 or indptr[-1] != len(indices):
        ends = f"{indptr[0]}..{indptr[-1]}" if len(indptr) else "nothing"
        raise ValueError(
            f"expected {folder}/{name}.npy to go from 0 to {len(indices)}, got {ends}; import the graph again"
        )


def verify_store(folder: Path | str) -> None:
    """Read all of a store: checksums, ranges and the order of neighbours, and that every edge has its reverse.

    Raises:
        ValueError: names the file and what is wrong with it.
    """
    folder = Path(folder)
    graph = open_store(folder)
    for name, expected in read_header(folder)["arrays"].items():
        digest = hashlib.sha256()
        with (folder / f"{name}.npy").open("rb") as file:
            while data := file.read(_CHUNK_BYTES):
                digest.update(data)
        if digest.hexdigest() != expected["sha256"]:
            raise ValueError(
                f"expected {folder}/{name}.npy with sha256 {expected['sha256']}, got {digest.hexdigest()}; "
                "import the graph again"
            )
    _check_rows(folder / "indices.npy", graph.indptr, graph.indices, graph.num_nodes, loops=False)
    _check_symmetric(folder / "indices.npy", graph)
    if isinstance(graph.features, sp.csr_array):
        rows = (graph.features.indptr, graph.features.indices)
        _check_rows(folder / "features_indices.npy", *rows, graph.in_features, loops=True)
        check_finite(graph.features)
        return
    for start in range(0, graph.num_nodes, _CHUNK_ROWS):
        check_finite(graph.features[start : start + _CHUNK_ROWS], start)


def _check_rows(path: Path, indptr: np.ndarray, indices: np.ndarray, num_columns: int, *, loops: bool) -> None:
    """Columns within range and ascending in every row; ``loops``: a row may name itself."""
    for first in range(0, len(indptr) - 1, _CHUNK_ROWS):
        ends = indptr[first : first + _CHUNK_ROWS + 1]
        size = np.diff(ends)
        if size.min() < 0:
            raise ValueError(f"expected the row starts of {path} to ascend, got a row of {size.min()}; import it again")
        columns = indices[ends[0] : ends[-1]]
        if not len(columns):
            continue
        if columns.min() < 0 or columns.max() >= num_columns:
            raise ValueError(f"expected {path} in 0..{num_columns - 1}, got {columns.min()}..{columns.max()}")
        row = np.repeat(np.arange(first, first + len(size)), size)
        wrong = (row[1:] == row[:-1]) & (columns[1:] <= columns[:-1])
        if wrong.any():
            raise ValueError(f"expected ascending columns, got others in row {row[wrong.argmax()]} of {path}")
        if not loops and (row == columns).any():
            raise ValueError(f"expected no self loops, got one in row {row[(row == columns).argmax()]} of {path}")


def _check_symmetric(path: Path, graph: Graph) -> None:
    """Sums over the neighbours of every node, once by rows and once by columns, of random numbers mod 2^64."""
    key = np.random.default_rng(0).integers(1 << 62, size=graph.num_nodes, dtype=np.uint64)
    by_row, by_column = (np.zeros(graph.num_nodes, np.uint64) for _ in range(2))
    for first in range(0, graph.num_nodes, _CHUNK_ROWS):
        ends = graph.indptr[first : first + _CHUNK_ROWS + 1]
        size = np.diff(ends)
        columns = graph.indices[ends[0] : ends[-1]]
        row = np.repeat(np.arange(first, first + len(size)), size)
        np.add.at(by_row, row, key[columns])
        np.add.at(by_column, columns, key[row])
    if (by_row != by_column).any():
        node = int((by_row != by_column).argmax())
        raise ValueError(f"expected both directions of every edge in {path}, got others at node {node}")


def describe(folder: Path | str) -> str:
    """A few lines about a store, from its header."""
    folder = Path(folder)
    header, graph = read_header(folder), open_store(folder)
    size = sum(array["bytes"] for array in header["arrays"].values())
    form = "sparse" if isinstance(graph.features, sp.csr_array) else str(graph.features.dtype)
    lines = [
        f"{graph.name}: {graph.num_nodes:,} nodes, {graph.num_edges // 2:,} undirected edges, "
        f"{graph.in_features} features ({form}), {graph.num_classes} classes, "
        f"{'no split of its own' if graph.split is None else 'a split of its own'}",
        f"{folder}: {size / 2**30:.2f} GiB in {len(header['arrays'])} files",
    ]
    return "\n".join([*lines, *(f"{key}: {value}" for key, value in header["notes"].items())])


def save_array(path: Path, array: np.ndarray) -> None:
    """Write an array so that a reader sees all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".npy", delete=False) as file:
        try:
            np.save(file, array)
            file.close()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
