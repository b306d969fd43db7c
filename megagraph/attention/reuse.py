"""Memory of large gradients on a CPU, kept for the next step.

The C library maps memory of 32 MiB and more anew each time, gives back what lies free at the end of its heap, and a
fresh page costs the system more than it costs to fill. Autograd asks for the same gradients in every step.
"""

from __future__ import annotations

import weakref
from collections import defaultdict

import torch
from torch import Tensor

_LEAST = 1 << 20  # bytes; smaller pieces the C library keeps itself
_MOST_KEPT = 1 << 30  # bytes that nobody uses
_free: defaultdict[int, list[Tensor]] = defaultdict(list)  # by size


def empty_like(x: Tensor) -> Tensor:
    """``torch.empty_like``; a large one on a CPU takes memory that another has left, if there is any of about its
    size."""
    num_bytes = x.numel() * x.itemsize
    if not _LEAST <= num_bytes <= _MOST_KEPT or x.device.type != "cpu":
        return torch.empty_like(x)
    step = 1 << num_bytes.bit_length() - 4
    size = -(-num_bytes // step) * step  # at most an eighth more, or batches of unequal length would share nothing
    try:
        memory = _free[size].pop()
    except IndexError:
        memory = torch.empty(size, dtype=torch.uint8, device="cpu")
    array = memory.numpy()[:num_bytes]  # lives as long as the result and its views
    weakref.finalize(array, _keep, memory).atexit = False
    strides = torch.empty_like(x, device="meta").stride()
    return torch.from_numpy(array).view(x.dtype).as_strided(x.shape, strides)


def _keep(memory: Tensor) -> None:
    if sum(len(blocks) * size for size, blocks in list(_free.items())) + memory.nbytes > _MOST_KEPT:
        _free.clear()
    _free[memory.nbytes].append(memory)
