"""Checkpoints: all that the next step of a run depends on, so that a run may stop at any moment and go on elsewhere.

RUN/checkpoints/latest          name of the checkpoint to go on from
                step-000123/    .metadata, *.distcp    parameters and optimizer state (torch.distributed.checkpoint)
                                copies of files of the run, as they were at that step
                                manifest.json          progress, and SHA-256 of the files above
                                committed              SHA-256 of manifest.json

Names are those of the whole model and tensors are saved in parts, so that any plan can read what another has written.
A folder is written once, ``committed`` and then ``latest`` last, and the checkpoint before it stays: a process that is
killed while it saves loses nothing. There is no random state: batches and dropout depend on seed, epoch and step alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from megagraph.parallel.mesh import all_gather, on_every_rank, on_rank_zero, rank, world_size
from megagraph.parallel.pipeline import Pipeline


class TrainingState:
    """Parameters and optimizer state of a rank by their names in the whole model, as torch.distributed.checkpoint asks.

    Tensors are the live ones, no copies: what is loaded into them is loaded.
    """

    def __init__(self, pipeline: Pipeline, optimizers: list[torch.optim.Optimizer]) -> None:
        self.pipeline, self.optimizers = pipeline, optimizers

    def _optimizer_state(self) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
        """Name, parameter and state; an optimizer without any makes it, and changes the parameters."""
        table = self.pipeline.table
        names = {parameter: name for name, parameter in self.pipeline.named_parameters().items()}
        if table is not None:
            names[table.weight] = "node_table"
        for optimizer in self.optimizers:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            if not optimizer.state:
                _make_state(optimizer, parameters)
            for parameter in parameters:
                yield names[parameter], parameter, optimizer.state[parameter]

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"parameters": self.pipeline.state_dict(), "optimizer": {}}
        table = self.pipeline.table
        for name, parameter, values in self._optimizer_state():
            if table is not None and parameter is table.weight:
                values = {key: table.whole(x) if isinstance(x, Tensor) else x for key, x in values.items()}
            state["optimizer"][name] = values
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, _, values in self._optimizer_state():
            loaded = state["optimizer"][name]
            values |= {key: loaded[key] for key, value in values.items() if not isinstance(value, Tensor)}


class Checkpoints:
    """The checkpoints of one run; the newest two are kept. All methods are collective.

    Args:
        folder: RUN/checkpoints, on a file system that all processes share.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._newest: str | None = None  # written or read last

    def save(self, step: int, state: Any, progress: dict[str, Any], files: Iterable[Path] = ()) -> None:
        """Write a checkpoint, then remove all but the one before.

        Args:
            step: its name; that of the newest checkpoint is not written again.
            state: a :class:`TrainingState`, or tensors by name.
            progress: JSON values.
            files: to copy, where they exist.

        Raises:
            OSError: it cannot be written; the checkpoints before are as they were.
        """
        name = f"step-{step:06d}"
        folder = self.folder / name
        if name == self._newest:
            return

        def start() -> None:
            shutil.rmtree(folder, ignore_errors=True)  # of a save that was killed, or one that load refused
            folder.mkdir(parents=True)
            for file in files:
                if file.exists():
                    shutil.copy(file, folder)

        def commit() -> None:
            manifest = json.dumps({"progress": progress, "files": checksums}, indent=2)
            _write(folder / "manifest.json", manifest)
            _write(folder / "committed", hashlib.sha256(manifest.encode()).hexdigest())
            _write(self.folder / "latest", name)
            for other in self.folder.glob("step-*"):
                if other.name not in (name, self._newest):
                    shutil.rmtree(other, ignore_errors=True)

        on_rank_zero(start)
        on_every_rank(lambda: _check_shared(folder))
        _checkpoint(dcp.save, state, folder)
        names = on_rank_zero(lambda: sorted(path.name for path in folder.iterdir()))
        own = on_every_rank(lambda: {name: _checksum(folder / name) for name in names[rank() :: world_size()]})
        checksums = {name: value for part in all_gather(own) for name, value in part.items()}
        on_rank_zero(commit)
        self._newest = name

    def load(self, state: Any) -> tuple[Path, dict[str, Any]]:
        """Read the newest checkpoint that is whole, and say which others are not.

        Args:
            state: as for :meth:`save`, under this or another plan, with new optimizers; it is filled in place.

        Returns:
            the folder of the checkpoint and its progress, the same on every rank.

        Raises:
            FileNotFoundError: there is no checkpoint that is whole; the message says why.
            ValueError: it is one of another model.
        """
        refused = []
        for name in on_rank_zero(self._names):
            try:
                progress = self._verify(name)
                break
            except Exception as error:  # whatever it is: it cannot be used
                refused.append(f"{name} cannot be used: {error}")
        else:
            raise FileNotFoundError("\n  ".join([f"{self.folder} holds no checkpoint to go on from", *refused]))
        if rank() == 0:
            for reason in refused:
                print(f"megagraph: warning: {reason}; going on from {name}", file=sys.stderr)
        try:
            _checkpoint(dcp.load, state, self.folder / name)
        except OSError as error:
            raise ValueError(f"{self.folder / name} does not fit this model: {error}") from error
        self._newest = name
        return self.folder / name, progress

    def _names(self) -> list[str]:
        """``latest`` first, then the others, newest first."""
        steps = {path.name: int(path.name[5:]) for path in self.folder.glob("step-*") if path.name[5:].isdecimal()}
        latest = self.folder / "latest"
        first = latest.read_text(errors="replace") if latest.is_file() else None
        return sorted(steps, key=lambda name: (name == first, steps[name]), reverse=True)

    def _verify(self, name: str) -> dict[str, Any]:
        """The progress of a checkpoint all of whose files are as they were written; each rank reads some of them."""
        folder = self.folder / name

        def read() -> dict[str, Any]:
            if not (folder / "committed").is_file():
                raise FileNotFoundError("it was not finished (no file committed)")
            _check(folder / "manifest.json", (folder / "committed").read_text(errors="replace"))
            return json.loads((folder / "manifest.json").read_text())

        def check() -> None:
            for file, expected in own:
                _check(folder / file, expected)

        manifest = on_rank_zero(read)
        own = list(manifest["files"].items())[rank() :: world_size()]
        on_every_rank(check)
        return manifest["progress"]


