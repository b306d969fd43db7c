"""What the processes of a run do once all of them have read the command line."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from megagraph.parallel.mesh import TIMEOUT_SECONDS


class Job(NamedTuple):
    """What a command asks for, once all processes have read theirs."""

    run: Callable[[], None]
    timeout_seconds: float = TIMEOUT_SECONDS
