"""Run folders: nothing of others is touched, one process writes, the command that starts a run goes on with it."""

from __future__ import annotations

import json
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter

import megagraph as mg
from megagraph import epochs, train
from megagraph.checkpoint import Checkpoints
from megagraph.config import AUTO
from megagraph.run import Run
from megagraph.weights import fill
from tests.checkpoint_cases import Stopped, config, graph, outcome, stop_at


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


FOREIGN = {
    "another project's": ["config.json", "model.safetensors", "checkpoints/some-llm/weights.bin"],
    "metrics only": ["metrics.jsonl"],
    "deep": ["a/b/c.txt"],
    "a marker that is none": ["run.json"],
}


@pytest.mark.parametrize("resume", [None, AUTO], ids=["new", "auto"])
@pytest.mark.parametrize("case", FOREIGN)
def test_files_of_others_are_refused_and_stay(tmp_path, case, resume):
    out = tmp_path / "out"
    for name in FOREIGN[case]:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text('{"precious": 1}')
    before = contents(out)
    with pytest.raises((FileExistsError, ValueError), match=r"none of ours: |marker of a run of ours"):
        mg.Trainer(config(out, epochs=1, resume=resume)).fit(graph())
    assert contents(out) == before


def test_a_start_that_was_killed_at_its_marker_is_in_nobody_s_way(tmp_path):
    """Or one that writes it at this moment: who runs is the lock's to say."""
    (tmp_path / "run.json.partial").write_text("{")
    mg.Trainer(config(tmp_path, epochs=1)).fit(graph())
    assert (tmp_path / "summary.json").is_file() and not (tmp_path / "run.json.partial").exists()


def test_files_beside_those_of_a_run_stay(tmp_path):
    out, outside = tmp_path / "out", tmp_path / "outside"
    with stop_at(3):
        mg.Trainer(config(out)).fit(graph())
    theirs = [out / "notes.txt", out / "checkpoints/step-000002/mine.txt", out / "checkpoints/step-000099/mine.txt"]
    outside.mkdir()
    (outside / "metrics.jsonl").write_text("precious")
    (out / "checkpoints/step-000077").symlink_to(outside)
    for path in theirs:
        path.parent.mkdir(exist_ok=True)
        path.write_text("precious")
    mg.Trainer.resume(out).fit(graph())
    assert all(path.read_text() == "precious" for path in theirs)
    assert (outside / "metrics.jsonl").read_text() == "precious"
    with pytest.raises(FileExistsError, match=r"holds a run already; pass another --out, .* by --resume auto"):
        mg.Trainer(config(out)).fit(graph())


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints", "model.safetensors", "lock"])
def test_nothing_is_written_through_links(tmp_path, name):
    out, outside = tmp_path / "out", tmp_path / "outside"
    with stop_at(3):
        mg.Trainer(config(out)).fit(graph())
    if (out / name).exists():
        shutil.move(out / name, outside)
    else:
        outside.write_text("precious")
    (out / name).symlink_to(outside)
    before = contents(outside) if outside.is_dir() else outside.read_bytes()
    with pytest.raises(FileExistsError, match=f"{name} is a link, and nothing is written through links"):
        mg.Trainer.resume(out).fit(graph())
    assert before == (contents(outside) if outside.is_dir() else outside.read_bytes())


def test_partial_files_of_others_are_not_written_through(tmp_path):
    out = tmp_path / "out"
    with stop_at(3):
        mg.Trainer(config(out)).fit(graph())
    (tmp_path / "theirs").write_text("precious")
    for name in ("metrics.jsonl.partial", "config.json.partial", "model.safetensors.partial"):
        (out / name).symlink_to(tmp_path / "theirs")
    mg.Trainer.resume(out).fit(graph())
    assert (tmp_path / "theirs").read_text() == "precious"


def test_a_folder_in_which_nothing_was_trained_is_taken_again(tmp_path):
    with pytest.raises(ValueError, match="split must be 'random'"):
        mg.Trainer(config(tmp_path / "new", split="public")).fit(graph())
    assert not (tmp_path / "new").exists()
    run, _ = Run.enter(config(tmp_path / "killed"))
    run.write_config(config(tmp_path / "killed"))
    run._lock.release()
    assert mg.Trainer(config(tmp_path / "killed", max_steps=1)).fit(graph()).steps == 1


