"""A run folder: what a training run leaves behind, and nothing lost if it stops half-way.

RUN/config.json        the TrainConfig
    plan.json          the Plan: how the processes shared the work
    model.json         the ModelConfig: its sizes and those of the data set
    metrics.jsonl      one object a step and one an epoch, written as they happen
    model.safetensors  the weights of the best validation epoch so far
    checkpoints/       what a run that stopped goes on from; gone once it has finished
    summary.json       the result
    curves.png         loss and accuracy
    trace/             rank-0.json.gz, ...: a few steps of every rank, with --trace
"""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from megagraph.config import LAYOUT_FIELDS, TrainConfig
from megagraph.models.config import ModelConfig


class Run:
    """One run folder.

    Args:
        writes: of the processes of a run, one writes; the others' calls do nothing.
    """

    def __init__(self, folder: Path, *, writes: bool = True) -> None:
        self.folder = folder
        self.writes = writes

    @classmethod
    def create(cls, config: TrainConfig) -> Path:
        """Make the folder of a new run.

        Raises:
            FileExistsError: the folder holds a run already.
            OSError: the folder cannot be written.
        """
        name = f"{Path(config.dataset).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
        folder = Path(config.out) if config.out is not None else Path("runs") / name
        cls.check_free(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            cls(folder)._write_config(config)
        except OSError as error:
            raise type(error)(f"the run folder {folder} cannot be written: {error}; pass another --out") from error
        return folder

    @staticmethod
    def check_free(folder: Path) -> None:
        """Raise FileExistsError if the folder holds a run already."""
        metrics = folder / "metrics.jsonl"
        if metrics.exists() and metrics.stat().st_size:
            raise FileExistsError(f"{folder} holds a run already; pass another --out, or remove it")

    @staticmethod
    def to_resume(folder: Path | str, *, new_plan: bool = False) -> TrainConfig:
        """The configuration that goes on with a run; fields that the numbers do not depend on may be replaced.

        Args:
            new_plan: another plan will be put in, so the layout is the default, not that of the run.

        Raises:
            FileNotFoundError: ``folder`` is not that of a run.
            ValueError: the run has finished.
        """
        folder = Path(folder)
        if not (folder / "config.json").is_file():
            raise FileNotFoundError(f"{folder} must be the folder of a run to resume, but it holds no config.json")
        if (folder / "summary.json").is_file():
            raise ValueError(f"the run in {folder} has finished, as its summary.json says; nothing is left to resume")
        default = TrainConfig()
        layout = {name: getattr(default, name) for name in LAYOUT_FIELDS} if new_plan else {}
        return replace(Run(folder).config, **layout, out=folder, resume=folder)

    @classmethod
    def resume(cls, config: TrainConfig) -> Path:
        """Check that ``config`` goes on with the run in ``config.resume``, and note its plan there.

        Raises:
            FileNotFoundError, ValueError: as ``to_resume``, or the numbers would not be those of the run.
        """
        assert config.resume is not None
        config.check_continues(cls.to_resume(config.resume))
        cls(config.resume)._write_config(config)
        return config.resume

    @classmethod
    def open(cls, folder: Path | str) -> Run:
        """Open the folder of a finished run.

        Raises:
            FileNotFoundError: a file of the run is missing.
        """
        folder = Path(folder)
        for name in ("config.json", "model.json", "model.safetensors"):
            if not (folder / name).is_file():
                raise FileNotFoundError(f"{folder} must be the folder of a run, but it holds no {name}")
        return cls(folder)

    @property
    def config(self) -> TrainConfig:
        return TrainConfig.from_json((self.folder / "config.json").read_text())

    @property
    def model_config(self) -> ModelConfig:
        return ModelConfig(**json.loads((self.folder / "model.json").read_text()))

    def _write_config(self, config: TrainConfig) -> None:
        self._write("config.json", json.loads(replace(config, resume=None).to_json()))
        config.parallel_plan().save(self.folder / "plan.json")

    def write_model_config(self, config: ModelConfig) -> None:
        self._write("model.json", asdict(config))

    def check_model_config(self, config: ModelConfig) -> None:
        """Raise ValueError unless the run, to be resumed, was started with this model on data of these sizes."""
        for name, value in asdict(config).items():
            expected = getattr(self.model_config, name)
            if value != expected:
                raise ValueError(f"a resumed run needs the data it was started on: {name} was {expected}, got {value}")

    def log(self, **values: Any) -> None:
        """Append one line to metrics.jsonl."""
        if self.writes:
            with (self.folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(values) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        with (self.folder / "metrics.jsonl").open() as file:
            return [json.loads(line) for line in file]

    def progress(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The lines of finished epochs, and those of the steps of the epoch under way."""
        epochs: list[dict[str, Any]] = []
        steps: list[dict[str, Any]] = []
        for line in self.metrics():
            if "epoch" in line:
                epochs, steps = [*epochs, line], []
            elif "step" in line:
                steps.append(line)
        return epochs, steps

    def save_weights(self, weights: dict[str, Tensor]) -> None:
        """Replace the weights in one move, so that the last good ones survive a crash."""
        from safetensors.torch import save_file

        if not self.writes:
            return
        partial = self.folder / "model.safetensors.partial"
        save_file({name: tensor.detach().contiguous() for name, tensor in weights.items()}, partial)
        os.replace(partial, self.folder / "model.safetensors")

    def weights(self) -> dict[str, Tensor]:
        from safetensors.torch import load_file

        return load_file(self.folder / "model.safetensors")

    def write_summary(self, summary: dict[str, Any]) -> None:
        self._write("summary.json", summary)

    @property
    def checkpointed(self) -> tuple[Path, Path]:
        """What a checkpoint keeps a copy of."""
        return self.folder / "metrics.jsonl", self.folder / "model.safetensors"

    def restore(self, checkpoint: Path) -> None:
        """Bring back what the run had written by the time of a checkpoint."""
        for file in self.checkpointed:
            if self.writes and (checkpoint / file.name).exists():
                shutil.copy(checkpoint / file.name, file.with_name(f"{file.name}.partial"))
                os.replace(file.with_name(f"{file.name}.partial"), file)

    def remove_checkpoints(self) -> None:
        if self.writes:
            shutil.rmtree(self.folder / "checkpoints", ignore_errors=True)

    def _write(self, name: str, values: dict[str, Any]) -> None:
        if self.writes:
            partial = self.folder / f"{name}.partial"
            partial.write_text(json.dumps(values, indent=2))
            os.replace(partial, self.folder / name)
