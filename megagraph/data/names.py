"""What nodes, classes and columns of features are called where a graph comes from tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class Ids:
    """Strings, that of node i in bytes starts[i]..starts[i + 1] of ``letters``, UTF-8.

    Shapes:
        starts:  [V + 1]  int64
        letters: [n]      uint8
    """

    starts: np.ndarray
    letters: np.ndarray

    @classmethod
    def of(cls, ids: Sequence[str]) -> Ids:
        encoded = [name.encode() for name in ids]
        starts = np.zeros(len(ids) + 1, np.int64)
        np.cumsum(list(map(len, encoded)), out=starts[1:])
        return cls(starts, np.frombuffer(b"".join(encoded), np.uint8))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, node: int) -> str:
        return self.letters[self.starts[node] : self.starts[node + 1]].tobytes().decode(errors="replace")


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of nodes, and the features that it becomes.

    Args:
        kind: a number is one feature, (x - mean) / deviation; a word one for each of ``values``, 1 where it is this.
        missing: one more feature is 1 where there is nothing; it is then 0, or none of the values.
    """

    name: str
    kind: Literal["number", "word"]
    mean: float = 0.0
    deviation: float = 1.0
    values: tuple[str, ...] = ()
    missing: bool = False

    @property
    def width(self) -> int:
        return self.missing + (len(self.values) if self.kind == "word" else 1)


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Classes by their number, and columns in the order of their features."""

    classes: tuple[str, ...] = ()
    columns: tuple[Column, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class Names(Vocabulary):
    """Classes, columns, and the ids of nodes."""

    ids: Ids
