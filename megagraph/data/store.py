"""Graph store: a folder of arrays that are mapped into memory instead of read, and a header that describes them.

    FOLDER/header.json      version, sizes, of every array its shape, dtype and checksum, and a checksum of its own
           indptr.npy       [V + 1]    int64
           indices.npy      [E]        int32
           features.npy     [V, d_in]  float32 or float16; or features_{indptr,indices,data}.npy, a CSR matrix
           labels.npy       [V]        int64
           {train,val,test}.npy        int64, where the data set has a split of its own
           cache/           what was computed from the graph (megagraph.data.cache)

A store is written into a temporary folder beside it and moved into place when it is complete. Before a number of it is
used, all of them are checked; that they were is remembered until a file changes.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, Literal

import numpy as np
import scipy.sparse as sp
import xxhash

from megagraph import files
from megagraph.data import cache
from megagraph.data.cache import npy_head
from megagraph.data.check import check_arrays
from megagraph.data.datasets import MAX_CLASSES, Graph, Split

_FORMAT = "MegaGraph graph store"
_VERSION = 2
_CHUNK_ROWS = 1 << 16
_CHUNK_BYTES = 1 << 24
_MAX_HEADER_BYTES = 1 << 24
_MAX_SIZE = 1 << 48  # of one dimension
_MAX_IDS = (1 << 31) - 1  # nodes and features
_TICK_NS = 20_000_000  # two changes of a file that are further apart differ in its ctime
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
        digest = xxhash.xxh3_128()
        path = self._folder / f"{name}.npy"
        try:
            with path.open("wb") as file:
                contents = (np.ascontiguousarray(chunk, dtype).reshape(-1).view(np.uint8) for chunk in chunks)
                for data in itertools.chain([np.frombuffer(npy_head(shape, dtype), np.uint8)], contents):
                    file.write(data.data)
                    digest.update(data.data)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            size = math.prod(shape) * dtype.itemsize
            raise OSError(
                f"could not write {path.name} of {size:,} bytes into {path.parent.parent}: {error.strerror}; "
                "make room, or raise the limit on the size of a file (ulimit -f)"
            ) from error
        self._arrays[name] = {
            "shape": [int(size) for size in shape],
            "dtype": dtype.str,
            "xxh3": digest.hexdigest(),
        }

    def finish(self, *, name: str, in_features: int, num_classes: int, **notes: Any) -> None:
        """Write the header, without which the folder is no store; ``notes`` are for ``describe``."""
        header = {"format": _FORMAT, "version": _VERSION, "id": uuid.uuid4().hex, "name": name}
        header |= {"in_features": in_features, "num_classes": num_classes, "notes": notes, "arrays": self._arrays}
        files.write_json(self._folder / "header.json", header)


@contextmanager
def new_store(folder: Path | str) -> Iterator[StoreWriter]:
    """Make a store, or replace one; after an error the previous one is as it was.

    Where ``folder`` is a link, the store is where it points to. The new one is checked before it takes its place.

    Raises:
        FileExistsError: there is something at ``folder`` that this package did not write.
        ValueError: what has been written is no graph.
    """
    folder = Path(os.path.realpath(folder))
    _files_to_replace(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    made, previous = temporary / "made", temporary.with_name(f"{temporary.name}-previous")
    try:
        made.mkdir()
        yield StoreWriter(made)
        try:
            open_store(made)
        except ValueError as error:
            raise ValueError(str(error).replace(str(made), str(folder))) from error
        old = _files_to_replace(folder)  # again: it may have taken hours
        try:
            if folder.exists():
                folder.rename(previous)
            made.rename(folder)
        except BaseException:
            if previous.exists() and not folder.exists():
                previous.rename(folder)
            raise
        files.sync_folder(folder.parent)
        with suppress(OSError):  # what cannot be removed stays
            files.remove(previous, old)
    finally:
        shutil.rmtree(temporary)


def _files_to_replace(folder: Path) -> list[str]:
    """Names of the files of the store at ``folder``, none where it is free or empty."""
    if not os.path.lexists(folder):
        return []
    ours: list[str] = []
    foreign, why = [folder.name], ""
    if folder.is_dir():
        try:
            arrays = _load_header(folder)["arrays"]
            ours = ["header.json", *(f"{name}.npy" for name in arrays), *cache.names(folder)]
            ours += [f"{name}.partial" for name in ours]  # of a process that was killed
        except FileNotFoundError:
            pass
        except ValueError as error:
            why = f" ({error})"
        if ours:
            empty = (path for path in folder.rglob("*") if path.is_dir() and not any(path.iterdir()))
            folders = (path.relative_to(folder).as_posix() for path in empty if path != folder / "cache")
            foreign = sorted({*files.others(folder, ours), *folders})
        else:
            foreign = sorted(path.name for path in folder.iterdir())
    if foreign:
        shown = ", ".join(foreign[:3]) + (f" and {len(foreign) - 3} more" if len(foreign) > 3 else "")
        raise FileExistsError(
            f"expected {folder} to be free, empty or a graph store and nothing else, got {shown}{why}; name another "
            "folder, or take away what is there"
        )
    return ours


def write_store(graph: Graph, folder: Path | str, features: FeatureForm = "same") -> None:
    """Write a graph as a store; ``features`` changes how they are kept.

    Raises:
        ValueError: features too large for fp16, or numbers that are not as ``Graph`` says.
        FileExistsError, OSError: the folder holds something else, or cannot be written.
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
    """The header of a store, with its fields and the sizes of all files checked.

    Raises:
        FileNotFoundError, ValueError: no store, or one that is not as its header says.
    """
    folder = Path(folder)
    header = _load_header(folder)
    for name, array in header["arrays"].items():
        path = folder / f"{name}.npy"
        size = path.stat().st_size if path.is_file() else 0
        if size != (expected := _num_bytes(array)):
            raise ValueError(f"expected {path} of {expected} bytes, got {size}; import the graph again")
    return header


