"""Traces of several processes: every span is there, and the bubble is the one that the spans say."""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from torch.profiler import record_function

import megagraph as mg
from megagraph import timeline
from megagraph.cli.plot import plot_timeline
from megagraph.run import Run
from tests.planner.test_by_hand import cost_model
from tests.processes import Command, launch

# rank: (name, start, stop) in ms; one step each, of a pipeline of two stages and two micro-batches
KNOWN = {
    0: [
        ("train step", 0, 100),
        ("stage forward", 0, 10),
        ("ring step", 2, 8),
        ("stage forward", 10, 20),
        ("stage backward", 50, 70),
        ("stage backward", 70, 90),
        ("optimizer", 90, 100),
    ],
    1: [
        ("train step", 2, 100),
        ("stage forward", 10, 20),
        ("stage forward", 20, 30),
        ("stage backward", 30, 50),
        ("stage backward", 50, 70),
        ("gloo:all_reduce", 50, 85),
        ("aten::mm", 30, 50),
    ],
}


def write_traces(folder: Path, spans=KNOWN) -> Path:
    """The clock of rank 1 starts half a second later."""
    folder.mkdir()
    for rank, own in spans.items():
        base, cats = rank * 500_000_000, {"aten::mm": "cpu_op"}
        events = [
            dict(
                ph="X",
                cat=cats.get(name, "user_annotation"),
                name=name,
                ts=start * 1e3 - base * 1e-3,
                dur=(stop - start) * 1e3,
                pid=1,
                tid=1,
            )
            for name, start, stop in own
        ]
        trace = {"baseTimeNanoseconds": base, "traceEvents": [*events, {"ph": "M", "name": "process_name"}]}
        (folder / f"rank-{rank}.json.gz").write_bytes(gzip.compress(json.dumps(trace).encode()))
    return folder


def test_the_bubble_of_known_spans(tmp_path):
    spans = timeline.read(write_traces(tmp_path / "trace"))
    assert [(s.rank, s.name) for s in spans if s.name in ("all-reduce", "aten::mm")] == [(1, "all-reduce")]
    assert spans[0].start == pytest.approx(0.0) and spans[-1].stop == pytest.approx(0.1)
    assert timeline.measured_bubble(spans) == pytest.approx(1 - 120 / 180)  # 60 ms of work in 90 ms on both


def test_the_bubble_of_two_steps_is_the_mean_of_theirs():
    whole, half = [(timeline.STEP, 0, 4), ("stage forward", 0, 4)], [("stage forward", 4, 5), ("stage backward", 7, 8)]
    spans = [timeline.Span(0, *span) for span in (*whole, (timeline.STEP, 4, 8), *half)]
    assert timeline.measured_bubble(spans) == (0 + 1 / 2) / 2


def test_waits_between_stages_become_spans(tmp_path):
    folder = write_traces(tmp_path / "trace")
    before = timeline.read(folder)
    for path in folder.iterdir():
        trace = json.loads(gzip.decompress(path.read_bytes()))
        timeline.name_bubbles(trace)
        path.write_bytes(gzip.compress(json.dumps(trace).encode()))
    spans = timeline.read(folder)
    waits = [(s.rank, round(s.start, 6), round(s.stop, 6)) for s in spans if s.name == timeline.BUBBLE]
    assert waits == [(1, 0.002, 0.01), (0, 0.02, 0.05)]
    assert [s for s in spans if s.name != timeline.BUBBLE] == before


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (mg.Plan(pp=2, num_microbatches=2), 1 / 3),
        (mg.Plan(pp=4, num_microbatches=8, schedule="1f1b"), 3 / 11),
        (mg.Plan(pp=4, num_microbatches=8, schedule="interleaved", stages_per_rank=2), 3 / 19),
        (mg.Plan(pp=4, num_microbatches=8, schedule="zero_bubble"), 1 / 9),
    ],
)
def test_the_bubble_in_theory(plan, expected):
    assert timeline.bubble_in_theory(plan) == pytest.approx(expected)


def test_traces_that_are_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"must hold the traces of a run, .*; train with --trace"):
        timeline.read(tmp_path)
    folder = write_traces(tmp_path / "trace", {0: [("stall", 0, 1)]})
    with pytest.raises(ValueError, match="must hold a training step, got none; train for more than 2 steps"):
        timeline.read(folder)