STEP = dict(step=0, loss=1.0, learning_rate=0.1, gradient_norm=None, step_seconds=1, stall_seconds=0.0)
EPOCH = dict(
    epoch=0,
    loss=None,
    skipped_steps=0,
    val_accuracy=0.5,
    test_accuracy=0.5,
    val_roc_auc=None,
    test_roc_auc=0.5,
    train_seconds=1.0,
    evaluation_seconds=1.0,
)
MEASURED = ("val_accuracy", "test_accuracy", "val_roc_auc", "test_roc_auc")
SEVERAL = {name: value for name, value in EPOCH.items() if name not in MEASURED[:2]} | {
    f"{part}_{name}": 0.5 for part in ("val", "test") for name in ("micro_f1", "macro_f1", "average_precision")
}
SEVERAL["val_average_precision"] = None
BAD_LINES = {
    "a list": STEP | dict(loss=[]),
    "nothing": STEP | dict(step_seconds=None),
    "not finite": STEP | dict(loss=float("inf")),
    "too large": STEP | dict(loss=10**400),
    "incomplete": dict(step=0),
    "one more": EPOCH | dict(extra=1),
    "text": EPOCH | dict(val_accuracy="0.5"),
    "not measured": EPOCH | dict(val_accuracy=None),
    "of both kinds of labels": EPOCH | dict(val_micro_f1=0.5),
    "of no kind": {name: value for name, value in EPOCH.items() if name not in MEASURED},
    "F1 not measured": SEVERAL | dict(test_macro_f1=None),
}


@pytest.mark.parametrize("bad", BAD_LINES.values(), ids=BAD_LINES)
def test_lines_of_steps_and_epochs_are_as_we_write_them(bad, tmp_path):
    run = Run(tmp_path, id="")
    for line in (STEP, EPOCH, STEP, SEVERAL, STEP, dict(changes={}, from_step=1)):
        run.log(**line)
    assert run.progress() == ([EPOCH, SEVERAL], [STEP])
    run.log(**bad)
    with pytest.raises(ValueError, match=r"expected steps and epochs as we note them in .*metrics\.jsonl, got"):
        run.progress()


def auto(out, **changes):
    return mg.Trainer(config(out, resume=AUTO, **changes))


def test_one_command_begins_goes_on_and_says_that_it_has_finished(tmp_path, capsys):
    expected_summary = mg.Trainer(config(tmp_path / "whole")).fit(graph())
    out = tmp_path / "out"
    for stop in (3, 8):
        with stop_at(stop):
            auto(out).fit(graph())
    summary = auto(out).fit(graph())
    assert outcome(out)["lines"] == outcome(tmp_path / "whole")["lines"]
    assert summary.test_accuracy == expected_summary.test_accuracy
    before = contents(out)
    assert auto(out).fit(graph()) == summary == mg.Trainer.resume(out).fit(graph())
    assert contents(out) == before
    with pytest.raises(ValueError, match="seed of a resumed run must stay 0, got 1"):
        auto(out, seed=1).fit(graph())
    with pytest.raises(ValueError, match="--resume auto needs --out"):
        mg.TrainConfig(resume=AUTO)


def test_auto_begins_anew_where_no_checkpoint_is_good(tmp_path, caplog):
    caplog.set_level("INFO", "megagraph")
    mg.Trainer(config(tmp_path / "whole")).fit(graph())
    out = tmp_path / "out"
    with stop_at(5):
        auto(out).fit(graph())
    for tensors in out.glob("checkpoints/*/*.distcp"):
        tensors.write_bytes(tensors.read_bytes()[:-1])
    with pytest.raises(FileNotFoundError, match="holds no checkpoint to go on from"):
        mg.Trainer.resume(out).fit(graph())
    auto(out).fit(graph())
    assert "beginning anew: " in caplog.text
    assert outcome(out)["lines"] == outcome(tmp_path / "whole")["lines"]


