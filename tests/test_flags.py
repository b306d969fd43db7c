"""Flags of a run: their groups, the two kinds of --help, and files that give some of them."""

from __future__ import annotations

import re
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import megagraph as mg
from bench.provenance import RESULTS, ROOT, rows_of
from megagraph.__main__ import main
from megagraph.cli.groups import GROUPS, unknown
from megagraph.data.options import BatchOptions
from megagraph.models.config import ModelConfig
from megagraph.planner.plan import Plan
from megagraph.run import Run
from tests.checkpoint_cases import config

NAMES = [own.name for own in fields(mg.TrainConfig)]


def test_every_option_of_batches_and_models_is_a_flag_but_what_the_data_says():
    of_data = {"in_features", "num_classes", "multi_label", "bias_size", "bias_unit", "bias_start", "graph_checksum"}
    assert {own.name for own in fields(ModelConfig)} - {*NAMES} == of_data
    assert {own.name for own in fields(BatchOptions)} - {*NAMES} == {"channel_dtype"}


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """megagraph train WORDS in a folder of its own: its configuration, or exit status and what was said."""
    given = []

    class Trainer:
        def __init__(self, config):
            given.append(config)

        def fit(self):
            return mg.train.Summary(**{own.name: None for own in fields(mg.train.Summary)})

    monkeypatch.setattr("megagraph.train.Trainer", Trainer)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["megagraph", "train", *map(str, words)])
        given.clear()
        try:
            main()
        except SystemExit as stopped:
            said = capsys.readouterr()
            return SimpleNamespace(code=stopped.code, out=said.out, err=said.err)
        return given[0]

    return run


def test_every_field_is_in_one_group():
    grouped = [name for group in GROUPS.values() for name in (*group.usual, *group.rare)]
    assert sorted(grouped) == sorted(NAMES)


def test_help_shows_the_usual_flags_and_help_all_every_one_with_a_word(call):
    usual, everything = call("--help"), call("--help-all")
    assert usual.code == everything.code == 0
    assert len(usual.out.splitlines()) <= 100
    assert "--help-all shows all" in usual.out and "--help-all shows all" not in everything.out
    for text, names in (
        (usual.out, [name for group in GROUPS.values() for name in group.usual]),
        (everything.out, NAMES),
    ):
        assert all(len(line) <= 80 for line in text.splitlines())
        parts = re.split(r"^[│ ]*--(?=[a-z])", text, flags=re.MULTILINE)[1:]
        said = {part.split()[0].rstrip(","): " ".join(part.split("(default:")[0].split()[1:]) for part in parts}
        said = {name: re.sub(r"^--no-[a-z-]+|^\{.*?\}|^[A-Z]+\b|│", "", words) for name, words in said.items()}
        assert set(said) == {name.replace("_", "-") for name in names} | {"config", "dry-run"}
        assert all(len(re.findall(r"\w+", words)) > 1 for words in said.values()), said


FILE = """
dataset = "graph"
out = "runs/mine"
epochs = 7
batch-size = 12  # as the flag is written, or as the field
learning_rate = 1
shard = true
plan = "1,1,2"
time-limit = "3h"
"""
FLAGS = (
    "--dataset graph --out runs/mine --epochs 7 --batch-size 12 --learning-rate 1 --shard --plan 1,1,2 --time-limit 3h"
)


def test_a_file_gives_what_its_flags_give_and_those_of_the_command_line_win(call):
    Path("run.toml").write_text(FILE)
    expected = call(*FLAGS.split(), "--time-limit", "3h")
    assert expected.shard and expected.out == Path("runs/mine")
    assert call("--config", "run.toml") == call("--config=run.toml") == expected
    changed = call("--epochs", 9, "--config", "run.toml", "--no-shard", "--time-limit", "4h")
    assert changed == replace(expected, epochs=9, shard=False, time_limit="4h")
    Path("run.toml").write_text("patience = 3")
    assert call("--config", "run.toml", "--patience", 0) == mg.TrainConfig()
    Path("empty.toml").write_text("")
    assert call("--config", "empty.toml") == mg.TrainConfig()


