"""Options of the benches, and where their rows go."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.provenance import origin

_PEDANTIC_SECONDS = 0.1 if torch.cuda.is_available() else 3.0  # a GPU's figures come from its events
_started = time.monotonic()


def pytest_addoption(parser):
    parser.addoption("--rows", type=Path, help="folder for the rows, one JSON file per bench; none: rows are lost")
    parser.addoption("--smoke", action="store_true", help="tiny cases: does everything run?")
    parser.addoption("--budget", type=float, default=float("inf"), help="seconds after which no bench starts")


def pytest_configure(config):
    if config.getoption("--rows") is not None and config.getoption("numprocesses", None):
        raise pytest.UsageError("expected --rows without -n, got both: workers slow and overwrite each other; name one")


def pytest_runtest_setup(item):
    if time.monotonic() - _started > item.config.getoption("--budget"):
        pytest.skip("out of time")


@pytest.fixture(scope="module")
def record(request) -> Callable[[dict[str, Any]], None]:
    """Writes a row at once, with its origin and the versions of what only peers use: what was measured survives
    whatever ends the run."""
    folder = request.config.getoption("--rows")
    more = {"jax": version("jax") if find_spec("jax") else None, "cudnn": torch.backends.cudnn.version()}
    more |= {"quick": True} if request.config.getoption("--smoke") else {}
    rows: list[dict[str, Any]] = []

    def add(row: dict[str, Any]) -> None:
        if folder is not None:
            rows.append(row | more | origin(results=folder))
            path = folder / f"{request.module.__name__.rpartition('.test_')[2]}.json"
            path.with_suffix(".part").write_text(json.dumps(rows, indent=1) + "\n")
            path.with_suffix(".part").replace(path)

    return add


@pytest.fixture
def pedantic(request) -> Callable[[Callable[[], Any]], list[float]]:
    """Times a launch with pytest-benchmark, which is asked for only now: a refused case is not a benchmark."""

    def time_(launch: Callable[[], Any]) -> list[float]:
        benchmark = request.getfixturevalue("benchmark")
        began = time.perf_counter()
        launch()
        once = time.perf_counter() - began
        rounds = int(_PEDANTIC_SECONDS / once)
        benchmark.pedantic(launch, rounds=2 if request.config.getoption("--smoke") else min(max(rounds, 3), 15))
        return [once] if benchmark.disabled else benchmark.stats.stats.data  # by --benchmark-disable

    return time_
