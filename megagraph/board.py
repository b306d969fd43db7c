"""The numbers of metrics.jsonl for TensorBoard or Weights & Biases, where a run is asked for them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from megagraph.config import TrainConfig

_FLUSH_SECONDS = 10


class Board:
    """Told each line that metrics.jsonl will have next; nothing is there before the first of a step or an epoch."""

    package: str  # and its flag

    def __init__(self, run: Path) -> None:
        self._run = run
        self._writer: Any = None
        self._step = 0

    @classmethod
    def check(cls) -> None:
        """Raise ImportError, before any work, where the package is missing."""
        try:
            cls._import()
        except ImportError as error:
            needed = f"--{cls.package} needs the package {cls.package}, pip install {cls.package}"
            raise ImportError(f"{needed}: {error}") from error

    def log(self, line: dict[str, Any]) -> None:
        """Write the numbers of a line; an epoch counts at its last step."""
        if not {"step", "epoch"} & line.keys():
            return
        if self._writer is None:
            steps = self._steps_before()
            self._step = max(steps - 1, 0)
            self._writer = self._open(steps)
        self._step = line.get("step", self._step)
        of_step = "step" in line
        numbers = {name: x for name, x in line.items() if name not in ("step", "epoch") and type(x) in (int, float)}
        self._write({_tag(name, of_step=of_step): x for name, x in numbers.items()})

    def close(self) -> None:
        """Write what has been told so far."""
        raise NotImplementedError

    @staticmethod
    def _import() -> Any:
        raise NotImplementedError

    def _open(self, steps: int) -> Any:
        raise NotImplementedError

    def _write(self, numbers: dict[str, float]) -> None:
        raise NotImplementedError

    def _steps_before(self) -> int:
        path = self._run / "metrics.jsonl"
        if not path.exists():
            return 0
        with path.open("rb") as lines:
            return sum(line.startswith(b'{"step"') for line in lines)


class TensorBoard(Board):
    """Events in RUN/tensorboard; those of steps that are done again once the run is resumed count no more."""

    package = "tensorboard"

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    @staticmethod
    def _import() -> Any:
        import torch.utils.tensorboard

        return torch.utils.tensorboard

    def _open(self, steps: int) -> Any:
        folder = str(self._run / "tensorboard")
        return self._import().SummaryWriter(folder, purge_step=steps, flush_secs=_FLUSH_SECONDS)

    def _write(self, numbers: dict[str, float]) -> None:
        for tag, x in numbers.items():
            self._writer.add_scalar(tag, x, self._step)


class WandB(Board):
    """A run of Weights & Biases, one for all starts; its own files are in RUN/wandb.

    Steps that are done again once the run is resumed are told again: their points lie on the first ones.
    """

    package = "wandb"

    def __init__(self, run: Path, id: str, config: TrainConfig) -> None:
        super().__init__(run)
        self._about = {"id": id, "name": run.name, "config": asdict(config)}

    @classmethod
    def check(cls) -> None:
        """Raise ImportError where the package is missing and ValueError where it knows no account."""
        super().check()
        wandb = cls._import()
        try:
            wandb.login()
        except wandb.errors.UsageError as error:
            raise ValueError(f"--wandb: {error} WANDB_MODE=offline keeps the numbers in the run folder") from error

    def close(self) -> None:
        if self._writer is not None:
            self._writer.finish()

    @staticmethod
    def _import() -> Any:
        import wandb

        return wandb

    def _open(self, steps: int) -> Any:
        wandb = self._import()
        writer = wandb.init(
            project="megagraph",
            dir=str(self._run),
            resume="allow",
            settings=wandb.Settings(console="off", quiet=True),
            **self._about,
        )
        writer.define_metric("step")
        writer.define_metric("*", step_metric="step")
        return writer

    def _write(self, numbers: dict[str, float]) -> None:
        self._writer.log({"step": self._step, **numbers})


def _tag(name: str, *, of_step: bool) -> str:
    """The tag of a number, such as step/loss, epoch/loss, validation/accuracy."""
    parts = {"val_": "validation", "test_": "test"}
    group = next((group for part, group in parts.items() if name.startswith(part)), None)
    if group is not None:
        return f"{group}/{name.partition('_')[2]}"
    return f"{'step' if of_step else 'epoch'}/{name}"