def _checkpoint(function: Callable, state: Any, folder: Path) -> None:
    """``dcp.save`` or ``dcp.load``; OSError on every rank where it fails on one."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is meant
            function({"training": state}, checkpoint_id=folder, no_dist=not dist.is_initialized())
    except CheckpointException as error:  # a BaseException, which nobody expects
        failed, (cause, _) = min(error.failures.items())
        raise OSError(f"{folder} (rank {failed}): {cause}") from error


def _make_state(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    """An optimizer makes its tensors in its first step: one from which the parameters will be loaded over."""
    sparse = isinstance(optimizer, torch.optim.SparseAdam)
    for parameter in parameters:
        empty = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device, layout=torch.sparse_coo)
        parameter.grad = empty if sparse else torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def _check_shared(folder: Path) -> None:
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}, made by rank 0, is not there; put the run on a file system that all share")


def _check(file: Path, expected: str) -> None:
    if not file.is_file():
        raise FileNotFoundError(f"{file.name} is missing")
    if _checksum(file) != expected:
        raise ValueError(f"{file.name} is not as it was written")


def _checksum(file: Path) -> str:
    checksum = hashlib.sha256()
    with file.open("rb") as opened:
        while block := opened.read(1 << 20):
            checksum.update(block)
    return checksum.hexdigest()


def _write(file: Path, text: str) -> None:
    """Replace a file in one move."""
    partial = file.with_name(f"{file.name}.partial")
    partial.write_text(text)
    os.replace(partial, file)
