"""What README, the pages and the docstrings show runs, and so do the examples."""

from __future__ import annotations

import doctest
import importlib
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

import megagraph as mg

ROOT = Path(__file__).parent.parent
PAGES = {path.name: path.read_text() for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]}
BLOCKS = {name: re.findall(r"```python\n(.*?)```", text, re.DOTALL) for name, text in PAGES.items()}
SHOWN = [name for page in PAGES.values() for name in re.findall(r"^::: (.*)$", page, re.MULTILINE)]
# what functions give and raise, and the base of models
WITHOUT_EXAMPLE = ("SearchResult", "Candidate", "NoFeasiblePlan", "Summary", "GraphTransformer")
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A folder of its own, with the files of a checkout that examples read."""
    (tmp_path / "bench").symlink_to(ROOT / "bench")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    return tmp_path


def test_readme_is_short():
    text = PAGES["README.md"]
    assert len(text.splitlines()) <= 120
    start = "\n".join(text.splitlines()[:60])
    for part in ("arXiv:2609.34420", "```mermaid", "pip install", "megagraph train", "megagraph predict", "torchrun"):
        assert part in start
    assert "biased_attention" in start and "Apache-2.0" in start


@pytest.mark.parametrize("page", [name for name, blocks in BLOCKS.items() if blocks])
def test_python_of_a_page(page, checkout):
    for block in BLOCKS[page]:
        exec(block, {"__name__": "example"})


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example(example, checkout):
    runpy.run_path(str(example))


@pytest.mark.slow
def test_tables_become_predictions(checkout):
    script, environment = ROOT / "examples" / "csv.sh", os.environ | {"TMPDIR": str(checkout)}
    done = subprocess.run([script], capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^node,class,probability_0,.*\n0,\d,0\.\d+", done.stdout, re.MULTILINE), done.stdout


def test_the_ring_example_has_the_gradients_of_one_process_on_two(checkout):
    script = checkout / "script.py"
    save = "\ngrads = {name: p.grad for name, p in encoder.named_parameters()}\n"
    save += f"torch.save((loss.item(), grads), f'{checkout}/{{layout.rank}}-{{world_size}}.pt')\n"
    script.write_text((ROOT / "examples" / "two_processes.py").read_text() + save)
    exec(script.read_text(), {})
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    loss, grads = torch.load(checkout / "0-1.pt")
    assert all(grad.abs().max() > 0 for grad in grads.values())
    for rank in (0, 1):
        torch.testing.assert_close(torch.load(checkout / f"{rank}-2.pt"), (loss, grads), rtol=1e-5, atol=1e-7)


def _found(name: str) -> object:
    """What a page of the API shows by this name."""
    module, _, rest = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), rest)
    except ModuleNotFoundError:
        return getattr(_found(module), rest)


def test_every_public_name_is_on_a_page_and_used_in_an_example():
    public = {f"megagraph.{name}" for name in mg.__all__} | {f"megagraph.planner.{name}" for name in mg.planner.__all__}
    assert public - set(SHOWN) == set()
    used = "".join(block for blocks in BLOCKS.values() for block in blocks)
    used += "".join(path.read_text() for path in EXAMPLES)
    without = [name for name in SHOWN if ">>>" not in (_found(name).__doc__ or "")]
    unused = {name.rpartition(".")[2] for name in without if not re.search(rf"\b{name.rpartition('.')[2]}\b", used)}
    assert unused == set(WITHOUT_EXAMPLE)


@pytest.mark.parametrize("module", sorted({m for name in SHOWN if (m := getattr(_found(name), "__module__", None))}))
def test_docstrings(module, checkout):
    own = vars(importlib.import_module(module)) | {"Data": Data, "Path": Path, "mg": mg, "np": np, "torch": torch}
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner()
    for name in SHOWN:
        if getattr(_found(name), "__module__", None) == module:
            for test in finder.find(_found(name), name, globs=dict(own)):
                runner.run(test)
    assert runner.summarize(verbose=False).failed == 0


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
