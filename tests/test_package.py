"""What is imported when, what is used where a package is missing, and what a name of the package leads to."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import megagraph as mg
from megagraph.attention import engines

# of which neither the operator nor the flags need any
OF_TRAINING = {"matplotlib", "numba", "polars", "psutil", "pymetis", "safetensors", "torch_geometric"}


def imported(code: str) -> set[str]:
    code += "\nimport sys; print(*{name.split('.')[0] for name in sys.modules}, sep='\\n', file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    return set(done.stderr.split())


def test_names_are_imported_when_they_are_used():
    assert not imported("import megagraph") & {"torch", "numpy", *OF_TRAINING}
    assert not imported("import megagraph as mg; mg.biased_attention; mg.BiasedRingAttention(8, 2)") & {
        "scipy", "triton", "tyro", *OF_TRAINING,
    }  # fmt: skip


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["data", "import", "--help"], ["trian"]])
def test_flags_are_read_without_torch(words):
    code = (
        f"import sys; sys.argv[1:] = {words}\nfrom megagraph.__main__ import main\ntry: main()\nexcept SystemExit: pass"
    )
    assert not imported(code) & {"torch", *OF_TRAINING}


def test_every_name_is_there():
    for package in (mg, mg.planner):
        for name in package.__all__:
            assert getattr(package, name).__name__.split(".")[-1] == name
    assert set(mg.__all__) <= set(dir(mg))
    with pytest.raises(AttributeError, match="No megagraph attribute nothing"):
        _ = mg.nothing


def test_a_name_stays_what_it_is_when_its_module_was_imported_before():
    code = "import megagraph.planner.searching, megagraph.train, megagraph as mg\nassert callable(mg.planner.search)"
    code += "\nassert isinstance(mg.Trainer, type) and callable(mg.predict)"
    imported(code + "\nimport sys; assert 'scipy.stats' not in sys.modules")  # half a second of every start


def test_a_cpu_without_numba_computes_by_the_reference(monkeypatch):
    monkeypatch.setitem(engines._INSTALLED, "numba", False)
    q, k, v = torch.randn(3, 1, 2, 5, 4, dtype=torch.float64)
    bias = mg.BucketBias(torch.randint(0, 3, (1, 5, 5)), torch.randn(2, 3, dtype=torch.float64))
    with pytest.warns(UserWarning, match="numba is not installed, .* impl='reference'.*; pip install numba"):
        out = mg.biased_attention(q, k, v, bias)
    torch.testing.assert_close(out, ((q @ k.mT) / 2 + bias.materialize()).softmax(-1) @ v)
    with pytest.raises(NotImplementedError, match="impl='blocked' cannot run these inputs:\n  numba is not installed"):
        mg.biased_attention(q, k, v, bias, impl="blocked")


def test_a_command_that_lacks_a_package(monkeypatch, capsys):
    from megagraph.__main__ import main

    monkeypatch.setitem(sys.modules, "tyro", None)
    monkeypatch.delitem(sys.modules, "megagraph.cli", raising=False)
    monkeypatch.delattr(mg, "cli", raising=False)
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 1
    said = capsys.readouterr().err
    assert said == "megagraph: error: the command line needs tyro; pip install 'megagraph[train]'\n"
