"""Which pairs of a sparse bias exist: a relation between M rows and N columns, by row and by column."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

_MOST_PAIRS = (1 << 31) - 1


@dataclass(frozen=True, eq=False)
class Relation:
    """The pairs of S relations, one after the other, P in all; plain tensors, made once for all layers and steps.

    Args:
        row_starts: int64 [S * M + 1], where the pairs of every row begin.
        columns: int32 [P], ascending in every row.
        key_starts: int64 [S * N + 1], where the pairs of every column begin in the two lists that follow.
        key_rows: int32 [P], ascending in every column.
        key_pairs: int32 [P], which pair, in the order of ``columns``, each of these is.
        num_columns: N.
    """

    row_starts: Tensor
    columns: Tensor
    key_starts: Tensor
    key_rows: Tensor
    key_pairs: Tensor
    num_columns: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """(S, M, N)."""
        sequences = (len(self.key_starts) - 1) // self.num_columns
        return sequences, (len(self.row_starts) - 1) // sequences, self.num_columns

    @property
    def lists(self) -> dict[str, Tensor]:
        """The tensors, by name."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "num_columns"}

    def to(self, device: torch.device | str) -> Relation:
        return Relation(**{name: x.to(device) for name, x in self.lists.items()}, num_columns=self.num_columns)

    def rows(self) -> Tensor:
        """int64 [P], the row of every pair, counted through all relations."""
        return torch.repeat_interleave(torch.arange(len(self.row_starts) - 1), self.row_starts.cpu().diff())

    @classmethod
    def from_csr(cls, name: str, given: Tensor | Sequence[Tensor]) -> tuple[Relation, Tensor]:
        """From one sparse CSR tensor [M, N], maybe with dense axes after these, or a list of such, one a sequence.

        Returns:
            the relation, and the values [P] or [P, ...] of its pairs, which keep their gradient.

        Raises:
            ValueError: not such tensors, no pair, columns that are not ascending and distinct within 0..N - 1, or more
                pairs than 32-bit numbers tell apart.
        """
        parts = [given] if isinstance(given, Tensor) else list(given)
        _check_parts(name, parts)
        counts = np.cumsum([0, *(part._nnz() for part in parts)])
        _check_count(name, int(counts[-1]))
        lists = [(part.crow_indices().cpu(), part.col_indices().cpu()) for part in parts]
        relation = cls._of_lists(name, lists, parts[0].shape[1], counts)
        return relation.to(parts[0].device), torch.cat([part.values() for part in parts])

    @classmethod
    def from_lists(
        cls, name: str, starts: Tensor, columns: Tensor, values: Tensor, num_columns: int
    ) -> tuple[Relation, Tensor]:
        """The same of one relation, from its row starts [M + 1], columns [P] and values [P, ...]."""
        _check_count(name, len(columns))
        return cls._of_lists(name, [(starts, columns)], num_columns, np.array([0, len(columns)])), values

    @classmethod
    def _of_lists(cls, name: str, given: list[tuple[Tensor, Tensor]], num_columns: int, counts: np.ndarray) -> Relation:
        lists = []
        for (starts_, columns_), before in zip(given, counts, strict=False):
            starts, columns = starts_.numpy(), columns_.numpy()
            _check_lists(name, starts, columns, num_columns)
            pairs, shape = np.arange(len(columns), dtype=np.int32), (len(starts) - 1, num_columns)
            by_column = sp.csr_array((pairs, columns.astype(np.int32), starts), shape=shape).tocsc()
            lists.append((starts, columns, by_column.indptr, by_column.indices, by_column.data + np.int32(before)))
        of_rows, of_columns, of_keys, key_rows, key_pairs = zip(*lists, strict=True)
        return cls(
            row_starts=_joined_starts(of_rows, counts),
            columns=_joined(of_columns),
            key_starts=_joined_starts(of_keys, counts),
            key_rows=_joined(key_rows),
            key_pairs=_joined(key_pairs),
            num_columns=num_columns,
        )


def is_sparse(given: object) -> bool:
    """Whether what is given for a bias is a sparse tensor, or a list of them."""
    if isinstance(given, list | tuple):
        return True
    return isinstance(given, Tensor) and given.layout != torch.strided and not given.is_nested


def _check_parts(name: str, parts: list[Tensor]) -> None:
    for part in parts:
        if not isinstance(part, Tensor) or part.layout != torch.sparse_csr:
            got = part.layout if isinstance(part, Tensor) else type(part).__name__
            raise ValueError(
                f"{name} must be a dense tensor, a torch.sparse_csr_tensor [M, N] or a list of such, one a sequence, "
                f"got {got}; pass its to_sparse_csr(), with dense_dim=1 where a pair has several numbers"
            )
        if part.crow_indices().ndim != 1:
            raise ValueError(
                f"{name} must have one relation [M, N], got a batch of {tuple(part.shape)}; pass a list of {len(part)}"
            )
        if part.shape != parts[0].shape or part.dtype != parts[0].dtype or part.device != parts[0].device:
            raise ValueError(
                f"{name} must have relations of one shape, dtype and device, got {tuple(parts[0].shape)} "
                f"{parts[0].dtype} on {parts[0].device} and {tuple(part.shape)} {part.dtype} on {part.device}"
            )
    if not parts:
        raise ValueError(f"{name} must have a relation for every sequence, got an empty list")


def _check_count(name: str, count: int) -> None:
    if count == 0:
        raise ValueError(f"{name} must have pairs, got an empty relation; a bias in which nobody attends is none")
    if count > _MOST_PAIRS:
        raise ValueError(f"{name} must have at most {_MOST_PAIRS:,} pairs, got {count:,}; take fewer hops")


def _check_lists(name: str, starts: np.ndarray, columns: np.ndarray, num_columns: int) -> None:
    if starts[0] != 0 or starts[-1] != len(columns) or (np.diff(starts) < 0).any():
        raise ValueError(f"{name} must have row starts that ascend from 0 to {len(columns)}, its pairs; coalesce it")
    if len(columns) and not 0 <= columns.min() <= columns.max() < num_columns:
        raise ValueError(
            f"{name} must have columns in 0..{num_columns - 1}, got {columns.min()}..{columns.max()}; a column is a key"
        )
    ascends = np.ones(len(columns), bool)
    ascends[1:] = columns[1:] > columns[:-1]
    ascends[starts[:-1][np.diff(starts) > 0]] = True  # the first of a row
    if not ascends.all():
        at = int(np.flatnonzero(~ascends)[0])
        row = int(np.searchsorted(starts, at, side="right")) - 1
        raise ValueError(
            f"{name} must have ascending, distinct columns in every row, got {columns[at - 1]} before {columns[at]} in "
            f"row {row}; coalesce it (torch.sparse_coo_tensor(...).coalesce().to_sparse_csr())"
        )


def _joined(parts: Sequence[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate([part.astype(np.int32, copy=False) for part in parts]))


def _joined_starts(parts: Sequence[np.ndarray], counts: np.ndarray) -> Tensor:
    ends = [part[1:].astype(np.int64) + before for part, before in zip(parts, counts, strict=False)]
    return torch.from_numpy(np.concatenate([np.zeros(1, np.int64), *ends]))
