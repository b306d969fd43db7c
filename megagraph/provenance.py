"""Where a figure comes from: every row carries this, and every run keeps it of each of its starts."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy
import torch
import xxhash

import megagraph

_CODE = (":/", ":(top,exclude)bench/results")  # rows of an earlier run do not change what is measured


def provenance(on: torch.device | None = None) -> dict[str, Any]:
    """Device, versions, sources and commit of this run; $MEGAGRAPH_COMMIT names the commit of a copy without git.

    Args:
        on: the device; default the GPU, or the CPU where there is none.
    """
    if torch.cuda.is_available() and (on is None or on.type == "cuda"):
        device = torch.cuda.get_device_name(on)
    else:
        device = f"{_cpu_name()}, {torch.get_num_threads()} threads"
    try:
        triton = version("triton")  # without importing it
    except PackageNotFoundError:
        triton = None
    return {
        "device": device,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton,
        "numpy": numpy.__version__,
        "tree": _tree(),
        "commit": os.environ.get("MEGAGRAPH_COMMIT") or _commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M"),
    }


def start_of_run(on: torch.device) -> dict[str, Any]:
    """The same and the command, for the folder of a run."""
    command = {"command": shlex.join(sys.argv), "directory": os.getcwd()}
    return provenance(on) | {"megagraph": megagraph.__version__, **command}


@cache
def _tree() -> str:
    """Of the package's own files: commits may get other names, these stay."""
    package = Path(__file__).parent
    sources = sorted({path for place in (package, package / "kernels") for path in place.rglob("*.py")})
    content = b"".join(f"{path.relative_to(package)}\n".encode() + path.read_bytes() for path in sources)
    return xxhash.xxh3_64_hexdigest(content)


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


@cache
def _commit() -> str:
    if not (Path(__file__).parent.parent / ".git").exists():
        return ""  # or it would be the commit of whatever checkout the package is installed in
    return _git("rev-parse", "--short", "HEAD") + ("-dirty" if _git("status", "--porcelain", "--", *_CODE) else "")


def _git(*arguments: str) -> str:
    here = Path(__file__).parent
    try:
        done = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""  # a machine without git
    return done.stdout.strip()
