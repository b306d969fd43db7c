"""One command in a folder of files, some of them changed: did it do the same, refuse, or go wrong?

A small world is made once: a store with its cache, a run that was stopped and one that has finished, a profile, a cost
model, a plan, an .npz file; and under `other/` the same again with another seed. Every case is a command in a copy of
it, in a fork of this process, which has imported the package and run every command once, or in a process of its own.

    same      the outcome of the command on unchanged files: metrics without times, weights, predictions, images and
              printed answers bit for bit
    refused   exit status 1 and exactly one message `megagraph: error: ...`
    silent    exit status 0 and another outcome
    traceback, signal, hang (longer than 3 times the unchanged command and 10 s), unclear (another exit status, or no
              message)
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil
import scipy.sparse as sp
import torch

from megagraph import cli, epochs, files
from megagraph.data.datasets import synthetic_graph
from megagraph.data.store import write_store
from megagraph.models.config import ModelConfig
from megagraph.planner.rows import save_rows
from tests.planner import synthetic

ROOT = Path(__file__).parent.parent
FAULTS = ("silent", "traceback", "signal", "hang", "unclear")
MEMORY_BYTES = 6 << 30  # that a command may take on top of what this process has
PROFILED = (
    "--layers 2 --dim 16 --ffn-dim 16 --heads 2 --samples 2 --sample-nodes 6 --channels 3 --batch-size 18 --device cpu"
)
SIZES = f"{PROFILED} --epochs 2 --lock-wait 0"
STOP_AT = 3  # steps, in the first epoch
NODES, FEATURES, CLASSES = 90, 8, 3


@dataclass(frozen=True, slots=True)
class Command:
    """A command of the world.

    Args:
        arguments: relative to the copy, which is the working directory.
        reads: files and folders that it reads; all in them may be damaged.
        makes: what its outcome is, beside what it prints.
        given: of these, files that the user hands over: another whole one is no damage.
    """

    name: str
    arguments: str
    reads: tuple[str, ...]
    makes: tuple[str, ...]
    given: tuple[str, ...] = ()


COMMANDS = {
    command.name: command
    for command in (
        Command("resume", "train --resume stopped", ("stopped",), ("stopped",)),
        Command("auto", f"train {SIZES} --dataset store --resume auto --out stopped", ("stopped",), ("stopped",)),
        Command("again", f"train {SIZES} --dataset store --resume auto --out finished", ("finished",), ()),
        Command("train", f"train {SIZES} --dataset store --max-steps 2 --out new", ("store",), ("new",)),
        Command(
            "weights",
            f"train {SIZES} --dataset store --max-steps 2 --out new --weights finished/model.safetensors",
            ("finished/model.safetensors",),
            ("new",),
            ("finished/model.safetensors",),
        ),
        Command("predict", "predict finished --out made.npy", ("finished",), ("made.npy",)),
        Command("info", "data info store --verify", ("store",), ()),
        Command("import", "data import graph.npz --out made", ("graph.npz",), ("made",), ("graph.npz",)),
        Command("fit", "fit profile.json --out made.json", ("profile.json",), ("made.json",), ("profile.json",)),
        Command(
            "search",
            "search cost.json --world-size 4 --memory-gib 8 --explain 1,1,4 --out made.json",
            ("cost.json",),
            ("made.json",),
            ("cost.json",),
        ),
        Command(
            "costmodel",
            "plot costmodel cost.json --rows profile.json --out made.png",
            ("cost.json", "profile.json"),
            ("made.png",),
            ("cost.json", "profile.json"),
        ),
        Command(
            "pareto",
            "plot pareto cost.json --world-size 4 --memory-gib 8 --out made.png",
            ("cost.json",),
            ("made.png",),
            ("cost.json",),
        ),
        Command(
            "stages",
            "plot stages cost.json plan.json --out made.png",
            ("cost.json", "plan.json"),
            ("made.png",),
            ("cost.json", "plan.json"),
        ),
        Command("timeline", "plot timeline finished --out made.png", ("finished",), ("made.png",)),
    )
}

SHORT = ("resume", "predict", "info", "import", "fit", "search", "stages")


@dataclass(frozen=True, slots=True)
class Done:
    """What came of a command; ``status`` is negative for a signal and ``None`` where it did not end."""

    status: int | None
    out: str
    err: str
    seconds: float


def make_world(world: Path, *, whole: bool = True) -> None:
    """All files of two graphs, those of the second in ``other``."""
    make_files(world, 0, whole=whole)
    make_files(world / "other", 1, whole=whole)


def make_files(folder: Path, seed: int, *, whole: bool = True) -> None:
    """Make files of a graph by the commands, in this process; without ``whole`` no traces, which take long."""
    folder.mkdir(parents=True, exist_ok=True)
    graph = synthetic_graph(NODES, CLASSES, FEATURES, average_degree=6.0, seed=seed)
    write_store(graph, folder / "store")
    adjacency = sp.csr_array(
        (np.ones(graph.num_edges), graph.indices, graph.indptr), shape=(graph.num_nodes, graph.num_nodes)
    )
    arrays = {"labels": graph.labels}
    for key, matrix in {"adj": adjacency, "attr": sp.csr_array(graph.features)}.items():
        arrays |= {f"{key}_{part}": np.array(getattr(matrix, part)) for part in ("data", "indices", "indptr")}
        arrays[f"{key}_shape"] = np.array(matrix.shape)
    np.savez(folder / "graph.npz", **arrays)
    rows = synthetic.rows()
    rows[0]["model"] = asdict(ModelConfig(in_features=8 + seed, num_classes=3, layers=8, dim=64, bias="bucket"))
    save_rows(folder / "profile.json", rows)
    seeded = f"{SIZES} --seed {seed} --dataset store"
    here(folder, "fit profile.json --out cost.json")
    here(folder, "search cost.json --world-size 4 --memory-gib 8 --pp 2 --out plan.json")
    with _stopping():
        here(folder, f"train {seeded} --checkpoint-every 1 --out stopped", status=75)
    here(folder, f"train {seeded}{' --trace' if whole else ''} --out finished")


@contextlib.contextmanager
def _stopping() -> Any:
    """A run hears SIGTERM in a step."""
    real = epochs.train_step

    def train_step(*arguments: Any, **more: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == STOP_AT:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*arguments, **more)

    steps = 0
    with patch.object(epochs, "train_step", train_step):
        yield


def here(folder: Path, arguments: str, status: int = 0) -> None:
    """A command in this process."""
    before, argv = Path.cwd(), sys.argv
    os.chdir(folder)
    sys.argv = ["megagraph", *arguments.split()]
    try:
        with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
            try:
                cli.main()
                code: Any = 0
            except SystemExit as stop:
                code = stop.code
    finally:
        os.chdir(before)
        sys.argv = argv
    assert code == status, (arguments, code)


def forked(place: Path, arguments: list[str], limit_seconds: float) -> Done:
    """A command in a fork of this process."""
    sys.stdout.flush()
    sys.stderr.flush()
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        code: Any = 111
        try:
            os.setsid()
            os.chdir(place)
            _limit_memory()
            for descriptor, name in ((1, "stdout"), (2, "stderr")):
                os.dup2(os.open(place / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), descriptor)
            sys.argv = ["megagraph", *arguments]
            try:
                cli.main()
                code = 0
            except SystemExit as stop:
                code = 0 if stop.code is None else stop.code
            sys.stdout.flush()
            sys.stderr.flush()
        except BaseException:
            import traceback

            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(code)

    def status() -> int | None:
        found, code = os.waitpid(pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(code) if found else None

    return _wait(pid, status, place, started, limit_seconds)


def started(place: Path, arguments: list[str], limit_seconds: float) -> Done:
    """A command in a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    began = time.monotonic()
    with open(place / "stdout", "wb") as out, open(place / "stderr", "wb") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "megagraph", *arguments],
            cwd=place,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
            preexec_fn=_limit_memory,
        )
    return _wait(process.pid, process.poll, place, began, limit_seconds)


