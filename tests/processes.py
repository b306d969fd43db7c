"""Processes forked from one that has imported the package: an interpreter of their own would take seconds to start."""

from __future__ import annotations

import multiprocessing
import os
import random
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

START_METHOD = "spawn" if torch.cuda.is_available() else "forkserver"  # a fork cannot use the GPU of its parent
CONTEXT = multiprocessing.get_context(START_METHOD)
CONTEXT.set_forkserver_preload(["tests.preloaded"])


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


class Command:
    """``megagraph ARGUMENTS`` in a process of its own.

    Args:
        environment: on top of this process's.
        before: called there first, with nothing.
    """

    def __init__(
        self,
        *arguments: object,
        environment: Mapping[str, str] | None = None,
        before: Callable[[], object] | None = None,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        words = ["megagraph", *map(str, arguments)]
        variables = dict(os.environ) | dict(environment or {})
        self._process = CONTEXT.Process(target=_run, args=(words, variables, before, Path(self._folder.name)))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def finish(self) -> Done:
        """Wait for its end; one that does not come is a kill."""
        self._process.join(600)
        self._process.kill()
        self._process.join()
        out, err = (Path(self._folder.name, name).read_text() for name in ("stdout", "stderr"))
        code = self._process.exitcode
        self._process.close()
        self._folder.cleanup()
        assert code is not None
        return Done(code, out, err)


def _run(words: list[str], variables: dict[str, str], before: Callable | None, folder: Path) -> None:
    from megagraph import cli

    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), descriptor)
    os.environ.clear()
    os.environ.update(variables)
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)  # the default of a shell's
    sys.argv = words
    if before is not None:
        before()
    cli.main()


def _free_port() -> int:
    """One below those that the system hands out, of which a test beside this one may get it before a store listens."""
    while True:
        port = random.SystemRandom().randrange(15_000, 32_000)
        with socket.socket() as free, suppress(OSError):
            free.bind(("localhost", port))
            return port


def launch(world_size: int, *arguments: object) -> list[Done]:
    """The command in as many processes as torchrun would start."""
    return launch_each([arguments] * world_size)


def launch_each(arguments: list[tuple[object, ...]]) -> list[Done]:
    """Each rank with its own arguments."""
    return [command.finish() for command in start_each(arguments)]


def start_each(arguments: list[tuple[object, ...]]) -> list[Command]:
    """Each rank with its own arguments, still to be finished."""
    size = str(len(arguments))
    where = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "localhost", "MASTER_PORT": str(_free_port())}
    return [
        Command(*words, environment=where | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank, words in enumerate(arguments)
    ]
