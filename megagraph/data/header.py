"""The header of a graph store: what it says of the arrays, and whether their files are as long as it says."""

from __future__ import annotations

import math
import re
import uuid
from pathlib import Path
from typing import Any

import numpy as np

from megagraph import files
from megagraph.data.cache import npy_head
from megagraph.data.graph import MAX_CLASSES, PARTS
from megagraph.data.names import Column, Vocabulary
from megagraph.flags import in_words, listed, short

_FORMAT = "MegaGraph graph store"
_VERSION = 2
_MAX_HEADER_BYTES = 1 << 24
_MAX_SIZE = 1 << 48  # of one dimension
_MAX_IDS = (1 << 31) - 1  # nodes and features
DTYPES = {
    "indptr": ("<i8",),
    "indices": ("<i4",),
    "labels": ("<i8", "|i1"),  # classes; several labels a node
    **{part: ("<i8",) for part in PARTS},
    "features": ("<f4", "<f2"),
    "features_indptr": ("<i4", "<i8"),
    "features_indices": ("<i4", "<i8"),
    "features_data": ("<f4",),
    "ids_indptr": ("<i8",),
    "ids": ("|u1",),
}


def read_header(folder: Path | str) -> dict[str, Any]:
    """The header of a store, with its fields and the sizes of all files checked.

    Raises:
        FileNotFoundError, ValueError: no store, or one that is not as its header says.
    """
    folder = Path(folder)
    header = load_header(folder)
    for name, array in header["arrays"].items():
        path = folder / f"{name}.npy"
        size = path.stat().st_size if path.is_file() else 0
        if size != (expected := num_bytes(array)):
            raise ValueError(f"expected {path} of {expected} bytes, got {size}; import the graph again")
    return header


def write_header(folder: Path, values: dict[str, Any]) -> None:
    """Write the header, without which a folder is no store."""
    values = {"format": _FORMAT, "version": _VERSION, "id": uuid.uuid4().hex} | values
    files.write_json(folder / "header.json", values)


def num_bytes(array: dict[str, Any]) -> int:
    """Bytes of the file of an array, as the header describes it."""
    dtype = np.dtype(array["dtype"])
    return len(npy_head(array["shape"], dtype)) + math.prod(array["shape"]) * dtype.itemsize


def load_header(folder: Path) -> dict[str, Any]:
    """The header of a store, with its fields checked."""
    path, what = folder / "header.json", "the header of a graph store"
    if not path.is_file():
        raise FileNotFoundError(
            f"expected a graph store, got {folder} without header.json{files.meant(folder)}; "
            "megagraph data import makes one"
        )
    if (size := path.stat().st_size) > _MAX_HEADER_BYTES:
        raise ValueError(f"expected {what} of at most {_MAX_HEADER_BYTES} bytes, got {size} in {path}")
    header = files.read_json(path, what)
    if header.get("format") != _FORMAT:
        got = short(header.get("format"))
        raise ValueError(f"expected {what} with the format {_FORMAT!r}, got {got} in {path}; import the graph again")
    if header.get("version") != _VERSION:
        got = short(header.get("version"))
        raise ValueError(f"expected a graph store of version {_VERSION}, got {got} in {folder}; import it again")
    _check_header(path, header)
    return header


def names_in(header: dict[str, Any], where: Path) -> Vocabulary:
    """Classes and columns of a graph from tables."""
    what = f"names of a graph in {where}"
    given = header["names"]
    columns = given.get("columns") if isinstance(given, dict) else None
    if not isinstance(columns, list):
        raise ValueError(f"expected {what} with a list of columns, got {short(given)}; import the graph again")
    return files.typed(Vocabulary, given | {"columns": [files.typed(Column, x, what) for x in columns]}, what)