def test_a_run_may_go_on_longer_from_a_chosen_step_and_with_a_lower_rate(tmp_path, caplog):
    out = tmp_path / "out"
    mg.Trainer(config(out, epochs=1, keep=9)).fit(graph())
    assert {path.name for path in (out / "checkpoints").iterdir()} >= {f"step-{step:06d}" for step in (0, 2, 4, 6)}
    assert mg.Trainer.resume(out, epochs=2).fit(graph()).steps == 12
    (changed,) = (line for line in Run.open(out).metrics() if "changes" in line)
    assert changed == {"changes": {"epochs": [1, 2]}, "from_step": 6}
    with pytest.raises(ValueError, match=r"learning_rate of a resumed run must stay 0.01, got 0.1.*may fall"):
        mg.Trainer.resume(out, learning_rate=0.1, epochs=3).fit(graph())
    summary = mg.Trainer.resume(out, epochs=3, learning_rate=0.001, resume_step=4).fit(graph())
    assert summary.steps == 18
    steps = [line["step"] for line in Run.open(out).metrics() if "step" in line]
    assert steps == list(range(18))
    rates = [line["learning_rate"] for line in Run.open(out).metrics() if "step" in line]
    assert max(rates[4:]) < min(rates[1:4])
    with caplog.at_level("INFO", "megagraph"):
        assert mg.Trainer.resume(out, resume_step=4).fit(graph()).steps == 18  # again, though it has been to the end
    assert f"resumed from {out / 'checkpoints/step-000004'}: epoch 0, batch 4" in caplog.text
    with pytest.raises(FileNotFoundError, match=r"step-000999 cannot be used: there is none"):
        mg.Trainer.resume(out, epochs=4, resume_step=999).fit(graph())


@pytest.mark.parametrize("keep", [1, 3])
def test_so_many_checkpoints_are_kept(tmp_path, keep):
    mg.Trainer(config(tmp_path / "out", epochs=1, checkpoint_every=1, keep=keep)).fit(graph())
    found = sorted(path.name for path in (tmp_path / "out/checkpoints").glob("step-*"))
    assert found == [f"step-{step:06d}" for step in range(7 - keep, 7)]


def test_weights_of_another_run_are_a_start(tmp_path):
    mg.Trainer(config(tmp_path / "first")).fit(graph())
    weights = tmp_path / "first/model.safetensors"
    still = dict(learning_rate=0.0, max_steps=1, dropout=0.0)
    mg.Trainer(config(tmp_path / "second", weights=weights, **still)).fit(graph())
    got, want = (Run.open(tmp_path / name).weights() for name in ("second", "first"))
    assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)
    with pytest.raises(ValueError, match=r"expected the weights of this model in .*, but .* has shape"):
        mg.Trainer(config(tmp_path / "third", weights=weights, dim=32)).fit(graph())
    content = bytearray(weights.read_bytes())
    content[-2] ^= 64
    weights.write_bytes(content)
    with pytest.raises(ValueError, match=r"expected weights as they were written, got .*changed since or is damaged"):
        mg.Trainer(config(tmp_path / "third", weights=weights)).fit(graph())


@pytest.fixture(scope="module")
def finished_runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        mg.Trainer(config(folder / str(seed), seed=seed, epochs=1)).fit(graph())
    return folder


def test_a_run_that_begins_anew_starts_from_its_weights_again(tmp_path, finished_runs):
    """Or not at all."""
    weights, out = tmp_path / "weights", tmp_path / "run"
    shutil.copy(finished_runs / "0/model.safetensors", weights)
    trainer = auto(out, weights=weights, learning_rate=0.0, max_steps=1)

    def begin_anew():
        for tensors in out.glob("checkpoints/*/*.distcp"):
            tensors.write_bytes(b"")
        (out / "summary.json").unlink()
        return trainer.fit(graph())

    trainer.fit(graph())
    begin_anew()
    want, got = (Run.open(run).weights() for run in (finished_runs / "0", out))
    assert all(torch.equal(got[name], want[name]) for name in want)
    weights.unlink()
    with pytest.raises(FileNotFoundError, match="holds no checkpoint to go on from"):
        begin_anew()


