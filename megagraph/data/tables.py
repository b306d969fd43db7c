"""Graphs in tables: a file of nodes with any ids, columns and classes, and one of edges between these ids.

CSV or Parquet, packed with gzip or not; CSV is separated by commas, in .tsv and .tsv.gz files by tabs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megagraph import files
from megagraph.data.columns import MISSING, features_of, first_row, import_polars, read_table
from megagraph.data.graph import PARTS, Graph, Split, check_unweighted
from megagraph.data.names import Ids, Names
from megagraph.data.options import Tables
from megagraph.flags import listed
from megagraph.progress import log

if TYPE_CHECKING:
    import polars as pl

_FLAGS = {"0": 0, "0.0": 0, "false": 0, "1": 1, "1.0": 1, "true": 1, "nan": -1}  # of one of several labels
_LABEL = "label:"
_SPLIT_NAMES = {part: part for part in PARTS} | {"training": "train", "valid": "val", "validation": "val"}


def read_tables(tables: Tables, like: Graph | None = None) -> Graph:
    """A graph with the ids of its nodes and the names of its classes.

    Numbers become features of mean 0 and deviation 1, words one feature a value. Where a column misses some, numbers
    count as their mean, words as none of their values, and one more feature says so.

    Args:
        like: another graph from tables, whose classes and columns it has: features are then made as there.

    Raises:
        ImportError: polars is not installed.
        FileNotFoundError, ValueError: a file is not there, or not as said; names it, the column and the row.
    """
    polars = import_polars()
    if tables.edges is None:
        raise ValueError("expected a data set, or a file of edges (--edges) beside --nodes, got neither")
    _check_roles(tables)
    ends = _ends(tables.edges)
    if tables.nodes is None:
        ids, rest = polars.concat(ends).unique().sort(), polars.DataFrame()
        if unused := [name for name in ("id", "label", "split", "drop") if getattr(tables, name)]:
            raise ValueError(f"expected a file of nodes (--nodes) for {', '.join(unused)}, got none")
    else:
        ids, rest = _nodes(tables.nodes, tables.id, tables.drop, _words_of(like, tables.label))
    row_of = polars.Enum(ids)
    _check_first_line(tables.edges, ends, (row_of.categories, row_of.categories), "source,target")
    edge_index = np.stack([_rows(end, row_of, tables.edges) for end in ends])
    label = _label_columns(rest, tables)
    split = _split_column(rest.drop(label), tables)
    labels, class_names = _labels(tables, rest.select(label), row_of, like)
    parts = None if split is None else _split(rest[split], f"column {split} of {tables.nodes}")
    rest = rest.drop([*label, *([] if split is None else [split])])
    known = None if like is None or like.names is None else like.names.columns
    log.info(f"{len(ids):,} nodes and {edge_index.shape[1]:,} edges read; making a graph of them")
    features, columns = features_of(rest, len(ids), known, tables.nodes)
    graph = Graph.from_arrays(tables.edges.name.split(".")[0], features, edge_index, labels, parts)
    names = Names(ids=Ids.of(ids.to_list()), classes=class_names, columns=columns)
    return replace(graph, names=names, num_classes=len(class_names))


def write_tables(graph: Graph, folder: Path) -> tuple[Path, Path]:
    """nodes.csv with ids, labels, split and features, and edges.csv, each edge once."""
    polars = import_polars()
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(
            f"expected a folder, or nothing, at {folder} to write tables in, got a file; name another"
        )
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / "nodes.csv", folder / "edges.csv"
    names = graph.names
    nodes = np.arange(graph.num_nodes)
    ids = nodes.astype(str) if names is None else np.array([names.ids[node] for node in range(graph.num_nodes)])
    classes = np.array([*(map(str, range(graph.num_classes)) if names is None else names.classes), ""])
    columns: dict[str, Any] = {"id": ids}
    if graph.multi_label:
        known = np.array(["0", "1", ""])
        columns |= {f"{_LABEL}{name}": known[own] for name, own in zip(classes[:-1], graph.labels.T, strict=True)}
    else:
        columns["label"] = classes[graph.labels]
    if graph.split is not None:
        columns["split"] = parts = np.full(graph.num_nodes, "", "U5")
        for part in PARTS:
            parts[getattr(graph.split, part)] = part
    features = np.empty((graph.num_nodes, graph.in_features), np.float32)
    graph.read_features(nodes, features)
    source = np.repeat(nodes, np.diff(graph.indptr))
    once = source < graph.indices
    tables = (
        columns | {f"x{i}": x for i, x in enumerate(features.T)},
        {"source": ids[source[once]], "target": ids[graph.indices[once]]},
    )
    for path, table in zip(paths, tables, strict=True):
        with files.replacing(path) as file:
            try:
                polars.DataFrame(table).write_csv(file)
            except OSError as error:  # of Rust: without a number
                raise OSError(f"could not write {path}: {error}; make room, or name another folder") from error
    return paths


def _ends(path: Path) -> list[pl.Series]:
    """The ids of both ends of every edge."""
    table = read_table(path, words=(0, 1))
    for name in table.columns[2:]:
        column = table[name]
        if column.dtype.is_numeric():
            check_unweighted(f"column {name} of {path}", column.drop_nulls().to_numpy())
        elif column.n_unique() > 1:
            raise ValueError(
                f"expected two columns in {path}, got also {name}: features and kinds of edges are not supported; take "
                "it away"
            )
    ends = [table[name] for name in table.columns[:2]]
    for end in ends:
        if (missing := end.null_count()) > 0:
            raise ValueError(
                f"expected both ends of every edge in {path}, got {missing:,} without {end.name}, the first in row "
                f"{first_row(end.is_null())}"
            )
    return ends


def _check_first_line(path: Path, columns: Sequence[pl.Series], known: Sequence[pl.Series], names: str) -> None:
    """Refuse names of columns that are values of theirs; Parquet has names of its own."""
    if ".parquet" not in path.suffixes and all(a.name in b for a, b in zip(columns, known, strict=True)):
        raise ValueError(
            f"expected a first line of names in {path}, got {','.join(column.name for column in columns)}, which reads "
            f"like all others; add one, such as {names}, or give the columns other names"
        )


def _check_roles(tables: Tables) -> None:
    """Refuse a column that is named for two purposes."""
    if len(set(tables.label)) < len(tables.label):
        raise ValueError(f"expected every column of labels once, got {listed(tables.label)}")
    flags = {"--id": (tables.id,), "--label": tables.label, "--split": (tables.split,), "--drop": tables.drop}
    for name in dict.fromkeys(name for names in flags.values() for name in names if name is not None):
        if len(given := [flag for flag, names in flags.items() if name in names]) > 1:
            raise ValueError(f"expected a column of nodes for one of {' and '.join(given)}, got {name} for both")


def _words_of(like: Graph | None, label: Sequence[str]) -> tuple[str, ...]:
    """Columns to read as the words that they are, as values of the other graph: 01 would be the number 1."""
    if like is None or like.names is None:
        return ()
    classes = () if like.multi_label else tuple(label) or ("label",)
    return (*(column.name for column in like.names.columns if column.kind == "word"), *classes)


def _nodes(
    path: Path, id_name: str | None, drop: Sequence[str], words: Sequence[str]
) -> tuple[pl.Series, pl.DataFrame]:
    """Ids, and the other columns, some of them as words."""
    table = read_table(path, words=(id_name or 0, *words))
    for name in (*([id_name] if id_name else []), *drop):
        _check_named(table, name, path)
    ids = table[id_name or table.columns[0]]
    if (missing := ids.null_count()) > 0:
        first = first_row(ids.is_null())
        raise ValueError(f"expected an id in every row of {path}, got {missing:,} without, the first in row {first}")
    if ids.n_unique() < len(ids):
        twice = ids.is_duplicated()
        raise ValueError(
            f"expected every id once in column {ids.name} of {path}, got {ids.filter(twice)[0]!r} again, first in row "
            f"{first_row(twice)}; name another column with --id, or take rows away"
        )
    return ids, table.drop([ids.name, *(name for name in drop if name != ids.name)])


def _rows(ids: pl.Series, row_of: Any, path: Path) -> np.ndarray:
    """The rows of nodes with these ids, int64."""
    found = ids.cast(row_of, strict=False)
    if (unknown := found.null_count()) > 0:
        at = first_row(found.is_null())
        raise ValueError(
            f"expected ids of nodes in {path}, got {unknown:,} that no node has, the first {ids[at - 2]!r} in row "
            f"{at}; add these nodes, or take the rows away"
        )
    rows: np.ndarray = found.to_physical().to_numpy().astype(np.int64)
    return rows


def _label_columns(table: pl.DataFrame, tables: Tables) -> tuple[str, ...]:
    """The columns that were named, or those that are called so."""
    for name in tables.label:
        _check_named(table, name, tables.nodes)
    free = [name for name in table.columns if name != tables.split]
    one, several = "label" in free, tuple(name for name in free if name.startswith(_LABEL))
    if one and several and not tables.label:
        raise ValueError(
            f"expected a column label or columns {_LABEL}NAME in {tables.nodes}, got label and {several[0]}; name the "
            "right ones with --label, and the others with --drop"
        )
    return tables.label or (("label",) if one else several)


def _split_column(table: pl.DataFrame, tables: Tables) -> str | None:
    if tables.split is None:
        return "split" if "split" in table.columns else None
    _check_named(table, tables.split, tables.nodes)
    return tables.split


def _check_named(table: pl.DataFrame, name: str, path: Path | None) -> None:
    if name not in table.columns:
        raise ValueError(f"expected a column {name} in {path}, got {listed(table.columns)}")


def _labels(
    tables: Tables, columns: pl.DataFrame, row_of: Any, like: Graph | None
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Labels of all nodes, as of ``Graph``, and names of the classes, from columns of nodes or a file of labels."""
    num_nodes = len(row_of.categories)
    known = () if like is None or like.names is None else like.names.classes
    if tables.labels is None and columns.width == 0:
        if like is not None and like.multi_label:
            return np.full((num_nodes, len(known)), -1, np.int8), known
        return np.full(num_nodes, -1), known
    if tables.labels is not None and columns.width:
        named = columns.columns[0]
        raise ValueError(f"expected classes in one file, got {tables.labels} and column {named} of {tables.nodes}")
    for name, kind in columns.schema.items():
        if kind.is_nested():
            raise ValueError(
                f"expected a class in every row of column {name} of {tables.nodes}, got {kind}: several labels a node "
                "are several columns (--label), or several rows of an id in a file of labels (--labels)"
            )
    where, several = f"column {listed(columns.columns)} of {tables.nodes}", columns.width > 1
    if tables.labels is not None:
        where = str(tables.labels)
        rows, given = _pairs(tables.labels, row_of)
        several = len(np.unique(rows)) < len(rows) or (bool(known) and like is not None and like.multi_label)
    elif not several:
        rows, given = np.arange(num_nodes), _words(columns.to_series())
    if known and like is not None and like.multi_label != several:
        kinds = ("one class", "several labels")
        raise ValueError(
            f"expected {kinds[not several]} a node in {where}, as in the graph of --like, got {kinds[several]}"
        )
    if columns.width > 1:
        return _flags(columns, known, where)
    if known:
        given = given.replace(_spellings(given, known))
    names = _class_names(given, known, where)
    number = {name: i for i, name in enumerate(names)}
    found = np.array([-1 if name is None else number[name] for name in given.to_list()], np.int64)
    if not several:
        labels = np.full(num_nodes, -1)
        labels[rows] = found
        return labels, names
    labels = np.full((num_nodes, len(names)), -1, np.int8)
    rows, found = rows[found >= 0], found[found >= 0]
    labels[rows] = 0
    labels[rows, found] = 1
    return labels, names


