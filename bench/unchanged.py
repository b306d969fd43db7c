"""Does a change of the code's shape leave what it computes as it was?

    python -m bench.unchanged --record FOLDER     in a checkout of the commit before
    python -m bench.unchanged --against FOLDER    here; names what differs

Recorded: bits of out, lse and every gradient of each implementation, in one call and in a ring, by 1 to 3 threads; the
code that Triton generates for every variant and architecture, without places in the source, and what its inner loops
count; schemas of the operators; losses of fp64 runs under three plans; what ``--help`` says; ``config.json``. The runs
and their store stay in FOLDER, and ``--against`` goes on with copies of them.

Fixed: the problems of ``tests/problems.py`` in the shapes below, seed 0, the flags below.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import tyro
import xxhash

SHAPES = ((17, 17, 4), (63, 129, 8), (144, 144, 16), (300, 257, 24))  # M, N, D of a whole call
RINGS = ((2, 0, 37), (3, 5, 65))  # ranks, super nodes, regular nodes
THREADS = (1, 2, 3)
DTYPES = ("float32", "float64", "bfloat16")
PLANS = {"1,1,1": "", "2,1,1": "--microbatches 2", "1,2,2": ""}
FLAGS = (
    "--layers 2 --dim 16 --ffn-dim 16 --heads 2 --samples 2 --sample-nodes 6 --channels 3 --epochs 2 --batch-size 36 "
    "--checkpoint-every 4 --keep 9 --device cpu --dtype fp64"
)
COMMANDS = ("", "train", "evaluate", "predict", "data", "profile", "fit", "plan", "search", "plot")
Record = dict[str, Any]
_OF_SOURCES = re.compile(r"\s*(//|;|\.loc|\.file|\$L__(tmp|func_\w+)\d*:|\.Ltmp\d+:|\.Lfunc_\w+:)")


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """Set variables of the environment for processes that are started in the block."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def bits(impl: str, threads: int) -> Record:
    """Digests of out, lse and gradients, by problem; an implementation says no where it cannot run one."""
    import megagraph as mg
    from megagraph.attention.context_parallel import loopback_attention
    from tests.problems import FORMS, Shape, make_problem, ring_problem

    torch.set_num_threads(threads)
    found = {}
    few = impl.startswith("triton")  # interpreted, which is slow
    for form, dtype, dropout_p in product(FORMS, DTYPES, (0.0, 0.3)):
        options: Record = {"dtype": getattr(torch, dtype), "dropout_p": dropout_p}
        case = f"{impl}, {threads} threads, {form}, {dtype}, p = {dropout_p}"
        for M, N, D in SHAPES[: 2 if few else None]:
            for planes in ((2, 2), (1, 1)) if form == "dense" else ((2, 2),):
                problem = make_problem(form, Shape(M, N, D), planes=planes, **options)
                whole = partial(mg.biased_attention, return_lse=True, impl=impl)
                found[f"{case}, {M} x {N} x {D}, {planes}"] = digest(problem, whole)
                found[f"{case}, {M} x {N} x {D}, {planes}, unpadded"] = digest(replace(problem, padding=None), whole)
        for (ranks, supers, nodes), comm in product(RINGS[-1 if few else 0 :], ("ring", "allgather")):
            problem = ring_problem(form, ranks, supers, nodes, **options)
            ring = partial(loopback_attention, num_super=supers, world_size=ranks, comm=comm, impl=impl)
            found[f"{case}, {comm} of {ranks}, {nodes} + {supers}"] = digest(problem, ring)
    return found


