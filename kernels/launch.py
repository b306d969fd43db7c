"""Launches, planned once for each geometry and repeated with other memory.

What a launcher decides - tiles, grids, strides, constants, which binary - follows from shapes, strides, dtypes and
alignment of its arguments, and takes longer to decide than the kernels of short sequences run. So a launcher runs once
for each such geometry, before a :class:`Recorder`; calls that follow repeat the :class:`Plan` that this leaves.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from megagraph.kernels.tile import INTERPRET

_MOST_PLANS = 4096  # sizes may vary from batch to batch; of a device they hold constants, which are small
plans: dict[tuple, Plan] = {}
_VALUES = frozenset({type(None), bool, int, float, str})  # isinstance takes longer


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
        for run, arguments in zip(self._runs, self._arguments, strict=True):
            run(*arguments(memory))
        return None if self._result is None else memory[self._result]


def planned(launcher: Callable[..., Any]) -> Callable[..., Any]:
    """``launcher(recorder, *arguments)`` as a function of its arguments: tensors, the first on the device to use,
    numbers, and dataclasses of tensors and hashable values. It may return an argument or memory of the recorder's."""

    @functools.wraps(launcher)
    def run(*arguments: Any) -> Tensor | None:
        device = arguments[0].device
        keys: list[Any] = [launcher, device]
        given: list[Tensor] = []
        pointers: list[int] = []
        for x in _fields(arguments):
            if x is None or type(x) in _VALUES:
                keys.append(x)
            elif isinstance(x, Tensor):
                pointer, dtype = x.data_ptr(), x.dtype
                keys += (Tensor, x.shape, x.stride(), dtype, pointer % 16)
                pointers.append(pointer)
                given.append(x.view(torch.uint8) if dtype is torch.bool else x)
            else:
                keys.append(tuple(x) if isinstance(x, list) else x)
        if len(set(pointers)) < len(pointers):  # who shares memory with whom
            keys += map(pointers.index, pointers)
        geometry = tuple(keys)
        with torch.cuda.device_of(arguments[0]):
            if plan := plans.get(geometry):
                return plan.repeat(given)
            recorder = Recorder(device)
            result = launcher(recorder, *arguments)
        if len(plans) >= _MOST_PLANS:
            plans.clear()
        plans[geometry] = Plan(recorder, given, result)
        return result

    return run


def _fields(arguments: tuple[Any, ...]) -> list[Any]:
    values: list[Any] = []
    for x in arguments:
        if type(x) in _VALUES or isinstance(x, Tensor):
            values.append(x)
        else:
            values += vars(x).values()
    return values
