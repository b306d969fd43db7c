"""Graph store: a folder of arrays that are mapped into memory instead of read, and a header that describes them.

    FOLDER/header.json      version, sizes, of every array its shape, dtype and checksum, and a checksum of its own
           indptr.npy       [V + 1]    int64
           indices.npy      [E]        int32
           features.npy     [V, d_in]  float32 or float16; or features_{indptr,indices,data}.npy, a CSR matrix
           labels.npy       [V]        int64; of several labels a node [V, C] int8
           {train,val,test}.npy        int64, where the data set has a split of its own
           ids.npy      [n]        uint8, UTF-8, and ids_indptr.npy [V + 1] int64, of a graph from tables
           cache/           what was computed from the graph (megagraph.data.cache)

A store is written into a temporary folder beside it and moved into place when it is complete. Before a number of it is
used, all of them are checked; that they were is remembered until a file changes.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import xxhash

from megagraph import files
from megagraph.data import cache
from megagraph.data.cache import npy_head
from megagraph.data.check import check_arrays
from megagraph.data.graph import PARTS, Graph, Split
from megagraph.data.header import DTYPES, load_header, names_in, num_bytes, read_header, write_header
from megagraph.data.names import Ids, Names, Vocabulary
from megagraph.data.options import FeatureForm
from megagraph.progress import Progress

_CHUNK_ROWS = 1 << 16
_CHUNK_BYTES = 1 << 24
_TICK_NS = 20_000_000  # two changes of a file that are further apart differ in its ctime


class StoreWriter:
    """Adds arrays to a store that is being made, and keeps their checksums."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._arrays: dict[str, dict[str, Any]] = {}

    def add(self, name: str, array: np.ndarray) -> None:
        """Write an array, its dtype being one that the store has for it."""
        dtype = array.dtype.newbyteorder("<")
        assert dtype.str in DTYPES[name], (name, dtype)
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

    def finish(
        self, *, name: str, in_features: int, num_classes: int, names: Vocabulary | None = None, **notes: Any
    ) -> None:
        """Write the header, without which the folder is no store; ``notes`` are for ``describe``."""
        header = {"name": name, "in_features": in_features, "num_classes": num_classes, "notes": notes}
        if names is not None:
            header["names"] = asdict(Vocabulary(classes=names.classes, columns=names.columns))
        write_header(self._folder, header | {"arrays": self._arrays})


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
            arrays = load_header(folder)["arrays"]
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
    """Write a graph as a store, a folder that ``--dataset`` takes.

    Args:
        graph: see [megagraph.Graph][].
        folder: of the store; one that is there already is replaced once the new one is complete.
        features: how to keep them: ``"same"``, ``"fp32"``, ``"fp16"`` or ``"sparse"``.

    Raises:
        ValueError: features too large for fp16, or numbers that are not as ``Graph`` says.
        FileExistsError, OSError: the folder holds something else, or cannot be written.

    Examples:
        >>> data = Data(x=torch.randn(3, 8), edge_index=torch.tensor([[0, 1], [1, 2]]), y=torch.tensor([0, 1, -1]))
        >>> write_store(mg.Graph.from_data(data), "graph", features="fp16")
        >>> open_store("graph").features.dtype
        dtype('float16')
    """
    with new_store(folder) as writer:
        writer.add("indptr", graph.indptr)
        writer.add("indices", graph.indices)
        writer.add("labels", graph.labels)
        _add_features(writer, graph, features)
        if graph.split is not None:
            for part in PARTS:
                writer.add(part, getattr(graph.split, part))
        if graph.names is not None:
            writer.add("ids_indptr", graph.names.ids.starts)
            writer.add("ids", graph.names.ids.letters)
        writer.finish(name=graph.name, in_features=graph.in_features, num_classes=graph.num_classes, names=graph.names)


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
        starts = range(0, graph.num_nodes, _CHUNK_ROWS)
        for start in Progress(starts, "features to disk", len(starts), "chunks"):
            nodes = np.arange(start, min(start + _CHUNK_ROWS, graph.num_nodes))
            rows = np.empty((len(nodes), graph.in_features), np.float32)
            graph.read_features(nodes, rows)
            largest = np.abs(rows).max(initial=0)
            if dtype == np.float16 and largest > np.finfo(np.float16).max:
                raise ValueError(f"expected features of at most 65504 for fp16, got {largest:g}; keep fp32")
            yield rows.astype(dtype)

    writer.stream("features", (graph.num_nodes, graph.in_features), dtype, chunks())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StoredGraph(Graph):
    """A graph whose arrays are mapped from the folder ``store`` and stay on disk until they are read.

    The store has checked them. A process that is sent the graph maps them again, and is sent what was replaced since.

    Args:
        opened: the fields of ``Graph`` as the store has them.
    """

    store: Path
    identity: str
    opened: dict[str, Any] = field(repr=False)

    def _replaced(self) -> dict[str, Any]:
        return {name: own for name, given in self.opened.items() if (own := getattr(self, name)) is not given}

    def _check_values(self) -> None:
        if self._replaced().keys() & {"labels", "num_classes", "split"}:
            Graph._check_values(self)  # a class with slots has no super()

    def fingerprint(self) -> str:
        """Fingerprint from the checksums in the header, whatever was replaced since; reads nothing."""
        return self.identity

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (self.store, self.identity, self._replaced())


def _reopened(store: Path, identity: str, replaced: dict[str, Any]) -> StoredGraph:
    return replace(open_store(store, identity), **replaced)


def open_store(folder: Path | str, fingerprint: str | None = None) -> StoredGraph:
    """Map a store into memory once all of it has been checked; if no file has changed since, that takes no reading.

    Args:
        folder: of the store.
        fingerprint: of the graph that has to be there.

    Returns:
        a [megagraph.Graph][] whose arrays stay on disk until they are read.

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


def _open(folder: Path, *, anew: bool = False) -> StoredGraph:
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
    names = None
    if "names" in header:
        known = names_in(header, folder)
        names = Names(ids=Ids(arrays["ids_indptr"], arrays["ids"]), classes=known.classes, columns=known.columns)
    fields = {
        "name": header["name"],
        "names": names,
        "indptr": arrays["indptr"],
        "indices": arrays["indices"],
        "features": features,
        "labels": arrays["labels"],
        "num_classes": header["num_classes"],
        "split": Split(*(arrays[part] for part in PARTS)) if "train" in arrays else None,
    }
    return StoredGraph(**fields, store=folder, identity=_digest(identity), opened=fields)


def _map(path: Path, file: BufferedReader, array: dict[str, Any]) -> np.ndarray:
    mapped = np.memmap(file, np.uint8, "r")
    dtype = np.dtype(array["dtype"])
    if len(mapped) != num_bytes(array):
        raise ValueError(f"expected {path} of {num_bytes(array)} bytes, got {len(mapped)}; import the graph again")
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
