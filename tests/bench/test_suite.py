"""The benches run, floors are those that were derived by hand, a wrong result is a row and not a speed."""

from __future__ import annotations

import ast
import json
import math
import os
import subprocess
import sys
import tarfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench import compile_report, conftest, host, measure, processes, tables, tune
from bench import test_ring as ring
from bench.floors import RATES, floor
from bench.mutant_list import MUTANTS
from bench.mutant_plans import PLANS_AND_SHARES
from bench.peers import CONTENDERS, Contender, _torch, eager
from bench.shapes import Case, square

ROOT = Path(__file__).parents[2]
H200 = RATES["NVIDIA H200"]


def smoke(folder: Path, *files: str) -> list[dict]:
    """Rows of a run in a process without the interpreter, tiny cases, every contender."""
    # the benches are not interpreted, and pytest-benchmark measures nothing in a worker of xdist
    environment = {
        name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET" and "XDIST" not in name
    }
    command = [sys.executable, "-m", "pytest", "-q", "--smoke", "--rows", folder, *files]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return [row for path in folder.glob("*.json") for row in json.loads(path.read_text())]


@pytest.mark.slow
def test_benches_run_and_tables_come_from_their_rows(tmp_path, capsys):
    rows = smoke(tmp_path, "bench")
    told = {"unit", "device", "torch", "triton", "commit", "B", "H", "M", "N", "D", "form", "dtype", "direction"}
    for row in rows:
        assert row.keys() >= told | {"contender", "series"} and row["quick"], row
        assert row.get("refusal") or 0 < row["min"] <= row["median"] <= row["max"], row
    assert {row["contender"] for row in rows} == {
        *CONTENDERS,
        "ring_steps",
        "one_call",
        "listed_pairs",
        "message_passing",
    }
    for row in rows:
        if row["contender"].startswith("megagraph") or row["contender"] == "eager":
            assert row["refusal"] is None, row
    by_name = {row["contender"]: row for row in rows if row["form"] == "bucket" and row["series"] == "shapes"}
    ours = next(row for name, row in by_name.items() if name.startswith("megagraph"))
    B, H, N, D = (ours[name] for name in "BHND")
    assert ours["saved_bytes"] == B * H * N * (D * getattr(torch, ours["dtype"]).itemsize + 4)  # out and lse
    assert by_name["eager"]["saved_bytes"] > ours["saved_bytes"]

    tables.main(tmp_path)
    printed = capsys.readouterr().out
    for title in (
        "Five shapes",
        "A rank's ring steps",
        "Listed pairs, forward + backward, ms",
        "Forward + backward over N, ms",
        "Refused",
    ):
        assert f"## {title}\n\n|" in printed
    assert rows[0]["device"] in printed and rows[0]["commit"] in (tmp_path / "time_against_n.svg").read_text()


def test_tables_of_no_rows_are_refused(tmp_path):
    with pytest.raises(SystemExit, match=r"expected a folder with lists of rows in files .*none"):
        tables.main(tmp_path / "none")


def test_every_command_answers_help_and_runs_nothing():
    """All but the one that a bench starts with the words of another command."""
    for path in sorted((ROOT / "bench").rglob("*.py")):
        started = path.read_text().partition('__name__ == "__main__":')[2]
        assert not started or "tyro." in started or path.name == "killer.py", path


@pytest.mark.timeout(20)
def test_a_command_may_say_more_than_a_pipe_holds():
    said, used = processes.run("-c", "print('a line' * 100_000)")
    assert said == "a line" * 100_000 and used["seconds"] > 0


# limits.md: milliseconds and the unit that binds
@pytest.mark.parametrize(
    ("shape", "form", "direction", "milliseconds", "unit"),
    [
        ((8192, 8, 32, 8), "bucket", "forward", 0.0351, "hbm"),
        ((8192, 8, 32, 8), "projected", "backward", 0.0802, "hbm"),
        ((256, 32, 144, 4), "bucket", "forward", 0.0406, "exp"),
        ((256, 32, 144, 4), "bucket", "backward", 0.0698, "shared"),
        ((256, 32, 144, 4), "projected", "backward", 0.0565, "issue"),
        ((1, 8, 8192, 8), "dense", "forward", 0.2507, "hbm"),
        ((1, 8, 8192, 64), "none", "backward", 0.4349, "tensor"),
        ((1, 8, 8192, 64), "dense", "forward_backward", 0.2576 + 0.5151, "hbm"),
    ],
)
def test_floors(shape, form, direction, milliseconds, unit):
    B, H, N, D = shape
    found = floor(Case(B, H, N, N, D, form, torch.bfloat16), direction, H200)
    assert found.seconds == pytest.approx(milliseconds / 1e3, rel=2e-3)
    assert found.unit == unit


