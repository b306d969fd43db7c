"""What the fields of a bias may hold, and how a bias takes sparse ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megagraph.attention.relation import Relation, is_sparse

MASKED_BUCKET = 255  # index value of a node pair that must not attend; buckets are the numbers below
MAX_CHANNELS = 16


def check_strided(name: str, tensor: object) -> None:
    """Raise ValueError for what is no tensor, or one whose numbers do not stand at strides."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(tensor).__name__}; torch.as_tensor makes one")
    if tensor.is_nested:
        raise ValueError(
            f"{name} must be a dense tensor, got a nested one; pad it (torch.nested.to_padded_tensor) and pass "
            "key_padding_mask, or have nn.TransformerEncoder make none: enable_nested_tensor=False"
        )
    if tensor.layout != torch.strided:
        raise ValueError(f"{name} must be a dense tensor, got one of {tensor.layout}; pass its to_dense()")


def as_buckets(index: Tensor) -> Tensor:
    """An index of another integer type as uint8."""
    if index.is_floating_point() or index.is_complex() or index.dtype == torch.bool:
        raise ValueError(f"BucketBias index must be torch.uint8, or another integer, got {index.dtype}")
    if torch.compiler.is_compiling():
        raise ValueError(f"BucketBias index must be torch.uint8 in compiled code, got {index.dtype}; convert it before")
    low, high = (int(x) for x in index.aminmax()) if index.numel() else (0, 0)
    if low < 0 or high > MASKED_BUCKET:
        raise ValueError(
            f"BucketBias index must be in 0..254, or 255 for a pair that must not attend, got {low}..{high}; nodes "
            "that cannot reach each other may have a bucket of their own"
        )
    return index.to(torch.uint8)


def take_relation(bias: Any, field: str) -> None:
    """Turn a sparse tensor, or several, in a field into the values of its pairs and a relation."""
    given = getattr(bias, field)
    if not is_sparse(given):
        return
    name = f"{type(bias).__name__} {field}"
    if torch.compiler.is_compiling():
        raise ValueError(
            f"{name} must be plain tensors in compiled code, got sparse ones; build the bias outside of it"
        )
    relation, values = Relation.from_csr(name, given)
    object.__setattr__(bias, field, values)
    object.__setattr__(bias, "relation", relation)


def check_pairs(name: str, values: Tensor, relation: Relation, axes: tuple[str, ...]) -> None:
    """Raise ValueError unless ``values`` has a number, or a row, for each pair of a relation: [P] or [P, X]."""
    check_strided(name, values)
    num_pairs = len(relation.columns)
    if values.ndim != 1 + len(axes) or len(values) != num_pairs:
        raise ValueError(
            f"{name} of a sparse bias must have shape [{', '.join([f'P = {num_pairs}', *axes])}], "
            f"{'a number' if not axes else 'a row'} for each pair, got {tuple(values.shape)}; a hybrid CSR tensor of "
            "shape [M, N, X] has values [P, X]"
        )


def check_plane(name: str, tensor: Tensor, ndim: int, axes: str) -> None:
    check_strided(name, tensor)
    if tensor.ndim != ndim:
        raise ValueError(f"{name} must have shape {axes}, got {tuple(tensor.shape)}")