@pytest.mark.parametrize(
    ("name", "file", "more"),
    [
        ("computers", "full", {}),
        ("pubmed", "full", {"label_input": 0.5}),
        ("wordnet30", "full", {"partitions": 8, "evaluate_every": 4, "label_input": 0.5}),
        ("debian12", "full", {"partitions": 8, "evaluate_every": 4, "label_input": 0.5}),
        ("tolokers", "full", {"propagate": 2}),
        *((name, "full-small", {}) for name in ("cora", "citeseer")),
    ],
)
def test_settings_of_examples_are_those_of_the_reported_trainings(call, name, file, more):
    given = replace(call("--config", ROOT / f"examples/{file}.toml"), **more)
    reported = [row for row in rows_of(RESULTS / f"cpu/accuracy/{name}.jsonl") if row["trial"] is None]
    settings = [row["settings"] for row in reported if row["system"] == "megagraph"][-1]
    assert given == mg.TrainConfig(**settings, epochs=given.epochs)


def test_whether_flags_go_together_is_seen_when_all_are_known(call):
    Path("run.toml").write_text('comm = "halo"')
    said = call("--config", "run.toml")
    assert said.code == 1 and "comm must be ring, allgather or ulysses where all pairs attend, got halo" in said.err
    both = mg.TrainConfig(comm="halo", batching="full", plan="1,2,1")
    assert call("--config", "run.toml", "--batching", "full", "--plan", "1,2,1") == both


def test_a_plan_of_the_command_line_takes_the_place_of_a_file_s(call):
    Plan(pp=2, layers=(1, 3), num_microbatches=4).save("plan.json")
    Path("run.toml").write_text('plan = "plan.json"')
    assert call("--config", "run.toml") == mg.TrainConfig(plan="plan.json")
    assert call("--config", "run.toml", "--plan", "1,2,1") == mg.TrainConfig(plan="1,2,1")


def test_the_configuration_of_a_run_starts_another(call, tmp_path):
    begun = config(tmp_path / "run", plan="2,1,1", stage_layers="1,2", microbatches=2, time_limit="3h")
    run, _ = Run.enter(begun)
    run.write_config(begun)
    run._lock.release()
    path = tmp_path / "run/config.json"
    another = replace(begun, out=None, time_limit=None)
    assert call("--config", path) == another
    new_plan = call("--config", path, "--plan", "1,1,2", "--seed", 3, "--out", "other")
    assert new_plan == replace(another.with_plan(Plan(dp=2)), seed=3, out=Path("other"))
    path.write_text(path.read_text().replace("0.01", "0.02"))  # and so the checksum is no longer right
    said = call("--config", path)
    assert said.code == 1 and "which has changed since or is damaged" in said.err


def test_the_command_with_a_file_and_resume_auto_begins_a_run_and_goes_on_with_it(call, tmp_path):
    Path("run.toml").write_text('epochs = 7\nout = "run"\nplan = "2,1,1"\nmicrobatches = 2')
    words = ("--config", "run.toml", "--resume", "auto")
    begun = call(*words)
    assert begun == mg.TrainConfig(epochs=7, out="run", resume="auto", plan="2,1,1", microbatches=2)
    begun = replace(begun, seed=3, stage_layers="1,3")
    run, _ = Run.enter(begun)
    run.write_config(begun)
    run._lock.release()
    assert call(*words) == replace(begun, stage_layers=None)  # what neither flags nor file say the run does
    assert call(*words, "--out", "other") == mg.TrainConfig(
        epochs=7, out="other", resume="auto", plan="2,1,1", microbatches=2
    )
    Path("run.toml").write_text("seed = 4")  # which training refuses
    assert call(*words, "--out", "run", "--epochs", 8) == replace(begun, seed=4, epochs=8)


