"""A run that stops at any moment goes on, here or under another plan, and nobody can tell from its results."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager
from torch.torch_version import TorchVersion

import megagraph as mg
from megagraph import files
from megagraph.checkpoint import Checkpoints
from megagraph.data.cluster import ClusterBatches
from megagraph.data.store import write_store
from megagraph.evaluate import batches, make_loader
from tests import ranks
from tests.checkpoint_cases import (
    CHAINS,
    EPOCHS,
    config,
    graph,
    outcome,
    save_until_killed,
    small_state,
    stop_at,
    values,
)
from tests.processes import CONTEXT


def saved(folder, steps=(1, 2)) -> Checkpoints:
    (folder / "metrics.jsonl").write_text("{}")
    checkpoints = Checkpoints(folder / "checkpoints")
    for step in steps:
        checkpoints.save(step, small_state(float(step)), {"step": step}, [folder / "metrics.jsonl", folder / "nothing"])
    checkpoints.wait()
    return checkpoints


def loaded(folder) -> tuple[str, set[float]]:
    """Name of the checkpoint that was loaded, and the numbers in it."""
    state = small_state()
    path, progress = Checkpoints(folder / "checkpoints").load(state)
    assert path.name == f"step-{progress['step']:06d}"
    return path.name, values(state)


def test_save_and_load(tmp_path):
    saved(tmp_path, steps=range(1, 6))
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"latest", "step-000004", "step-000005"}
    names = {"begun.json", "metadata.json", "__0_0.distcp", "metrics.jsonl", "manifest.json", "committed"}
    assert {path.name for path in (tmp_path / "checkpoints" / "step-000005").iterdir()} == names
    assert loaded(tmp_path) == ("step-000005", {5.0})


def test_a_stager_of_torch_2_11_is_used_once(tmp_path, monkeypatch):
    """It closes itself after that."""
    stage = DefaultStager.stage

    def stage_and_close(stager, *args):
        staged = stage(stager, *args)
        stager.close()
        return staged

    monkeypatch.setattr(DefaultStager, "stage", stage_and_close)
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0"))
    saved(tmp_path)
    assert loaded(tmp_path) == ("step-000002", {2.0})


def test_a_checkpoint_that_was_read_is_never_written_again(tmp_path):
    saved(tmp_path)
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.load(small_state())
    checkpoints.save(2, small_state(9.0), {"step": 2})
    checkpoints.wait()
    assert loaded(tmp_path) == ("step-000002", {2.0})
    checkpoints.save(3, small_state(3.0), {"step": 3})
    checkpoints.wait()
    assert loaded(tmp_path) == ("step-000003", {3.0})


def flip(file) -> None:
    """One bit, anywhere."""
    content = bytearray(file.read_bytes())
    content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    file.write_bytes(content)


def cut(file) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def remove(file) -> None:
    file.unlink()


DAMAGES = {
    "tensor bit": (flip, "__0_0.distcp", "__0_0.distcp is not as it was written"),
    "tensors cut": (cut, "__0_0.distcp", "__0_0.distcp is not as it was written"),
    "tensors gone": (remove, "__0_0.distcp", "__0_0.distcp is missing"),
    "metadata bit": (flip, "metadata.json", "metadata.json is not as it was written"),
    "metadata cut": (cut, "metadata.json", "metadata.json is not as it was written"),
    "metadata gone": (remove, "metadata.json", "metadata.json is missing"),
    "copy bit": (flip, "metrics.jsonl", "metrics.jsonl is not as it was written"),
    "copy gone": (remove, "metrics.jsonl", "metrics.jsonl is missing"),
    "manifest bit": (flip, "manifest.json", "manifest.json is not as it was written"),
    "manifest cut": (cut, "manifest.json", "manifest.json is not as it was written"),
    "manifest gone": (remove, "manifest.json", "manifest.json is missing"),
    "marker bit": (flip, "committed", "manifest.json is not as it was written"),
    "marker cut": (cut, "committed", "manifest.json is not as it was written"),
    "marker gone": (remove, "committed", r"it was not finished \(no file committed\)"),
}


def _warnings(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "megagraph"]


@pytest.mark.parametrize("case", DAMAGES)
def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path, caplog, case):
    damage, file, reason = DAMAGES[case]
    saved(tmp_path)
    damage(tmp_path / "checkpoints" / "step-000002" / file)
    assert loaded(tmp_path) == ("step-000001", {1.0})
    expected = f"step-000002 cannot be used: {reason}; going on from step-000001"
    assert _warnings(caplog) == [expected.replace("\\", "")]
    damage(tmp_path / "checkpoints" / "step-000001" / file)
    message = f"holds no checkpoint to go on from\n  step-000002 cannot be used: {reason}\n  step-000001 cannot"
    with pytest.raises(FileNotFoundError, match=message):
        loaded(tmp_path)


def sealed(folder, name, edit) -> None:
    """Change a JSON file of a checkpoint as one who also makes the checksums anew."""
    values = json.loads((folder / name).read_text())
    edit(values)
    if name == "metadata.json":
        values.pop("checksum")
        files.write_json(folder / name, values)
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["files"][name] = files.checksum(folder / name)
        values = manifest
    files.write(folder / "manifest.json", json.dumps(values))
    files.write(folder / "committed", files.checksum(folder / "manifest.json"))


NO_METADATA = "metadata.json", "expected what lies where in a checkpoint in .*, got "
NO_FIELDS = "its manifest names no progress, no files or no configuration"
HOSTILE = {
    "no tensors": (*NO_METADATA, lambda values: values.pop("tensors")),
    "a chunk that is none": (*NO_METADATA, lambda values: values["tensors"]["a"].update(chunks=[10**30])),
    "a dtype that is none": (*NO_METADATA, lambda values: values["tensors"]["a"].update(dtype="magic")),
    "a size of text": (*NO_METADATA, lambda values: values["tensors"]["a"].update(size=["x"])),
    "before the file": (
        "metadata.json",
        "expected a at places and of sizes of at least 0, got",
        lambda values: values["tensors"]["a"]["chunks"][0].update(start=-1),
    ),
    "no progress": ("manifest.json", NO_FIELDS, lambda v: v.update(progress=3)),
    "no files": ("manifest.json", NO_FIELDS, lambda v: v.update(files=["a"])),
    "no configuration": ("manifest.json", NO_FIELDS, lambda v: v.update(config=0.5)),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_checkpoint_whose_checksums_are_right_but_not_its_fields(tmp_path, caplog, case):
    name, message, edit = HOSTILE[case]
    saved(tmp_path)
    sealed(tmp_path / "checkpoints" / "step-000002", name, edit)
    assert loaded(tmp_path) == ("step-000001", {1.0})
    (said,) = _warnings(caplog)
    assert re.match(f"step-000002 cannot be used: {message}", said)


@pytest.mark.parametrize("damage", [flip, cut, remove])
def test_latest_is_a_hint(tmp_path, damage):
    saved(tmp_path)
    damage(tmp_path / "checkpoints" / "latest")
    assert loaded(tmp_path) == ("step-000002", {2.0})


def test_a_future_that_was_given_up_is_removed(tmp_path):
    saved(tmp_path)
    flip(tmp_path / "checkpoints" / "step-000002" / "__0_0.distcp")
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.load(small_state())
    checkpoints.save(2, small_state(7.0), {"step": 2})
    checkpoints.wait()
    assert loaded(tmp_path) == ("step-000002", {7.0})


def test_a_checkpoint_of_another_model(tmp_path):
    saved(tmp_path)
    for shape in ((200, 301), (200, 300)):
        state = {name: torch.zeros(shape) for name in ("a", "layers.1.b")}
        with pytest.raises(ValueError, match=r"step-000002 does not fit this model: .*(301|layers\.1\.b)"):
            Checkpoints(tmp_path / "checkpoints").load(state)


def test_a_save_that_fails_names_the_folder_and_leaves_the_last_one(tmp_path, monkeypatch):
    checkpoints = saved(tmp_path)
    monkeypatch.setattr("torch.distributed.checkpoint.FileSystemWriter.write_data", lambda *_: 1 / 0)
    checkpoints.save(3, small_state(3.0), {"step": 3})
    with pytest.raises(OSError, match=r"step-000003 \(rank 0\): division by zero"):
        checkpoints.wait()
    checkpoints.wait()
    assert loaded(tmp_path) == ("step-000002", {2.0})


def kill_while_saving(folder, times: int) -> int:
    """Kill a process that saves, again and again, each going on from what the one before has left; the last step."""
    last = 0
    for _ in range(times):
        receive, send = CONTEXT.Pipe(duplex=False)
        process = CONTEXT.Process(target=save_until_killed, args=(folder, send))
        process.start()
        send.close()
        last = receive.recv()
        started = time.perf_counter()
        last = receive.recv()
        time.sleep(random.uniform(0.0, 1.5) * (time.perf_counter() - started))
        process.kill()
        process.join()
        while True:
            try:
                last = receive.recv()
            except EOFError:
                break
        state = small_state()
        _, progress = Checkpoints(folder).load(state)
        assert progress["step"] in (last, last + 1)
        assert values(state) == {float(progress["step"])}
    return last


def test_a_process_killed_while_it_saves_loses_nothing(tmp_path):
    assert kill_while_saving(tmp_path / "checkpoints", times=5) >= 10


def uninterrupted(tmp_path, **changes):
    summary = mg.Trainer(config(tmp_path / "whole", **changes)).fit(graph())
    return summary, outcome(tmp_path / "whole")


@pytest.mark.parametrize(
    ("changes", "stops"),
    [
        (dict(dtype="fp32", epochs=2), (2, 3, 9)),
        (dict(dtype="fp64", epochs=2, workers=1), (5,)),
        (dict(dtype="fp32", epochs=2, embedding="learned"), (3,)),
        (dict(dtype="fp32", checkpoint_every=0), (7, 16)),
        (dict(dtype="fp32", max_steps=11), (10,)),
        (dict(batching="cluster", sequence_nodes=128, super_nodes=4, batch_size=1, epochs=9, dtype="fp32"), (4,)),
    ],
    ids=["fp32", "fp64", "learned", "at the end of epochs", "max steps", "cluster"],
)
def test_a_run_that_stops_equals_one_that_does_not(tmp_path, changes, stops):
    summary, expected = uninterrupted(tmp_path, **changes)
    run = tmp_path / "run"
    trainer = mg.Trainer(config(run, **changes))
    for stop in (*stops, None):
        with stop_at(stop):
            resumed = trainer.fit(graph())
        if stop is not None:
            torn = (run / "metrics.jsonl").read_text() + '{"step": 99, "lo'
            (run / "metrics.jsonl").write_text(torn)
            trainer = mg.Trainer.resume(run)
    got = outcome(run)
    assert got["lines"] == expected["lines"]
    assert got["weights"].keys() == expected["weights"].keys()
    assert all(torch.equal(got["weights"][name], expected["weights"][name]) for name in got["weights"])
    for name in ("test_accuracy", "best_val_accuracy", "best_epoch", "majority_accuracy", "epochs", "steps"):
        assert getattr(resumed, name) == getattr(summary, name)
    assert {path.name for path in run.iterdir()} == {path.name for path in (tmp_path / "whole").iterdir()}


def test_epochs_that_differ_in_their_batches(tmp_path, monkeypatch):
    """All of them are trained on, the rate falls to the end, and a run goes on from wherever it was."""
    plan = ClusterBatches.plan

    def cut(self, nodes, batch_size, rng):
        """Some epochs take the nodes of their batch in two."""
        (batch,) = plan(self, nodes, batch_size, rng)
        if rng is None or rng.random() > 0.5:
            return [batch]
        first, second = batch.copy(), batch.copy()
        first[:, 50:], second[:, :50] = -1, -1
        return [first, second]

    monkeypatch.setattr(ClusterBatches, "plan", cut)
    options = dict(batching="cluster", sequence_nodes=128, super_nodes=4, batch_size=1, epochs=6, checkpoint_every=1)
    options |= dict(warmup=0.0)
    summary, expected = uninterrupted(tmp_path, **options)
    builder = batches(config(tmp_path, **options), graph())
    loader = make_loader(config(tmp_path, **options), builder, np.arange(100), shuffle=True)
    lengths = [len(loader.epoch(epoch)) for epoch in range(6)]
    assert lengths[0] == 1 and {*lengths} == {1, 2} and summary.steps == sum(lengths)
    rates = [line["learning_rate"] for line in expected["lines"] if "learning_rate" in line]
    assert (np.diff(rates) < 0).all() and rates[-1] < 0.2 * rates[0]
    longer = lengths.index(2)
    for stop in (sum(lengths[:longer]) + 1, sum(lengths[: longer + 1])):  # within it, and before the next
        run = tmp_path / f"run{stop}"
        with stop_at(stop):
            mg.Trainer(config(run, **options)).fit(graph())
        mg.Trainer.resume(run).fit(graph())
        assert outcome(run)["lines"] == expected["lines"]


def assert_same_results(got, expected) -> None:
    assert [line.keys() for line in got["lines"]] == [line.keys() for line in expected["lines"]]
    for one, other in zip(got["lines"], expected["lines"], strict=True):
        one, other = (np.array(list(values.values()), np.float64) for values in (one, other))  # None becomes nan
        np.testing.assert_allclose(one, other, rtol=1e-8)
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(
            got["weights"][name], weight, rtol=1e-6, atol=1e-8, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize(("world_size", "embedding"), [ranks.param(chain[0], *chain) for chain in CHAINS])
def test_a_run_goes_on_under_another_plan(tmp_path, world_size, embedding):
    _, expected = uninterrupted(tmp_path, embedding=embedding, epochs=EPOCHS)
    result = ranks.results(world_size)[0]
    assert_same_results(result[f"resume {embedding}"], expected)


@pytest.mark.parametrize("case", ["not shared", "another save"])
def test_ranks_that_do_not_share_the_folder_are_told_before_they_write(case):
    for result in ranks.results(2):
        assert re.match(r"FileNotFoundError: rank 1: .*step-000001, made by rank 0, is not there", result[case])


def test_no_checkpoint_without_a_file_of_another_rank(tmp_path, monkeypatch):
    def save(*arguments, **keywords):
        real(*arguments, **keywords)
        (tmp_path / "checkpoints" / "step-000001" / "__0_0.distcp").unlink()  # as where it is on another disk

    real = dcp.save
    monkeypatch.setattr(dcp, "save", save)
    with pytest.raises(FileNotFoundError, match=r"lacks __0_0\.distcp of other ranks; put the run on a file system"):
        saved(tmp_path, steps=(1,))


@pytest.mark.slow
def test_four_replicas_go_on_bit_for_bit():
    whole, stopped = ranks.results(4)[0]["resume same plan"]
    assert stopped["lines"] == whole["lines"]
    assert all(torch.equal(x, stopped["weights"][name]) for name, x in whole["weights"].items())


@pytest.mark.slow
def test_a_run_goes_on_in_two_processes_and_in_one_again(tmp_path):
    """From the command line; one of the two is killed when the first epoch has been trained."""
    _, expected = uninterrupted(tmp_path)
    write_store(graph(), tmp_path / "store")
    run = tmp_path / "run"
    with stop_at(3):
        mg.Trainer(config(run, dataset=str(tmp_path / "store"))).fit()
    faulty = Path(__file__).parent / "parallel" / "faulty.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", faulty]
    command += ["kill", "evaluation", "1", tmp_path / "log", "train", "--resume", run, "--plan", "1,2,1"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    killed = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert killed.returncode != 0 and (tmp_path / "log-fault").exists(), killed.stderr
    assert f"resumed from {run / 'checkpoints' / 'step-000002'}: epoch 0, batch 2" in killed.stderr
    # the last one may not have been complete when the rank was killed
    assert (run / "checkpoints" / "latest").read_text() in ("step-000004", "step-000006")
    mg.Trainer.resume(run, plan="1,1,1").fit()
    assert_same_results(outcome(run), expected)


def no_checkpoints(run):
    shutil.rmtree(run / "checkpoints")


BAD_RESUMES = {
    "no run": (lambda run: shutil.rmtree(run), dict(), FileNotFoundError, "of a run, but it holds no config.json"),
    "no checkpoint": (no_checkpoints, dict(), FileNotFoundError, "holds no checkpoint to go on from$"),
    "seed": (None, dict(seed=1), ValueError, "seed of a resumed run must stay 0, got 1; only root, device, .* may ch"),
    "layers": (None, dict(layers=2), ValueError, "layers of a resumed run must stay 3, got 2"),
    "epochs": (None, dict(epochs=2), ValueError, "epochs of a resumed run must stay 3, got 2"),
    "dtype": (None, dict(dtype="fp32"), ValueError, "dtype of a resumed run must stay 'fp64', got 'fp32'"),
    "batch": (None, dict(batch_size=20), ValueError, "batch_size of a resumed run must stay 10, got 20"),
    "plan": (None, dict(plan="1,2,1"), ValueError, r"= 2, got 1; start them with torchrun --nproc-per-node 2"),
    "interval": (None, dict(checkpoint_every=-1), ValueError, "checkpoint_every must be at least 0, got -1"),
}


@pytest.fixture(scope="module")
def stopped_run(tmp_path_factory):
    run = tmp_path_factory.mktemp("stopped") / "run"
    with stop_at(3):
        mg.Trainer(config(run)).fit(graph())
    return run


@pytest.mark.parametrize("case", BAD_RESUMES)
def test_bad_resume(tmp_path, stopped_run, case):
    prepare, changes, error, message = BAD_RESUMES[case]
    run = tmp_path / "run"
    shutil.copytree(stopped_run, run)
    if prepare is not None:
        prepare(run)
    with pytest.raises(error, match=message):
        mg.Trainer.resume(run, **changes).fit(graph())


def test_other_data_are_refused(tmp_path, stopped_run):
    shutil.copytree(stopped_run, tmp_path / "run")
    with pytest.raises(ValueError, match="needs the data it was started on: in_features was 8, got 5"):
        mg.Trainer.resume(tmp_path / "run").fit(replace(graph(), features=graph().features[:, :5]))


def test_a_checkpoint_that_is_not_ours_any_more_is_put_aside(tmp_path, stopped_run, caplog):
    run = tmp_path / "run"
    shutil.copytree(stopped_run, run)
    for name in ("begun.json", "metadata.json"):
        flip(run / "checkpoints/step-000002" / name)
    assert mg.Trainer.resume(run).fit(graph()).steps == 18
    assert "step-000002 was not written by this run, it is now " in caplog.text
    assert (run / "checkpoints/step-000002-aside-1/begun.json").exists()