def _pairs(path: Path, row_of: Any) -> tuple[np.ndarray, pl.Series]:
    """The rows of nodes, and their classes, from a file of ids and classes."""
    table = read_table(path, words=(0, 1))
    if table.width != 2:
        raise ValueError(f"expected two columns in {path}, ids and classes, got {listed(table.columns)}")
    who, what = table[:, 0], _words(table[:, 1])
    _check_first_line(path, (who, what), (row_of.categories, what), "id,class")
    # an id that is there twice has several labels, but not the same one twice, nor one and none
    for wrong, got in (
        (table.is_duplicated(), "the same one again"),
        (what.is_null() & who.is_duplicated(), "a row without one"),
    ):
        if wrong.any():
            at = first_row(wrong)
            raise ValueError(
                f"expected one class a node in {path}, or several, each in a row of its own, got {got} for "
                f"{who[at - 2]!r}, first in row {at}; take rows away"
            )
    return _rows(who, row_of, path), what


def _words(given: pl.Series) -> pl.Series:
    """Labels as words, none where a Parquet file has NaN or a word for nothing; of CSV polars knows these."""
    words = given.cast(import_polars().String)
    return words.set(words.is_in(MISSING), None)


def _spellings(given: pl.Series, known: tuple[str, ...]) -> dict[str, str]:
    """Of words that are no known class but the same whole number, or truth, as one: its name."""
    names = {value: name for name in known if (value := _value(name)) is not None}
    others = set(given.drop_nulls().unique()) - set(known)
    return {word: names[value] for word in others if (value := _value(word)) in names}