def test_no_floor_without_rates_or_for_single_precision():
    assert floor(square(1, 1, 16, 8, "none"), "forward", None) is None
    assert floor(Case(1, 1, 16, 16, 8, "none", torch.float32), "forward", H200) is None


def compiled(variant: str, total: float, spills: int = 0, programs: int = 2) -> dict:
    """A row of the compile report; a masked tile is there to be left out, or its spills to be found."""
    kernel, form, dtype, head_dim, _, *flags = variant.split("-")
    loops = [
        {"pass": "tile", "masked": False, "instructions": total, "spills": 0},
        {"pass": "tile", "masked": True, "instructions": 99.0, "spills": spills},
    ]
    row = {"arch": "sm_90", "variant": variant, "kernel": kernel, "form": form, "head_dim": int(head_dim[1:])}
    row |= {"path": "short" if "short" in flags else "long", "learned_grad": "frozen" not in flags, "shared": 0}
    row |= {"dropout": "dropout" in flags, "dtype": dtype}
    kernels = [{"kernel": "step", "programs_per_sm": programs, "warps_per_sm": 4 * programs}]
    return row | {"kernels": kernels, "loops": loops, "total": compile_report.total(loops)}


def test_budget_of_instructions(tmp_path, monkeypatch):
    entry = {"kernel": "bwd", "form": "bucket", "path": "long"}
    entries = [entry | {"head_dims": [8], "most": 19, "pending": 50}, entry | {"most": 40}]
    budget = tmp_path / "budget.json"
    budget.write_text(json.dumps({"max_head_dim": 64, "totals": entries}))
    monkeypatch.setattr(compile_report, "BUDGET", budget)

    def faults(variant: str, *args: float, **kwargs: int) -> list[str]:
        return compile_report.over_budget([compiled(variant, *args, **kwargs)])

    for variant, count in (("D8-only", 50), ("D64-only", 40), ("D128-only", 99), ("D64-only-short", 99)):
        assert faults(f"bwd-bucket-bfloat16-{variant}", count) == []
    assert faults("bwd-bucket-bfloat16-D64-only-frozen", 99) == faults("fwd-bucket-bfloat16-D64-only", 99) == []
    (above,), (met,) = (faults("bwd-bucket-bfloat16-D8-only", count) for count in (51, 19))
    assert above.endswith("51 instructions per score, at most 50") and met.endswith("so 19 is no longer pending")
    (above,) = faults("bwd-bucket-bfloat16-D64-only", 41)
    assert above.endswith("41 instructions per score, at most 40")
    assert faults("bwd-bucket-float32-D64-only", 99) == []
    (spills,) = faults("fwd-none-bfloat16-D128-only", 9, spills=2)
    (warps,) = faults("fwd-none-bfloat16-D128-only", 9, programs=1)
    assert spills.endswith("tile: 2 spills") and warps.endswith("step: 4 warps a multiprocessor, at least 8")
    wide = compiled("fwd-none-bfloat16-D64-only", 9) | {"shared": 1 << 20}
    (memory,) = compile_report.too_large([wide])
    assert "1048576 bytes of shared memory" in memory


def test_a_total_is_of_the_first_loop_of_each_pass():
    loops = [("fwd", False, 7.0), ("fwd", True, 9.0), ("key", False, 3.0), ("fwd", False, 8.0)]
    assert (
        compile_report.total([dict(zip(("pass", "masked", "instructions"), loop, strict=True)) for loop in loops]) == 10
    )


def test_programs_of_a_multiprocessor():
    """65,536 registers, 228 KiB of shared memory, 64 warps."""
    assert [compile_report.programs_per_sm(90, *sizes) for sizes in ((255, 0, 4), (128, 0, 8), (32, 0, 4))] == [
        2,
        2,
        16,
    ]
    assert compile_report.programs_per_sm(90, 32, 100_000, 4) == 2


