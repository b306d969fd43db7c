"""A run folder: what a training run leaves behind, and nothing lost if it stops half-way.

RUN/config.json        the TrainConfig
    plan.json          the Plan: how the processes shared the work
    model.json         the ModelConfig: its sizes and those of the data set
    metrics.jsonl      one object a step and one an epoch, written as they happen
    model.safetensors  the weights of the best validation epoch so far
    summary.json       the result
    curves.png         loss and accuracy
    trace/rank-0.json  a few steps of every rank, with --trace
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from megagraph.config import TrainConfig
from megagraph.models.config import ModelConfig


class Run:
    """One run folder.

    Args:
        writes: of the processes of a run, one writes; the others' calls do nothing.
    """

    def __init__(self, folder: Path, *, writes: bool = True) -> None:
        self.folder = folder
        self.writes = writes

    @staticmethod
    def create(config: TrainConfig) -> Path:
        """Make the folder of a new run.

        Raises:
            FileExistsError: the folder holds a run already.
            OSError: the folder cannot be written.
        """
        name = f"{Path(config.dataset).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
        folder = Path(config.out) if config.out is not None else Path("runs") / name
        metrics = folder / "metrics.jsonl"
        if metrics.exists() and metrics.stat().st_size:
            raise FileExistsError(f"{folder} holds a run already; pass another --out, or remove it")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "config.json").write_text(config.to_json())
            config.parallel_plan().save(folder / "plan.json")
        except OSError as error:
            raise type(error)(f"the run folder {folder} cannot be written: {error}; pass another --out") from error
        return folder

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

    def write_model_config(self, config: ModelConfig) -> None:
        self._write("model.json", asdict(config))

    def log(self, **values: Any) -> None:
        """Append one line to metrics.jsonl."""
        if self.writes:
            with (self.folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(values) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        with (self.folder / "metrics.jsonl").open() as file:
            return [json.loads(line) for line in file]

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

    def _write(self, name: str, values: dict[str, Any]) -> None:
        if self.writes:
            (self.folder / name).write_text(json.dumps(values, indent=2))
