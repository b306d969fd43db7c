"""The kernels compile for sm_90, those with default arguments within the committed budget, on a machine without a GPU.

The interpreter accepts what the compiler does not, so that every variant has to be compiled once: where the committed
rows are of these very sources and this Triton, they are that once, and every EACH-th of them is compiled again. In a
process of its own, because this one may have imported triton as an interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.compile_report import over_budget, too_large, wrong
from bench.provenance import RESULTS, changed
from megagraph.kernels.variants import Variant, cover, defaults

triton = pytest.importorskip("triton", reason="triton has wheels for Linux only")
pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
EACH = 14
AGAIN = """
import json, sys
from bench.compile_report import compile_variant
from megagraph.kernels.variants import cover, defaults
chosen = [variant for variant in dict.fromkeys(defaults() + cover()) if variant.name in sys.argv[1:]]
print(json.dumps([compile_variant("sm_90", variant) for variant in chosen]))
"""


def run(*command: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, *command], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def committed(variants: list[Variant]) -> dict[str, dict[str, Any]]:
    """Their rows, by name; none where the sources or Triton are others."""
    rows = json.loads((RESULTS / "compile" / "sm_90.json").read_text(encoding="utf-8"))
    sources = {row["sources"]: row for row in rows}.values()
    others = {name for row in sources for name in changed(row)} - {"bench/provenance.py"}  # which only writes rows
    if others or {row["triton"] for row in rows} != {triton.__version__}:
        return {}
    by_name = {row["variant"]: row for row in rows}
    return {variant.name: by_name[variant.name] for variant in variants if variant.name in by_name}


@pytest.mark.parametrize(("variants", "check"), [(defaults(), True), (cover(), False)], ids=["defaults", "cover"])
def test_kernels_compile(variants, check):
    rows = committed(variants)
    if len(rows) < len(set(variants)):
        command = ["-m", "bench.compile_report", "--archs", "sm_90", "--only", "defaults" if check else "cover"]
        print(run(*command, *["--check"] * check))
        return
    again = json.loads(run("-c", AGAIN, *list(rows)[::EACH]))
    assert len(again) == len(list(rows)[::EACH])
    for row in again:
        del row["seconds"]
        assert row.items() <= rows[row["variant"]].items(), row["variant"]
    found = list(rows.values())
    spilt = {row["variant"] for row in found for loop in row["loops"] if loop["spills"] and row["head_dim"] <= 128}
    assert not spilt, "registers of their loops do not suffice"
    assert not too_large(found) + wrong(found) + (over_budget(found) if check else [])
