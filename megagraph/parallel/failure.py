"""When a rank fails, every rank says which one, where and why, and leaves.

Each rank writes what it is doing into the store that torchrun hosts. The first to meet an error, a collective that lost
a peer or timed out, or the launcher's SIGTERM raises a flag there. Every rank that still runs answers it, whatever its
main thread waits for; who does not answer is dead or stopped, who answers but meets no error of its own hangs. The
cause is written once, so all ranks print the same one. The launcher ends what cannot end itself.

Once a rank has something to save (``defer``), a signal is no end but a wish to leave, which the store passes on to all.
A rank that does not confirm it is dead, the reason for the launcher's signal, and the others do not wait for it.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

POLL_SECONDS = 0.2
GRACE_SECONDS = 1.0  # a rank whose peer timed out will time out itself, unless it is the one that hangs
ANSWER_SECONDS = 2.5  # longer than the two above: who has not answered by then cannot
ORPHAN_SECONDS = 120.0  # for the last step and a checkpoint, after the launcher has gone
FAILED, CAUSE, LEAVE = "failed", "cause", "leave"  # keys of the store, beside phase/RANK, answer/RANK and leave/RANK
RAISED = "raised"
SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))  # Windows has one

_watch: Watch | None = None
_phase = "the beginning"


class Asked(Protocol):
    """Who hears of the wish to leave."""

    def ask(self, reason: str) -> None: ...


def watched() -> bool:
    """Whether this rank is one of several that watch over each other."""
    return _watch is not None


def defer(stop: Asked | None) -> None:
    """From now on tell ``stop`` of signals, in place of an end; ``None``: end again. Nothing to do for one process."""
    if _watch is not None:
        _watch.stop = stop


def phase(name: str, *, step: int | None = None) -> None:
    """Say what this rank does from now on; the step stays the last one named."""
    global _phase
    _phase = name if step is None else f"{name} (step {step})"
    if _watch is not None:
        _watch.enter(name, step)


def current_phase() -> str:
    """What this rank does."""
    return _phase


def note(error: BaseException) -> None:
    """Keep an error of this rank as the cause of what will follow, unless there is one."""
    if _watch is not None:
        _watch.note(error)


def is_of_a_peer(error: BaseException) -> bool:
    """Whether the error says no more than that a collective failed; the cause is then on another rank."""
    chain = _chain(error)
    return any(isinstance(link, dist.DistError) or "gloo/" in str(link) for link in chain)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on a GPU or here."""
    chain = _chain(error)
    return any(
        isinstance(link, (MemoryError, torch.OutOfMemoryError)) or "DefaultCPUAllocator" in str(link) for link in chain
    )


