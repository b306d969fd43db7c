"""Compile, where there is no GPU, what checks launch on one: minutes of its time are few.

    python -m bench.ahead bench/wheels/kernels.tar.xz                    what bench/test_values.py launches, for sm_90
    python -m bench.ahead bench/wheels/kernels.tar.xz tests/attention bench/test_points.py    other tests, more kernels

Tests run as on an H200, but that their tensors lie on the CPU and their kernels are compiled and not started, so that
all of them fail. ``bench/gpu.sh`` unpacks the binaries, which serve the same wheels of Python and Triton only; others
are compiled there.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed.tensor  # before torch.Generator is another, which it takes for a type
import tyro
from torch.overrides import TorchFunctionMode

CACHE = Path("/tmp/megagraph_kernels")  # its files name each other by their whole paths


def main(archive: tyro.conf.Positional[Path], tests: tyro.conf.Positional[tuple[str, ...]] = ()) -> None:
    """Write the binaries of what the tests launch; what is compiled already stays."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "pytest", "-p", "bench.ahead", "-n", str(os.cpu_count())]
    command += ["-q", "--tb=no", "-o", "filterwarnings=default", "--benchmark-disable", "-m", "slow or not slow"]
    command += tests or ["bench/test_values.py"]
    subprocess.run(command, env=environment | {"TRITON_CACHE_DIR": str(CACHE)}, check=False)  # the tests fail
    kept = [path for path in CACHE.rglob("*") if path.suffix in (".cubin", ".json")]  # each kind after the other
    with tarfile.open(archive, "w:xz", preset=1) as file:
        for path in sorted(kept, key=lambda path: path.name):
            file.add(path, path.relative_to(CACHE))
    print(f"{archive}: {sum(path.suffix == '.cubin' for path in kept)} kernels, {archive.stat().st_size >> 20} MiB")


class OnCpu(TorchFunctionMode):
    """What would be made on the GPU, or moved there, is on the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*map(_on_cpu, args), **{name: _on_cpu(value) for name, value in (kwargs or {}).items()})


def _on_cpu(value: Any) -> Any:
    named = isinstance(value, str | torch.device) and str(value).startswith("cuda")
    return torch.device("cpu") if named else value


def pose() -> None:
    """Make the process take itself for one with a GPU; a plugin of pytest, before it imports any test."""
    torch.cuda.is_available = lambda: True  # tests ask it where their tensors go
    torch.cuda.synchronize = torch.cuda.empty_cache = lambda *_: None
    torch.Tensor.pin_memory = lambda self, *_: self
    import triton
    from triton.runtime.jit import JITFunction

    from bench.compile_report import StubDriver
    from megagraph.attention import engines
    from megagraph.kernels import launch

    run, choose, generator = JITFunction.run, engines.choose, torch.Generator

    class NoPlans(dict):
        """A plan would start its kernels; a launcher only compiles them."""

        def get(self, geometry: tuple, default: None = None) -> None:
            return None

    triton.runtime.driver.set_active(StubDriver("sm_90"))
    JITFunction.run = lambda self, *args, warmup, **kwargs: run(self, *args, warmup=True, **kwargs)
    launch.plans = NoPlans()
    engines.Triton.refusals = lambda self, q: []
    for module in [module for name, module in sys.modules.items() if name.startswith("megagraph")]:
        if getattr(module, "choose", None) is choose:
            module.choose = lambda impl, q, **about: choose(impl or "triton", q, **about)
    torch.Generator = lambda device="cpu": generator()
    OnCpu().__enter__()


if __name__ == "__main__":
    tyro.cli(main)
else:
    pose()
