"""Where rows go, with where they come from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from megagraph.provenance import provenance

RESULTS = Path(__file__).parent / "results"


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


def append_row(name: str, row: dict[str, Any]) -> None:
    """Add a row to bench/results/cpu/NAME.jsonl, with its provenance; several processes may do so at once."""
    path = RESULTS / "cpu" / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(row | provenance()) + "\n"
    with path.open("a") as file:
        file.write(line)
