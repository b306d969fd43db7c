"""How the tensors of a call lie: one object for each way, for what is checked and planned once for all calls of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

_MOST = 4096  # sizes may vary from batch to batch
_known: dict[tuple, Geometry] = {}


class Geometry:
    """Shapes, strides, dtypes, devices and alignment of tensors, whether their memory is there, and which begin at the
    same place."""

    checked = False  # whether an operator has found them in order


def geometry_of(tensors: Iterable[Tensor | None]) -> Geometry:
    """That of tensors with memory."""
    key: list[Any] = []
    pointers: list[int] = []
    for x in tensors:
        if x is None:
            key.append(None)
        else:
            pointer, there = x.data_ptr(), x.untyped_storage().nbytes()  # less, if it was freed
            key += (x.shape, x.stride(), x.dtype, x.device, there >= x.nbytes or there, pointer % 16)
            pointers.append(pointer)
    if len(set(pointers)) < len(pointers):
        key += map(pointers.index, pointers)
    lies = tuple(key)
    geometry = _known.get(lies)
    if geometry is None:
        if len(_known) >= _MOST:
            _known.clear()
        geometry = _known[lies] = Geometry()
    return geometry