def _num_bytes(array: dict[str, Any]) -> int:
    dtype = np.dtype(array["dtype"])
    return len(npy_head(array["shape"], dtype)) + math.prod(array["shape"]) * dtype.itemsize


def _load_header(folder: Path) -> dict[str, Any]:
    path, what = folder / "header.json", "the header of a graph store"
    if not path.is_file():
        raise FileNotFoundError(f"expected a graph store, got {folder} without header.json")
    if (size := path.stat().st_size) > _MAX_HEADER_BYTES:
        raise ValueError(f"expected {what} of at most {_MAX_HEADER_BYTES} bytes, got {size} in {path}")
    old: dict[str, Any] = {}
    try:
        header = files.read_json(path, what)
    except ValueError:
        with suppress(ValueError):
            old = files.read_json(path, what, by_hand=True)  # that of version 1 had no checksum
        _check_version(folder, old.get("version", _VERSION))
        raise
    if header.get("format") != _FORMAT:
        got = _short(header.get("format"))
        raise ValueError(f"expected {what} with the format {_FORMAT!r}, got {got} in {path}; import the graph again")
    _check_version(folder, header.get("version"))
    _check_header(path, header)
    return header


def _check_version(folder: Path, version: Any) -> None:
    if version != _VERSION:
        raise ValueError(
            f"expected a graph store of version {_VERSION}, got {_short(version)} in {folder}; import it again"
        )


def _check_header(path: Path, header: dict[str, Any]) -> None:
    def expect(right: bool, what: str, got: Any) -> None:
        if not right:
            raise ValueError(f"expected {what} in {path}, got {_short(got)}; import the graph again")

    kinds = {"version": int, "id": str, "name": str, "in_features": int, "num_classes": int, "notes": dict}
    for key, kind in {**kinds, "arrays": dict}.items():
        expect(type(header.get(key)) is kind, f"{key} of type {kind.__name__}", header.get(key))
    for key, most in (("in_features", _MAX_IDS), ("num_classes", MAX_CLASSES)):
        expect(0 <= header[key] <= most, f"{key} in 0..{most}", header[key])
    arrays = header["arrays"]
    sparse, split = "features_indptr" in arrays, "train" in arrays
    needed = {"indptr", "indices", "labels", *(_PARTS if split else ())}
    needed |= {"features_indptr", "features_indices", "features_data"} if sparse else {"features"}
    expect(arrays.keys() == needed, f"the arrays {', '.join(sorted(needed))}", ", ".join(sorted(arrays)))
    for name, array in arrays.items():
        expect(
            type(array) is dict and array.keys() == {"shape", "dtype", "xxh3"}, f"shape, dtype, xxh3 of {name}", array
        )
        expect(array["dtype"] in _DTYPES[name], f"{name} of dtype {' or '.join(_DTYPES[name])}", array["dtype"])
        sizes = array["shape"]
        right = type(sizes) is list and all(type(size) is int and 0 <= size < _MAX_SIZE for size in sizes)
        expect(right and len(sizes) == 1 + (name == "features"), f"the shape of {name}", sizes)
        expect(bool(re.fullmatch("[0-9a-f]{32}", str(array["xxh3"]))), f"the xxh3 of {name}", array["xxh3"])
    shape = {name: array["shape"] for name, array in arrays.items()}
    nodes = shape["indptr"][0] - 1
    expect(1 <= nodes <= _MAX_IDS, f"indptr for 1..{_MAX_IDS} nodes", shape["indptr"])
    fixed = {"labels": [nodes], "features": [nodes, header["in_features"]], "features_indptr": [nodes + 1]}
    fixed["features_data"] = shape.get("features_indices", [])
    for name in fixed.keys() & arrays.keys():
        expect(shape[name] == fixed[name], f"{name} of shape {fixed[name]}", shape[name])