def test_tiles_are_chosen_by_instructions_or_by_time(monkeypatch):
    def candidate(
        edge: int, count: float, registers: int, shared: int = 0, spills: int = 0, head_dim: int = 32
    ) -> dict:
        loops = [{"masked": False, "instructions": count, "count": 100, "spills": spills}] if count else []
        row = {"arch": "sm_86", "variant": "fwd", "loops": loops, "registers": registers, "shared": shared}
        row |= {"spills": spills}
        return tune.rank(row, head_dim) | {"tiles": {"BLOCK_M": edge}}

    results = [
        candidate(16, 9.02, 90),
        candidate(32, 9.01, 99),
        candidate(64, 7, 80, 1 << 20),
        candidate(8, 6, 80, spills=1),
    ]
    tiles, why = tune.lowest(results)
    assert tiles == {"BLOCK_M": 16} and why == "9.0 instructions per score, 90 registers; not timed"
    # wide heads may spill, at eight instructions each
    wide = [candidate(16, 9.0, 90, head_dim=128), candidate(32, 8.0, 255, spills=2, head_dim=128)]
    assert tune.lowest(wide)[0] == {"BLOCK_M": 16}
    # no loops are read for AMD: the first with the fewest spills
    assert tune.lowest([candidate(64, 0, 99, spills=3), candidate(32, 0, 90), candidate(16, 0, 80)]) == (
        {"BLOCK_M": 32},
        "90 registers; not timed",
    )

    times = {16: 7.0, 32: 5.25, 64: math.inf, 8: math.inf}
    monkeypatch.setattr(tune, "microseconds", lambda *job: times[job[-1]["BLOCK_M"]])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    tiles, why = tune.fastest("fwd", "none", 32, results)
    assert tiles == {"BLOCK_M": 32} and why == "5.2 us, next best 7.0 us, on NVIDIA H200"


def test_floor_and_prediction_reach_the_table():
    row = {"series": "shapes", "contender": "megagraph_triton", "device": "NVIDIA H200", "median": 2e-3, "floor": 1e-3}
    row |= {name: 8 for name in "BHMND"} | {"form": "dense", "dtype": "bfloat16", "direction": "forward"}
    peer = row | {"contender": "eager", "median": 6e-3}
    assert "| 2 | megagraph triton | 50% | 2.00 | - | - | - | - | eager | 6 | 3.00 |" in tables.five_shapes([row, peer])
    predicted = {name: 8 for name in "BHND"} | {"form": "dense", "direction": "forward"}
    predicted |= {"full": 1.2e-3, "likely": 1.6e-3, "binds": "fwd: l1"}
    rows = [row, row | {"direction": "forward_backward", "median": 7e-3, "floor": 3e-3}]
    backward = predicted | {"direction": "backward", "full": 2.1e-3, "likely": 2.5e-3, "binds": "bwd: hbm"}
    table = tables.five_shapes(rows + tables._backward(rows), [predicted, backward])
    assert "| 2 | megagraph triton | 50% | 2.00 | 1.2 | 1.6 | fwd: l1 | 1.25 |" in table
    assert "| backward | 5 | megagraph triton | 40% | 2.50 | 2.1 | 2.5 | bwd: hbm | 2.00 |" in table


def test_a_shape_that_is_in_two_series_has_its_backward_in_both():
    row = {name: 8 for name in "BHMND"} | {"form": "bucket", "dtype": "bfloat16", "contender": "megagraph_triton"}
    times = {"forward": {"median": 1.0, "floor": 0.5}, "forward_backward": {"median": 3.0, "floor": 2.0}}
    rows = [
        row | {"series": series, "direction": direction, **of}
        for series in ("shapes", "N")
        for direction, of in times.items()
    ]
    assert [(row["series"], row["median"]) for row in tables._backward(rows)] == [("shapes", 2.0), ("N", 2.0)]


def test_rows_of_workers_are_refused():
    options = {"--rows": Path("rows"), "numprocesses": 2}
    config = SimpleNamespace(getoption=lambda name, default=None: options.get(name, default))
    with pytest.raises(pytest.UsageError, match="expected --rows without -n"):
        conftest.pytest_configure(config)
    options["numprocesses"] = None
    conftest.pytest_configure(config)


def test_a_folder_without_the_package_is_not_measured_as_another_checkout(tmp_path, monkeypatch):
    monkeypatch.delattr(host, "start")
    with pytest.raises(SystemExit, match=r"expected a checkout of the package, got .* without megagraph/"):
        host.main(old=tmp_path)


def wrong(form, q, k, v, data, *learned):
    return 1.01 * eager(form, q, k, v, data, *learned)


def refuses(form, q, k, v, data, *learned):
    raise RuntimeError("head dim 8\nand more")


@pytest.mark.parametrize(
    ("attend", "reason"), [(wrong, "wrong values: out is"), (refuses, "head dim 8")], ids=["wrong", "refuses"]
)
def test_no_time_without_right_values(attend, reason, monkeypatch):
    def never(launch):
        raise AssertionError("timed")

    monkeypatch.setitem(CONTENDERS, "other", _torch(attend))
    row = measure.measure("other", square(2, 2, 17, 8, "bucket"), "forward", never)
    assert row["refusal"].startswith(reason) and "more" not in row["refusal"]
    assert "median" not in row


