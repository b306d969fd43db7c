"""A command in a process of its own, and the memory of its process tree, sampled.

USS: pages that one process alone maps, those of files among them. PSS: every page, shared ones in equal parts, so that
what the tree shares within counts once. RSS: every page of every process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import psutil

_SAMPLE_SECONDS = 0.25


class Child:
    """A Python command, and all that it starts; ended on leaving the context.

    ``peak`` holds the largest bytes that ``sample`` has seen, ``seconds`` the time since the start.
    """

    def __init__(self, *arguments: str | Path, environment: Mapping[str, str] | None = None) -> None:
        self.command = [sys.executable, *map(str, arguments)]
        self.peak: dict[str, int] = {}
        self._environment = None if environment is None else os.environ | dict(environment)

    def __enter__(self) -> Child:
        self._started = time.perf_counter()
        self._said = tempfile.TemporaryFile("w+")  # it may say more than a pipe holds before anybody reads
        self._process = subprocess.Popen(self.command, stdout=self._said, env=self._environment, start_new_session=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._said.close()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._started

    def running(self) -> bool:
        """Whether it goes on, after a short wait and a sample.

        Raises:
            SystemExit: it has failed.
        """
        if self._process.poll() is None:
            self.sample()
            time.sleep(_SAMPLE_SECONDS)
        if self._process.returncode:
            raise SystemExit(f"{' '.join(self.command)} ended with {self._process.returncode}")
        return self._process.returncode is None

    @property
    def cpu_seconds(self) -> float:
        """Seconds of the processor, of the processes of the tree that have not ended."""
        seconds = 0.0
        for process in _tree(self._process.pid):
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                seconds += sum(process.cpu_times()[:2])
        return seconds

    def sample(self) -> dict[str, int]:
        """Bytes of the whole tree now."""
        total: dict[str, int] = {}
        for process in _tree(self._process.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                memory = process.memory_full_info()
                for name in ("uss", "pss", "rss"):
                    total[f"{name}_bytes"] = total.get(f"{name}_bytes", 0) + getattr(memory, name)
        for name, size in total.items():
            self.peak[f"peak_{name}"] = max(self.peak.get(f"peak_{name}", 0), size)
        return total

    def said(self) -> str:
        """What it has printed; it has ended."""
        self._said.seek(0)
        return self._said.read().strip()


def run(*arguments: str | Path, environment: Mapping[str, str] | None = None) -> tuple[str, dict[str, float]]:
    """What a command prints, and its seconds and peak bytes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with Child(*arguments, environment=environment) as child:
        while child.running():
            pass
        seconds, said = child.seconds, child.said()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_seconds = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
    return said, {"seconds": seconds, "cpu_seconds": cpu_seconds, **child.peak}


def forget_peak() -> int:
    """Let ``peak_resident`` begin here, after what compiling and loading took; bytes resident now. Linux."""
    ctypes.CDLL(None).malloc_trim(0)  # memory that is free already would hide what is taken
    Path("/proc/self/clear_refs").write_text("5")
    return psutil.Process().memory_info().rss


def peak_resident() -> int:
    """Bytes: the highest resident set of this process since ``forget_peak``. Linux."""
    status = Path("/proc/self/status").read_text()  # getrusage knows no other beginning than that of the parent
    return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", status)[1])


def _tree(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
