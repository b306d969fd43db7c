"""What a call of attention costs the host: all of it from ``biased_attention`` to the driver, in microseconds.

    python -m bench.host                       this checkout
    python -m bench.host --old CHECKOUT        beside another one, in turns, with ratios

Without a GPU: kernels are compiled for sm_90, Triton handles their arguments as on the device, and only what would
hand them to the driver does nothing. Tensors lie on the CPU, few sequences each, so that none of torch's own
operations computes long; what is never done on a GPU is left out: reading values of a bias, and keeping memory of large
gradients.

A round calls every case once, so that shapes and forms alternate; the first rounds compile and fill caches. Backward
is ``torch.autograd.grad`` of out, with the engine's own work.

Fixed: bf16, seed 0, heads as projections leave them, 32 entries or 4 channels, gradients of all, no dropout; 5 runs of
new processes, each of 5 warm-up rounds and 200 rounds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

HERE = Path(__file__).parents[1]
SHAPES = ((4, 8, 32, 8), (2, 32, 144, 4), (1, 8, 512, 8), (1, 8, 512, 64))  # B, H, N, D
FORMS = ("none", "dense", "bucket", "projected")
RUNS, WARMUP_ROUNDS, ROUNDS = 5, 5, 200
ARCH = "sm_90"


def stub_driver() -> None:
    """Triton's driver, as far as a launch asks it, for kernels that are loaded and launched into nothing."""
    import triton
    from triton.backends.compiler import GPUTarget

    utils = SimpleNamespace(
        load_binary=lambda *_: (object(), 0, 32, 0, 1024),
        get_device_properties=lambda _: {"max_shared_mem": 232_448},
    )
    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", int(ARCH[3:]), 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda _=None: 0,
        launcher_cls=lambda *_: lambda *_: None,
        utils=utils,
    )
    triton.runtime.driver.set_active(driver)


def serve() -> None:
    """Answer each line read with the seconds of one round, [case] of (forward, backward)."""
    stub_driver()
    import torch

    import megagraph as mg
    from megagraph.attention import operator
    from megagraph.kernels import biased_attention  # noqa: F401  asks what TRITON_INTERPRET is now

    os.environ["TRITON_INTERPRET"] = "1"  # takes tensors of the CPU, from here on
    operator.check_values = lambda step: None
    if hasattr(operator, "reuse"):
        operator.reuse._LEAST = 1 << 62
    torch.manual_seed(0)
    torch.set_num_threads(1)

    def case(form: str, B: int, H: int, N: int, D: int) -> Callable[[], tuple[float, float]]:
        def rows() -> torch.Tensor:
            return torch.randn(B, N, H, D, dtype=torch.bfloat16).transpose(1, 2)

        q, k, v = (rows().requires_grad_() for _ in range(3))
        index, table = torch.randint(32, (B, N, N), dtype=torch.uint8), torch.randn(H, 32)
        channels, weight = torch.randn(B, 4, N, N, dtype=torch.bfloat16), torch.randn(H, 4)
        values = torch.randn(B, H, N, N, dtype=torch.bfloat16)
        learned = {"none": None, "dense": values, "bucket": table, "projected": weight}[form]
        inputs = [q, k, v] if learned is None else [q, k, v, learned.requires_grad_()]
        bias = {
            "none": lambda: None,
            "dense": lambda: mg.DenseBias(values),
            "bucket": lambda: mg.BucketBias(index, table),
            "projected": lambda: mg.ProjectedBias(channels, weight),
        }[form]()
        d_out = rows()

        def call() -> tuple[float, float]:
            started = time.perf_counter()
            out = mg.biased_attention(q, k, v, bias, impl="triton")
            between = time.perf_counter()
            torch.autograd.grad(out, inputs, d_out)
            return between - started, time.perf_counter() - between

        return call

    calls = [case(form, *shape) for shape in SHAPES for form in FORMS]
    for _ in sys.stdin:
        calls[-1]()  # after a wait, whose cost is not the call's
        print(json.dumps([call() for call in calls]), flush=True)


def start(checkout: Path) -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    return subprocess.Popen(
        [sys.executable, __file__, "--serve"],
        cwd=checkout, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def measure(checkouts: dict[str, Path]) -> dict[str, np.ndarray]:
    """Microseconds [rounds, cases, direction] of each checkout."""
    servers = {name: start(path) for name, path in checkouts.items()}
    found: dict[str, list[Any]] = {name: [] for name in servers}
    for round_ in range(WARMUP_ROUNDS + ROUNDS):
        for name in list(servers) if round_ % 2 else reversed(servers):
            server = servers[name]
            assert server.stdin is not None
            assert server.stdout is not None
            server.stdin.write("\n")
            server.stdin.flush()
            found[name].append(json.loads(server.stdout.readline()))
    for server in servers.values():
        server.communicate()
    return {name: np.array(rows[WARMUP_ROUNDS:]) * 1e6 for name, rows in found.items()}


def main(old: Path | None = None) -> None:
    """Print medians and the spread, and write the rows to bench/results/cpu/host.json."""
    from bench.provenance import PACKAGE, write_rows

    # the installed package would be measured in its place
    if old is not None and not (old / "megagraph" / "__init__.py").exists():
        raise SystemExit(f"expected a checkout of the package, got {old} without megagraph/; name its folder")
    runs = [measure({"new": HERE} | ({} if old is None else {"old": old.resolve()})) for _ in range(RUNS)]
    found = {name: np.concatenate([run[name] for run in runs]) for name in runs[0]}
    rows = []
    for i, (shape, form) in enumerate((shape, form) for shape in SHAPES for form in FORMS):
        for j, direction in enumerate(("forward", "backward")):
            row: dict[str, Any] = dict(zip("BHND", shape, strict=True)) | {"form": form, "direction": direction}
            row |= {"unit": "us", "arch": ARCH}
            for name, times in found.items():
                low, median, high = np.percentile(times[:, i, j], (10, 50, 90))
                row[name] = {"median": median, "percentiles_10_90": [low, high]}
            text = ", ".join(
                "{} {median:.0f} us [{percentiles_10_90[0]:.0f}, {percentiles_10_90[1]:.0f}]".format(name, **row[name])
                for name in found
            )
            if old is not None:
                row["ratio"] = row["new"]["median"] / row["old"]["median"]
                ours, theirs = ([np.median(run[name][:, i, j]) for run in runs] for name in ("new", "old"))
                row["ratio_of_runs"] = (np.array(ours) / theirs).tolist()
                text += f", ratio {row['ratio']:.2f}"
            rows.append(row)
            print(f"{form:9} {shape} {direction:8}: {text}", flush=True)
    if old is not None:
        for direction in ("forward", "backward"):
            ratios = [row["ratio"] for row in rows if row["direction"] == direction]
            of_runs = np.median([row["ratio_of_runs"] for row in rows if row["direction"] == direction], axis=0)
            print(
                f"{direction}: ratio {np.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f} over cases, "
                f"{of_runs.min():.2f} to {of_runs.max():.2f} over runs"
            )
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=old, capture_output=True, text=True)
        rows = [row | {"old_commit": commit.stdout.strip()} for row in rows]
    print(write_rows("host", rows, folder="cpu", children=PACKAGE))


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        serve()
    else:
        import tyro

        tyro.cli(main)