BAD_TRACES = {
    "empty": (b"", "expected a trace in .*rank-0.json.gz, got a file that cannot be read"),
    "cut": (gzip.compress(b"{}" * 100)[:-12], "expected a trace in .*, got a file that cannot be read"),
    "no archive": (b"hello", "expected a trace in .*, got a file that cannot be read: Not a gzipped file"),
    "damaged": (gzip.compress(b"{}")[:10] + bytes(20), "expected a trace in .*, got a file that cannot be read"),
    "text": (gzip.compress(b"hello"), "expected a trace in .*, got a file that cannot be read"),
    "list": (gzip.compress(b"[]"), "expected a trace in .*, got list; trace the run again"),
    "object": (gzip.compress(b"{}"), r"expected a trace in .*, got one that is not whole: KeyError\('traceEvents'\)"),
    "of another kind": (gzip.compress(b'{"traceEvents": 3}'), "expected a trace in .*, got one that is not whole"),
}


@pytest.mark.parametrize("case", BAD_TRACES)
def test_a_trace_that_is_none(tmp_path, case):
    content, message = BAD_TRACES[case]
    (write_traces(tmp_path / "trace") / "rank-0.json.gz").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        timeline.read(tmp_path / "trace")


def test_a_trace_of_another_run(tmp_path):
    folder = write_traces(tmp_path / "trace")
    with pytest.raises(ValueError, match=r"expected a trace of this run in .*rank-0.json.gz, got that of another run"):
        timeline.read(folder, run="mine")


def test_a_run_that_goes_on_with_fewer_ranks_has_no_traces_of_others(tmp_path):
    folder = write_traces(tmp_path / "trace")
    with timeline.recorder(folder, 0, ranks=1) as profiler:
        for _ in range(timeline.SKIPPED_STEPS + timeline.TRACED_STEPS):
            with record_function(timeline.STEP):
                pass
            profiler.step()
    assert {span.rank for span in timeline.read(folder)} == {0}


def test_a_traced_run_has_all_spans_and_a_picture(tmp_path, capsys):
    run = tmp_path / "run"
    flags = "--plan 2,2,1 --microbatches 2 --layers 2 --dim 16 --ffn-dim 16 --heads 2 --samples 1 --batch-size 64"
    for done in launch(4, "train", *flags.split(), "--max-steps", 4, "--device", "cpu", "--trace", "--out", run):
        assert done.returncode == 0, done.stderr
    done = Command("plot", "timeline", run).finish()
    assert done.returncode == 0, done.stderr
    assert "bubble of gpipe, 2 ranks x 1 stages, 2 micro-batches: measured" in done.stdout
    assert "in theory 33.3%" in done.stdout
    assert (run / "timeline.png").stat().st_size > 10_000
    spans = timeline.read(run / "trace", Run.of(run).id)
    for rank in range(4):
        own = [span for span in spans if span.rank == rank]
        assert {span.name for span in own} == {*timeline.SPANS, timeline.STEP}
        assert sum(span.name == timeline.STEP for span in own) == 2  # the third and the fourth
    steps = [next(s for s in spans if s.rank == rank and s.name == timeline.STEP) for rank in range(4)]
    assert max(s.start for s in steps) < min(s.stop for s in steps), "the clocks of the ranks differ"
    cost = cost_model({"forward": {"layer.call": 0.002}, "backward": {"layer.call": 0.01}})
    model = replace(cost.model, layers=2, dim=16, ffn_dim=16, heads=2)
    cost = replace(cost, model=model, workload=replace(cost.workload, num_nodes=15))  # of 4 sequences
    cost.save(tmp_path / "cost.json")
    plot_timeline(run, cost=tmp_path / "cost.json").run()
    said = capsys.readouterr().out
    assert re.search(r"a step of 64 sequences: [\d.]+ s, predicted 0.036 s", said)  # 12 ms a layer; 3 in a row
    assert re.search(r"measured [\d.]+%, predicted 33.3%, in theory 33.3%", said)
    for other, said in (
        ({"model": replace(model, layers=4)}, "layers = 4, and .*run has 2"),
        ({"workload": replace(cost.workload, dtype="bf16")}, "dtype = bf16, and .*run has fp32"),
        ({"workload": replace(cost.workload, num_nodes=16)}, "nodes of a sequence = 16, and .*run has 15"),
        ({"workload": replace(cost.workload, pairs=9)}, "full batches = True, and .*run has False"),
    ):
        replace(cost, **other).save(tmp_path / "cost.json")
        with pytest.raises(ValueError, match=rf"cost.json was fitted for {said}; profile it anew"):
            plot_timeline(run, cost=tmp_path / "cost.json").run()
    (run / "trace" / "rank-3.json.gz").unlink()
    with pytest.raises(ValueError, match=r"expected traces of the ranks 0\.\.3 in .*, got \[0, 1, 2\]"):
        plot_timeline(run).run()
