"""Some of the damages and of the bad input of `python -m bench.damage`; and a judge that finds a fault where one is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.judge import Done, verdict

ROOT = Path(__file__).parent.parent.parent
# in a process of its own, as forks of this one would share its threads
BENCH = """
import sys
from megagraph import files
if sys.argv.pop(1) == "credulous":
    files.check_values = lambda values, *arguments, **more: values.pop("checksum", None)
from pathlib import Path
from tempfile import TemporaryDirectory
from bench import damage
from bench.judge import Bench
place = TemporaryDirectory()
bench = Bench(Path(place.name), short=True)
for mode in sys.argv[1:]:
    row = {"cases": 0, "counts": {}, "faults": []}
    damage.run(bench, damage.cases(bench, mode, 0, 40), row, None, lambda: None)
    print(mode, row["cases"], sorted({fault["verdict"] for fault in row["faults"]}))
place.cleanup()
"""


def bench(*arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", BENCH, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(not hasattr(os, "fork"), reason="cases are forks")
def test_damages_and_bad_input_without_a_fault():
    assert bench("as it is", "damage", "numbers", "bad_input") == "damage 40 []\nnumbers 40 []\nbad_input 40 []\n"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="cases are forks")
def test_who_believes_damaged_files_is_found_out():
    assert "\ndamage 40 ['silent" in "\n" + bench("credulous", "damage").split("\n}\n")[-1]


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
