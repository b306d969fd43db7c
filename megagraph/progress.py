"""What is said while work goes on, by the logger "megagraph", and how far it has come."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

log = logging.getLogger("megagraph")
LINE_SECONDS = 30.0  # from one line to the next where there is no terminal; what is done sooner says nothing


class Progress(tqdm):
    """Gives what ``iterable`` gives: a bar at a terminal, elsewhere a line now and then, and nothing where the logger
    is not to say what goes on, or on another rank than the first. Of ``total`` so many are ``done`` before."""

    monitor_interval = 0  # a thread of its own would be there when workers are forked

    def __init__(
        self, iterable: Iterable[Any] | None, what: str, total: int | None = None, unit: str = "batches", done: int = 0
    ):
        self._bar = sys.stderr.isatty()
        wait = {} if self._bar else {"mininterval": LINE_SECONDS, "delay": LINE_SECONDS, "file": io.StringIO()}
        quiet = os.environ.get("RANK", "0") != "0" or not log.isEnabledFor(logging.INFO)
        super().__init__(
            iterable, what, total, unit=f" {unit}", leave=False, disable=quiet, miniters=1, initial=done, **wait
        )

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        """Draw the bar, or log a line; tqdm calls it with an empty message at the end."""
        if self._bar:
            super().display(msg, pos)
        elif msg is None:
            whole = "" if self.total is None else f" of {self.total:,}"
            log.info(f"{self.desc}: {self.n:,}{whole}{self.unit}" + (f", {self.postfix}" if self.postfix else ""))