def test_a_finished_run_that_goes_on_has_no_result_meanwhile(tmp_path, finished_runs):
    run = tmp_path / "run"
    shutil.copytree(finished_runs / "0", run)
    with stop_at(8):
        auto(run, epochs=2).fit(graph())
    assert Run.of(run).state == "started" and Run.of(run).config.epochs == 2
    assert auto(run, epochs=2).fit(graph()).steps == 12


def test_a_run_that_is_stopped_before_it_goes_on_is_finished_as_before(tmp_path, finished_runs, monkeypatch):
    run = tmp_path / "run"
    shutil.copytree(finished_runs / "0", run)
    before = contents(run)

    def killed(*_):
        raise Stopped

    monkeypatch.setattr(Checkpoints, "load", killed)
    with pytest.raises(Stopped):
        auto(run, epochs=2).fit(graph())
    assert contents(run) == before
    monkeypatch.undo()
    assert auto(run, epochs=2).fit(graph()).steps == 12


OTHER_DATA = {
    "another graph": lambda: replace(graph(), features=graph().features + 1),
    "NaN": lambda: replace(graph(), features=graph().features * np.nan),
    "other widths": lambda: replace(graph(), features=graph().features[:, :5]),
    "none": lambda: None,  # the generated graph
}


@pytest.mark.parametrize("case", OTHER_DATA)
def test_a_resume_that_is_refused_changes_nothing(tmp_path, finished_runs, case):
    run = tmp_path / "run"
    shutil.copytree(finished_runs / "0", run)
    before = contents(run)
    with pytest.raises(ValueError):
        mg.Trainer.resume(run, epochs=500, learning_rate=1e-9).fit(OTHER_DATA[case]())
    assert contents(run) == before
    assert mg.Trainer.resume(run, epochs=2).fit(graph()).steps == 12


DAMAGES = {
    "a bit of the weights": lambda run, other: flip(run / "model.safetensors", -2),
    "weights cut": lambda run, other: (run / "model.safetensors").write_bytes(b"1234"),
    "weights of another run": lambda run, other: shutil.copy(other / "model.safetensors", run),
    "a digit of the rate": lambda run, other: (run / "config.json").write_text(
        (run / "config.json").read_text().replace("0.01", "0.21")
    ),
    "configuration of another run": lambda run, other: shutil.copy(other / "config.json", run),
    "sizes of another run": lambda run, other: shutil.copy(other / "model.json", run),
    "marker of another run": lambda run, other: shutil.copy(other / "run.json", run),
    "no object": lambda run, other: (run / "model.json").write_text("[]"),
    "nothing": lambda run, other: (run / "config.json").write_text(""),
}


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 64
    path.write_bytes(content)


@pytest.mark.parametrize("case", DAMAGES)
def test_what_is_not_as_it_was_written_is_not_used(tmp_path, finished_runs, case):
    run = tmp_path / "run"
    shutil.copytree(finished_runs / "0", run)
    DAMAGES[case](run, finished_runs / "1")
    with pytest.raises(
        ValueError, match=r"as it was written|as they were written|of another run|this run|object|whole"
    ):
        mg.predict(run, graph())
    if "weights" not in case:
        with pytest.raises(ValueError):
            mg.Trainer.resume(run, epochs=2).fit(graph())


def test_checkpoints_of_another_run_and_other_data_are_refused(tmp_path, finished_runs):
    run = tmp_path / "run"
    shutil.copytree(finished_runs / "0", run)
    shutil.rmtree(run / "checkpoints")
    shutil.copytree(finished_runs / "1" / "checkpoints", run / "checkpoints")
    with pytest.raises(FileNotFoundError, match="step-000006 cannot be used: it is one of another run"):
        mg.Trainer.resume(run, epochs=2).fit(graph())
    shutil.copytree(finished_runs / "0", tmp_path / "data")
    changed = replace(graph(), features=graph().features + 1)
    with pytest.raises(ValueError, match="a resumed run needs the data it was started on: their fingerprint was"):
        mg.Trainer.resume(tmp_path / "data", epochs=2).fit(changed)


