"""What a person types wrong is one message: what was expected, what came, what to do. No traceback, nothing written.

Damaged files of ours are in bench/damage.py, tables in tests/data/test_tables.py, flags in files in test_flags.py.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import sys
from pathlib import Path

import pytest

from bench import judge
from megagraph import epochs
from megagraph.__main__ import main

SMALL = f"train {judge.SIZES} --dataset store"
SEARCH = "search cost.json --world-size 4 --memory-gib 8"
TABLES = "data import --nodes nodes.csv --edges edges.csv --out new"


def write(name: str, text: str):
    return lambda: Path(name).write_text(text)


def rows(change):
    """A profile whose first row is changed."""

    def damage():
        values = json.loads(Path("profile.json").read_text())
        change(values)
        Path("profile.json").write_text(json.dumps(values))

    return damage


# what is done to the files before, the command, the message
CASES = [
    # commands and flags
    (None, "", r"Expected one of \{train, predict, evaluate"),
    (None, "trian", r"expected one of the commands train, .*data, got 'trian'; did you mean train\?"),
    (None, "Train", r"got 'Train'; did you mean train\?"),
    (None, "xyzzy", r"expected one of the commands .*, got 'xyzzy'$"),
    (None, "plot timelin", r"expected one of the commands timeline, .*got 'timelin'; did you mean timeline\?"),
    (None, "plot", r"Expected one of \{timeline, curves, bias"),
    (None, "data imprt", r"got 'imprt'; did you mean import\?"),
    (None, "data", r"Expected one of \{import, export"),
    (None, "train --epoch 3", r"expected flags of megagraph train, got --epoch; did you mean --epochs\?"),
    (None, "train --Batch-Size=3", r"got --Batch-Size=3; did you mean --batch-size\?"),
    (None, "train --lr 0.1", r"got --lr; did you mean --learning-rate\?"),
    (None, "train --xyzzy", r"expected flags of megagraph train, got --xyzzy; --help lists them"),
    (None, "profile --layer 3", r"expected flags of megagraph profile, got --layer; did you mean --layers\?"),
    (None, "profile --epoch 3", r"expected flags of megagraph profile, got --epoch; --help lists them"),
    (None, "profile --epochs 3", r"megagraph profile, got --epochs; it is of megagraph train, and changes nothing"),
    (None, "profile --plan 2,1,1", r"megagraph profile, got --plan; it is of megagraph train, and changes nothing"),
    (None, "profile --out x", r"megagraph profile, got --out; it is of megagraph train, .* named by --rows"),
    (None, "profile --resume stopped", r"megagraph profile, got --resume; it is of megagraph train"),
    (None, "profile --weights=x", r"megagraph profile, got --weights=x; it is of megagraph train"),
    (None, "predict finished --Out p.npy", r"flags of megagraph predict, got --Out; did you mean --out\?"),
    (None, "fit profile.json --output x", r"flags of megagraph fit, got --output"),
    (None, "train cora", r"Unrecognized options: cora"),
    (None, "train --epochs", r"Missing value for argument '--epochs'"),
    (None, "train --out", r"Missing value for argument '--out'"),
    (None, "train --epochs three", r"Error parsing --epochs: .*'three'"),
    (None, "train --epochs 0", r"epochs must be at least 1, got 0"),
    (None, "train --model gcn", r"invalid choice 'gcn' .*'hierarchical'"),
    (None, "train --model Graphormer", r"invalid choice 'Graphormer'"),
    (None, "train --learning-rate -1", r"learning_rate must be at least 0.*got -1"),
    (None, "train --time-limit soon", r"time_limit must be as 3h, 90m, .*got 'soon'"),
    (None, "train --device tpu", r"device must be auto, cpu or a CUDA device that is here, got 'tpu'"),
    (None, "train --device cuda:7", r"device must be auto, cpu or a CUDA device that is here, got 'cuda:7'"),
    (None, f"{SMALL} --heads 3", r"heads"),
    (None, "predict", r"Missing from megagraph predict:"),
    (
        None,
        "evaluate finished --config nope.toml",
        r"megagraph evaluate, got --config; other commands have it$",
    ),
    (None, "evaluate finished --ablate everything", r"invalid choice 'everything' .*'bias'"),
    (None, "data generate --nodes 10 --out new", r"Missing from megagraph data generate:"),
    (None, "data generate --nodes 0 --edges 0 --features 0 --classes 0 --out new", r"expected classes >= 2, nodes"),
    # graphs
    (None, "train --dataset Coraa --root .", r"expected one of synthetic, .*got 'Coraa'; did you mean 'cora'\?"),
    (lambda: Path("store").rename("synthetic"), "train --dataset synthetic", r"is both: ./synthetic is the folder"),
    (None, "train --dataset Store", r"or a store folder, got 'Store' \(did you mean store\?\)"),
    (None, "train --dataset graf.npz", r"expected an .npz file, got graf.npz, .*\(did you mean graph.npz\?\)"),
    (None, "train --dataset cora", r"expected a folder for cora, got none; name it with --root"),
    (
        None,
        "train --dataset finished",
        r"expected a graph store, got .*finished without header.json; megagraph data import makes",
    ),
    (None, "train --dataset profile.json", r"or a store folder, got 'profile.json'"),
    (write("a.npz", "x"), "train --dataset a.npz", r"a\.npz"),
    (None, "data info stor", r"got stor without header.json \(did you mean store\?\)"),
    (None, "data export synthetic --out plan.json", r"expected a folder, or nothing, at plan.json to write tables"),
    (None, "data import synthetic --out finished", r"expected .*finished to be free, empty or a graph store"),
    (None, "data import synthetic --out new --features fp8", r"invalid choice 'fp8'"),
    # tables
    (None, "data import --nodes Nodes.csv --edges edges.csv --out new", r"got Nodes.csv, .*did you mean nodes.csv\?"),
    (None, "data import --nodes nodes.csv --out new", r"or a file of edges \(--edges\) beside --nodes, got neither"),
    (None, f"{TABLES} --seed 7", r"root and seed are of a data set, got them beside tables"),
    (None, f"{TABLES} --root nodir", r"root and seed are of a data set, got them beside tables"),
    (write("nodes.csv", ",".join(map(str, range(25)))), f"{TABLES} --drop x", r"got 0, .*, 19 and 5 more"),
    (None, f"{TABLES} --label clas", r"clas"),
    (None, f"{TABLES} --id name", r"name"),
    (None, f"{TABLES} --label class --label kind", r"expected --label once, with all of its values after it"),
    (None, "evaluate finished --ablate bias --ablate=features", r"expected --ablate once"),
    (None, "plot scaling c.json --world-sizes 2 --world_sizes 4", r"expected --world-sizes once"),
    (None, "plot costmodel cost.json --rows profile.json --rows rows.json", r"expected --rows once"),
    (write("edges.csv", "a,b\nx,q\n"), TABLES, r"q"),
    (write("edges.csv", "a\nx\n"), TABLES, r"edges.csv"),
    (write("nodes.csv", ""), TABLES, r"nodes.csv"),
    (write("nodes.csv", "id,class\nx,a\nx,b\n"), f"{TABLES} --label class", r"x"),
    # runs
    (
        None,
        "predict finishd",
        r"finishd must be the folder of a run, but it holds no config.json \(did you mean finished",
    ),
    (None, "predict store", r"store must be the folder of a run, but it holds no config.json$"),
    (
        None,
        "predict finished --out nodir/p.npy",
        r"expected a folder to write nodir/p.npy in, got nodir, .*make it before",
    ),
    (None, "predict finished --out p.txt", r"out must end in .npy, .csv or .parquet, got p.txt"),
    (
        None,
        "predict finished --out finished/model.json",
        r"finished/model.json is a file of the run; pass another --out",
    ),
    (None, "predict finished --dataset stor", r"got 'stor' \(did you mean store\?\)"),
    (None, "evaluate Finished", r"did you mean finished\?"),
    (None, "plot timeline finishd", r"holds no run.json \(did you mean finished\?\)"),
    (None, "plot timeline finished", r"must hold the traces of a run, .*train with --trace"),
    (None, "plot timeline finished --out finished/curves.png", r"curves.png is a file of the run; pass another --out"),
    (None, "plot bias nodir/run", r"holds no config.json \(there is no folder nodir\)"),
    (None, "plot bias finished --out nodir/x.png", r"expected a folder to write nodir/x.png in"),
    (None, "report finished --out rep.pdf", r"out must end in .html, which is what is written, got rep.pdf"),
    (None, "plot curves finished --out finished/curves", r"out must end in .png, .svg, .pdf or .*finished/curves"),
    (None, "plot bias finished --out finished/curves", r"out must end in"),
    (None, "plot attention finished --out a.x", r"out must end in"),
    (lambda: Path("a.png").mkdir(), "plot bias finished --out a.png", r"a.png to write it, got a folder"),
    (None, "train --resume stoped", r"of a run, but it holds no config.json \(did you mean stopped\?\)"),
    (None, "train --resume auto", r"--resume auto needs --out"),
    (None, "train --resume stopped --seed 3", r"seed of a resumed run must stay .*; only root, device, workers"),
    (None, "train --resume stopped --out other", r"out must be the folder that --resume names, stopped, got other"),
    (None, "train --resume stopped --resume-step 99", r"step-000099 cannot be used: there is none"),
    (None, f"{SMALL} --out finished", r"finished holds a run already; pass another --out"),
    (None, f"{SMALL} --out store", r"store holds files that are none of ours"),
    (None, f"{SMALL} --out graph.npz", r"graph.npz must be a folder to write a run to"),
    (None, f"{SMALL} --out graph.npz/run", r"the run folder graph.npz/run cannot be written.*pass another --out"),
    (None, f"{SMALL} --out new --weights weights", r"expected weights, a safetensors file, at weights"),
    (write("finished/config.json", "{"), "predict finished", r"config.json, which is not a whole JSON file"),
    # plans, profiles and cost models
    (None, "train --plan 1,1", r"plan must be pp,cp,dp, three numbers such as 1,2,3, got '1,1'"),
    (None, "train --plan 0,1,1", r"pp"),
    (
        None,
        f"{SMALL} --out new --plan 2,1,1",
        r"must equal the number of processes: 2 \* 1 \* 1 = 2, got 1; start them with torchrun",
    ),
    (
        None,
        "train --plan Plan.json",
        r"expected a plan, got Plan.json, which does not exist \(did you mean plan.json\?\)",
    ),
    (None, "train --plan cost.json", r"must hold a plan with the fields .*got "),
    (None, "train --plan 2,1,1 --stage-layers 1,1,1", r"stage_layers must be 2 numbers such as 1,2, got '1,1,1'"),
    (None, "fit nothing.json", r"expected rows, got nothing.json, which does not exist; run megagraph profile"),
    (None, "fit .", r"expected rows, got \., which is no file; run megagraph profile"),
    (None, "fit plan.json", r"rows|row 0"),
    (None, "fit profile.json --out nodir/cost.json", r"expected a folder to write nodir/cost.json in"),
    (None, "fit profile.json --out store", r"expected a file, or nothing, at store"),
    (None, "fit profile.json --out ./profile.json", r"out must be another file than those that are read, got profile"),
    (None, f"{SEARCH} --out cost.json", r"out must be another file than those that are read, got cost.json"),
    (rows(lambda values: values.clear()), "fit profile.json", r"row"),
    (
        rows(lambda values: values[0].update(kind="x")),
        "fit profile.json",
        r"expected row 0 of profile.json as it was written, which has changed",
    ),
    (None, "search cots.json --world-size 4 --memory-gib 8", r"which does not exist \(did you mean cost.json\?\)"),
    (None, "search cost.json", r"world_size and memory_gib must be given with a cost model"),
    (None, "search plan.json --world-size 4 --memory-gib 8", r"plan.json must hold a cost model"),
    (None, "search profile.json --world-size 4 --memory-gib 8", r"must hold a cost model, got a list, as .* profile"),
    (None, f"{SEARCH} --explain 3,1,1", r"explain must name pp,cp,dp whose product is 4, the processes, got 3,1,1"),
    (None, f"{SEARCH} --explain 2,2", r"explain must be pp,cp,dp, three numbers such as 1,2,3, got '2,2'"),
    (None, f"{SEARCH} --explain 2,2,1 --pp 1", r"explain must have pp = 1, as --pp says, got 2,2,1"),
    (None, f"{SEARCH} --pp 3", r"no plan of 4 processes has pp = 3; change"),
    (None, "search cost.json --world-size 4 --memory-gib -2", r"memory_gib must be above 0, got -2.0"),
    (None, "search cost.json --world-size 4 --memory-gib 0.001", r"no plan of 4 processes fits"),
    (None, f"{SEARCH} --out nodir/plan.json", r"expected a folder to write nodir/plan.json in"),
    (None, "plot pareto cost.json", r"world_size and memory_gib must be given"),
    (None, "plot stages cost.json profile.json", r"plan"),
    (None, "plot stages cost.json plan.json --out a", r"out must end in"),
    (None, "plot costmodel cost.json --rows profile.json --out a", r"out must end in"),
    (None, "plot pareto cost.json --world-size 4 --memory-gib 8 --out a", r"out must end in"),
    (None, "plot costmodel cost.json --rows nothing.json", r"expected rows, got nothing.json, which does not exist"),
    (None, "plot scaling cost.json", r"cluster"),
]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    judge.make_files(folder, 0, whole=False)
    (folder / "nodes.csv").write_text("id,class,kind\nx,a,0\ny,b,1\nz,a,0\n")
    (folder / "edges.csv").write_text("a,b\nx,y\ny,z\n")
    return folder


@pytest.fixture
def call(world, tmp_path, monkeypatch, capsys):
    """A command in a copy of the files: exit status and what was said on stderr."""
    monkeypatch.chdir(shutil.copytree(world, tmp_path / "world"))
    monkeypatch.setenv("COLUMNS", "120")

    def run(words: str) -> tuple[object, str]:
        monkeypatch.setattr(sys, "argv", ["megagraph", *words.split()])
        with pytest.raises(SystemExit) as stopped:
            main()
        return stopped.value.code, capsys.readouterr().err

    return run


def files_here() -> set[str]:
    """But for what a store keeps of what was computed from it."""
    return {path for path in map(str, Path().rglob("*")) if "store/cache" not in path}


@pytest.mark.parametrize(
    ("damage", "words", "message"), CASES, ids=[f"{i} {words}" for i, (_, words, _) in enumerate(CASES)]
)
def test_wrong_input_is_one_message(call, damage, words, message):
    if damage is not None:
        damage()
    before = files_here()
    code, said = call(words)
    assert code == 1, said
    assert re.search(message, said, re.MULTILINE), said
    last = said[said.rindex("megagraph: error: ") :]
    assert len(last.splitlines()) <= 16 and len(last) < 1500 and "Traceback" not in said and "[Errno" not in said, said
    assert files_here() == before


@pytest.mark.parametrize(
    "words",
    [
        "data import synthetic --out new",
        "data export synthetic --out new",
        "predict finished --out p.npy",
        f"{SMALL} --out new",
        "fit profile.json --out new.json",
        f"{SEARCH} --out new.json",
    ],
)
def test_a_full_disk_is_one_message(call, words):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        code, said = call(words)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 1 and "File too large" in said and "Traceback" not in said, said
    assert "make room, or " in said


def test_ctrl_c_before_the_first_step_is_in_nobody_s_way(call, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(epochs, "train_step", interrupted)
    code, said = call(f"{SMALL} --out new")
    assert code == 130 and said.splitlines()[-1].startswith("megagraph: interrupted"), said
    assert "Traceback" not in said
    assert not os.path.exists("new") or "--resume new" in said