def _short(value: Any) -> str:
    return shown if len(shown := repr(value)) <= 100 else f"{shown[:100]}..."


def open_store(folder: Path | str, fingerprint: str | None = None) -> Graph:
    """Map a store into memory once all of it has been checked; if no file has changed since, that takes no reading.

    Args:
        fingerprint: of the graph that has to be there.

    Raises:
        FileNotFoundError, ValueError: no store, or one with anything in it that is not as it was written.
        OSError: a file cannot be read.
    """
    graph = _open(Path(folder).absolute())
    if fingerprint not in (None, graph.fingerprint()):
        raise ValueError(
            f"expected the graph {fingerprint} in {folder}, got {graph.fingerprint()}: another one has been imported "
            "there since; start again"
        )
    return graph


def _open(folder: Path, *, anew: bool = False) -> Graph:
    header = read_header(folder)
    with ExitStack() as stack:
        opened = {name: stack.enter_context((folder / f"{name}.npy").open("rb")) for name in header["arrays"]}
        arrays = {name: _map(folder / f"{name}.npy", file, header["arrays"][name]) for name, file in opened.items()}
        _check(folder, header, opened, arrays, anew=anew)
    features: Any = arrays.get("features")
    if features is None:
        features = sp.csr_array((len(arrays["indptr"]) - 1, header["in_features"]), dtype=np.float32)
        # the constructor would read them all
        features.data, features.indices, features.indptr = (
            arrays[f"features_{name}"] for name in ("data", "indices", "indptr")
        )
    identity = [[(name, array["xxh3"]) for name, array in sorted(header["arrays"].items())]]
    identity += [header["in_features"], header["num_classes"]]
    return Graph(
        name=header["name"],
        indptr=arrays["indptr"],
        indices=arrays["indices"],
        features=features,
        labels=arrays["labels"],
        num_classes=header["num_classes"],
        split=Split(*(arrays[part] for part in _PARTS)) if "train" in arrays else None,
        store=folder,
        identity=_digest(identity),
    )


def _map(path: Path, file: BufferedReader, array: dict[str, Any]) -> np.ndarray:
    mapped = np.memmap(file, np.uint8, "r")
    dtype = np.dtype(array["dtype"])
    if len(mapped) != _num_bytes(array):
        raise ValueError(f"expected {path} of {_num_bytes(array)} bytes, got {len(mapped)}; import the graph again")
    # a plain array on the map, without memmap's cost at every slice
    return np.ndarray(tuple(array["shape"]), dtype, buffer=mapped, offset=len(npy_head(array["shape"], dtype)))


def _check(
    folder: Path,
    header: dict[str, Any],
    opened: dict[str, BufferedReader],
    arrays: dict[str, np.ndarray],
    *,
    anew: bool,
) -> None:
    """Read all that is open once, unless it is remembered that these files were found right."""

    def stamps() -> dict[str, Any]:
        found = {name: os.fstat(file.fileno()) for name, file in opened.items()}
        by_name = {name: [s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino] for name, s in found.items()}
        return {"header": _digest(header), **by_name}

    before = stamps()
    if not anew and cache.checked(folder) == before:
        return
    settled = max(before[name][2] for name in opened) + _TICK_NS
    if 0 < (left := settled - time.time_ns()) <= _TICK_NS:
        time.sleep(left / 1e9)  # so that what changes from now on has another ctime
    check_arrays(folder, header, opened, arrays)
    if stamps() == before and time.time_ns() >= settled:
        with suppress(OSError):  # the folder may be read-only
            cache.remember(folder, before)


def _digest(values: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(values, sort_keys=True).encode())


def verify_store(folder: Path | str) -> None:
    """Read all of a store: what ``open_store`` checks, now, and that every edge has its reverse.

    Raises:
        FileNotFoundError, ValueError, OSError: as ``open_store``; names the file and what is wrong with it.
    """
    folder = Path(folder).absolute()
    _check_symmetric(folder / "indices.npy", _open(folder, anew=True))


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
    header = read_header(folder)
    arrays = header["arrays"]
    form = np.dtype(arrays["features"]["dtype"]).name if "features" in arrays else "sparse"
    lines = [
        f"{header['name']}: {arrays['labels']['shape'][0]:,} nodes, {arrays['indices']['shape'][0] // 2:,} undirected "
        f"edges, {header['in_features']} features ({form}), {header['num_classes']} classes, "
        f"{'a split of its own' if 'train' in arrays else 'no split of its own'}",
        f"{folder}: {sum(map(_num_bytes, arrays.values())) / 2**30:.2f} GiB in {len(arrays)} files",
    ]
    return "\n".join([*lines, *(f"{key}: {value}" for key, value in header["notes"].items())])
