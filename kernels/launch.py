"""Launches, planned once for each geometry and repeated with other memory.

What a launcher decides - tiles, grids, strides, constants, which binary - follows from the geometry of its tensors and
its other arguments, and takes longer to decide than the kernels of short sequences run. So a launcher runs once for
each such geometry, before a :class:`Recorder`; calls that follow repeat the :class:`Plan` that this leaves.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
import triton
from torch import Tensor

from megagraph.kernels.geometry import Geometry, geometry_of
from megagraph.kernels.tile import INTERPRET

_MOST_PLANS = 4096  # sizes may vary from batch to batch; of a device they hold constants, which are small
plans: dict[tuple, Plan] = {}
_PLAIN = (Tensor, bool, int, float, str, type(None))


class Recorder:
    """Launches of a call, made at once and kept in order.

    A launcher may read no values, and hand to kernels only its own arguments, expanded or as bytes, and what it got
    here.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.scratch: list[Tensor] = []
        self.constants: dict[int, Tensor] = {}
        self.launches: list[tuple[Any, tuple[int, int, int], tuple]] = []

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Memory of one call."""
        self.scratch.append(torch.empty(shape, dtype=dtype, device=self.device))
        return self.scratch[-1]

    def constant(self, x: Tensor) -> Tensor:
        """Memory that calls share."""
        self.constants[x.data_ptr()] = x
        return x

    def launch(self, kernel: Any, programs: int, *args: Any, **constants: Any) -> None:
        """A Triton kernel; ``constants``: its compile-time ones, and options of the compiler."""
        binary = kernel[(programs,)](*args, **constants)
        signature = inspect.signature(kernel.fn)
        own = {name: value for name, value in constants.items() if name in signature.parameters}
        self.launches.append((kernel if INTERPRET else binary, (programs, 1, 1), signature.bind(*args, **own).args))


class Plan:
    """Launches that can be repeated: their arguments, but for memory.

    The numbers in a getter are places in a list of what was given, scratch, and then what never changes, among which
    the tuples stand that are made anew.
    """

    def __init__(self, recorder: Recorder, given: list[Tensor], result: Tensor | None) -> None:
        moving = [*given, *recorder.scratch]
        self._device = recorder.device
        self._sizes = [(x.shape, x.dtype) for x in recorder.scratch]
        self._fixed: list[Any] = []
        self._tuples: list[tuple[int, Callable, itemgetter]] = []
        places = {x.data_ptr(): place for place, x in reversed(list(enumerate(moving)))}
        known: dict[int, int] = {}  # by id; the recorder keeps all of them alive

        def place(value: Any) -> int:
            if isinstance(value, Tensor) and value.data_ptr() not in recorder.constants:
                return places[value.data_ptr()]
            if id(value) not in known:
                named = isinstance(value, tuple) and hasattr(value, "_make")
                fields = itemgetter(*map(place, value)) if named else None
                known[id(value)] = here = len(moving) + len(self._fixed)
                self._fixed.append(value if fields is None else None)
                if fields is not None:  # compiled code knows places, not names
                    self._tuples.append((here, value._make if INTERPRET else tuple, fields))
            return known[id(value)]

        self._kernels = [(kernel, grid) for kernel, grid, _ in recorder.launches]
        self._arguments = [itemgetter(*map(place, args)) for _, _, args in recorder.launches]
        self._runs: list[Callable] = []
        self._result = None if result is None else places[result.data_ptr()]

    def repeat(self, given: list[Tensor]) -> Tensor | None:
        """The launches with other memory."""
        memory: list[Any] = [*given]
        memory += [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in self._sizes]
        memory += self._fixed
        for place, make, fields in self._tuples:
            memory[place] = make(fields(memory))
        if not self._runs:  # now, as it loads them
            self._runs = [kernel[grid] for kernel, grid in self._kernels]
        stream = _stream()
        for run, arguments in zip(self._runs, self._arguments, strict=True):
            run(*arguments(memory), **stream)
        return None if self._result is None else memory[self._result]


def _stream() -> dict[str, Any]:
    """The current stream, which each kernel would else ask for."""
    if INTERPRET:
        return {}
    driver = triton.runtime.driver.active
    return {"stream": driver.get_current_stream(driver.get_current_device())}


def planned(launcher: Callable[..., Any]) -> Callable[..., Any]:
    """``launcher(recorder, *arguments)`` as a function of its arguments: tensors, the first on the device to use,
    numbers, and dataclasses of tensors and hashable values. It may return an argument or memory of the recorder's.

    ``geometry``: one that those of all tensors follow from, where the caller has it.
    """

    @functools.wraps(launcher)
    def run(*arguments: Any, geometry: Geometry | None = None) -> Tensor | None:
        keys: list[Any] = [launcher]
        given: list[Tensor] = []
        for x in _fields(arguments):
            if isinstance(x, Tensor):
                keys.append(Tensor)
                given.append(x.view(torch.uint8) if x.dtype is torch.bool else x)
            else:
                keys.append(tuple(x) if type(x) is list else x)
        key = (geometry or geometry_of(given), *keys)
        with torch.cuda.device_of(arguments[0]):
            if plan := plans.get(key):
                return plan.repeat(given)
            recorder = Recorder(arguments[0].device)
            result = launcher(recorder, *arguments)
        if len(plans) >= _MOST_PLANS:
            plans.clear()
        plans[key] = Plan(recorder, given, result)
        return result

    return run


def _fields(arguments: tuple[Any, ...]) -> list[Any]:
    values: list[Any] = []
    for x in arguments:
        values += [x] if isinstance(x, _PLAIN) else vars(x).values()
    return values
