"""Training steps as CUDA graphs, for a GPU that is done with a step's kernels before Python has called them all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_MOST_GRAPHS = 8  # steps of further shapes go on being called
_SIZES = 8  # between one power of two and the next, to which the length of a ragged tensor is rounded up

Results = tuple[Tensor | None, ...]  # a loss, and the gradient of every parameter


class _Graph(NamedTuple):
    """A recorded step: the memory that it reads and writes, and what runs it."""

    tensors: dict[str, Tensor]
    inverse: Tensor
    results: Results
    run: Callable[[], None]


class CapturedSteps:
    """Losses, with their gradients; the second step of a shape is recorded as a CUDA graph, which then is replayed.

    A replay copies its inputs to where the recorded kernels read them. All graphs share one pool of memory: the
    gradients of a step are gone with the next.

    Args:
        loss_of: tensors by name, and what else it is called with -> the sum of a loss; it must not wait for the device.
        ragged: names of tensors of varying length, which may end in rows that nobody reads.
    """

    def __init__(
        self, loss_of: Callable[..., Tensor], parameters: list[nn.Parameter], ragged: tuple[str, ...] = ()
    ) -> None:
        self._loss_of, self._parameters, self._ragged = loss_of, parameters, ragged
        self._device = parameters[0].device
        self._graphs: dict[tuple, _Graph | None] = {}  # None: of this shape there was one step
        self._pool: Any = None

    def __call__(self, num_targets: int, tensors: dict[str, Tensor], **fixed: Any) -> Tensor:
        """The sum over ``num_targets``; its gradients take the place of the parameters' ``grad``.

        Args:
            fixed: hashable; a graph is replayed for equal ones only.
        """
        shapes = {
            name: (_rounded_up(len(x)) if name in self._ragged else len(x), *x.shape[1:]) for name, x in tensors.items()
        }
        geometry = [(name, shapes[name], x.stride(), x.dtype) for name, x in tensors.items()]
        key = (*geometry, *fixed.items())
        if key not in self._graphs:
            if len(self._graphs) < _MOST_GRAPHS:
                self._graphs[key] = None
            return self._keep(self._step(self._inverse(num_targets), tensors, fixed))
        graph = self._graphs[key]
        if graph is None:
            graph = self._graphs[key] = self._record(shapes, tensors, fixed)
        for name, x in tensors.items():
            held = graph.tensors[name]
            held[: len(x)].copy_(x)
            if len(x) < len(held):
                held[len(x) :].zero_()
        graph.inverse.fill_(1 / num_targets)
        graph.run()
        return self._keep(graph.results)

    def _keep(self, results: Results) -> Tensor:
        loss, *gradients = results
        assert loss is not None
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        return loss

    def _inverse(self, num_targets: int) -> Tensor:
        """1 / num_targets on the device, by which a GPU multiplies where it is to divide."""
        return torch.full((), 1 / num_targets, dtype=torch.float64, device=self._device)

    def _step(self, inverse: Tensor, tensors: dict[str, Tensor], fixed: dict[str, Any]) -> Results:
        loss = self._loss_of(**tensors, **fixed)
        loss = loss * inverse.to(loss.dtype)
        return loss.detach(), *torch.autograd.grad(loss, self._parameters, allow_unused=True)

    def _record(self, shapes: dict[str, tuple[int, ...]], tensors: dict[str, Tensor], fixed: dict[str, Any]) -> _Graph:
        inverse, held = self._inverse(1), {}
        for name, x in tensors.items():
            held[name] = torch.empty_strided(shapes[name], x.stride(), dtype=x.dtype, device=x.device).zero_()
        return _Graph(held, inverse, *self._capture(lambda: self._step(inverse, held, fixed)))

    def _capture(self, step: Callable[[], Results]) -> tuple[Results, Callable[[], None]]:
        """A step's results, and what makes them anew in the same memory."""
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):  # a first call sets up what must not be recorded
            step()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # loaders use the device from threads of theirs meanwhile
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            results = step()
        self._pool = graph.pool()
        return results, graph.replay


def _rounded_up(length: int) -> int:
    step = max((1 << max(length - 1, 1).bit_length() - 1) // _SIZES, 1)
    return -(-length // step) * step
