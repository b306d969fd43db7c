"""A page about runs, one HTML file with everything in it, from the files of their folders alone."""

from __future__ import annotations

import base64
import io
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from jinja2 import Environment

import megagraph
from megagraph import files, plots, timeline
from megagraph.config import TrainConfig
from megagraph.flags import in_words
from megagraph.history import GraphFacts, History, graph_of, model_of, names_of
from megagraph.objective import METRICS
from megagraph.planner.plan import Plan
from megagraph.run import Run
from megagraph.train import Summary

_OF_THIS_RUN = ("out", "resume", "resume_step")
_NONE = "-"


def report(folders: Sequence[Path | str], out: Path | str) -> None:
    """Write what was trained on what, configuration, results, curves, bias, timeline, plan and environment of runs.

    Args:
        folders: of runs of ``Trainer.fit``, finished or under way.
        out: an HTML file, which needs nothing else; what comes from the runs' files is text in it.

    Raises:
        FileNotFoundError, ValueError: a folder is not that of a run, or a file of it is damaged; ``out`` is no .html.
        FileExistsError: ``out`` is a file of a run, or a link.

    Examples:
        >>> small = {"layers": 1, "dim": 16, "heads": 2, "batching": "cluster", "sequence_nodes": 128}
        >>> _ = mg.Trainer(mg.TrainConfig(max_steps=2, out="runs/reported", **small)).fit()
        >>> report(["runs/reported"], "report.html")
    """
    paths, out = [Path(folder) for folder in folders], Path(out)
    if not paths:
        raise ValueError("expected the folder of a run, or several, got none")
    if out.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"out must end in .html, which is what is written, got {out}")
    runs = [Run.of(path) for path in paths]
    for run in runs:
        run.check_output(out)
    names = names_of(paths)
    histories = [History.of(run, name) for run, name in zip(runs, names, strict=True)]
    sections = [_section(run, history) for run, history in zip(runs, histories, strict=True)]
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((Path(__file__).parent / "report.html").read_text(encoding="utf-8"))
    page = template.render(
        heading=", ".join(names),
        version=megagraph.__version__,
        date=time.strftime("%Y-%m-%d %H:%M"),
        several=len(runs) > 1,
        names=names,
        runs=sections,
        low=any(row["low"] for section in sections for row in section.results),
        curves_wide=_image(lambda file: plots.curves(histories, file)),
        curves_narrow=_image(lambda file: plots.curves(histories, file, columns=1)),
        environment=_environment([_latest(run) for run in runs]),
        **_configuration([run.config for run in runs]),
    )
    files.write(out, page.encode("utf-8", "replace"))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Section:
    """What the page says of one run, as text, but for pictures as URLs of their data."""

    name: str
    model: str
    graph: str
    progress: str
    results: list[dict[str, Any]]
    best_epoch: int | None
    plan: str
    costs: list[tuple[str, str, str]]
    resumed: list[list[tuple[str, str]]]
    bias: str | None
    timeline: str | None


def _section(run: Run, history: History) -> _Section:
    config, graph, best = run.config, graph_of(run), history.best
    measured = [] if best is None else [name for name in METRICS if best.get(f"test_{name}") is not None]
    summary = files.typed(Summary, run.summary, "the result of a run") if run.state == "finished" else None
    partitions = f" in {config.partitions} partitions" if config.partitions > 1 else ""
    epochs = history.epochs[-1]["epoch"] + 1 if history.epochs else 0  # not all may have been evaluated
    sizes = ""
    if summary:
        sizes = f", {summary.parameters:,} parameters, sequences of N = {summary.sequence_nodes:,} nodes"
    state = "Finished" if summary else "Not finished; so far"
    return _Section(
        name=history.name,
        model=f"{model_of(config)}{partitions}, {config.heads} heads, {config.bias_form} bias{sizes}.",
        graph=f"{graph}.",
        progress=f"{state}: {epochs:,} epochs, {len(history.steps):,} steps. {run.folder.absolute()}",
        results=[_result(name, best, graph) for name in measured if best is not None],
        best_epoch=None if best is None else best["epoch"],
        plan=str(Plan.load(run.folder / "plan.json")),
        costs=_costs(summary),
        resumed=[[(name, _text(value)) for name, value in start.items()] for start in run.starts[1:]],
        bias=_image(lambda file: plots.bias_of(run, file)) if best is not None else None,
        timeline=_timeline(run),
    )


