"""Where a figure comes from; every row carries this."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy
import torch

RESULTS = Path(__file__).parent / "results"
_CODE = (":/", ":(top,exclude)bench/results")  # rows of an earlier run do not change what is measured


def provenance() -> dict[str, Any]:
    """Device, versions and commit of this run; $MEGAGRAPH_COMMIT names the commit of a copy without git."""
    import triton

    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    else:
        device = f"{_cpu_name()}, {torch.get_num_threads()} threads"
    return {
        "device": device,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "numpy": numpy.__version__,
        "commit": os.environ.get("MEGAGRAPH_COMMIT") or _commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M"),
    }


def write_rows(name: str, rows: list[dict[str, Any]], folder: str | None = None) -> Path:
    """Write rows to bench/results/FOLDER/NAME.json, each with its provenance; without ``folder`` the device's, which is
    cpu, nvidia-h200, ..."""
    if folder is None:
        folder = torch.cuda.get_device_name().lower().replace(" ", "-") if torch.cuda.is_available() else "cpu"
    path = RESULTS / folder / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    origin = provenance()
    path.write_text(json.dumps([row | origin for row in rows], indent=1) + "\n")
    return path


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def _commit() -> str:
    return _git("rev-parse", "--short", "HEAD") + ("-dirty" if _git("status", "--porcelain", "--", *_CODE) else "")


def _git(*arguments: str) -> str:
    here = Path(__file__).parent
    try:
        done = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""  # a machine without git
    return done.stdout.strip()