def _value(word: str) -> float | str | None:
    if word.lower() in ("true", "false"):
        return word.lower()
    try:
        value = float(word)
    except ValueError:
        return None
    return value if value.is_integer() and abs(value) < 2**53 else None  # further ones are not exact


def _class_names(given: pl.Series, known: tuple[str, ...], where: str) -> tuple[str, ...]:
    """Names of the classes, all there are or those that are known; numbers in the order of their values."""
    found = given.drop_nulls().unique().sort().to_list()
    try:
        values = [float(name) for name in found]
    except ValueError:
        pass
    else:
        if others := [name for name, x in zip(found, values, strict=True) if not np.isfinite(x) or x != int(x)]:
            raise ValueError(
                f"expected classes in {where}, got numbers such as {others[0]}: regression is not supported; cut them "
                "into classes"
            )
        found = [name for _, name in sorted(zip(values, found, strict=True))]
    if known and (others := sorted(set(found) - set(known))):
        raise ValueError(f"expected the classes {listed(known)} in {where}, got also {', '.join(others[:5])}")
    return known or tuple(found)


def _flags(columns: pl.DataFrame, known: tuple[str, ...], where: str) -> tuple[np.ndarray, tuple[str, ...]]:
    """int8 [V, C], -1 = not known, and the names of the columns, in the order of those that are known."""
    polars = import_polars()
    named = {name.removeprefix(_LABEL): name for name in columns.columns}
    names = known or tuple(named)
    if set(names) != set(named):
        raise ValueError(f"expected the labels {listed(names)} in {where}, got {listed(named)}")
    labels = np.empty((columns.height, len(names)), np.int8)
    for label, name in enumerate(names):
        words = _words(columns[named[name]]).fill_null("nan")
        found = words.str.to_lowercase().replace_strict(_FLAGS, default=None, return_dtype=polars.Int8)
        if found.null_count() > 0:
            at = first_row(found.is_null())
            raise ValueError(
                f"expected 0 or 1, true or false, or nothing in {where}, got {words[at - 2]!r} in {named[name]} in row "
                f"{at}: several columns are several labels a node. Classes are one column; numbers to predict "
                "(regression) are not supported, cut them into classes"
            )
        labels[:, label] = found.to_numpy()
    return labels, names


def _split(given: pl.Series, where: str) -> Split:
    polars = import_polars()
    names = given.cast(polars.String).str.to_lowercase().to_list()
    parts: dict[str, list[int]] = {part: [] for part in PARTS}
    for node, name in enumerate(names):
        if (part := _SPLIT_NAMES.get(name)) is not None:
            parts[part].append(node)
    if not all(parts.values()):
        lacking = ", ".join(part for part, nodes in parts.items() if not nodes)
        raise ValueError(f"expected train, val and test in {where}, got no {lacking}")
    return Split(*(np.array(parts[part], np.int64) for part in PARTS))
