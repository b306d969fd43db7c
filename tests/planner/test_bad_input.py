"""What the planner refuses, and what it says then: rows, files, searches, splits."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

import megagraph as mg
from megagraph.cli.planner import Wanted, read_rows, run_search
from megagraph.planner import CostModel, Workload, fit, search, split_layers
from tests.planner import synthetic

CONFIG = mg.ModelConfig(
    in_features=32, num_classes=5, layers=6, dim=64, ffn_dim=64, heads=8, bias="bucket", bias_size=8
)


def rows(**changes):
    """Fit rows of which the first is changed."""
    changed = synthetic.rows()
    changed[0] = {name: value for name, value in (changed[0] | changes).items() if value != "gone"}
    return lambda cost, folder: fit(changed)


def cost_file(edit):
    """Load a cost model whose text is edited."""

    def load(cost: CostModel, folder: Path):
        cost.save(folder / "cost.json")
        (folder / "cost.json").write_text(edit((folder / "cost.json").read_text()))
        CostModel.load(folder / "cost.json")

    return load


def fields(**changes):
    def edit(text):
        values = json.loads(text) | changes
        return json.dumps({name: value for name, value in values.items() if value != "gone"})

    return cost_file(edit)


def rows_file(text):
    def read(cost: CostModel, folder: Path):
        (folder / "rows.json").write_text(text)
        read_rows((folder / "rows.json",))

    return read


def plan_file(text):
    def load(cost: CostModel, folder: Path):
        (folder / "plan.json").write_text(text)
        mg.Plan.load(folder / "plan.json")

    return load


def searched(**changes):
    good = dict(world_size=4, memory_limit_bytes=1e15)
    return lambda cost, folder: search(cost, CONFIG, **(good | changes))


def split(**changes):
    good = dict(num_layers=4, num_stages=2, seconds=lambda *stage: 1, memory_bytes=lambda *stage: 1, limit_bytes=2)
    return lambda cost, folder: split_layers(**(good | changes))


def workload(**changes):
    return lambda cost, folder: Workload(**(dict(batch_sequences=1, num_nodes=1) | changes))


def batch_of_whole_graphs(cost, folder):
    whole = Workload(batch_sequences=1, num_nodes=1000, pairs=3000)
    replace(cost, model=CONFIG, workload=whole).save(folder / "cost.json")
    run_search(folder / "cost.json", Wanted(world_size=4, memory_gib=1.0, batch_sequences=4))


BAD = {
    "no rows": (lambda cost, folder: fit([]), "expected rows to fit, got none, or .*; run megagraph profile"),
    "row kind": (rows(kind="magic"), r"row 0 must have a kind of \['all_reduce', .*got 'magic'"),
    "row kind unhashable": (rows(kind=[]), r"row 0 must have a kind of .*got \[\]"),
    "row origin": (rows(device={"x": 1}), r"row 0 \(layers\): device must be text, got {'x': 1}"),
    "row bias": (rows(bias=3), r"row 0 \(layers\): bias must be text, got 3"),
    "row huge": (rows(seconds=10**400), "seconds must be a number of at least 0, got 1000"),
    "row workload": (rows(workload=3), r"row 0 \(layers\): workload must be a JSON object, got 3"),
    "row workload unknown": (rows(workload={"a": 1}), "must hold a workload with the fields"),
    "row model": (rows(model={"dim": "8"}), "the sizes of a model"),
    "row optional": (rows(in_features="x"), "in_features must be a number of at least 0, got 'x'"),
    "row size missing": (rows(dim="gone"), r"row 0 \(layers\) must have the fields .*lacks 'dim'"),
    "row NaN": (rows(seconds=math.nan), r"row 0 \(layers\): seconds must be a number of at least 0, got nan"),
    "row negative": (rows(seconds=-1.0), r"seconds must be a number of at least 0, got -1.0"),
    "row of no time": (rows(seconds=0.0), r"row 0 \(layers\): seconds must be above 0, got 0; leave the row out"),
    "row of no layers": (rows(layers=0), r"row 0 \(layers\): layers must be above 0, got 0; leave"),
    "row of no ranks": (
        rows(kind="all_reduce", bytes=8, link="node", ranks=0),
        r"row 0 \(all_reduce\): ranks must be above 0, got 0; leave",
    ),
    "row text": (rows(heads="8"), r"heads must be a number of at least 0, got '8'"),
    "row direction": (rows(direction="up"), "direction must be forward, backward or forward_backward, got 'up'"),
    "row devices": (
        rows(device="other"),
        r"one device, one implementation .*got \['other None fp32', 'paper None fp32'\]",
    ),
    "row impls": (rows(impl="reference"), r"got \['paper None fp32', 'paper reference fp32'\]; fit a model for each"),
    "row of a bench, no sizes": (
        rows_file('[{"contender": "megagraph_short", "median": 1, "form": "bucket", "dtype": "float32"}]'),
        "expected a row of a bench of attention, got .*KeyError",
    ),
    "benchmarks": (rows_file('{"benchmarks": [1]}'), "must hold benchmarks of pytest-benchmark with an extra_info"),
    "rows file truncated": (rows_file('[{"kind": "la'), "is not a whole JSON file .* run megagraph profile again"),
    "rows file": (rows_file("{}"), "must hold a list of rows, or the benchmarks of pytest-benchmark, got dict"),
    "cost file truncated": (cost_file(lambda text: text[:200]), "not a whole JSON file .* run megagraph fit again"),
    "cost file": (cost_file(lambda text: "3"), "must hold a cost model of schema 1, got None"),
    "cost list": (cost_file(lambda text: "[1]"), "must hold a cost model, got a list, as megagraph profile leaves"),
    "cost version": (fields(schema=7), "must hold a cost model of schema 1, got 7; run megagraph fit again"),
    "cost missing": (fields(memory="gone"), r"lacks \['memory'\]"),
    "cost unknown": (fields(tp=1), r"has unknown \['tp'\]"),
    "cost NaN": (fields(stall_seconds=math.nan), "stall.seconds must be a number of at least 0, got nan"),
    "cost negative": (fields(memory={"kept.key": -1}), "memory.kept.key must be a number of at least 0, got -1"),
    "cost range": (fields(ranges={"dim": [1, 10**400]}), "does not hold what a cost model holds: .*too large"),
    "cost workload": (fields(workload={"num_nodes": []}), "expected a cost model whose workload is right"),
    "cost origin": (fields(origin=[], checksum="gone"), "expected a cost model in .* whose origin is right, got "),
    "cost ranks of a node": (
        fields(origin={"ranks_per_node": "0"}, checksum="gone"),
        "origin.ranks_per_node must be an integer of at least 1, got '0'",
    ),
    "cost workers": (fields(origin={"workers": "x"}, checksum="gone"), "origin.workers must be an integer of .*'x'"),
    "cost not a table": (fields(links=3), "does not hold what a cost model holds"),
    "plan file": (plan_file('{"pp": 2, "tp": 8}'), r"must hold a plan with the fields .*got {'pp': 2, 'tp': 8}"),
    "plan file empty": (plan_file("{}"), "expected a plan with pp, cp, dp or more, got {} in"),
    "plan file truncated": (plan_file('{"pp": 2,'), r"is not a whole JSON file"),
    "plan file bool": (plan_file('{"pp": true}'), "expected a plan whose pp is right, got True: it is no "),
    "plan file huge": (plan_file('{"pp": 2, "num_microbatches": 16000000}'), "num_microbatches must be at most 16384"),
    "plan file text": (plan_file('{"pp": "2"}'), "pp must be an integer of at least 1, got '2'"),
    "no processes": (searched(world_size=0), "world_size must be an integer of at least 1, got 0"),
    "too many processes": (searched(world_size=10**30), "world_size must be at most 1048576, got 10000"),
    "half a process": (searched(world_size=1.5), "world_size must be an integer of at least 1, got 1.5"),
    "prime": (
        searched(world_size=67),
        r"no plan of 67 processes is possible: dp \* num_microbatches must be at most the batch of 64 sequences "
        r"\(\d+ plans\); pp must be at most the model's 6 layers",
    ),
    "no memory": (searched(memory_limit_bytes=0), "memory_limit_bytes must be above 0, got 0"),
    "NaN memory": (searched(memory_limit_bytes=math.nan), "memory_limit_bytes must be above 0, got nan"),
    "too little memory": (
        searched(memory_limit_bytes=1e6),
        r"no plan of 4 processes fits 0.95 MiB with 8% headroom: the lightest, pp .*, needs .* [GM]iB on its heaviest "
        r"rank, and has no room on rank \d of a pipeline; start more processes, lower the batch size",
    ),
    "fixed": (searched(fixed={"tp": 2}), r"fixed must name fields of .*, got \['tp'\]"),
    "heads": (
        searched(world_size=3, fixed={"cp": 3, "comm": "ulysses"}),
        "no plan of 3 processes has comm = ulysses; change the number of processes, or what is fixed",
    ),
    "one of several": (searched(fixed={"cp": 2, "pp": 3}), "no plan of 4 processes has pp = 3; change"),
    "several together": (searched(fixed={"cp": 4, "pp": 2}), "no plan of 4 processes has cp = 4, pp = 2; change"),
    "heads of a plan": (
        lambda cost, folder: cost.step_seconds(CONFIG, mg.Plan(cp=3, comm="ulysses")),
        "heads must be a multiple of the 3 ranks that comm 'ulysses' deals them out to, got 8; take 'ring'",
    ),
    "strict": (
        searched(strict=True, workload=Workload(batch_sequences=64, num_nodes=9999)),
        r"every size must have been measured \(strict\)",
    ),
    "huge workload": (workload(num_nodes=10**30), r"num_nodes must be below 2\^31, got 100000"),
    "NaN workload": (workload(feature_rows=math.nan), "feature_rows must be a number of at least 0, got nan"),
    "batch_of_whole_graphs": (batch_of_whole_graphs, "batch_sequences must be 1 for a profile of full batches.* got 4"),
    "workload": (workload(batch_sequences=0), "batch_sequences must be at least 1, got 0"),
    "stages": (split(num_stages=5), r"num_stages must be in 1..num_layers = 4, got 5"),
    "no stage": (split(num_stages=0), r"num_stages must be in 1..num_layers = 4, got 0"),
    "stage limit": (split(limit_bytes=0), r"limit_bytes must be above 0, got 0"),
    "stage NaN limit": (split(limit_bytes=math.nan), r"limit_bytes must be above 0, got nan"),
    "stage NaN": (split(seconds=lambda *stage: math.nan), r"numbers of at least 0, got nan s and 1 bytes"),
    "stage negative": (split(memory_bytes=lambda *stage: -1), r"numbers of at least 0, got 1 s and -1 bytes"),
}


@pytest.fixture(scope="module")
def cost():
    return fit(synthetic.rows())


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case, cost, tmp_path):
    call, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        call(cost, tmp_path)
