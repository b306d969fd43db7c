"""The command line: ``train``, ``predict``, ``evaluate``, ``report``, ``plot``; ``profile``, ``fit``, ``search``; and
``data``."""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import json
import logging
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import tyro

from megagraph import __version__
from megagraph.cli.data import data
from megagraph.cli.groups import NOT_OF_PROFILE, check_once, flags_of_a_run, in_groups, read_config, unknown
from megagraph.cli.job import Changes, Job
from megagraph.cli.planner import fit, profile, search
from megagraph.cli.plot import plot, report
from megagraph.config import AUTO, Part, TrainConfig

# what a command needs is imported by its job: to say what a flag means takes less time than to import torch
_LEVELS = ("debug", "info", "warning", "error")


def train(config: TrainConfig, dry_run: bool = False) -> Job:
    """Train a model on a graph and leave a run folder; prints the summary as JSON.

    Example: megagraph train --dataset cora --root DATA --out runs/cora

    Args:
        dry_run: read and prepare the graph and print what would be trained, and what a step would take where a profile
            of this machine is kept; trains nothing and leaves no run folder.
    """

    def job() -> None:
        from megagraph.parallel.mesh import rank

        if dry_run:
            from megagraph.dry_run import dry_run as would_train

            result = would_train(config)
        else:
            from megagraph.train import Trainer

            result = asdict(Trainer(config).fit())
        if rank() == 0:
            print(json.dumps(result, indent=2, default=str))

    return Job(job, config.timeout, several=True)


def predict(
    run: tyro.conf.Positional[Path],
    /,
    out: Path | None = None,
    changes: tyro.conf.OmitArgPrefixes[Changes] = Changes(),
) -> Job:
    """Write class probabilities of every node of a graph, by default the one that the run was trained on.

    Args:
        run: run folder of ``megagraph train``.
        out: file to write, fp32 [V, classes] as .npy, or a line a node as .csv or .parquet, with its class, or of
            several labels those of at least 1/2; default RUN/probabilities.npy.
    """

    def job() -> None:
        from megagraph.evaluate import predict as predict_probabilities
        from megagraph.parallel.mesh import rank
        from megagraph.run import Run

        path = run / "probabilities.npy" if out is None else out
        probabilities = predict_probabilities(run, out=path if rank() == 0 else None, **changes.given())
        if rank() == 0:
            what = "labels" if Run.open(run).model_config.multi_label else "classes"
            print(f"{path}: {probabilities.shape[0]} nodes x {probabilities.shape[1]} {what}")

    return Job(job, several=True)


def evaluate(
    run: tyro.conf.Positional[Path],
    /,
    ablate: tuple[Part, ...] = (),
    changes: tyro.conf.OmitArgPrefixes[Changes] = Changes(),
) -> Job:
    """Print how good a run is on the validation and test nodes of its split, and what its parts are worth.

    Args:
        run: run folder of ``megagraph train``.
        ablate: parts to leave out, one at a time. bias: the learned part of the attention bias is zero; initial: it is
            as before training; features: those of all nodes are zero, labels among them; labels: no node's label is
            input; super_nodes, global_token: nobody attends to super nodes, or to global tokens; convolution: nobody
            has neighbours in it; samples: one sequence of a target in place of all.
    """

    def job() -> None:
        from megagraph import ablation
        from megagraph.parallel.mesh import rank

        results = ablation.evaluate(run, ablate=ablate, **changes.given())
        if rank() == 0:
            print(json.dumps(results, indent=2))

    return Job(job, several=True)


def _defaults(words: list[str]) -> Any:
    """Defaults of the flags of train: those of the run that --resume names, but for its layout where another --plan is
    given, and over them those of --config."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"megagraph {__version__}")
    for flag, kind in {"resume": Path, "out": Path, "plan": str, "config": Path}.items():
        parser.add_argument(f"--{flag}", type=kind, nargs="?")  # where a value is missing tyro says so
    given, _ = parser.parse_known_args(words)
    if words[:1] not in (["train"], ["profile"]):
        return TrainConfig()
    if words[0] == "profile":
        given.resume = None  # none of its flags
    if given.config is not None and given.resume not in (None, AUTO):
        raise ValueError(f"a resumed run has its own configuration, got --config {given.config} beside --resume")
    values = {} if given.config is None else read_config(given.config, new_plan=given.plan is not None)
    folder = given.resume
    if folder == AUTO:
        folder = values.get("out") if given.out is None else given.out
    defaults = TrainConfig()
    if folder is not None and (given.resume != AUTO or (folder / "config.json").is_file()):
        from megagraph.run import Run

        new_plan = given.plan is not None or "plan" in values
        defaults = replace(Run.to_resume(folder, new_plan=new_plan), resume=given.resume)
    return SimpleNamespace(**vars(defaults) | values)


class _ToStderr(logging.Handler):
    """Lines on what is stderr now, above a bar of progress."""

    def emit(self, record: logging.LogRecord) -> None:
        bars = sys.modules.get("tqdm")
        write = print if bars is None else bars.tqdm.write
        prefix = f"megagraph: {record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        write(prefix + self.format(record), file=sys.stderr)


def _take_log_level(words: list[str]) -> list[str]:
    """What the logger is to say goes to stderr, of a run with several processes by the first; gives the other words."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--log-level", choices=_LEVELS, default="info")
    try:
        given, others = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise ValueError(f"cannot read the command line: {error}") from error
    level = getattr(logging, given.log_level.upper())
    logger = logging.getLogger("megagraph")
    logger.setLevel(level if os.environ.get("RANK", "0") == "0" else max(level, logging.WARNING))
    logger.handlers = [_ToStderr()]
    return others


