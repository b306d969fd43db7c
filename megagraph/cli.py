"""The command line: ``megagraph train`` and ``megagraph predict``."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import numpy as np
import torch.distributed as dist
import tyro

from megagraph.config import TrainConfig
from megagraph.parallel.mesh import on_every_rank, process_group, rank

Job = Callable[[], None]


def train(config: Annotated[TrainConfig, tyro.conf.arg(name="")]) -> Job:
    """Train a model on a graph and leave a run folder; prints the summary as JSON."""

    def job() -> None:
        from megagraph.train import Trainer

        summary = Trainer(config).fit()
        if rank() == 0:
            print(json.dumps(asdict(summary), indent=2))

    return job


def predict(run: tyro.conf.Positional[Path], /, out: Path | None = None) -> Job:
    """Write class probabilities of every node of the graph that a run was trained on.

    Args:
        run: run folder of ``megagraph train``.
        out: file to write, fp32 [V, classes] as .npy; default RUN/probabilities.npy.
    """

    def job() -> None:
        from megagraph.evaluate import predict as predict_probabilities

        path = run / "probabilities.npy" if out is None else out
        probabilities = predict_probabilities(run)
        np.save(path, probabilities)
        print(f"{path}: {probabilities.shape[0]} nodes x {probabilities.shape[1]} classes")

    return job


def _parse() -> Job:
    """What the command line asks for; bad flags are a ValueError that says what tyro says."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.extras.subcommand_cli_from_dict({"train": train, "predict": predict}, prog="megagraph")
    except SystemExit as stop:
        if stop.code:
            raise ValueError(f"cannot read the command line\n{said.getvalue().rstrip()}") from None
        raise


def main() -> None:
    """Entry point; an error that names its cause ends with exit code 1 and without a traceback."""
    try:
        with process_group():
            on_every_rank(_parse)()
    except Exception as error:
        named = (ValueError, OSError, ImportError, NotImplementedError, FloatingPointError)
        message = f"megagraph: error: {error}" if isinstance(error, named) else traceback.format_exc()
        print(message, file=sys.stderr, flush=True)
        if dist.is_initialized():
            time.sleep(1)  # the launcher ends the other ranks once this one is gone: they have to say why, too
            os._exit(1)  # an orderly exit would wait for ranks that may be waiting for this one
        raise SystemExit(1) from error
