"""Results of cheap functions that are made again for the backward pass instead of kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class _Again:
    """function(x), made when the first of its readers asks for it, and dropped after the last one."""

    def __init__(self, function: Callable[[Tensor], Tensor], x: Tensor) -> None:
        self.function, self.x = function, x.detach()
        kind = x.device.type
        self.autocast = torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        self.readers = self.served = 0
        self.y: Tensor | None = None

    def give(self) -> Tensor:
        if self.y is None:
            with torch.no_grad(), self.autocast:
                self.y = self.function(self.x)
        y, self.served = self.y, self.served + 1
        if self.served % self.readers == 0:
            self.y = None
        return y


@contextmanager
def recomputed(function: Callable[[Tensor], Tensor], x: Tensor) -> Iterator[Tensor]:
    """Gives function(x); what reads it inside the ``with`` keeps x for its backward pass, not the result.

    For functions that keep x anyway and cost little beside their readers, as a normalisation before projections.
    ``torch.compile`` decides itself what to keep. Hooks on saved tensors that are set outside (``save_on_cpu``,
    ``torch.utils.checkpoint``) do not see what is kept inside.

    Args:
        function: deterministic; its result has memory of its own.
        x: any shape; must not be changed in place before the backward pass.
    """
    y = function(x)
    if not y.requires_grad or torch.compiler.is_compiling():
        yield y
        return
    # no name of y in the hooks, which live as long as what they pack
    again, place, dtype = _Again(function, x), y.untyped_storage().data_ptr(), y.dtype

    def pack(saved: Tensor) -> Any:
        if saved.untyped_storage().data_ptr() != place or saved.dtype != dtype:
            return saved
        again.readers += 1
        return saved.shape, saved.stride(), saved.storage_offset()

    def unpack(kept: Any) -> Tensor:
        return kept if isinstance(kept, Tensor) else again.give().as_strided(*kept)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield y