def _parse() -> Job:
    """What the command line asks for; bad flags are a ValueError that says what tyro says."""
    said = io.StringIO()
    words = _take_log_level(sys.argv[1:])
    check_once(words)
    defaults, usual = _defaults(words), bool({"-h", "--help"} & {*words})
    commands: dict[str, Callable[..., Job]] = {
        "train": in_groups(train, flags_of_a_run(defaults, usual=usual), usual=usual),
        "predict": predict,
        "evaluate": evaluate,
        "profile": in_groups(profile, flags_of_a_run(defaults, usual=usual, without=NOT_OF_PROFILE), usual=usual),
        "fit": fit,
        "search": search,
        "plot": plot,
        "report": report,
        "data": data,
    }
    try:
        with contextlib.redirect_stderr(said):
            return tyro.extras.subcommand_cli_from_dict(
                commands,
                prog="megagraph",
                description=f"--log-level {'|'.join(_LEVELS)} beside any command: what stderr says, default info.",
                args=["--help" if word == "--help-all" else word for word in words],
                config=(tyro.conf.DisallowNone,),
            )
    except SystemExit as stop:
        if stop.code:
            text = said.getvalue().rstrip()
            raise ValueError(unknown(words, text) or f"cannot read the command line\n{text}") from None
        raise


def main() -> None:
    """Entry point. Exit status 0: done, 75: left with a checkpoint, to be started again, 130: interrupted, 1: an error.

    An error that names its cause ends without a traceback.
    """
    try:
        _run()
    except SystemExit:
        raise
    except KeyboardInterrupt as interrupt:
        run: Path | None = getattr(interrupt, "run", None)
        go_on = "" if run is None else f"; go on with megagraph train --resume {run}"
        print(f"megagraph: interrupted{go_on}", file=sys.stderr, flush=True)
        _end(130)
    except BrokenPipeError:  # whoever read what is printed has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _end(1)
    except BaseException as error:
        named = (ValueError, OSError, ImportError, NotImplementedError, FloatingPointError, MemoryError)
        short = isinstance(error, named) or _says_enough(error)
        message = f"megagraph: error: {_said(error)}" if short else traceback.format_exc()
        print(message, file=sys.stderr, flush=True)
        _end(1)


def _said(error: BaseException) -> str:
    """The words for an error; one of the system says neither of what it was nor what to do: both are added."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    what = "" if error.filename is None else f" {error.filename}"
    full = error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
    do = "make room, or name another folder" if full else "look at its name and rights, or name another"
    return f"could not {'write' if full else 'read or write'}{what}: {error.strerror}; {do}"


def _says_enough(error: BaseException) -> bool:
    from megagraph.parallel.failure import is_of_a_peer, is_out_of_memory

    return is_of_a_peer(error) or is_out_of_memory(error)


def _end(code: int) -> NoReturn:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        os._exit(code)  # an orderly exit would wait for ranks that may be waiting for this one
    raise SystemExit(code)


def _run() -> None:
    try:
        job, error = _parse(), None
    except Exception as caught:
        if "WORLD_SIZE" not in os.environ:  # nobody else is to know
            raise
        job, error = Job(lambda: None), caught
    from megagraph.parallel.mesh import on_every_rank, process_group, world_size

    def agree() -> None:
        if error is not None:
            raise error
        if world_size() > 1 and not job.several:  # each would write the same files
            raise ValueError(f"expected one process for this command, got {world_size()}; start it without torchrun")

    with process_group(job.timeout_seconds):
        on_every_rank(agree)
        job.run()
