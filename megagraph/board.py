"""The numbers of metrics.jsonl for TensorBoard, where a run is asked for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_FLUSH_SECONDS = 10


def check_installed() -> None:
    """Raise ImportError, before any work, where tensorboard is missing."""
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError as error:
        raise ImportError(f"--tensorboard needs the package tensorboard, pip install tensorboard: {error}") from error


class Board:
    """Events in RUN/tensorboard; those of steps that are done again once the run is resumed count no more.

    Nothing is there before the first line.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._writer: Any = None
        self._step = 0

    def log(self, line: dict[str, Any]) -> None:
        """A line of a step or an epoch that metrics.jsonl will have next; an epoch counts at its last step."""
        if not {"step", "epoch"} & line.keys():
            return
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            steps = self._steps_before()
            self._step = max(steps - 1, 0)
            self._writer = SummaryWriter(str(self._run / "tensorboard"), purge_step=steps, flush_secs=_FLUSH_SECONDS)
        self._step = line.get("step", self._step)
        for name, value in line.items():
            if name not in ("step", "epoch") and type(value) in (int, float):
                self._writer.add_scalar(_tag(name, of_step="step" in line), value, self._step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _steps_before(self) -> int:
        path = self._run / "metrics.jsonl"
        if not path.exists():
            return 0
        with path.open("rb") as lines:
            return sum(line.startswith(b'{"step"') for line in lines)


def _tag(name: str, *, of_step: bool) -> str:
    """Such as step/loss, epoch/loss, validation/accuracy."""
    parts = {"val_": "validation", "test_": "test"}
    group = next((group for part, group in parts.items() if name.startswith(part)), None)
    if group is not None:
        return f"{group}/{name.partition('_')[2]}"
    return f"{'step' if of_step else 'epoch'}/{name}"
