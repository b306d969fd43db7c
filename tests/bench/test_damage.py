"""Some of the damages and of the bad input of `python -m bench.damage`; and a judge that finds a fault where one is."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.judge import Done, verdict

ROOT = Path(__file__).parent.parent.parent
# in a process of its own, as forks of this one would share its threads
BENCH = """
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from bench import damage
from bench.judge import Bench
from megagraph import files

def faults(mode, count, of=None):
    row = {"cases": 0, "counts": {}, "faults": []}
    drawn = damage.cases(bench, mode, 0, count if of is None else 10_000)
    todo = islice((case for case in drawn if of in (None, case.name)), count)
    damage.run(bench, todo, row, None, lambda: None)
    return mode, row["cases"], sorted({fault["verdict"] for fault in row["faults"]})

with TemporaryDirectory() as place:
    bench = Bench(Path(place), short=True)
    found = [faults("damage", 15), faults("numbers", 8), faults("bad_input", 15)]
    files.check_values = lambda values, *arguments, **more: values.pop("checksum", None)
    found.append(faults("damage", 60, "search"))  # whose every digit makes another plan or another time
print(found)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="cases are forks")
def test_no_fault_and_one_where_damaged_files_are_believed():
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", BENCH]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    *found, (_, cases, believed) = ast.literal_eval(done.stdout.splitlines()[-1])
    assert found == [("damage", 15, []), ("numbers", 8, []), ("bad_input", 15, [])], done.stdout
    assert cases == 60 and "silent" in believed


@pytest.mark.parametrize(
    ("status", "err", "same", "expected"),
    [
        (0, "", True, "same"),
        (0, "", False, "silent"),
        (1, "megagraph: error: expected a plan", False, "refused"),
        (1, "megagraph: error: ", False, "unclear"),
        (1, "megagraph: error: one\nmegagraph: error: two", False, "unclear"),
        (1, "Traceback (most recent call last):\nmegagraph: error: one", False, "traceback"),
        (0, "Exception ignored in: ...", True, "traceback"),
        (75, "", True, "unclear"),
        (-11, "", True, "signal"),
        (None, "", True, "hang"),
    ],
)
def test_the_judge(status, err, same, expected):
    assert verdict(Done(status, "", err, 1.0), lambda: same) == expected