def _wait(pid: int, status: Callable[[], int | None], place: Path, began: float, limit_seconds: float) -> Done:
    while (code := status()) is None and time.monotonic() < began + limit_seconds:
        time.sleep(0.003)
    seconds = time.monotonic() - began
    if code is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        while status() is None:
            time.sleep(0.003)
    out, err = (
        (place / name).read_bytes().decode(errors="replace") if (place / name).exists() else ""
        for name in ("stdout", "stderr")
    )
    return Done(code, out, err, seconds)


def _limit_memory() -> None:
    taken = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY_BYTES, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def outcome(place: Path, command: Command, printed: str) -> Any:
    """What a command has come to: what it made, and what it printed without times."""
    if command.arguments.startswith("train"):
        printed = re.sub(r'"\w*(_seconds|_bytes|run)": .*', "", printed)
    return printed, [_content(place / name) for name in command.makes]


def _content(path: Path) -> Any:
    if (path / "run.json").exists():
        return _run(path)
    if path.is_dir():  # a store: its header has an id of its own
        header = json.loads((path / "header.json").read_text()) | {"id": "", "checksum": ""}
        return header, {file.name: file.read_bytes() for file in sorted(path.glob("*.npy"))}
    return path.read_bytes() if path.exists() else None


def _run(path: Path) -> Any:
    from safetensors.torch import load_file

    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    lines = [{key: value for key, value in line.items() if not key.endswith("seconds")} for line in lines]
    weights = {name: x.numpy().tobytes() for name, x in sorted(load_file(path / "model.safetensors").items())}
    configs = [json.loads((path / name).read_text()) for name in ("config.json", "model.json", "plan.json")]
    for values in configs:
        values.pop("run_id", None)
        values.pop("checksum", None)
    return lines, weights, configs