@pytest.mark.parametrize("direction", ["forward", "forward_backward"])
@pytest.mark.parametrize(
    ("contender", "module", "name"),
    [("ring_steps", ring, "attend"), ("one_call", ring.mg, "biased_attention")],
    ids=["ring", "one call"],
)
def test_no_time_of_ring_steps_without_right_values(direction, contender, module, name, monkeypatch):
    case, num_super = ring.ring_cases(smoke=True)[0]
    assert len(ring.checked(case, num_super, direction, contender)()) == (4 if direction == "forward" else 20)
    right = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *given, **more: [1.01 * x for x in right(*given, **more)])
    with pytest.raises(measure.WrongValues, match="wrong values: out is"):
        ring.checked(case, num_super, direction, contender)


def test_our_own_errors_are_not_rows(monkeypatch):
    ours = Contender(_torch(refuses).prepare, ours=True)
    monkeypatch.setitem(CONTENDERS, "megagraph_other", ours)
    with pytest.raises(RuntimeError, match="head dim 8"):
        measure.measure("megagraph_other", square(2, 2, 17, 8, "bucket"), "forward", list)


def test_mutants_change_one_place_and_are_programs(tmp_path):
    every = (*MUTANTS, *PLANS_AND_SHARES)
    assert len({(mutant.name, mutant.file) for mutant in every}) == len(every) == 75
    for mutant in every:
        copy = tmp_path / mutant.file
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text((ROOT / mutant.file).read_text())
        before = mutant.apply(tmp_path)
        assert copy.read_text() != before == (ROOT / mutant.file).read_text()
        ast.parse(copy.read_text())
        assert all((ROOT / tests).exists() for tests in mutant.tests)


def test_what_a_loop_moves_and_multiplies():
    """By hand: bytes a lane moves; products of 4 warps, which are one warp group."""
    pytest.importorskip("triton", reason="triton has wheels for Linux only")
    from bench import sass

    moves = {"LDG.E.128": 2, "LDG.E.U8": 3, "LDS": 1, "STSM.16.M88.4": 1, "LDGSTS.E.BYPASS.128": 1, "LDGDEPBAR": 9}
    products = {"HMMA.16816.F32.BF16": 3, "HMMA.1688.F32.BF16": 1, "HGMMA.64x32x16.F32.BF16": 2, "FFMA": 7}
    loop = sass.Loop(Counter(moves | products))
    assert loop.moved == 2 * 16 + 3 * 1 + 4 + 16 + 16
    assert loop.products(warps=4) == (4 * (3 * 2 * 16 * 8 * 16 + 2 * 16 * 8 * 8), 2 * 2 * 64 * 32 * 16)


COPY = "%c = ttg.local_alloc : () -> !ttg.memdesc<{copies}x16x128xbf16, #shared, #smem, mutable>"
PRODUCT = """
%v = ttg.memdesc_index %c[%i] : !ttg.memdesc<1x16x128xbf16> -> !ttg.memdesc<16x128xbf16>
%t = ttg.memdesc_trans %v {{order = array<i32: 1, 0>}} : !ttg.memdesc<16x128xbf16> -> !ttg.memdesc<128x16xbf16>
%d = ttng.warp_group_dot %a, %t, %acc {{isAsync = true}} : tensor<64x16xbf16> * !ttg.memdesc<128x16xbf16>
%w:2 = ttng.warp_group_dot_wait %d, %t {{pendings = {pendings} : i32}} : tensor<64x128xf32>
"""


@pytest.mark.parametrize(("copies", "pendings", "races"), [(1, 1, 1), (1, 0, 0), (2, 1, 0)])
def test_products_that_read_what_is_loaded_anew_are_found(copies, pendings, races):
    assert compile_report.races(COPY.format(copies=copies) + PRODUCT.format(pendings=pendings)) == races


@pytest.mark.parametrize(("shape", "width", "misfits"), [("32x16", 8, 1), ("32x16", 4, 0), ("4x32x32", 8, 0)])
def test_products_of_too_few_numbers_are_found(shape, width, misfits):
    operand = f"tensor<{shape}xbf16, #ttg.dot_op<{{opIdx = 0, parent = #mma, kWidth = {width}}}>>"
    assert compile_report.misfits(f"%d = tt.dot %p, %a, %acc : {operand} * tensor<16x16xbf16, #b> -> ") == misfits


@pytest.mark.slow
def test_kernels_are_compiled_ahead(tmp_path):
    archive = tmp_path / "wheels" / "kernels.tar.xz"
    test = "bench/test_values.py::test_operator[bfloat16-8-none-triton]"
    done = subprocess.run(
        [sys.executable, "-m", "bench.ahead", archive, test], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    with tarfile.open(archive) as file:
        names = {Path(name).name for name in file.getnames()}
    assert {"step_fwd.cubin", "row_delta.cubin", "key_pass.cubin", "__grp__key_pass.json"} <= names
