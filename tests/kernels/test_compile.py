"""The kernels compile for sm_90, those with default arguments within the committed budget, on a machine without a GPU.

In a process of its own, because this one may have imported triton as an interpreter. Run with ``-s`` to see the
registers, spills, shared memory and instructions of each kernel.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton has wheels for Linux only")
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("which", [("defaults", "--check"), ("cover",)], ids=" ".join)
def test_kernels_compile(which):
    """The interpreter accepts what the compiler does not, so that every variant has to be compiled once."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "bench.compile_report", "--archs", "sm_90", "--only", *which]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stderr
