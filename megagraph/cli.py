"""The command line: ``megagraph train``, ``predict``, ``plot`` and ``data``."""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch.distributed as dist
import tyro

from megagraph.config import TrainConfig
from megagraph.data.store import FeatureForm
from megagraph.parallel.failure import is_of_a_peer
from megagraph.parallel.mesh import TIMEOUT_SECONDS, on_every_rank, process_group, rank
from megagraph.run import Run


class Job(NamedTuple):
    """What a command asks for, once all processes have read theirs."""

    run: Callable[[], None]
    timeout_seconds: float = TIMEOUT_SECONDS


def train(config: Annotated[TrainConfig, tyro.conf.arg(name="")]) -> Job:
    """Train a model on a graph and leave a run folder; prints the summary as JSON."""

    def job() -> None:
        from megagraph.train import Trainer

        summary = Trainer(config).fit()
        if rank() == 0:
            print(json.dumps(asdict(summary), indent=2))

    return Job(job, config.timeout)


def predict(run: tyro.conf.Positional[Path], /, out: Path | None = None) -> Job:
    """Write class probabilities of every node of the graph that a run was trained on.

    Args:
        run: run folder of ``megagraph train``.
        out: file to write, fp32 [V, classes] as .npy; default RUN/probabilities.npy.
    """

    def job() -> None:
        from megagraph.evaluate import predict as predict_probabilities

        path = run / "probabilities.npy" if out is None else out
        probabilities = predict_probabilities(run, out=path)
        print(f"{path}: {probabilities.shape[0]} nodes x {probabilities.shape[1]} classes")

    return Job(job)


def import_data(
    dataset: tyro.conf.Positional[str], /, *, out: Path, root: Path | None = None, features: FeatureForm = "same"
) -> Job:
    """Make a graph store, a folder that is a --dataset of its own, from a data set.

    Args:
        dataset: what --dataset of megagraph train takes.
        out: folder of the store; one that is there already is replaced once the new one is complete.
        root: folder of the named data sets.
        features: how to keep them; "same" is as they come.
    """

    def job() -> None:
        from megagraph.data.datasets import load_graph
        from megagraph.data.store import describe, write_store

        write_store(load_graph(dataset, root), out, features)
        print(describe(out))

    return Job(job)


def data_info(folder: tyro.conf.Positional[Path], /, verify: bool = False) -> Job:
    """Say what a graph store holds.

    Args:
        folder: of the store.
        verify: read all of it: checksums, ranges, order, and both directions of every edge.
    """

    def job() -> None:
        from megagraph.data.store import describe, verify_store

        print(describe(folder))
        if verify:
            verify_store(folder)
            print("verified: checksums, ranges, order of neighbours, both directions of every edge")

    return Job(job)


def generate_data(*, nodes: int, edges: int, features: int, classes: int, out: Path, seed: int = 0) -> Job:
    """Make a synthetic graph of any size as a graph store, with hubs and with blocks that a partition can find.

    Args:
        nodes: of the graph.
        edges: undirected, none twice; exactly so many.
        features: of a node.
        classes: a class is a run of blocks of about 300 nodes.
        out: folder of the store; one that is there already is replaced once the new one is complete.
        seed: the same one gives the same graph.
    """

    def job() -> None:
        from megagraph.data.generate import generate
        from megagraph.data.store import describe

        generate(out, nodes=nodes, edges=edges, features=features, classes=classes, seed=seed)
        print(describe(out))

    return Job(job)


def data(
    job: tyro.conf.OmitSubcommandPrefixes[
        tyro.conf.OmitArgPrefixes[
            Annotated[Any, tyro.conf.subcommand("import", constructor=import_data)]
            | Annotated[Any, tyro.conf.subcommand("generate", constructor=generate_data)]
            | Annotated[Any, tyro.conf.subcommand("info", constructor=data_info)]
        ]
    ],
) -> Job:
    """Graph stores: graphs on disk, mapped into memory instead of read."""
    return job


def plot(what: tyro.conf.Positional[Literal["timeline"]], run: tyro.conf.Positional[Path], /) -> Job:
    """Draw a figure from the files of a run.

    Args:
        what: timeline: what every rank did in the steps that --trace recorded, and how long its stages waited.
        run: run folder of ``megagraph train --trace``.
    """

    def job() -> None:
        from megagraph import plots, timeline
        from megagraph.planner.plan import Plan

        spans = timeline.read(run / "trace")
        plots.timeline(spans, run / f"{what}.png")
        print(f"{run / what}.png")
        plan = Plan.load(run / "plan.json")
        if plan.pp > 1:
            measured, theory = timeline.measured_bubble(spans), timeline.bubble_in_theory(plan)
            print(
                f"bubble of {plan.schedule}, {plan.pp} ranks x {plan.stages_per_rank} stages, "
                f"{plan.num_microbatches} micro-batches: measured {measured:.1%}, in theory {theory:.1%}"
            )

    return Job(job)


def _defaults() -> TrainConfig:
    """Of the flags of train: with --resume those of the run, but for its layout where another --plan is given."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--plan")
    given, _ = parser.parse_known_args()
    return TrainConfig() if given.resume is None else Run.to_resume(given.resume, new_plan=given.plan is not None)


def _parse() -> Job:
    """What the command line asks for; bad flags are a ValueError that says what tyro says."""
    commands: dict[str, Callable[..., Job]] = {
        "train": train, "predict": predict, "profile": profile, "fit": fit, "search": search, "plot": plot,
    }  # fmt: skip
    said = io.StringIO()
    commands: dict[str, Callable[..., Job]] = {
        "train": functools.partial(train, config=_defaults()),
        "predict": predict,
        "plot": plot,
        "data": data,
    }
    try:
        with contextlib.redirect_stderr(said):
            return tyro.extras.subcommand_cli_from_dict(commands, prog="megagraph")
    except SystemExit as stop:
        if stop.code:
            raise ValueError(f"cannot read the command line\n{said.getvalue().rstrip()}") from None
        raise


def main() -> None:
    """Entry point; an error that names its cause ends with exit code 1 and without a traceback."""
    try:
        _run()
    except SystemExit:
        raise
    except BaseException as error:
        named = (ValueError, OSError, ImportError, NotImplementedError, FloatingPointError)
        short = isinstance(error, named) or is_of_a_peer(error)
        message = f"megagraph: error: {error}" if short else traceback.format_exc()
        print(message, file=sys.stderr, flush=True)
        if dist.is_initialized():
            os._exit(1)  # an orderly exit would wait for ranks that may be waiting for this one
        raise SystemExit(1) from error


def _run() -> None:
    try:
        job, error = _parse(), None
    except Exception as caught:
        job, error = Job(lambda: None), caught

    def agree() -> None:
        if error is not None:
            raise error

    with process_group(job.timeout_seconds):
        on_every_rank(agree)
        job.run()
