"""What README shows runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_there_are_examples():
    assert len(BLOCKS) == 4


@pytest.mark.parametrize("block", BLOCKS, ids=["train", "operator", "multihead", "ring"])
def test_python_example(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(block, {})


def test_the_ring_example_has_the_gradients_of_one_process_on_two(tmp_path):
    script = tmp_path / "script.py"
    save = "\ngrads = {name: p.grad for name, p in encoder.named_parameters()}\n"
    save += f"torch.save((loss.item(), grads), f'{tmp_path}/{{layout.rank}}-{{world_size}}.pt')\n"
    script.write_text(BLOCKS[3] + save)
    exec(script.read_text(), {})
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr
    loss, grads = torch.load(tmp_path / "0-1.pt")
    assert all(grad.abs().max() > 0 for grad in grads.values())
    for rank in (0, 1):
        torch.testing.assert_close(torch.load(tmp_path / f"{rank}-2.pt"), (loss, grads), rtol=1e-5, atol=1e-7)


def test_the_tree_names_every_file_once():
    """Each in its folder, by the indentation of CONTRIBUTING.md."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    tree = text.split("## Where things are\n\n")[1].split("\n\n")[0]
    named, folders = [], []
    for line in tree.splitlines():
        depth, name = (len(line) - len(line.lstrip()) - 4) // 2, line.split()[0]
        folders = folders[:depth]
        if name.endswith("/"):
            folders.append(name)
        else:
            named.append("".join([*folders, name]))
    places = [ROOT / folder for folder in ("kernels", "megagraph", "bench")]
    files = {path.relative_to(ROOT) for place in places for path in place.rglob("*.py")}
    files = {path.as_posix() for path in files if "megagraph/kernels" not in path.as_posix()}
    assert sorted(named) == sorted(file for file in files if not file.endswith(("__init__.py", "__main__.py")))