def _result(measure: str, best: dict[str, Any], graph: GraphFacts) -> dict[str, Any]:
    test, majority = best[f"test_{measure}"], getattr(graph, f"majority_{measure}", None)  # some measures have none
    return {
        "measure": _MEASURES[measure],
        "test": _share(test),
        "val": _share(best[f"val_{measure}"]),
        "majority": _share(majority),
        "low": majority is not None and test <= majority,
    }


_MEASURES = {
    "accuracy": "accuracy",
    "roc_auc": "ROC AUC",
    "micro_f1": "micro-F1",
    "macro_f1": "macro-F1",
    "average_precision": "average precision",
}


def _costs(summary: Summary | None) -> list[tuple[str, str, str]]:
    def seconds(name: str) -> str:
        value = getattr(summary, name, None)
        return _NONE if value is None else f"{value:.3g} s"

    def size(name: str) -> str:
        value = getattr(summary, name, None)
        return _NONE if value is None else in_words(value)

    return [
        ("a step", seconds("predicted_step_seconds"), seconds("measured_step_seconds")),
        ("memory of a process", size("predicted_memory_bytes"), size("peak_memory_bytes")),
        ("an epoch, training", _NONE, seconds("epoch_seconds")),
        ("an epoch, evaluation", _NONE, seconds("evaluation_seconds")),
        ("preparation", _NONE, seconds("preprocess_seconds")),
    ]


def _timeline(run: Run) -> str | None:
    """A picture of what the ranks did, where there are traces of all ranks of the plan."""
    if not any((run.folder / "trace").glob("rank-*.json.gz")):
        return None
    spans = timeline.read(run.folder / "trace", run.id)
    if {span.rank for span in spans} != {*range(run.config.parallel_plan().world_size)}:
        return None
    return _image(lambda file: plots.timeline(spans, file))


def _image(draw: Callable[[io.BytesIO], None]) -> str:
    """A picture as a URL that holds it."""
    file = io.BytesIO()
    draw(file)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def _configuration(configs: Sequence[TrainConfig]) -> dict[str, list[tuple[str, list[str]]]]:
    """Flags and values: those that differ between runs, those that are not the default, and the others."""
    differing, changed, others = [], [], []
    for field in fields(TrainConfig):
        if field.name in _OF_THIS_RUN:
            continue
        flag, values = f"--{field.name.replace('_', '-')}", [getattr(config, field.name) for config in configs]
        if any(value != values[0] for value in values):
            differing.append((flag, [_text(value) for value in values]))
        elif values[0] != field.default:
            changed.append((flag, [_text(values[0]), _text(field.default)]))
        else:
            others.append((flag, [_text(values[0])]))
    return {"differing": differing, "changed": changed, "others": others}


def _latest(run: Run) -> dict[str, Any]:
    """What the last start says, with what had not changed since the ones before."""
    known: dict[str, Any] = {}
    for start in run.starts:
        known |= start
    known.pop("data", None)
    graph = graph_of(run)
    return known | {"graph read from": graph.path, "fingerprint of the graph": graph.fingerprint}


def _environment(starts: Sequence[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    names = list(dict.fromkeys(name for start in starts for name in start))
    return [(name, [_text(start.get(name)) for start in starts]) for name in names]


def _share(value: float | None) -> str:
    return _NONE if value is None else f"{value:.4f}"


def _text(value: Any) -> str:
    if value is None or value == "":
        return _NONE
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    if isinstance(value, dict):
        return "; ".join(f"{name} {_text(x)}" for name, x in value.items())
    return f"{value:g}" if isinstance(value, float) else str(value)
