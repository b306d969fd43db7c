"""A run folder: what a training run leaves behind, and nothing lost if it stops half-way.

RUN/run.json           that this is a run of ours, and its id; every other file names it
    config.json        the TrainConfig
    plan.json          the Plan: how the processes shared the work
    provenance.json    versions, sources, command, device and data of every start, of a later one what had changed
    model.json         the ModelConfig: its sizes and those of the data set
    metrics.jsonl      one object a step and one an epoch, written as they happen
    model.safetensors  the weights of the best validation epoch so far
    checkpoints/       what a run goes on from; the newest stays when it has finished
    summary.json       the result
    curves.png         loss and accuracy
    trace/             rank-0.json.gz, ...: a few steps of every rank, with --trace
    tensorboard/       the numbers of metrics.jsonl, with --tensorboard
    wandb/             what Weights & Biases keeps of them here, with --wandb
    lock               while a process writes here
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import psutil
from torch import Tensor

from megagraph import files
from megagraph.board import Board
from megagraph.config import AUTO, TrainConfig
from megagraph.lock import Lock
from megagraph.metrics import EpochLine, StepLine, checked
from megagraph.models.config import ModelConfig
from megagraph.planner.plan import Plan
from megagraph.progress import log
from megagraph.weights import read_weights, write_weights

State = Literal["new", "started", "finished"]

_WEIGHTS = "model.safetensors"
# what may lie in a run in which nothing has been trained yet
_MARKING = "run.json.partial"  # of another start at this moment, or of one that was killed
_BEFORE_THE_FIRST_STEP = ("run.json", "lock", "provenance.json", "config.json", "plan.json", "model.json")
_RESULTS = ("summary.json", "curves.png", "trace", "tensorboard", "wandb")
_OURS = (*_BEFORE_THE_FIRST_STEP, "metrics.jsonl", _WEIGHTS, "checkpoints", *_RESULTS)


class Run:
    """One run folder.

    Args:
        id: of the run.
        writes: of the processes of a run, one writes; the others' calls do nothing.
        lock: held by the process that writes.
    """

    def __init__(self, folder: Path, *, id: str, writes: bool = True, lock: Lock | None = None) -> None:
        self.folder = folder
        self.id = id
        self.writes = writes
        self.changes: dict[str, tuple[Any, Any]] = {}  # of the configuration, by the process that has entered it
        self.boards: list[Board] = []  # which are told the same as metrics.jsonl
        self._lock = lock

    @classmethod
    def enter(cls, config: TrainConfig, launches: Iterable[str | None] | None = None) -> tuple[Run, State]:
        """Take the folder of a run for this process: a new one, or one to go on with as ``config.resume`` says.

        Args:
            launches: of all its processes, another on every node but with --rdzv-id; default this one's.

        Returns:
            the run and whether it is new, to be gone on with, or finished, in which case it is not locked; of the files
            of one to be gone on with only the marker has changed.

        Raises:
            FileExistsError: files of others are in the folder, or a run that nobody asked to go on with.
            FileNotFoundError: there is no run to resume.
            TimeoutError: another process writes there.
            ValueError: a file of the run is damaged, or ``config`` is not one that goes on with it.
            OSError: the folder cannot be written.
        """
        folder, launched = _folder(config), {"launches": sorted(filter(None, {*(launches or [launch()])}))}
        fresh = not folder.exists()
        if config.resume not in (None, AUTO):
            _check_holds(folder, "run.json")
        if not fresh:
            cls._check_ours(folder, config)  # before a lock is written beside files of others
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = Lock(folder, config.lock_wait)
        except TimeoutError:
            raise
        except OSError as error:
            said = error.strerror or error
            raise type(error)(f"the run folder {folder} cannot be written: {said}; pass another --out") from error
        try:
            cls._check_ours(folder, config)  # anew: another process may just have made a run of it
            if not (folder / "run.json").exists():
                id = uuid.uuid4().hex
                values = {"kind": "run", "id": id, "made": time.strftime("%Y-%m-%d %H:%M:%S")}
                files.write_json(folder / "run.json", values | launched)
                return cls(folder, id=id, lock=lock), "new"
            run = cls(folder, id=_marker(folder)["id"], lock=lock)
            state = run.state
            if state == "new":
                files.write_json(folder / "run.json", _marker(folder) | launched)
                return run, "new"
            run.changes = config.check_continues(run.config)
            longer = {"epochs", "max_steps"} & run.changes.keys()
            if state == "finished" and not longer and config.resume_step is None:
                lock.release()
                return run, "finished"
            files.write_json(folder / "run.json", _marker(folder) | launched)
            return run, "started"  # whatever it was: what has finished stays so until it really goes on
        except BaseException:
            lock.release()
            if fresh:
                _remove_empty(folder)
            raise

    @classmethod
    def _check_ours(cls, folder: Path, config: TrainConfig) -> None:
        """Raise FileExistsError if the folder is neither free nor a run that ``config`` goes on with."""
        if not folder.is_dir():
            raise FileExistsError(f"{folder} must be a folder to write a run to, but it is something else")
        for name in _OURS:
            if (folder / name).is_symlink():
                raise FileExistsError(
                    f"{folder / name} is a link, and nothing is written through links; pass another --out"
                )
        others = set(files.others(folder, ("lock", _MARKING)))  # first: another start may be making a run of it
        ours = (folder / "run.json").is_file()
        if ours and config.resume is not None:
            return
        state = cls(folder, id=_marker(folder)["id"]).state if ours else "new"
        if state != "new":
            raise FileExistsError(
                f"{folder} holds a run already; pass another --out, or remove it, or go on with it by --resume auto"
            )
        if others := others - set(_BEFORE_THE_FIRST_STEP if ours else ()):
            raise FileExistsError(
                f"{folder} holds files that are none of ours: {_some(sorted(others))}; "
                "pass another --out, a new or empty folder"
            )

    @property
    def state(self) -> State:
        """How far the run has come."""
        if (self.folder / "summary.json").exists():
            return "finished"
        metrics = self.folder / "metrics.jsonl"
        begun = (metrics.exists() and metrics.stat().st_size) or (self.folder / "checkpoints").exists()
        return "started" if begun else "new"

    @staticmethod
    def to_resume(folder: Path | str, *, new_plan: bool = False) -> TrainConfig:
        """The configuration that goes on with a run; fields that the numbers do not depend on may be replaced.

        Args:
            new_plan: another plan will be put in, so the layout is the default, not that of the run.

        Raises:
            FileNotFoundError: ``folder`` is not that of a run.
            ValueError: its configuration is damaged.
        """
        folder = Path(folder)
        _check_holds(folder, "config.json", "run.json")
        config = Run(folder, id=_marker(folder)["id"]).config
        return replace(config.with_plan(Plan()) if new_plan else config, out=folder, resume=folder)

    @classmethod
    def of(cls, folder: Path) -> Run:
        """The run in a folder, to read what it has written so far.

        Raises:
            FileNotFoundError, ValueError: it is not the folder of a run.
        """
        _check_holds(folder, "run.json")
        return cls(folder, id=_marker(folder)["id"])

    @classmethod
    def open(cls, folder: Path | str) -> Run:
        """Open the folder of a finished run, to read it.

        Raises:
            FileNotFoundError: a file of the run is missing.
            ValueError: the folder's marker is damaged.
        """
        folder = Path(folder)
        _check_holds(folder, "config.json", "model.json", "provenance.json", _WEIGHTS, "run.json")
        return cls(folder, id=_marker(folder)["id"], writes=False)

    def check_output(self, path: Path, own: str | None = None) -> None:
        """Raise FileExistsError if what is to be written at ``path`` would replace a file of the run other than
        ``own``, or a link, and FileNotFoundError if there is no folder for it."""
        files.check_folder(path)
        inside = path.parent.resolve() == self.folder.resolve() and path.name in _OURS and path.name != own
        if inside or (self.folder / "checkpoints").resolve() in path.resolve().parents or path.is_symlink():
            raise FileExistsError(
                f"{path} is {'a link' if path.is_symlink() else 'a file of the run'}; pass another --out"
            )

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Hold the folder until the block ends; a new one in which nothing has begun by then is removed again."""
        with ExitStack() as end:  # the last first, each whatever fails
            if self.writes:
                end.callback(_remove_empty, self.folder)
                if self._lock is not None:
                    end.callback(self._lock.release)
                end.callback(self._remove_if_new)
                for board in self.boards:
                    end.callback(_close, board)
            yield

    def _remove_if_new(self) -> None:
        if self.state == "new" and not files.others(self.folder, _BEFORE_THE_FIRST_STEP):
            files.remove(self.folder, _BEFORE_THE_FIRST_STEP)

    @property
    def config(self) -> TrainConfig:
        return TrainConfig.from_json(self._read("config.json", "the configuration of a run"))

    @property
    def model_config(self) -> ModelConfig:
        return ModelConfig.from_json(self._read("model.json", "the sizes of a model"))

    @property
    def summary(self) -> dict[str, Any]:
        return self._read("summary.json", "the result of a run")

    @property
    def starts(self) -> list[dict[str, Any]]:
        """Where each start comes from: the first in full, of later ones what had changed.

        Raises:
            FileNotFoundError, ValueError: the file is missing or damaged.
        """
        name, what = "provenance.json", "the origin of a run"
        _check_holds(self.folder, name)
        starts = self._read(name, what).get("starts")
        if not isinstance(starts, list) or not all(isinstance(start, dict) for start in starts):
            raise ValueError(
                f"expected {what}, a list of its starts, got {self.folder / name}, which is something else"
            )
        return starts

    def note_start(self, origin: dict[str, Any], *, first: bool) -> None:
        """Note where this start comes from: of a later one its date, its command and what else is new."""
        if not self.writes:
            return
        origin = json.loads(json.dumps(origin, default=str))
        starts = [] if first else self.starts
        known = {name: value for start in starts for name, value in start.items()}
        always = ("date", "command")
        changed = {n: x for n, x in origin.items() if n in always or n not in known or known[n] != x}
        self._write("provenance.json", {"starts": [*starts, changed]})

    def write_config(self, config: TrainConfig) -> None:
        """Note the configuration, but for what is of one start only."""
        self._write("config.json", asdict(replace(config, resume=None, resume_step=None, time_limit=None)))

    def write_plan(self, plan: Plan) -> None:
        if self.writes:
            plan.save(self.folder / "plan.json")

    def write_model_config(self, config: ModelConfig) -> None:
        self._write("model.json", asdict(config))

    def check_resumable(self, config: ModelConfig) -> None:
        """Raise ValueError unless the run, to be resumed, was started with this model on data of these sizes, and
        FileNotFoundError if it does not say where it comes from."""
        written, _ = self.model_config, self.starts
        for name, value in asdict(config).items():
            expected = getattr(written, name)
            if value != expected:
                raise ValueError(
                    f"a resumed run needs the data it was started on: {name} was {expected}, got {value}; bring that "
                    "data back, or start a new run"
                )

    def log(self, **values: Any) -> None:
        """Append one line to metrics.jsonl."""
        if self.writes:
            for board in self.boards:
                board.log(values)
            with (self.folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(values) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl; none before the first step.

        Raises:
            ValueError: a line of it is no JSON object.
        """
        lines = []
        path = self.folder / "metrics.jsonl"
        for number, text in enumerate(path.read_bytes().splitlines() if path.exists() else [], start=1):
            try:
                lines.append(json.loads(text))
                assert isinstance(lines[-1], dict)
            except (ValueError, RecursionError, AssertionError) as error:
                raise ValueError(f"expected a JSON object in line {number} of {path}, got {text[:80]!r}") from error
        return lines

    def progress(self, *, whole: bool = False) -> tuple[list[EpochLine], list[StepLine]]:
        """The lines of finished epochs, and those of the steps of the epoch under way, or of the whole run.

        Raises:
            ValueError: a line is not as we write it.
        """
        epochs: list[EpochLine] = []
        steps: list[StepLine] = []
        path = self.folder / "metrics.jsonl"
        for line in self.metrics():
            if "epoch" in line:
                epochs.append(checked(EpochLine, line, path))
                steps = steps if whole else []
            elif "step" in line:
                steps.append(checked(StepLine, line, path))
        return epochs, steps

    def begin_anew(self) -> None:
        """Forget what was trained, as no checkpoint of it can be used."""
        if self.writes:
            files.remove(self.folder, ["metrics.jsonl", _WEIGHTS])

    def save_weights(self, weights: dict[str, Tensor]) -> None:
        """Replace the weights in one move, so that the last good ones survive a crash."""
        if self.writes:
            write_weights(self.folder / _WEIGHTS, weights, run=self.id)

    def weights(self) -> dict[str, Tensor]:
        """The weights of the best epoch, on the CPU.

        Raises:
            ValueError: they are damaged, or those of another run.
        """
        return read_weights(self.folder / _WEIGHTS, run=self.id)

    def forget_summary(self) -> None:
        """It goes on, and so has not finished."""
        if self.writes:
            (self.folder / "summary.json").unlink(missing_ok=True)

    def write_summary(self, summary: dict[str, Any]) -> None:
        self._write("summary.json", summary)

    @property
    def checkpointed(self) -> tuple[Path, Path]:
        """What a checkpoint keeps a copy of."""
        return self.folder / "metrics.jsonl", self.folder / _WEIGHTS

    def restore(self, checkpoint: Path) -> None:
        """Bring back what the run had written by the time of a checkpoint."""
        if not self.writes:
            return
        for file in self.checkpointed:
            if (checkpoint / file.name).exists():
                with files.replacing(file) as new, (checkpoint / file.name).open("rb") as kept:
                    shutil.copyfileobj(kept, new, files.CHUNK_BYTES)
            else:
                file.unlink(missing_ok=True)

    def _write(self, name: str, values: dict[str, Any]) -> None:
        if self.writes:
            files.write_json(self.folder / name, {"run_id": self.id} | values)

    def _read(self, name: str, what: str) -> dict[str, Any]:
        path = self.folder / name
        values = files.read_json(path, what)
        if values.pop("run_id", None) != self.id:
            raise ValueError(f"expected {what}, got {path}, which is that of another run")
        return values


def launch() -> str | None:
    """What the processes that one torchrun starts have in common, over its restarts; ``None`` without one."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    run_id = os.environ["TORCHELASTIC_RUN_ID"]
    if run_id != "none":
        return run_id
    launcher = psutil.Process(os.getppid())
    return f"{socket.gethostname()}-{launcher.pid}-{launcher.create_time():.0f}"


def is_restart() -> bool:
    """Whether torchrun has started this process in place of one that failed on this node; others may not know."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def restarted(config: TrainConfig, launches: Iterable[str | None]) -> Path | None:
    """The folder to go on with where one of these launches has begun it, in processes that failed since."""
    folder = _folder(config)
    if config.resume is not None or not (folder / "run.json").is_file():
        return None
    return None if set(launches).isdisjoint(_marker(folder).get("launches", ())) else folder


def _folder(config: TrainConfig) -> Path:
    if config.resume is not None and config.resume != AUTO:
        return config.resume
    if config.out is not None:
        return config.out
    name = launch() or time.strftime("%Y%m%d-%H%M%S")
    return Path("runs") / f"{Path(config.dataset).stem}-{name}"


def _close(board: Board) -> None:
    try:
        board.close()
    except Exception as error:  # which would hide how the run ended
        log.warning(f"--{board.package} may lack the last numbers, as it could not be closed: {error}")


def _remove_empty(folder: Path) -> None:
    """Remove a folder where it is empty, and so the ``runs`` that it is in by default."""
    for place in (folder, *(parent for parent in folder.parents if parent == Path("runs"))):
        with suppress(OSError):
            place.rmdir()


def _check_holds(folder: Path, *names: str) -> None:
    for name in names:
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"{folder} must be the folder of a run, but it holds no {name}{files.meant(folder)}"
            )


def _marker(folder: Path) -> dict[str, Any]:
    values = files.read_json(folder / "run.json", "the marker of a run of ours")
    if values.get("kind") != "run" or not isinstance(values.get("id"), str):
        raise ValueError(f"expected the marker of a run of ours, got {folder / 'run.json'}, which is something else")
    return values


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