class Planted:
    """Whoever unpickles it runs it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.write_text, (self.path, "executed")


def test_no_code_of_a_checkpoint_is_run(tmp_path):
    import pickle

    import xxhash

    run, planted = tmp_path / "run", tmp_path / "executed"
    with stop_at(3):
        mg.Trainer(config(run)).fit(graph())
    step = run / "checkpoints" / (run / "checkpoints/latest").read_text()
    manifest = json.loads((step / "manifest.json").read_text())
    for name in (".metadata", "metadata.json", "__0_0.distcp"):
        (step / name).write_bytes(pickle.dumps(Planted(planted)))
        manifest["files"][name] = xxhash.xxh3_128_hexdigest((step / name).read_bytes())
    (step / "manifest.json").write_text(json.dumps(manifest))
    (step / "committed").write_text(xxhash.xxh3_128_hexdigest((step / "manifest.json").read_bytes()))
    assert pickle.loads((step / ".metadata").read_bytes()) and planted.exists()  # the plant would work
    planted.unlink()
    assert mg.Trainer.resume(run).fit(graph()).steps == 18
    assert not planted.exists()


def test_predictions_never_replace_a_file_of_the_run(tmp_path, finished_runs, capsys):
    run = tmp_path / "run"
    shutil.copytree(finished_runs / "0", run)
    before = contents(run)
    (tmp_path / "link.npy").symlink_to(tmp_path / "elsewhere")
    for out in ("run/model.safetensors", "run/../run/config.json", "run/checkpoints/latest", "link.npy"):
        with pytest.raises(FileExistsError, match="pass another --out"):
            mg.predict(run, graph(), tmp_path / out)
    assert contents(run) == before
    mg.predict(run, graph(), run / "probabilities.npy")


def test_predict_says_what_it_reads_because_the_run_says_so(tmp_path, caplog):
    caplog.set_level("INFO", "megagraph")
    mg.Trainer(mg.TrainConfig(out=tmp_path / "run", layers=1, max_steps=1, samples=1, device="cpu")).fit()
    mg.predict(tmp_path / "run")
    assert f"reading synthetic, as {tmp_path / 'run' / 'config.json'} says" in caplog.text
    with pytest.raises(FileNotFoundError, match=r"nosuch\.npz"):
        mg.predict(tmp_path / "run", dataset="nosuch.npz")


def with_nan(monkeypatch, steps, where="loss"):
    """The loss, or a weight after the step, is not finite in these steps."""
    real, count = epochs.train_step, iter(range(10**6))

    def train_step(pipeline, optimizers, *arguments, **options):
        bad = next(count) in steps
        weight = next(iter(pipeline.named_parameters().values()))
        if bad and where == "loss":
            hook = weight.register_hook(lambda gradient: gradient * float("nan"))
        done = real(pipeline, optimizers, *arguments, **options)
        if bad and where == "loss":
            hook.remove()
        elif bad:
            weight.data[0, 0] = float("nan")
        return done

    monkeypatch.setattr(epochs, "train_step", train_step)


def test_a_step_that_is_not_finite_is_skipped_and_counted(tmp_path, monkeypatch, caplog):
    with_nan(monkeypatch, {2, 4, 5})
    summary = mg.Trainer(config(tmp_path / "run")).fit(graph())
    assert summary.skipped_steps == 3 and summary.steps == 18
    lines = [line for line in Run.open(tmp_path / "run").metrics() if "step" in line]
    assert [line["step"] for line in lines if line["loss"] is None] == [2, 4, 5]
    assert "step 2 was skipped" in caplog.text
    assert all(x.isfinite().all() for x in Run.open(tmp_path / "run").weights().values())
    modes = {(tmp_path / "run" / name).stat().st_mode for name in ("model.safetensors", "config.json", "metrics.jsonl")}
    assert len(modes) == 1  # whoever may read one may read the others


def test_too_many_of_them_end_the_run_with_the_layer_and_the_batch(tmp_path, monkeypatch):
    with_nan(monkeypatch, set(range(7, 99)))
    message = r"2 steps in a row were skipped, the last one batch 2 of epoch 1, .*the gradient of .*input_proj"
    with pytest.raises(FloatingPointError, match=message):
        mg.Trainer(config(tmp_path / "run", bad_steps=2)).fit(graph())
    monkeypatch.undo()
    assert mg.Trainer.resume(tmp_path / "run", learning_rate=1e-3).fit(graph()).steps == 18


def test_a_run_that_has_diverged_goes_on_from_before_with_a_lower_rate(tmp_path):
    """The newest checkpoint has finite weights, of which nothing but NaN comes."""
    with pytest.raises(
        FloatingPointError, match=r"lower --learning-rate .*--resume-step N with a lower --learning-rate"
    ):
        mg.Trainer(config(tmp_path / "run", learning_rate=1e30, checkpoint_every=1, dtype="fp32")).fit(graph())
    with pytest.raises(FloatingPointError):
        mg.Trainer.resume(tmp_path / "run").fit(graph())
    assert mg.Trainer.resume(tmp_path / "run", learning_rate=1e-3, resume_step=0).fit(graph()).steps == 18


@pytest.mark.parametrize("step", [14, 17], ids=["then a save", "then an evaluation"])
def test_weights_that_are_not_finite_are_never_kept(tmp_path, monkeypatch, step):
    every = 1 if step == 14 else 16
    with_nan(monkeypatch, {step}, "weight")
    with pytest.raises(FloatingPointError, match=r"is not finite, and a checkpoint of it|the weights are not"):
        mg.Trainer(config(tmp_path / "run", checkpoint_every=every, bad_steps=99)).fit(graph())
    monkeypatch.undo()
    assert all(x.isfinite().all() for x in Run.open(tmp_path / "run").weights().values())
    assert mg.Trainer.resume(tmp_path / "run").fit(graph()).steps == 18


def test_running_out_of_memory_says_what_to_turn(tmp_path, monkeypatch):
    def train_step(*_, **__):
        torch.empty(2**62, dtype=torch.uint8)

    monkeypatch.setattr(epochs, "train_step", train_step)
    with pytest.raises(
        MemoryError,
        match=r"out of memory on rank 0 in forward and backward \(step 0\), plan 1,1,1, at \d.*--checkpoint",
    ):
        mg.Trainer(config(tmp_path / "run")).fit(graph())


def test_a_rank_without_room_is_named_by_the_others(tmp_path, monkeypatch):
    def batches(*_):
        raise MemoryError("rank 1: no room")  # as on_every_rank says it

    monkeypatch.setattr(train, "same_batches", batches)
    with pytest.raises(MemoryError, match=r"^out of memory in build, plan 1,1,1: rank 1: no room; less is taken by"):
        mg.Trainer(config(tmp_path / "run")).fit(graph())


def test_a_save_that_fails_in_the_background_ends_the_run(tmp_path, monkeypatch):
    real, saves = FileSystemWriter.write_data, []

    def write_data(*arguments):
        saves.append(threading.current_thread())
        if len(saves) == 3:
            raise OSError("no room")
        return real(*arguments)

    monkeypatch.setattr(FileSystemWriter, "write_data", write_data)
    with pytest.raises(OSError, match=r"step-000004 \(rank 0\): no room"):
        mg.Trainer(config(tmp_path / "run")).fit(graph())
    assert threading.main_thread() not in saves and len(set(saves)) == len(saves) == 3
    monkeypatch.undo()
    assert mg.Trainer.resume(tmp_path / "run").fit(graph()).steps == 18


@pytest.mark.parametrize(
    "found", [{}, {"weight": torch.zeros(3, 3), "bias": torch.zeros(3)}, {"other": torch.zeros(1)}]
)
def test_weights_of_another_model_are_one_error(found):
    with pytest.raises(ValueError, match=r"expected the weights of this model in there, but \w+ has shape .* differ"):
        fill(torch.nn.Linear(2, 3), found, Path("there"))