BAD = {
    "resume": ('resume = "auto"', "", r"resume is a flag of the command line, got it in run.toml; take it away there"),
    "resume step": ("resume-step = 3", "", r"resume_step is a flag of the command line, got it in run.toml"),
    "beside --resume": ("epochs = 3", "--resume x", r"a resumed run has its own configuration, got --config run.toml"),
    "no value": ("", "--config", r"Missing value for argument '--config'"),
    "missing": (None, "--config x", r"expected flags, got x, which does not exist; name another"),
    "other case": (None, "--config RUN2.toml", r"RUN2.toml, which does not exist \(did you mean run2.toml\?\)"),
    "a folder": (None, "--config .", r"expected flags, got \., which is no file"),
    "no TOML": ("epochs = ", "", r"expected TOML such as epochs = 20 in run.toml: Invalid value"),
    "no text": (b"\xff\xfe", "", r"run.toml, which is no text in UTF-8"),
    "misspelt": ("epoch = 3", "", r"expected names of flags in run.toml, got 'epoch'; did you mean epochs\?"),
    "other case of a name": ("Batch-Size = 3", "", r"got 'Batch_Size'; did you mean batch_size\?"),
    "another's name": ("lr = 0.1", "", r"got 'lr'; did you mean learning_rate\?"),
    "unknown": ("xyzzy = 3", "", r"got 'xyzzy'; megagraph train --help-all lists them"),
    "a table": ("[model]\nlayers = 3", "", r"flags in run.toml whose model is right, got \{'layers': 3\}"),
    "twice": ("batch-size = 1\nbatch_size = 2", "", r"expected each flag once in run.toml"),
    "a word": ('layers = "4"', "", r"flags in run.toml whose layers is right, got '4': str is not an instance of int"),
    "a list": ("layers = [4]", "", r"flags in run.toml whose layers is right, got \[4\]: list is not"),
    "a bool": ("seed = true", "", r"flags in run.toml whose seed is right, got True"),
    "a number": ("dataset = 3", "", r"flags in run.toml whose dataset is right, got 3: int is not an instance of str"),
    "no path": ("weights = 3", "", r"flags in run.toml whose weights is right, got 3: it is neither Path nor nothing$"),
    "a bool for a path": ("out = true", "", r"whose out is right, got True: it is neither Path nor nothing$"),
    "a date": ("out = 1979-05-27", "", r"flags in run.toml whose out is right, got datetime.date"),
    "no choice": ('model = "gcn"', "", r"whose model is right, got 'gcn': .*'hierarchical'"),
    "not finite": ("weight-decay = nan", "", r"weight_decay must be at least 0, got nan"),
    "out of range": ("layers = 0", "", r"layers must be at least 1, got 0"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_a_file_must_not_hold_is_one_message(call, case):
    content, words, message = BAD[case]
    Path("run2.toml").write_text("epochs = 3")
    if content is not None:
        Path("run.toml").write_bytes(content if isinstance(content, bytes) else content.encode())
    said = call(*(() if words.startswith("--config") else ("--config", "run.toml")), *words.split())
    assert said.code == 1 and re.search(message, said.err), said
    assert said.err.startswith("megagraph: error: ") and len(said.err.splitlines()) <= 10 and not said.out


def test_commands_on_two_lines_of_a_box_are_all_named():
    said = "│ Unrecognized options: reprot, r0 │\n│ Available subcommands: train, plot, │\n│ report, data │\n│ ──── │"
    expected = "expected one of the commands train, plot, report, data, got 'reprot'; did you mean report?"
    assert unknown(["reprot", "r0"], said) == expected
    said = "│ Unrecognized options: --output │\n│ ──── │\n│ Perhaps you meant: │\n│     --out PATH │"
    assert unknown(["fit"], said) == "expected flags of megagraph fit, got --output; did you mean --out?"


@pytest.mark.parametrize(
    ("content", "message"),
    [("[1]", "a JSON object, got list in run.json"), ("{", "run.json, which is not a whole JSON file")],
)
def test_a_json_file_that_is_no_configuration(call, content, message):
    Path("run.json").write_text(content)
    said = call("--config", "run.json")
    assert said.code == 1 and message in said.err
