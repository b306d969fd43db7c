"""The benches run, floors are those that were derived by hand, a wrong result is a row and not a speed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import measure, tables
from bench.floors import RATES, floor, issue_slot_seconds
from bench.peers import CONTENDERS, Contender, _torch, eager
from bench.shapes import Case, square

ROOT = Path(__file__).parents[2]
H200 = RATES["NVIDIA H200"]


def smoke(folder: Path, *files: str) -> list[dict]:
    """Rows of a run in a process without the interpreter, tiny cases, every contender."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "pytest", "-q", "--smoke", "--rows", folder, *files]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return [row for path in folder.glob("*.json") for row in json.loads(path.read_text())]


def test_benches_run_and_tables_come_from_their_rows(tmp_path, capsys):
    rows = smoke(tmp_path, "bench")
    told = {"unit", "device", "torch", "triton", "commit", "B", "H", "M", "N", "D", "form", "dtype", "direction"}
    for row in rows:
        assert row.keys() >= told | {"contender", "series"}, row
        assert row.get("refusal") or 0 < row["min"] <= row["median"] <= row["max"], row
    assert {row["contender"] for row in rows} == {*CONTENDERS, "ring_steps", "one_call"}
    for row in rows:
        if row["contender"].startswith("megagraph") or row["contender"] == "eager":
            assert row["refusal"] is None, row
    by_name = {row["contender"]: row for row in rows if row["form"] == "bucket" and row["series"] == "shapes"}
    ours = next(row for name, row in by_name.items() if name.startswith("megagraph"))
    B, H, N, D = (ours[name] for name in "BHND")
    assert ours["saved_bytes"] == B * H * N * (D * getattr(torch, ours["dtype"]).itemsize + 4)  # out and lse
    assert by_name["eager"]["saved_bytes"] > ours["saved_bytes"]

    tables.main(tmp_path)
    printed = capsys.readouterr().out
    for title in ("Five shapes", "A rank's ring steps", "Forward + backward over N, ms", "Refused"):
        assert f"## {title}\n\n|" in printed
    assert rows[0]["device"] in printed and rows[0]["commit"] in (tmp_path / "time_against_n.svg").read_text()


# limits.md: milliseconds and the unit that binds
@pytest.mark.parametrize(
    ("shape", "form", "direction", "milliseconds", "unit"),
    [
        ((8192, 8, 32, 8), "bucket", "forward", 0.0351, "hbm"),
        ((8192, 8, 32, 8), "projected", "backward", 0.0802, "hbm"),
        ((256, 32, 144, 4), "bucket", "forward", 0.0406, "exp"),
        ((256, 32, 144, 4), "bucket", "backward", 0.0698, "shared"),
        ((256, 32, 144, 4), "projected", "backward", 0.0565, "issue"),
        ((1, 8, 8192, 8), "dense", "forward", 0.2507, "hbm"),
        ((1, 8, 8192, 64), "none", "backward", 0.4349, "tensor"),
        ((1, 8, 8192, 64), "dense", "forward_backward", 0.2576 + 0.5151, "hbm"),
    ],
)
def test_floors(shape, form, direction, milliseconds, unit):
    B, H, N, D = shape
    found = floor(Case(B, H, N, N, D, form, torch.bfloat16), direction, H200)
    assert found.seconds == pytest.approx(milliseconds / 1e3, rel=2e-3)
    assert found.unit == unit


def test_no_floor_without_rates_or_for_single_precision():
    assert floor(square(1, 1, 16, 8, "none"), "forward", None) is None
    assert floor(Case(1, 1, 16, 16, 8, "none", torch.float32), "forward", H200) is None


def test_issue_slots():
    """8 instructions per element take as long as one exponential: 128 lanes against 16 results a clock."""
    elements = 8 * 8192**2
    assert issue_slot_seconds(8.0, elements, H200) == pytest.approx(elements / H200.exp)


def test_floor_and_fraction_reach_the_table():
    row = {"series": "shapes", "contender": "megagraph_triton", "device": "NVIDIA H200", "median": 2e-3, "floor": 1e-3}
    row |= {name: 8 for name in "BHMND"} | {"form": "dense", "dtype": "bfloat16", "direction": "forward"}
    peer = row | {"contender": "eager", "median": 6e-3}
    assert "| 2 | megagraph triton | 50% | 2.00 | eager | 6 | 3.00 |" in tables.five_shapes([row, peer])


def wrong(form, q, k, v, data, *learned):
    return 1.01 * eager(form, q, k, v, data, *learned)


def refuses(form, q, k, v, data, *learned):
    raise RuntimeError("head dim 8\nand more")


@pytest.mark.parametrize(
    ("attend", "reason"), [(wrong, "wrong values: out is"), (refuses, "head dim 8")], ids=["wrong", "refuses"]
)
def test_no_time_without_right_values(attend, reason, monkeypatch):
    def never(launch):
        raise AssertionError("timed")

    monkeypatch.setitem(CONTENDERS, "other", _torch(attend))
    row = measure.measure("other", square(2, 2, 17, 8, "bucket"), "forward", never)
    assert row["refusal"].startswith(reason) and "more" not in row["refusal"]
    assert "median" not in row


def test_our_own_errors_are_not_rows(monkeypatch):
    ours = Contender(_torch(refuses).prepare, ours=True)
    monkeypatch.setitem(CONTENDERS, "megagraph_other", ours)
    with pytest.raises(RuntimeError, match="head dim 8"):
        measure.measure("megagraph_other", square(2, 2, 17, 8, "bucket"), "forward", list)
