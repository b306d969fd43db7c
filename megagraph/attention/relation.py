"""Which pairs of a sparse bias exist: a relation between M rows and N columns, by row and by column."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor, nn

_MOST_PAIRS = (1 << 31) - 1


def numbered(device: torch.device | str) -> torch.device:
    """The device as tensors name it: "cuda" is the current one, with its number."""
    return torch.empty(0, device=device).device


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
        if numbered(device) == self.columns.device:
            return self  # and keep what is known of it
        return Relation(**{name: x.to(device) for name, x in self.lists.items()}, num_columns=self.num_columns)

    def rows(self) -> Tensor:
        """int64 [P], the row of every pair, counted through all relations."""
        return torch.repeat_interleave(
            torch.arange(len(self.row_starts) - 1, device="cpu"), self.row_starts.cpu().diff()
        )

    def take(self, rows: Tensor) -> tuple[Relation, Tensor]:
        """These rows int64 [M'] of every relation, -1 = an empty one, and which of its pairs they have, int64 [P']."""
        sequences, num_rows, num_columns = self.shape
        starts, rows = self.row_starts.cpu(), rows.cpu()
        listed = (rows.clamp(min=0) + num_rows * torch.arange(sequences, device="cpu")[:, None]).flatten()
        lengths = (starts[listed + 1] - starts[listed]).masked_fill(rows.repeat(sequences) < 0, 0)
        ends = nn.functional.pad(lengths.cumsum(0), (1, 0))
        pairs = torch.arange(int(ends[-1]), device="cpu") + torch.repeat_interleave(starts[listed] - ends[:-1], lengths)
        taken = Relation.of_rows(ends, self.columns.cpu()[pairs], num_columns, sequences)
        return taken.to(self.columns.device), pairs.to(self.columns.device)

    @classmethod
    def of_rows(cls, row_starts: Tensor, columns: Tensor, num_columns: int, sequences: int) -> Relation:
        """A relation from its lists by row, on the host and as they should be."""
        import scipy.sparse as sp  # a bias that is not sparse does without

        starts, listed = row_starts.numpy(), columns.numpy()
        num_rows, by_column = (len(starts) - 1) // sequences, []
        for first in num_rows * np.arange(sequences):
            own = starts[first : first + num_rows + 1]
            places, keys = np.arange(own[0], own[-1], dtype=np.int32), listed[own[0] : own[-1]]
            matrix = sp.csr_array((places, keys, own - own[0]), shape=(num_rows, num_columns)).tocsc()
            by_column.append((matrix.indptr[1:] + own[0], matrix.indices, matrix.data))
        key_ends, key_rows, key_pairs = (np.concatenate(parts) for parts in zip(*by_column, strict=True))
        return cls(
            row_starts=row_starts,
            columns=columns,
            key_starts=torch.from_numpy(np.concatenate([np.zeros(1, np.int64), key_ends])),
            key_rows=torch.from_numpy(key_rows.astype(np.int32, copy=False)),
            key_pairs=torch.from_numpy(key_pairs),
            num_columns=num_columns,
        )

    @classmethod
    def from_csr(cls, name: str, given: Tensor | Sequence[Tensor]) -> tuple[Relation, Tensor]:
        """From one sparse CSR tensor [M, N], maybe with dense axes after these, or a list of such, one a sequence.

        Returns:
            the relation, and the values [P] or [P, ...] of its pairs, which keep their gradient.

        Raises:
            ValueError: not such tensors, no pair, columns that are not ascending and distinct within 0..N - 1, or more
                pairs than 32-bit numbers tell apart.
        """
        read = cls._read
        if "torch._dynamo" in sys.modules:  # whose import takes seconds; where it is missing nothing compiles
            read = torch.compiler.disable(read)  # or the checks, NumPy's, are traced, and read what is not there
        return read(name, [given] if isinstance(given, Tensor) else list(given))

    @classmethod
    def _read(cls, name: str, parts: list[Tensor]) -> tuple[Relation, Tensor]:
        _check_parts(name, parts)
        _check_count(name, sum(part._nnz() for part in parts))
        lists = [(part.crow_indices().cpu(), part.col_indices().cpu()) for part in parts]
        relation = cls._checked(name, lists, parts[0].shape[1])
        return relation.to(parts[0].device), torch.cat([part.values() for part in parts])

    @classmethod
    def from_lists(
        cls, name: str, starts: Tensor, columns: Tensor, values: Tensor, num_columns: int
    ) -> tuple[Relation, Tensor]:
        """A relation from row starts [M + 1] and columns [P], and the values [P, ...] of its pairs."""
        _check_count(name, len(columns))
        return cls._checked(name, [(starts, columns)], num_columns), values

    @classmethod
    def _checked(cls, name: str, given: list[tuple[Tensor, Tensor]], num_columns: int) -> Relation:
        """A relation from the row starts and columns of each sequence, which are checked."""
        for starts, columns in given:
            _check_lists(name, starts.numpy(), columns.numpy(), num_columns)
        lengths = torch.cat([starts.long().diff() for starts, _ in given])
        row_starts = nn.functional.pad(lengths.cumsum(0), (1, 0))
        return cls.of_rows(row_starts, torch.cat([columns.int() for _, columns in given]), num_columns, len(given))


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
        raise ValueError(
            f"{name} must have pairs, got an empty relation, in which nobody attends; list every node with itself, or "
            "leave attention out (bias=None is no such bias: everybody attends to all)"
        )
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
