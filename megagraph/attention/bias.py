"""The three forms of the additive attention bias b in softmax(scale * q k^T + b) v (paper Eq. 1-2).

Each form separates *data*, built once per batch and shared by every layer, from what is *learned* per layer.
Only :class:`DenseBias` holds one value per head and node pair; the compact forms are never expanded to it.

Each form is *dense*, with data for every pair, or *sparse*: given a ``torch.sparse_csr_tensor``, or a list of such, one
a sequence, it has data only where a pair exists, and a pair that is absent must not attend. The constructor turns these
into plain tensors once: what it keeps is the values of the P pairs, and ``relation``, who they are. Another layer takes
them from there, as in ``dataclasses.replace(bias, table=table)``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from megagraph.attention.fields import (
    MASKED_BUCKET,
    MAX_CHANNELS,
    as_buckets,
    check_pairs,
    check_plane,
    check_strided,
    take_relation,
)
from megagraph.attention.layout import NodeLayout
from megagraph.attention.relation import Relation, numbered

_ALIGNMENT = 16  # rows of a batch's data begin at multiples of it: a GPU then reads 16 bytes at a time

B = TypeVar("B", "DenseBias", "BucketBias", "ProjectedBias")


def _scattered(values: Tensor, relation: Relation, fill: float) -> Tensor:
    """Values [P, X] of pairs as [S, X, M, N], ``fill`` elsewhere; differentiable."""
    S, M, N = relation.shape
    dense = values.new_full((S * M, N, values.shape[1]), fill)
    rows = relation.rows().to(values.device)
    return dense.index_put((rows, relation.columns.long()), values).view(S, M, N, values.shape[1]).movedim(3, 1)


def _sparse_rows(bias: B, field: str, index: Tensor | slice) -> B:
    """The sparse bias of these rows, whose field has the values of the pairs."""
    assert bias.relation is not None
    rows = torch.arange(bias.relation.shape[1], device="cpu")
    wanted = rows[index if isinstance(index, slice) else index.cpu()]
    if isinstance(index, slice) and torch.equal(wanted, rows):
        # all as it is, but a relation of its own, as ranks have that take fewer: all of them plan a halo, or none
        return replace(bias, relation=replace(bias.relation))
    relation, pairs = bias.relation.take(wanted)
    return replace(bias, **{field: getattr(bias, field)[pairs], "relation": relation})


@dataclass(frozen=True, eq=False)
class DenseBias:
    """One learned (or constant) value per head and node pair.

    Args:
        values: floating point [B or 1, H or 1, M, N]; -inf means "cannot attend". Sparse: hybrid CSR [M, N, H], and
            after construction [P, H].
        relation: the pairs of sparse values.

    Raises:
        ValueError: a shape or dtype above does not hold; a boolean mask, which is ambiguous.
    """

    values: Tensor
    relation: Relation | None = None
    form: ClassVar[str] = "dense"

    def __post_init__(self) -> None:
        take_relation(self, "values")
        if self.relation is not None:
            check_pairs("DenseBias values", self.values, self.relation, ("H",))
        else:
            check_plane("DenseBias values", self.values, 4, "[B or 1, H or 1, M, N]")
        if self.values.dtype == torch.bool:
            raise ValueError(
                "DenseBias values must be floating point, got torch.bool; a boolean mask is ambiguous: True means "
                "'attend' to F.scaled_dot_product_attention and 'ignore' to nn.MultiheadAttention. "
                "Pass a float tensor with -inf where a pair must not attend"
            )
        if not self.values.is_floating_point():
            raise ValueError(f"DenseBias values must be floating point, got {self.values.dtype}")

    @property
    def data(self) -> None:
        """What layers share; here nothing."""

    @property
    def learned(self) -> Tensor:
        """What gets a gradient, the values."""
        return self.values

    @property
    def mask(self) -> None:
        """None: -inf masks."""

    @property
    def shape(self) -> torch.Size:
        """[B or 1, H or 1, M, N]."""
        if self.relation is not None:
            return _shape(self.relation, self.values.shape[1])
        return self.values.shape

    def rows(self, index: Tensor | slice) -> DenseBias:
        """The bias of these query rows, in their order; index: int64 [M'], bool [M], or a slice."""
        if self.relation is not None:
            return _sparse_rows(self, "values", index)
        return DenseBias(self.values[:, :, index])

    def of_pairs(self) -> Tensor:
        """Values [P, H] of the pairs of a sparse bias."""
        return self.values

    def materialize(self) -> Tensor:
        """The bias as a dense tensor [B or 1, H or 1, M, N]."""
        return self.values if self.relation is None else _scattered(self.of_pairs(), self.relation, -torch.inf)


@dataclass(frozen=True, eq=False)
class BucketBias:
    """b[h, i, j] = table[h, index[i, j]]: Graphormer's spatial encoding (arXiv:2106.05234, Eq. 6).

    Args:
        index: uint8 [B or 1, M, N], a bucket per node pair; 255 means "cannot attend". Other integers are looked
            through and converted in every call. One beyond the table makes its row NaN. On a CPU it is an error
            instead, but for a change that PyTorch does not count (``index.data``, NumPy) after the index was first
            seen; a GPU would have to wait for a check. Sparse: CSR [M, N], and after construction [P].
        table: learned, floating point [H, R], R <= 255.
        relation: the pairs of a sparse index.

    Raises:
        ValueError: a shape or dtype above does not hold.

    Examples:
        >>> index = torch.tensor([[[0, 1], [1, 255]]], dtype=torch.uint8)  # [1, 2, 2]
        >>> mg.BucketBias(index, torch.tensor([[0.0, -1.0]])).materialize()
        tensor([[[[ 0., -1.],
                  [-1., -inf]]]])
    """

    index: Tensor
    table: Tensor
    relation: Relation | None = None
    form: ClassVar[str] = "bucket"

    def __post_init__(self) -> None:
        take_relation(self, "index")
        if self.relation is not None:
            check_pairs("BucketBias index", self.index, self.relation, ())
        else:
            check_plane("BucketBias index", self.index, 3, "[B or 1, M, N]")
        if self.index.dtype != torch.uint8:
            object.__setattr__(self, "index", as_buckets(self.index))
        check_plane("BucketBias table", self.table, 2, "[H, R]")
        if not self.table.is_floating_point():
            raise ValueError(f"BucketBias table must be floating point, got {self.table.dtype}")
        if not 1 <= self.table.shape[1] <= MASKED_BUCKET:
            raise ValueError(
                f"BucketBias table must have 1 to {MASKED_BUCKET} buckets (255 marks a masked pair), "
                f"got shape {tuple(self.table.shape)}"
            )

    @property
    def data(self) -> Tensor:
        """What layers share, the index."""
        return self.index

    @property
    def learned(self) -> Tensor:
        """What gets a gradient, the table."""
        return self.table

    @property
    def mask(self) -> None:
        """None: bucket 255 masks."""

    @property
    def shape(self) -> torch.Size:
        """[B or 1, H, M, N]."""
        if self.relation is not None:
            return _shape(self.relation, self.table.shape[0])
        return torch.Size((self.index.shape[0], self.table.shape[0], *self.index.shape[1:]))

    def rows(self, index: Tensor | slice) -> BucketBias:
        """The bias of these query rows, in their order; index: int64 [M'], bool [M], or a slice."""
        if self.relation is not None:
            return _sparse_rows(self, "index", index)
        return replace(self, index=self.index[:, index])

    def of_pairs(self) -> Tensor:
        """Values [P, H] of the pairs of a sparse bias."""
        masked = self.index == MASKED_BUCKET
        return self.table.t()[self.index.long().masked_fill(masked, 0)].masked_fill(masked[:, None], -torch.inf)

    def materialize(self) -> Tensor:
        """The bias as a dense tensor [B or 1, H, M, N]."""
        if self.relation is not None:
            return _scattered(self.of_pairs(), self.relation, -torch.inf)
        masked = self.index == MASKED_BUCKET
        values = self.table[:, self.index.long().masked_fill(masked, 0)].transpose(0, 1)
        return values.masked_fill(masked.unsqueeze(1), -torch.inf)


@dataclass(frozen=True, eq=False)
class ProjectedBias:
    """b[h, i, j] = sum_c weight[h, c] * channels[c, i, j]: ANS-GT's projection of adjacency powers.

    A constant per head would cancel in the softmax, so there is no offset. On a GPU the sum is made in fp32 and rounded
    to the dtype of the queries once, as a dense bias in it would be.

    Args:
        channels: finite, floating point [B or 1, C, M, N], C <= 16. Sparse: hybrid CSR [M, N, C], and after
            construction [P, C].
        weight: learned, floating point [H, C].
        mask: optional bool [B or 1, M, N], True means "cannot attend"; a sparse bias leaves a pair out instead.
        relation: the pairs of sparse channels.

    Raises:
        ValueError: a shape or dtype above does not hold; channels that ask for a gradient.

    Examples:
        >>> mg.ProjectedBias(torch.rand(2, 6, 50, 50), torch.zeros(4, 6, requires_grad=True)).shape
        torch.Size([2, 4, 50, 50])
    """

    channels: Tensor
    weight: Tensor
    mask: Tensor | None = None
    relation: Relation | None = None
    form: ClassVar[str] = "projected"

    def __post_init__(self) -> None:
        take_relation(self, "channels")
        if self.relation is not None:
            check_pairs("ProjectedBias channels", self.channels, self.relation, ("C",))
        else:
            check_plane("ProjectedBias channels", self.channels, 4, "[B or 1, C, M, N]")
        check_plane("ProjectedBias weight", self.weight, 2, "[H, C]")
        for name, tensor in (("channels", self.channels), ("weight", self.weight)):
            if not tensor.is_floating_point():
                raise ValueError(f"ProjectedBias {name} must be floating point, got {tensor.dtype}")
        if self.channels.requires_grad:
            raise ValueError("ProjectedBias channels are data and get no gradient; pass channels.detach()")
        num_channels = self.channels.shape[1]
        if self.weight.shape[1] != num_channels or not 1 <= num_channels <= MAX_CHANNELS:
            raise ValueError(
                f"ProjectedBias weight must have shape [H, C] with C = {num_channels} the number of channels "
                f"(1 to {MAX_CHANNELS}), got {tuple(self.weight.shape)}"
            )
        if self.mask is not None:
            check_strided("ProjectedBias mask", self.mask)
            if self.relation is not None:
                raise ValueError("ProjectedBias mask must be None with sparse channels: leave out pairs to mask")
            batch, _, rows, columns = self.channels.shape
            if self.mask.dtype != torch.bool:
                raise ValueError(f"ProjectedBias mask must be torch.bool (True = masked), got {self.mask.dtype}")
            if self.mask.ndim != 3 or self.mask.shape[0] not in (1, batch) or self.mask.shape[1:] != (rows, columns):
                raise ValueError(
                    f"ProjectedBias mask must have shape [{batch} or 1, {rows}, {columns}], "
                    f"got {tuple(self.mask.shape)}"
                )

    @property
    def data(self) -> Tensor:
        """What layers share, the channels."""
        return self.channels

    @property
    def learned(self) -> Tensor:
        """What gets a gradient, the weight."""
        return self.weight

    @property
    def shape(self) -> torch.Size:
        """[B or 1, H, M, N]."""
        if self.relation is not None:
            return _shape(self.relation, self.weight.shape[0])
        return torch.Size((self.channels.shape[0], self.weight.shape[0], *self.channels.shape[2:]))

    def rows(self, index: Tensor | slice) -> ProjectedBias:
        """The bias of these query rows, in their order; index: int64 [M'], bool [M], or a slice."""
        if self.relation is not None:
            return _sparse_rows(self, "channels", index)
        mask = None if self.mask is None else self.mask[:, index]
        return replace(self, channels=self.channels[:, :, index], mask=mask)

    def of_pairs(self) -> Tensor:
        """Values [P, H] of the pairs of a sparse bias."""
        dtype = torch.promote_types(self.channels.dtype, self.weight.dtype)
        return self.channels.to(dtype) @ self.weight.to(dtype).t()

    def materialize(self) -> Tensor:
        """The bias as a dense tensor [B or 1, H, M, N]."""
        if self.relation is not None:
            return _scattered(self.of_pairs(), self.relation, -torch.inf)
        dtype = torch.promote_types(self.channels.dtype, self.weight.dtype)
        values = torch.einsum("bcmn,hc->bhmn", self.channels.to(dtype), self.weight.to(dtype))
        return values if self.mask is None else values.masked_fill(self.mask.unsqueeze(1), -torch.inf)


@dataclass(frozen=True, eq=False)
class BorderedBias:
    """A sparse bias of regular nodes, with N_s super nodes that see, and are seen by, all; of one table.

    The super nodes are the last of N rows and columns. Nothing of N x N exists.

    Args:
        pairs: sparse, [S, H, R, N'], of the R regular rows that are here.
        super_columns: dense, [S, H, R, N_s], of these rows.
        super_rows: dense, [S, H, N_s, R + N_s], whose regular columns are those rows; ``None``: they are not asked for.
    """

    pairs: BucketBias
    super_columns: BucketBias
    super_rows: BucketBias | None
    form: ClassVar[str] = "bordered"

    @property
    def shape(self) -> torch.Size:
        """[S, H, M, N]; M is R + N_s, or R without super rows."""
        sequences, heads, num_rows, num_super = self.super_columns.shape
        num_nodes = self.relation.num_columns
        return torch.Size(
            (sequences, heads, num_rows + (self.super_rows is not None) * num_super, num_nodes + num_super)
        )

    @property
    def data(self) -> Tensor:
        return self.pairs.index

    @property
    def learned(self) -> Tensor:
        return self.pairs.table

    @property
    def mask(self) -> None:
        return None

    @property
    def relation(self) -> Relation:
        assert self.pairs.relation is not None
        return self.pairs.relation

    def rows(self, index: Tensor | slice) -> BorderedBias:
        """The bias of all rows, or of the regular ones alone; of no others."""
        num_regular, num_rows = self.super_columns.shape[2], self.shape[2]
        wanted = index.indices(num_rows) if isinstance(index, slice) else None
        if wanted == (0, num_regular, 1):
            return replace(self, super_rows=None)
        if wanted != (0, num_rows, 1):
            raise ValueError(f"rows of a bordered bias must be all {num_rows}, or the first {num_regular}, got {index}")
        return self

    def shard(self, layout: NodeLayout) -> BorderedBias:
        """The bias of one rank's rows, from that of all nodes."""
        assert self.super_rows is not None
        data = BorderedData(self.relation, self.data, self.super_columns.index, self.super_rows.index)
        return data.shard(layout).bias(self.learned)

    def materialize(self) -> Tensor:
        """The bias as a dense tensor [S, H, M, N], of all nodes."""
        regular = torch.cat([self.pairs.materialize(), self.super_columns.materialize()], dim=3)
        return regular if self.super_rows is None else torch.cat([regular, self.super_rows.materialize()], dim=2)


@dataclass(frozen=True, eq=False)
class BorderedData:
    """The data of a :class:`BorderedBias`, buckets, shared by all layers.

    Args:
        relation: which pairs of the R regular rows that are here and the N' regular columns exist.
        index: uint8 [P], of these pairs.
        super_columns: uint8 [1, R, N_s], of regular rows.
        super_rows: uint8 [1, N_s, R + N_s].
    """

    relation: Relation
    index: Tensor
    super_columns: Tensor
    super_rows: Tensor
    _moved: dict[torch.device, BorderedData] = field(default_factory=dict, init=False, repr=False)

    @property
    def tensors(self) -> list[Tensor]:
        return [self.index, self.super_columns, self.super_rows, *self.relation.lists.values()]

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> BorderedData:
        """The data on ``device``; kept, as a graph is the same in every step: kernels put its pairs into tiles once."""
        device = numbered(device)
        if device == self.index.device:
            return self
        if device not in self._moved:
            with torch.inference_mode(False):  # training takes it, too
                parts = (self.index, self.super_columns, self.super_rows)
                moved = (x.to(device, non_blocking=non_blocking) for x in parts)
                self._moved[device] = BorderedData(self.relation.to(device), *moved)
        return self._moved[device]

    def shard(self, layout: NodeLayout) -> BorderedData:
        """What one rank holds of the data of all nodes; padding rows attend to super nodes alone."""
        if layout.world_size == 1:
            return self
        rows = layout.local_to_global.to(self.index.device)
        relation, pairs = self.relation.take(rows[: layout.block_size])
        at = rows.clamp(min=0)
        columns = self.super_columns[:, at[: layout.block_size]]
        return BorderedData(relation, self.index[pairs], columns, self.super_rows[:, :, at])

    def bias(self, table: Tensor) -> BorderedBias:
        """The bias that these data are with the table [H, R] of a layer."""
        return BorderedBias(
            pairs=BucketBias(self.index, table, self.relation),
            super_columns=BucketBias(self.super_columns, table),
            super_rows=BucketBias(self.super_rows, table),
        )


Bias = DenseBias | BucketBias | ProjectedBias | BorderedBias


def _shape(relation: Relation, heads: int) -> torch.Size:
    sequences, rows, columns = relation.shape
    return torch.Size((sequences, heads, rows, columns))


def aligned_columns(columns: int) -> int:
    """How many a row of a batch's data has in memory, for N = ``columns``."""
    return -(-columns // _ALIGNMENT) * _ALIGNMENT


def aligned_rows(x: Tensor) -> Tensor:
    """x laid out as the data of a batch: every row [N] has ``aligned_columns`` numbers in memory."""
    columns = aligned_columns(x.shape[-1])
    if columns == x.shape[-1]:
        return x
    return x.new_zeros(*x.shape[:-1], columns)[..., : x.shape[-1]].copy_(x)


def masked_table(table: Tensor) -> Tensor:
    """A table [H, R] with a column for every index: NaN beyond R, -inf at 255, so that a masked pair is a look-up."""
    masked = table.new_full((table.shape[0], MASKED_BUCKET + 1), torch.nan)
    masked[:, : table.shape[1]] = table
    masked[:, MASKED_BUCKET] = -torch.inf
    return masked