def _check_header(path: Path, header: dict[str, Any]) -> None:
    def expect(right: bool, what: str, got: Any) -> None:
        if not right:
            raise ValueError(f"expected {what} in {path}, got {short(got)}; import the graph again")

    kinds = {"version": int, "id": str, "name": str, "in_features": int, "num_classes": int, "notes": dict}
    for key, kind in {**kinds, "arrays": dict}.items():
        expect(type(header.get(key)) is kind, f"{key} of type {kind.__name__}", header.get(key))
    for key, most in (("in_features", _MAX_IDS), ("num_classes", MAX_CLASSES)):
        expect(0 <= header[key] <= most, f"{key} in 0..{most}", header[key])
    arrays = header["arrays"]
    sparse, split = "features_indptr" in arrays, "train" in arrays
    needed = {"indptr", "indices", "labels", *(PARTS if split else ())}
    needed |= {"features_indptr", "features_indices", "features_data"} if sparse else {"features"}
    if "names" in header:
        needed |= {"ids", "ids_indptr"}
        _check_names(path, header)
    expect(arrays.keys() == needed, f"the arrays {', '.join(sorted(needed))}", ", ".join(sorted(arrays)))
    for name, array in arrays.items():
        expect(
            type(array) is dict and array.keys() == {"shape", "dtype", "xxh3"}, f"shape, dtype, xxh3 of {name}", array
        )
        expect(array["dtype"] in DTYPES[name], f"{name} of dtype {' or '.join(DTYPES[name])}", array["dtype"])
        sizes = array["shape"]
        right = type(sizes) is list and all(type(size) is int and 0 <= size < _MAX_SIZE for size in sizes)
        table = name == "features" or array["dtype"] == "|i1"
        expect(right and len(sizes) == 1 + table, f"the shape of {name}", sizes)
        expect(bool(re.fullmatch("[0-9a-f]{32}", str(array["xxh3"]))), f"the xxh3 of {name}", array["xxh3"])
    shape = {name: array["shape"] for name, array in arrays.items()}
    nodes = shape["indptr"][0] - 1
    expect(1 <= nodes <= _MAX_IDS, f"indptr for 1..{_MAX_IDS} nodes", shape["indptr"])
    several = [header["num_classes"]] if arrays["labels"]["dtype"] == "|i1" else []
    fixed = {"labels": [nodes, *several], "features": [nodes, header["in_features"]]}
    fixed |= {name: [nodes + 1] for name in ("features_indptr", "ids_indptr")}
    fixed["features_data"] = shape.get("features_indices", [])
    for name in fixed.keys() & arrays.keys():
        expect(shape[name] == fixed[name], f"{name} of shape {fixed[name]}", shape[name])


def _check_names(path: Path, header: dict[str, Any]) -> None:
    names = names_in(header, path)
    width = sum(column.width for column in names.columns)
    if (len(names.classes), width) != (header["num_classes"], header["in_features"]):
        raise ValueError(
            f"expected names of {header['num_classes']} classes and columns of {header['in_features']} features in "
            f"{path}, got {len(names.classes)} and {width}; import the graph again"
        )


def describe(folder: Path | str) -> str:
    """A few lines about a store, from its header."""
    header = read_header(folder)
    arrays = header["arrays"]
    form = np.dtype(arrays["features"]["dtype"]).name if "features" in arrays else "sparse"
    classes = "labels, several a node" if len(arrays["labels"]["shape"]) == 2 else "classes"
    lines = [
        f"{header['name']}: {arrays['labels']['shape'][0]:,} nodes, {arrays['indices']['shape'][0] // 2:,} undirected "
        f"edges, {header['in_features']} features ({form}), {header['num_classes']} {classes}, "
        f"{'a split of its own' if 'train' in arrays else 'no split of its own'}",
        f"{folder}: {in_words(sum(map(num_bytes, arrays.values())))} in {len(arrays)} files",
    ]
    if "names" in header:
        names = names_in(header, Path(folder))
        shown = (f"{c.name} ({'number' if c.kind == 'number' else f'{len(c.values)} words'})" for c in names.columns)
        lines += [f"{classes.split(',')[0]}: {listed(names.classes)}", f"columns: {listed(shown)}"]
    return "\n".join([*lines, *(f"{key}: {value}" for key, value in header["notes"].items())])
