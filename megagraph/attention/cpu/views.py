"""What compiled loops on a CPU see of an attention step: memory, and its strides."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megagraph.attention.bias import masked_table
from megagraph.attention.step import Step
from megagraph.jit import jit

BUCKET, PROJECTED, DENSE = 1, 2, 3
FORMS = {"none": 0, "bucket": BUCKET, "projected": PROJECTED, "dense": DENSE}


class Plane(NamedTuple):
    """A tensor [B, H, R, width], the width's numbers side by side."""

    memory: np.ndarray
    stride_b: int
    stride_h: int
    stride_row: int


@jit()
def place_of(x, at):
    """Place of a row (b, h, row) in the memory of a plane."""
    return at[0] * x.stride_b + at[1] * x.stride_h + at[2] * x.stride_row


class Strides(NamedTuple):
    """Strides of the arrays of a bias, and its form and sizes."""

    form: int
    num_learned: int  # R, of a head: 256 buckets (255 = masked) or C channels
    b: int
    c: int
    m: int
    mask_b: int
    mask_m: int


class BiasArrays(NamedTuple):
    """What makes the bias of a row; what another form needs is empty."""

    buckets: np.ndarray  # uint8, the memory of [B, M, N]
    channels: np.ndarray  # the memory of [B, C, M, N]
    learned: np.ndarray  # [H, R], flat: table or weight
    dense: Plane  # [B, H, M, N]
    mask: np.ndarray  # bool, the memory of [B, M, N], True = masked
    at: Strides


def number_of(compute: torch.dtype) -> type[Any]:
    """NumPy's type of a number."""
    return torch.empty(0, dtype=compute, device="cpu").numpy().dtype.type


def side_by_side(x: Tensor) -> Tensor:
    """x, or a copy of it whose last axis is contiguous."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def memory(x: Tensor) -> np.ndarray:
    """All that a tensor spans, from its first element on."""
    return _span(x).numpy()


def _span(x: Tensor) -> Tensor:
    if x.is_contiguous():
        return x.detach().view(-1)
    size = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    return x.detach().as_strided((size,), (1,))


def _memory_of_parameter(x: Tensor) -> np.ndarray:
    """``memory``, read only; after Tensor.numpy() FSDP could not free it any more."""
    array = np.from_dlpack(_span(x))
    array.flags.writeable = False  # as NumPy 1 does itself
    return array


def plane(x: Tensor | None, dtype: torch.dtype) -> Plane:
    """x [B or 1, H or 1, R, width], or [B, H, R] for a width of 1; inputs only where the width's numbers are apart."""
    x = torch.empty(1, 1, 0, 1, dtype=dtype, device="cpu") if x is None else x.unsqueeze(-1) if x.ndim == 3 else x
    x = side_by_side(x)
    return Plane(memory(x), *_strides(x))


def _strides(x: Tensor) -> tuple[int, int, int]:
    """Strides of a plane along b, h and rows; 0 where all share what stands there once."""
    return _stride(x, 0), _stride(x, 1), x.stride(2)


def _stride(x: Tensor, axis: int) -> int:
    return x.stride(axis) if x.shape[axis] > 1 else 0


def bias_arrays(step: Step, dtype: torch.dtype) -> BiasArrays:
    """The bias of a step, its numbers in ``dtype``."""
    nothing = learned = torch.empty(0, dtype=dtype, device="cpu")
    buckets, channels, mask = np.empty(0, np.uint8), nothing.numpy(), np.empty(0, bool)
    num_learned, strides, mask_strides = 0, (0, 0, 0), (0, 0)
    dense = Plane(_memory_of_parameter(nothing), 0, 0, 0)
    if step.form == "dense":
        assert step.learned is not None
        values = side_by_side(step.learned.detach().to(dtype))
        dense = Plane(_memory_of_parameter(values), *_strides(values))
    if step.form in ("bucket", "projected"):
        assert step.data is not None and step.learned is not None
        data = side_by_side(step.data.unsqueeze(1) if step.form == "bucket" else step.data.to(dtype))
        strides = (_stride(data, 0), data.stride(1), data.stride(2))
        table = step.learned.detach().to(dtype)
        if step.form == "bucket":
            buckets = memory(data)
            table = masked_table(table)
        else:
            channels = memory(data)
        learned, num_learned = table.contiguous(), table.shape[1]
    if step.bias_mask is not None:
        given = side_by_side(step.bias_mask)
        mask, mask_strides = memory(given), (_stride(given, 0), given.stride(1))
    at = Strides(FORMS[step.form], num_learned, *strides, *mask_strides)
    return BiasArrays(buckets, channels, _memory_of_parameter(learned), dense, mask, at)
