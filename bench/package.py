"""How light the package is to carry: what installs, and what importing it and its help take: `python -m bench.package`.

The wheel of this checkout goes into an empty environment outside of it, first alone, then with the extra ``train``.
Megabytes are those of site-packages with torch for CPUs. Seconds are of the processor, beyond an empty Python's start,
medians of ROUNDS in turn after one that is not counted. Asked of it: importing the operator takes at most IMPORT times
as long as importing torch, a command's help at most HELP seconds; without Numba the operator computes all the same.

Fixed: 7 rounds; the packages' newest versions that pip finds.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import tyro

from bench.provenance import PACKAGE, write_rows

ROUNDS, IMPORT, HELP = 7, 1.3, 1.0
OPERATOR = """
import torch, megagraph as mg
q = torch.randn(1, 2, 5, 4, requires_grad=True)
table = torch.zeros(2, 3, requires_grad=True)
mg.biased_attention(q, q, q, mg.BucketBias(torch.zeros(1, 5, 5, dtype=torch.uint8), table)).sum().backward()
assert table.grad is not None and mg.BiasedRingAttention(8, 2)(torch.randn(1, 5, 8)).shape == (1, 5, 8)
"""
TIMED = {
    "python": ("-c", "pass"),
    "torch": ("-c", "import torch"),
    "package": ("-c", "import megagraph"),
    "operator": ("-c", "import megagraph as mg; mg.biased_attention; mg.BiasedRingAttention; mg.BucketBias"),
    "help": ("-m", "megagraph", "--help"),
    "train help": ("-m", "megagraph", "train", "--help"),
    "misspelt": ("-m", "megagraph", "trian"),
}


def seconds(python: Path, words: tuple[str, ...], folder: Path) -> float:
    """Seconds of the processor, of a command run in ``folder``."""
    before = os.times()
    subprocess.run([python, *words], cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def megabytes(python: Path) -> float:
    """Megabytes of all that is installed for a Python."""
    (site,) = python.parent.parent.glob("lib/python*/site-packages")
    return sum(path.lstat().st_size for path in site.rglob("*") if not path.is_dir()) / 1e6


def main() -> None:
    """Install, measure, and write bench/results/cpu/package.json."""
    root = Path(__file__).parent.parent
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, root], check=True)
        (wheel,) = folder.glob("*.whl")
        subprocess.run([sys.executable, "-m", "venv", folder / "env"], check=True)
        python = folder / "env" / "bin" / "python"
        rows.append({"what": "wheel", "value": wheel.stat().st_size / 1e6, "unit": "MB"})
        rows.append({"what": "empty environment", "value": megabytes(python), "unit": "MB"})
        for extra in ("", "[train]"):
            subprocess.run([python, "-m", "pip", "install", "-q", f"megagraph{extra} @ file://{wheel}"], check=True)
            rows.append({"what": f"megagraph{extra}", "value": megabytes(python), "unit": "MB"})
            done = subprocess.run([python, "-c", OPERATOR], cwd=folder, capture_output=True, text=True, check=True)
            assert ("numba is not installed" in done.stderr) == (not extra), done.stderr
        samples: dict[str, list[float]] = {name: [] for name in TIMED}
        for turn in range(ROUNDS + 1):
            for what, words in TIMED.items():
                spent = seconds(python, words, folder)
                if turn:
                    samples[what].append(spent)
    start = median(samples.pop("python"))
    times = {what: median(values) - start for what, values in samples.items()}
    for what, values in samples.items():
        spread = {"least": min(values) - start, "most": max(values) - start}
        rows.append({"what": what, "value": times[what], **spread, "unit": "s"})
    for row in rows:
        print(f"{row['what']:<20} {row['value']:9.3f} {row['unit']}")
    judged = {
        f"operator / torch, at most {IMPORT}": times["operator"] / times["torch"] <= IMPORT,
        f"help, at most {HELP} s": max(times["help"], times["train help"], times["misspelt"]) <= HELP,
    }
    print(*(f"{what}: {'holds' if holds else 'FAILS'}" for what, holds in judged.items()), sep="\n")
    write_rows("package", rows, folder="cpu", children=PACKAGE)


if __name__ == "__main__":
    tyro.cli(main)
