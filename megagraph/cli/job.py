"""What the processes of a run do once all of them have read the command line, and flags of several commands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megagraph.config import TrainConfig


class Job(NamedTuple):
    """What a command asks for, once all processes have read theirs."""

    run: Callable[[], None]
    timeout_seconds: float = TrainConfig.timeout
    several: bool = False  # whether it is one for several processes, too


@dataclass(frozen=True, kw_only=True)
class Changes:
    """What takes the place of a run's own."""

    dataset: str | None = None
    """Graph to read in place of the run's, as for megagraph train."""
    root: Path | None = None
    """Folder of the named data sets, in place of the run's."""
    device: str | None = None
    """Device to compute on, in place of the run's."""

    def given(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}
