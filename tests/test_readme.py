"""What README shows runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_there_are_examples():
    assert len(BLOCKS) == 2


@pytest.mark.parametrize("block", BLOCKS, ids=["train", "operator"])
def test_python_example(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(block, {})