def verdict(done: Done, same: Callable[[], bool]) -> str:
    """One of ``same``, ``refused`` and ``FAULTS``; ``same`` says whether the outcome is that of unchanged files."""
    if done.status is None:
        return "hang"
    if done.status < 0:
        return "signal"
    if "Traceback (most recent call last)" in done.err or "Exception ignored" in done.err:
        return "traceback"
    if done.status == 0:
        return "same" if same() else "silent"
    messages = re.findall(r"megagraph: error: \S", done.err)
    return "refused" if done.status == 1 and len(messages) == 1 else "unclear"


class Bench:
    """The world in a folder, and what every command makes of it unchanged.

    Args:
        folder: empty.
        short: fewer commands, and none in a process of its own.
    """

    def __init__(self, folder: Path, *, short: bool = False) -> None:
        torch.set_num_threads(1)
        self.world, self._places = folder / "world", folder / "places"
        make_world(self.world, whole=not short)
        self._places.mkdir()
        self.expected: dict[str, Any] = {}
        self.seconds: dict[str, float] = {}
        for name in SHORT if short else COMMANDS:
            command = COMMANDS[name]
            with self.copy(command.name) as place:
                here(place, command.arguments)  # what it compiles and imports is there in the forks
            with self.copy(command.name) as place:
                done = forked(place, command.arguments.split(), 300)
                assert done.status == 0, (name, done)
                self.expected[name], self.seconds[name] = outcome(place, command, done.out), done.seconds
        self.start_seconds = 0.0
        if short:
            return
        with self.copy("info") as place:
            self.start_seconds = started(place, COMMANDS["info"].arguments.split(), 300).seconds

    @contextlib.contextmanager
    def copy(self, name: str = "") -> Any:
        """A copy of what a command may read, or of all."""
        place = self._places / "place"
        place.mkdir()
        words = COMMANDS[name].arguments.split() if name else []
        try:
            for path in self.world.iterdir():
                if path.name != "other" and (not name or path.name in [*words, "store"] or name == "weights"):
                    (shutil.copytree if path.is_dir() else shutil.copy)(path, place / path.name)
            yield place
        finally:
            shutil.rmtree(place)

    def run(self, place: Path, arguments: list[str], seconds: float, start: bool) -> Done:
        """The command in a fork or in a process of its own, killed where it takes too long."""
        if start:
            return started(place, arguments, 3 * (seconds + self.start_seconds) + 10)
        return forked(place, arguments, 3 * seconds + 10)

    def judge(self, place: Path, name: str, done: Done) -> str:
        """The verdict on a command whose outcome is known."""

        def same() -> bool:
            try:
                return outcome(place, COMMANDS[name], done.out) == self.expected[name]
            except Exception:  # it left something that cannot even be read
                return False

        return verdict(done, same)


def seal(values: dict[str, Any]) -> str:
    """The text of an object of ours, with the checksum of these values."""
    values.pop("checksum", None)
    return json.dumps(files.add_checksum(values), indent=2) + "\n"
