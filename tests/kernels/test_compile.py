"""The kernels compile for sm_90 and fit its shared memory, on a machine without a GPU.

In a process of its own, because this one may have imported triton as an interpreter. Run with ``-s`` to see
the registers, spills and shared memory of each kernel.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SHARED_LIMIT = 232_448  # bytes a program may use on sm_90; the compiler does not check
CASES = (
    "none:bfloat16:64:0:only",
    "none:bfloat16:8:0.1:middle",
    "dense:bfloat16:64:0.1:only",
    "dense:bfloat16:8:0:middle",
    "dense:bfloat16:256:0:only",
    "bucket:bfloat16:64:0:middle",
    "bucket:bfloat16:8:0.1:only",
    "projected:bfloat16:64:0.1:middle",
    "projected:bfloat16:8:0:only",
)


def test_kernels_compile_for_sm_90():
    script = Path(__file__).with_name("compile_step.py")
    root = script.parents[2]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    done = subprocess.run([sys.executable, script, *CASES], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["case"] for row in rows[::2]] == list(CASES)
    for row in rows:
        assert row["shared"] <= SHARED_LIMIT, row
        assert row["hgmma"] + row["hmma"] > 0, f"no tensor-core instruction: {row}"
