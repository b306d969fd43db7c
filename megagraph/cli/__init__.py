"""The command line: ``train`` and ``predict``; ``profile``, ``fit`` and ``search``; ``plot`` and ``data``."""

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
from typing import Annotated

import torch.distributed as dist
import tyro

from megagraph.cli.data import data
from megagraph.cli.job import Job
from megagraph.cli.planner import fit, profile, search
from megagraph.cli.plot import plot
from megagraph.config import TrainConfig
from megagraph.parallel.failure import is_of_a_peer
from megagraph.parallel.mesh import on_every_rank, process_group, rank
from megagraph.run import Run


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


def _defaults() -> TrainConfig:
    """Of the flags of train: with --resume those of the run, but for its layout where another --plan is given."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--plan")
    given, _ = parser.parse_known_args()
    return TrainConfig() if given.resume is None else Run.to_resume(given.resume, new_plan=given.plan is not None)


def _parse() -> Job:
    """What the command line asks for; bad flags are a ValueError that says what tyro says."""
    said = io.StringIO()
    commands: dict[str, Callable[..., Job]] = {
        "train": functools.partial(train, config=_defaults()),
        "predict": predict,
        "profile": profile,
        "fit": fit,
        "search": search,
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
