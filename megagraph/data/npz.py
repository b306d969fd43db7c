"""A graph in an ``.npz`` file."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import psutil
import scipy.sparse as sp

from megagraph import files
from megagraph.data.graph import Graph, check_unweighted


def load_npz(path: Path) -> Graph:
    """The graph of a file with CSR matrices adj and attr (``adj_data``, ``adj_indices``, ``adj_indptr``, ``adj_shape``,
    ...) and integer ``labels``, as ``torch_geometric.io.read_npz`` takes it.

    Features keep their values; PyG makes those above 0 ones.

    Raises:
        FileNotFoundError, ValueError: no such file, or one that is damaged; names it.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"expected an .npz file, got {path}, which does not exist or is no file{files.meant(path)}"
        )
    values = _read_npz(path)
    try:
        adjacency, x = _csr(values, "adj", np.float64), _csr(values, "attr", np.float32)
        nodes = x.shape[0]
        if adjacency.shape != (nodes, nodes):
            got = list(adjacency.shape)
            raise ValueError(f"expected adj of shape [{nodes}, {nodes}], as attr has {nodes} rows, got {got}")
        check_unweighted("adj_data", adjacency.data)
        _check_memory(4 * nodes * x.shape[1], f"features of shape {list(x.shape)}")
        edge_index = np.stack(adjacency.tocoo().coords).astype(np.int64)
        return Graph.from_arrays(path.stem, x.toarray(), edge_index, values["labels"])
    except (ValueError, MemoryError) as error:
        raise ValueError(f"{path}: {error or 'it takes more memory than there is'}") from error


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    keys = [f"{key}_{part}" for key in ("adj", "attr") for part in ("data", "indices", "indptr", "shape")]
    values = {}
    try:
        with zipfile.ZipFile(path) as archive:
            _check_memory(sum(entry.file_size for entry in archive.infolist()), "arrays")
            for key in (*keys, "labels"):
                with archive.open(f"{key}.npy") as file:
                    values[key] = np.lib.format.read_array(file, allow_pickle=False)
    except Exception as error:  # numpy, zipfile and zlib raise a dozen kinds for a damaged file
        why = error.args[0] if isinstance(error, KeyError) else str(error) or type(error).__name__
        raise ValueError(
            f"expected {path} to hold adj_data, adj_indices, adj_indptr, adj_shape, the same four of attr, and "
            f"labels; {why}"
        ) from error
    return values


def _check_memory(needed: int, what: str) -> None:
    if needed > (total := psutil.virtual_memory().total):
        raise ValueError(f"expected {what} that fit into {total:,} bytes of memory, got {needed:,} bytes")


def _csr(values: dict[str, np.ndarray], key: str, dtype: type) -> sp.csr_array:
    for part in ("data", "indices", "indptr", "shape"):
        array = values[f"{key}_{part}"]
        kinds, what = ("biuf", "numbers") if part == "data" else ("iu", "integers")
        if array.dtype.kind not in kinds or array.ndim != 1:
            raise ValueError(f"expected {key}_{part} of {what}, [n], got {array.dtype} {list(array.shape)}")
    sizes = values[f"{key}_shape"].tolist()
    if len(sizes) != 2 or not all(0 <= size < 1 << 31 for size in sizes):
        raise ValueError(f"expected two sizes below 2^31 in {key}_shape, got {sizes[:3]}")
    with np.errstate(over="ignore"):  # what is too large is infinite then, and refused
        data: np.ndarray = values[f"{key}_data"].astype(dtype)
    indices, indptr = (values[f"{key}_{part}"].astype(np.int64) for part in ("indices", "indptr"))
    try:
        if (np.diff(indptr) < 0).any():  # which SciPy looks for where there are entries alone
            raise ValueError("indptr must be a non-decreasing sequence")
        matrix = sp.csr_array((data, indices, indptr), shape=tuple(sizes))
        matrix.check_format(full_check=True)
    except ValueError as error:
        raise ValueError(f"expected {key} to be a CSR matrix, got one that is none: {error}") from error
    return matrix