class Watch:
    """A thread that listens for failures of other ranks and for the launcher while the main thread works or waits.

    Args:
        store: of all ranks, for nothing else; used from two threads, so not one that a group blocks.
        timeout_seconds: how long the store may take to answer.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout_seconds: float) -> None:
        self.store, self.rank, self.world_size = store, rank, world_size
        self._entered = 0
        self._looks, self._timeout = 0, timeout_seconds
        self._step: int | None = None
        self._raised, self._closed = threading.Event(), False
        self._main = threading.current_thread()
        self._phase = "the beginning"
        self.stop: Asked | None = None
        self._launcher = os.getppid()
        self._orphaned: float | None = None  # since when the launcher is gone
        self._leaving: float | None = None  # since when all ranks are asked to leave
        # the C part of Python's signal handling writes here at once, even while the main thread waits inside torch
        self._signals, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        self._handles_signals = self._main is threading.main_thread()
        if self._handles_signals:
            self._old_handlers = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
            self._old_fd = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, name="megagraph-watch", daemon=True)
        self._thread.start()
        threading.Thread(target=self._guard, name="megagraph-guard", daemon=True).start()
        global _watch
        _watch = self

    def enter(self, name: str, step: int | None = None) -> None:
        self._entered += 1
        self._step = self._step if step is None else step
        self._phase = name if self._step is None else f"{name} (step {self._step})"
        with suppress(RuntimeError):  # no store, no launcher: the thread has noticed, too
            self.store.set(f"phase/{self.rank}", f"{self._entered} {self._phase}")

    def note(self, error: BaseException) -> None:
        with suppress(RuntimeError):  # no store: this rank says it alone
            self.store.compare_set(CAUSE, "", self._describe(error))

    def report(self, error: BaseException) -> None:
        """Tell the others of an error of the main thread, and print the first cause."""
        self._raised.set()
        if not is_of_a_peer(error):
            self.note(error)
        self._print(self._agree(RAISED, error))
        self.close()

    def close(self) -> None:
        """End the thread, and leave signals as they were."""
        global _watch
        _watch, self._closed = None, True
        if self._handles_signals:
            signal.set_wakeup_fd(self._old_fd)
            for number, handler in self._old_handlers.items():
                signal.signal(number, handler)
        self._wake.send(b"\0")
        self._thread.join()
        for end in (self._wake, self._signals):
            end.close()

    def _listen(self) -> None:
        told = False
        while not told and not self._closed:
            self._looks += 1
            readable, _, _ = select.select([self._signals], [], [], POLL_SECONDS)
            heard = self._signals.recv(4096) if readable else b""
            told = any(self._hear(number) for number in SIGNALS if number in heard)
            told = told or self._lost_launcher() or self._others_failed() or self._lost_peers()
        if self._closed or self._raised.wait(GRACE_SECONDS) or self._closed:
            return  # the main thread has an error of its own to report, or is done
        frame = sys._current_frames()[self._main.ident or 0]
        place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
        self._print(self._agree(place, None))
        _end()

    def _guard(self) -> None:
        """End a process that is cut off: its store gives neither an answer nor an error, in whatever thread it asks."""
        most = (self._timeout + GRACE_SECONDS + ANSWER_SECONDS) / POLL_SECONDS
        seen, waited = -1, 0  # counted, as a clock goes on while a process is stopped
        while self._thread.is_alive():
            time.sleep(POLL_SECONDS)
            seen, waited = self._looks, waited + 1 if self._looks == seen else 0
            if waited > most:
                self._print("the store does not answer, this machine or that of rank 0 is cut off")
                _end()

    def _hear(self, number: int) -> bool:
        """Take a signal; whether it is the end."""
        if self.stop is None:
            return True
        self.stop.ask(signal.Signals(number).name)
        with suppress(RuntimeError):
            self.store.set(LEAVE, signal.Signals(number).name)
        return False

    def _lost_launcher(self) -> bool:
        """Notice a launcher that is gone; whether it is the end."""
        if self._orphaned is None and os.getppid() == self._launcher:
            return False
        if self.stop is None:
            return True
        self._orphaned = self._orphaned or time.monotonic()
        self.stop.ask("the end of the launcher")
        return time.monotonic() - self._orphaned > ORPHAN_SECONDS

    def _others_failed(self) -> bool:
        if self._orphaned is not None:
            return False
        try:
            return self.store.check([FAILED])
        except RuntimeError:  # no store, no launcher
            self._orphaned = time.monotonic()
            return self._lost_launcher()

    def _lost_peers(self) -> bool:
        """Pass on the wish to leave, and see whether all ranks have heard of it; whether one cannot."""
        if self._orphaned is not None or self.stop is None:
            return False
        try:
            if self._leaving is None and self.store.check([LEAVE]):
                self._leaving = time.monotonic()
                self.stop.ask(self.store.get(LEAVE).decode())
                self.store.set(f"{LEAVE}/{self.rank}", "1")
            if self._leaving is None or time.monotonic() - self._leaving < ANSWER_SECONDS:
                return False
            return not self.store.check([f"{LEAVE}/{rank}" for rank in range(self.world_size)])
        except RuntimeError:
            return False  # the next look at the store tells

    def _agree(self, answer: str, error: BaseException | None) -> str:
        """Answer, hear the others' answers, and agree on the first cause."""
        try:
            self.store.set(f"answer/{self.rank}", answer)
            self.store.set(FAILED, "1")
            deadline = time.monotonic() + ANSWER_SECONDS
            keys = [f"answer/{rank}" for rank in range(self.world_size)]
            while not self.store.check(keys) and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS / 2)
            if not self.store.check([CAUSE]):
                self.store.compare_set(CAUSE, "", self._diagnose(error))
            return self.store.get(CAUSE).decode()
        except RuntimeError as lost:
            return self._without_store(lost if error is None else error)

    def _without_store(self, error: BaseException) -> str:
        """The cause that this rank can tell alone."""
        if os.getppid() == self._launcher and is_of_a_peer(error):
            return "the machine of rank 0, which has the store, does not answer"
        return self._describe(error)

    def _diagnose(self, error: BaseException | None) -> str:
        """Which ranks are to blame where none has an error but that of a lost peer."""
        phases, answers = ({r: self._read(f"{key}/{r}") for r in range(self.world_size)} for key in ("phase", "answer"))
        entered = {rank: int(text.split(" ", 1)[0]) if text else 0 for rank, text in phases.items()}
        where = {rank: text.split(" ", 1)[1] if text else "nothing yet" for rank, text in phases.items()}
        silent = [rank for rank, answer in answers.items() if not answer]
        if silent:
            return "; ".join(
                f"rank {rank} does not answer (killed, stopped or cut off), last seen in {where[rank]}"
                for rank in silent
            )
        if error is None and RAISED not in answers.values():
            return f"the launcher ended all ranks, rank {self.rank} in {self._phase}"
        waiting = [rank for rank in sorted(entered, key=lambda rank: entered[rank]) if answers[rank] != RAISED]
        if waiting:
            return " or ".join(f"rank {rank} hangs in {where[rank]} at {answers[rank]}" for rank in waiting)
        return self._describe(error) if error is not None else f"a collective failed, rank {self.rank} in {self._phase}"

    def _read(self, key: str) -> str:
        return self.store.get(key).decode() if self.store.check([key]) else ""

    def _describe(self, error: BaseException) -> str:
        root = _chain(error)[-1]
        lines = str(root).strip().splitlines()
        return f"rank {self.rank} in {self._phase}: {type(root).__name__}: {lines[0] if lines else ''}"

    def _print(self, cause: str) -> None:
        print(f"megagraph: rank {self.rank} leaves, first cause: {cause}", file=sys.stderr, flush=True)


def _end() -> None:
    """Leave at once, as the main thread may wait for ever."""
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(1)


def _in_child() -> None:
    """A child shares the socket that signals are written to."""
    if _watch is not None and threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(-1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


def _chain(error: BaseException) -> list[BaseException]:
    """The error and what it was raised from, the root last; torch's pipelining wraps what a stage raises."""
    chain = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    return chain