def digest(problem: Any, attention: Callable[..., Any]) -> str:
    """Digest of the bits of out, lse and gradients."""
    from tests.problems import expected

    def attend(q, k, v, bias, padding, scale, dropout_p, dropout_key):
        return attention(
            q, k, v, bias, key_padding_mask=padding, scale=scale, dropout_p=dropout_p, dropout_key=dropout_key
        )

    try:
        results = expected(problem, attend)
    except NotImplementedError:
        return "refused"
    found = xxhash.xxh3_128()
    for name, x in results.items():
        found.update(f"{name} {x.dtype} {tuple(x.shape)}".encode())
        found.update(x.contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def code(arch: str, variant: Any) -> Record:
    """What one kernel compiles to."""
    from bench import compile_report

    rows: list[Record] = []
    texts = []
    with compile_report.compiled_launches(arch) as launches:
        compile_report.prepare(variant)()
    for launch in launches:
        rows.append(compile_report.kernel_row(launch))
        assembly = launch.binary.asm["ptx" if "ptx" in launch.binary.asm else "amdgcn"]
        text = re.split(r"\n\s*\.section\s+\.debug", assembly)[0]
        texts += [line for line in text.splitlines() if not _OF_SOURCES.match(line)]
    name = f"{arch} {variant.name}"
    return {
        f"{name}: code": xxhash.xxh3_128_hexdigest("\n".join(texts).encode()),
        f"{name}: counts": [{key: row[key] for key in ("registers", "spills", "shared", "tiles")} for row in rows],
    }


def schemas() -> Record:
    import megagraph  # noqa: F401  # which registers them

    names = sorted(
        name for name in torch._C._dispatch_get_all_op_names() if name.startswith("megagraph::") and "test" not in name
    )
    return {f"operator {name}": str(torch._C._get_schema(name, "")) for name in names}


def helps() -> Record:
    found = {}
    for command in COMMANDS:
        done = _megagraph(*command.split(), "--help")
        found[f"megagraph {command} --help"] = (done.stdout + done.stderr) if done.returncode == 0 else done.returncode
    return found


def runs(folder: Path, *, record: bool) -> Record:
    """fp64 losses of runs, and of runs that go on from the fourth step of those in ``folder``."""
    from megagraph.data.datasets import synthetic_graph
    from megagraph.data.store import write_store

    found: Record = {}
    if record:
        write_store(synthetic_graph(num_nodes=400, num_classes=3, in_features=16, seed=0), folder / "store")
    for plan, more in PLANS.items():
        flags = [*FLAGS.split(), *more.split(), "--dataset", folder / "store", "--plan", plan]
        with tempfile.TemporaryDirectory() as place:
            anew = folder / f"run-{plan}" if record else Path(place) / "anew"
            found |= _losses(f"run {plan}", anew, plan, *flags, "--out", anew)
            resumed = Path(place) / "resumed"
            shutil.copytree(folder / f"run-{plan}", resumed)
            found |= _losses(f"run {plan} from step 4", resumed, plan, "--resume", resumed, "--resume-step", 4)
            config = json.loads((resumed / "config.json").read_text())
            found[f"config.json of {plan}"] = {
                k: v for k, v in config.items() if k not in ("out", "dataset", "run_id", "checksum")
            }
    return found


def _losses(name: str, run: Path, plan: str, *flags: object) -> Record:
    ranks = torch.tensor([int(n) for n in plan.split(",")]).prod().item()
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, "-m", "megagraph")
    (run / "summary.json").unlink(missing_ok=True)
    done = _python(*(launcher if ranks > 1 else ("-m", "megagraph")), "train", *flags)
    if done.returncode:
        raise SystemExit(f"{name} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    keys = ("loss", "gradient_norm", "val_accuracy", "test_accuracy")
    return {name: [line[key] for line in lines for key in keys if key in line]}


def _megagraph(*arguments: object) -> subprocess.CompletedProcess[str]:
    return _python("-m", "megagraph", *arguments)


def _python(*arguments: object) -> subprocess.CompletedProcess[str]:
    values = os.environ | {"COLUMNS": "120", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent.parent)}
    return subprocess.run([sys.executable, *map(str, arguments)], env=values, capture_output=True, text=True)


def everything(folder: Path, *, record: bool, archs: tuple[str, ...]) -> Record:
    """All of it, by name; FOLDER has the runs to go on with."""
    found = schemas() | helps() | runs(folder, record=record)
    spawn = get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        for threads in THREADS:
            for impl in ("blocked", "blocked_long"):
                found |= pool.submit(bits, impl, threads).result()
    with environment(TRITON_INTERPRET="1"), ProcessPoolExecutor(1, mp_context=spawn) as pool:
        found |= pool.submit(bits, "triton", 1).result()
    if archs:
        from megagraph.kernels.variants import cover, defaults

        jobs = list(product(archs, dict.fromkeys(defaults() + cover())))
        with ProcessPoolExecutor(mp_context=spawn) as pool:
            for part in pool.map(code, *zip(*jobs, strict=True)):
                found |= part
    return found


def differences(before: Record, now: Record) -> list[str]:
    """What was recorded and is something else now, or gone; of what is new nothing is known."""
    return [
        f"{name}: {'gone' if name not in now else 'changed'}"
        + (f"\n  - {value}\n  + {now[name]}" if name in now and not name.endswith("--help") else "")
        for name, value in before.items()
        if name not in now or now[name] != value
    ]


def main(
    record: Path | None = None,
    against: Path | None = None,
    archs: tuple[str, ...] = ("sm_80", "sm_90", "sm_100"),
) -> None:
    """Record, or compare; without ``archs`` no kernel is compiled."""
    if (record is None) == (against is None):
        sys.exit("expected --record FOLDER or --against FOLDER")
    folder = (record or against or Path()).absolute()
    folder.mkdir(parents=True, exist_ok=record is None)
    found = json.loads(json.dumps(everything(folder, record=record is not None, archs=archs)))
    if record is not None:
        (folder / "record.json").write_text(json.dumps(found, indent=1))
        print(f"{len(found)} recorded")
        return
    before = json.loads((folder / "record.json").read_text())
    if not archs:
        before = {name: value for name, value in before.items() if not name.startswith(("sm_", "gfx"))}
    changed = differences(before, found)
    print("\n".join(changed) or f"all {len(before)} are as they were")
    sys.exit(bool(changed))


if __name__ == "__main__":
    tyro.cli(main)
