"""Leaving before a run is done, with a checkpoint, on a signal or before a time limit.

A scheduler that wants its machines back sends SIGTERM or SIGUSR1, which torchrun passes on, and kills some time later.
Who is asked alone, be it one rank, asks all: through the store that torchrun hosts (``failure.Watch``) and by a number
that every step sums up over the ranks, so that all leave after the same step.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType, TracebackType

import psutil
import torch

from megagraph.parallel import failure
from megagraph.parallel.mesh import sum_over_ranks

EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: try again


class Stopped(SystemExit):
    """A run has left before it was done, with a checkpoint if it had begun; the same command goes on with it.

    As an exit status it is 75; under torchrun, which would start ranks again that end with another one, 0.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(0 if "TORCHELASTIC_RUN_ID" in os.environ else EXIT_CODE)
        self.reason = reason


class Stop:
    """Listens for the wish to leave, from ``with`` to the end of the block.

    In one process a signal raises :class:`Stopped` at once until ``deferred`` is set, as before the first step nothing
    can be lost. With several, :class:`failure.Watch` hears them, and ends the ranks until then.

    Args:
        limit_seconds: since this process, or the torchrun that started it, was started.
    """

    def __init__(self, limit_seconds: float | None = None) -> None:
        self.deferred = False
        self.leave = False  # as all ranks have agreed
        self._reason: str | None = None
        self._deadline = None if limit_seconds is None else _start_of_job() + limit_seconds
        self._reserve = 5.0  # seconds that one more step and a checkpoint may take
        self._old: dict[int, object] = {}

    def __enter__(self) -> Stop:
        if not failure.watched() and threading.current_thread() is threading.main_thread():
            self._old = {number: signal.signal(number, self._hear) for number in failure.SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failure.defer(None)
        for number, handler in self._old.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def defer(self) -> None:
        """From now on there is something to save: who is asked to leave does so after the step."""
        self.deferred = True
        failure.defer(self)

    def ask(self, reason: str) -> None:
        """Leave after the step under way."""
        self._reason = self._reason or reason

    def took(self, seconds: float) -> None:
        """A step or a checkpoint took so long; the time limit keeps room for three."""
        self._reserve = max(self._reserve, 3 * seconds)

    @property
    def asked(self) -> bool:
        """Whether this rank was asked, or its time is nearly over."""
        if self._deadline is not None and time.time() + self._reserve > self._deadline:
            self.ask("the time limit")
        return self._reason is not None

    def agreed(self) -> bool:
        """Whether any rank was asked; the same on every rank. Collective."""
        self.leave = bool(sum_over_ranks(torch.tensor(float(self.asked))))
        return self.leave

    @property
    def reason(self) -> str:
        """Why the run leaves, as far as this rank knows."""
        return self._reason or "another rank"

    def _hear(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        self.ask(name)
        if not self.deferred:
            raise Stopped(name)


def _start_of_job() -> float:
    """When torchrun was started, or this process where it is alone; seconds since the epoch."""
    pid = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()
    return psutil.Process(pid).create_time()
