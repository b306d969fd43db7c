"""Columns of a table: as polars reads them, and as features of nodes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megagraph import files
from megagraph.data.names import Column
from megagraph.flags import listed
from megagraph.progress import log

if TYPE_CHECKING:
    import polars as pl

MAX_CATEGORIES = 100  # words of a column; one of more is a text, or another id
MISSING = ["", "NA", "N/A", "NaN", "nan", "null", "NULL", "None"]


def import_polars() -> Any:
    try:
        import polars
    except ImportError as error:
        raise ImportError("tables are read by the polars package: pip install 'megagraph[train]'") from error
    return polars


def read_table(path: Path, words: Sequence[int | str]) -> pl.DataFrame:
    """A file as a table; the columns ``words``, by place or name, are read as words."""
    polars = import_polars()
    if not path.is_file():
        raise FileNotFoundError(
            f"expected a CSV or Parquet file, got {path}, which does not exist or is no file{files.meant(path)}"
        )
    log.info(f"reading {path}")
    kind = [suffix for suffix in path.suffixes if suffix != ".gz"][-1:]
    try:
        if kind == [".parquet"]:
            table = polars.read_parquet(path)
            return table.with_columns(
                polars.col(name).cast(polars.String) for name in _named(table.columns, words, path)
            )
        given: dict[str, Any] = {"separator": "\t" if kind == [".tsv"] else ",", "null_values": MISSING}
        columns = polars.read_csv(path, n_rows=0, **given).columns
        read_as = {name.replace('""', '"'): name for name in columns}  # polars leaves quotes in a name doubled
        as_words = {read_as[name]: polars.String for name in _named([*read_as], words, path)}
        table = polars.read_csv(path, infer_schema_length=None, schema_overrides=as_words, **given)
        return table.rename({own: name for name, own in read_as.items() if own != name})
    except (polars.exceptions.PolarsError, UnicodeDecodeError) as error:
        raise ValueError(f"expected a table with a line of names, got {path}: {error}") from error
    except OSError as error:  # of Rust: names no file
        raise ValueError(
            f"expected a whole table, got {path}, which cannot be read: {error}; make it anew, or readable"
        ) from error


def _named(columns: Sequence[str], words: Sequence[int | str], path: Path) -> list[str]:
    """Which columns ``words`` names, by place or name, of those that are there, each once."""
    needed = 1 + max((word for word in words if isinstance(word, int)), default=-1)
    if len(columns) < needed or (len(columns) == 1 and not {";", "\t"}.isdisjoint(columns[0])):
        raise ValueError(
            f"expected a table with a line of names, got {path}, which has no columns but {listed(columns)!r}; "
            "begin with names, not with remarks, and separate columns by commas, or by tabs in a file called .tsv"
        )
    named = [columns[word] if isinstance(word, int) else word for word in words]
    return [name for name in dict.fromkeys(named) if name in columns]


def first_row(flags: pl.Series) -> int:
    """The line of a file with the first true one, below a line of names."""
    index = flags.arg_max()
    assert index is not None
    return index + 2


def features_of(
    table: pl.DataFrame, num_nodes: int, known: tuple[Column, ...] | None, path: Path | None
) -> tuple[np.ndarray, tuple[Column, ...]]:
    """Features float32 [V, d_in] of a table, and the columns that they come from."""
    if known is None:
        known = tuple(_column(table[name], path) for name in table.columns)
    elif {column.name for column in known} - set(table.columns):
        lacking = [column.name for column in known if column.name not in table.columns]
        raise ValueError(f"expected the columns of the other graph in {path}, got no {listed(lacking)}")
    features = np.zeros((num_nodes, sum(column.width for column in known)), np.float32)
    first = 0
    for column in known:
        _encode(table[column.name], column, features[:, first : first + column.width], path)
        first += column.width
    return features, known


def _column(given: pl.Series, path: Path | None) -> Column:
    """What a column is, from its values."""
    polars = import_polars()
    if given.dtype == polars.Boolean or given.dtype.is_numeric():
        numbers = _numbers(given)
        present = numbers[~np.isnan(numbers)]
        mean, deviation = _mean_and_deviation(present) if len(present) else (0.0, 1.0)
        missing = len(present) < len(numbers)
        return Column(name=given.name, kind="number", mean=mean, deviation=deviation, missing=missing)
    if given.dtype not in (polars.String, polars.Categorical, polars.Enum):
        raise ValueError(
            f"expected numbers or words in column {given.name} of {path}, got {given.dtype}; leave it out with "
            f"--drop {given.name}"
        )
    values = given.cast(polars.String).drop_nulls().unique().sort().to_list()
    if len(values) > MAX_CATEGORIES:
        raise ValueError(
            f"expected at most {MAX_CATEGORIES} values of words in column {given.name} of {path}, got {len(values):,}, "
            f"such as {values[0]!r}; leave it out with --drop {given.name}, or turn it into numbers"
        )
    return Column(name=given.name, kind="word", values=tuple(values), missing=given.null_count() > 0)


def _mean_and_deviation(numbers: np.ndarray) -> tuple[float, float]:
    """Mean and deviation of fp64 numbers of any size; 1 is the deviation of a constant."""
    if numbers.min() == numbers.max():  # whose mean may be rounded
        return float(numbers[0]), 1.0
    _, exponent = np.frexp(np.abs(numbers).max())  # a power of two, which rounds nothing
    with np.errstate(invalid="ignore"):  # infinite ones, which have no features
        scaled = np.ldexp(numbers, -exponent)
        mean, deviation = (float(np.ldexp(x, exponent)) for x in (scaled.mean(), scaled.std()))
    return mean, deviation or 1.0


def _encode(given: pl.Series, column: Column, into: np.ndarray, path: Path | None) -> None:
    polars = import_polars()
    if column.kind == "number":
        if not (given.dtype == polars.Boolean or given.dtype.is_numeric() or given.null_count() == len(given)):
            raise ValueError(f"expected numbers in column {column.name} of {path}, got {given.dtype}")
        numbers = _numbers(given)
        missing = np.isnan(numbers)
        with np.errstate(over="ignore", invalid="ignore"):
            into[:, 0] = np.where(missing, 0.0, (numbers - column.mean) / column.deviation)
        if not np.isfinite(into[:, 0]).all():
            at = int(np.nanargmax(np.abs(numbers)))
            raise ValueError(
                f"expected finite numbers in column {column.name} of {path}, got {numbers[at]:g} in row {at + 2}, of "
                f"which no feature can be made (mean {column.mean:g}, deviation {column.deviation:g}); take it away, "
                "or scale the column of the first graph"
            )
    else:
        found = given.cast(polars.String).cast(polars.Enum(column.values), strict=False).to_physical()
        missing = found.is_null().to_numpy()
        rows = np.flatnonzero(~missing)
        into[rows, found.drop_nulls().to_numpy()] = 1.0
    if column.missing:
        into[:, -1] = missing


def _numbers(given: pl.Series) -> np.ndarray:
    """A column as fp64; nothing is NaN."""
    polars = import_polars()
    numbers: np.ndarray = given.cast(polars.Float64).fill_null(float("nan")).to_numpy()
    return numbers
