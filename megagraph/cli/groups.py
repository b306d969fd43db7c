"""The flags of a run in the groups of --help, the usual ones or all, and a file with some of them."""

from __future__ import annotations

import difflib
import inspect
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, make_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import docstring_parser
import tyro

from megagraph.cli.job import Job
from megagraph.config import TrainConfig


@dataclass(frozen=True)
class _Group:
    """Flags that answer one question; those below ``rare`` are left to --help-all."""

    about: str
    usual: tuple[str, ...]
    rare: tuple[str, ...] = ()


GROUPS = {
    "graph": _Group("What to learn from.", ("dataset", "root"), ("split",)),
    "run": _Group(
        "Where it goes, and on what it runs.",
        ("out", "resume", "device", "seed"),
        (
            "dtype", "workers", "resume_step", "weights", "checkpoint_every", "keep", "time_limit", "lock_wait",
            "bad_steps", "timeout", "trace", "tensorboard",
        ),
    ),
    "model": _Group(
        "What is trained.",
        ("model", "layers", "dim", "heads"),
        ("embedding", "ffn_dim", "global_tokens", "dropout", "input_dropout", "attention_dropout", "max_degree"),
    ),
    "bias": _Group(
        "What attention knows of the graph.",
        ("bias",),
        ("channels", "power_scope", "power_gib", "max_distance", "shuffle_structure"),
    ),
    "batches": _Group(
        "How a graph becomes sequences.",
        ("batching", "batch_size"),
        (
            "samples", "sample_nodes", "candidates", "epsilon", "super_ratio", "super_nodes", "sequence_nodes", "hops",
            "top", "max_pairs", "propagate",
        ),
    ),
    "training": _Group(
        "How long, and how.",
        ("epochs", "learning_rate", "patience"),
        ("max_steps", "warmup", "weight_decay", "bias_lr_scale", "clip_norm", "metric"),
    ),
    "processes": _Group(
        "Several processes, started by torchrun.",
        ("plan", "microbatches"),
        (
            "schedule", "checkpoint", "shard", "comm", "stage_layers", "stages_per_rank", "shares", "across", "pp",
            "cp", "dp", "memory_gib", "any_fit",
        ),
    ),
}  # fmt: skip


def in_groups(command: Callable[..., Job], defaults: TrainConfig, *, usual: bool) -> Callable[..., Job]:
    """A command whose first argument is a ``TrainConfig``, with the fields of that as flags in groups.

    Args:
        defaults: what flags are that are not given.
        usual: without the rare ones, to be looked at only.
    """
    flags = _flags(defaults, usual)
    first, *others = inspect.signature(command).parameters.values()
    hints = get_type_hints(command, include_extras=True)
    config_help = "Values of flags from a file, such as epochs = 20 in TOML, or the config.json of a run."
    added = {
        "flags": (Annotated[type(flags), tyro.conf.arg(name="")], flags),
        "config": (Annotated[Path | None, tyro.conf.arg(help=config_help)], None),
    }

    def run(flags: Any, config: Path | None, **rest: Any) -> Job:
        values = {name: value for group in vars(flags).values() for name, value in vars(group).items()}
        return command(**{first.name: TrainConfig(**values)}, **rest)

    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default) for name, (_, default) in added.items()
    ]
    parameters += [own.replace(kind=inspect.Parameter.KEYWORD_ONLY) for own in others]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {name: kind for name, (kind, _) in added.items()} | {
        own.name: hints[own.name] for own in others
    }
    run.__doc__ = command.__doc__
    return run


def _flags(defaults: TrainConfig, usual: bool) -> Any:
    hints = get_type_hints(TrainConfig)
    said = {
        part.arg_name: " ".join((part.description or "").split())
        for part in docstring_parser.parse_from_object(TrainConfig).params
    }
    groups: dict[str, Any] = {}
    for title, group in GROUPS.items():
        names = group.usual if usual else group.usual + group.rare
        if names:
            kinds = [(name, Annotated[hints[name], tyro.conf.arg(help=said.get(name))]) for name in names]
            kind = make_dataclass(title, kinds, frozen=True, kw_only=True, namespace={"__doc__": group.about})
            groups[title] = kind(**{name: getattr(defaults, name) for name in names})
    whole = [(title, Annotated[type(values), tyro.conf.OmitArgPrefixes]) for title, values in groups.items()]
    return make_dataclass("Flags", whole, frozen=True, kw_only=True)(**groups)


def read_config(path: Path) -> TrainConfig:
    """The configuration in a TOML file of the flags' names, or in the config.json of a run.

    Raises:
        FileNotFoundError, ValueError: there is no such file, or a name or value of it is wrong.
    """
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        try:
            values = json.loads(text)
        except ValueError as error:
            raise ValueError(f"expected the config.json of a run in {path}: {error}") from error
        begun = ("resume", "resume_step", "out")  # of that run, not of this one
        given = {name: value for name, value in values.items() if name not in begun} if type(values) is dict else {}
        given.pop("checksum", None)
    else:
        given = {name.replace("-", "_"): value for name, value in _parse_toml(path, text).items()}
    known = [own.name for own in fields(TrainConfig)]
    for name in given:
        if name not in known:
            meant = difflib.get_close_matches(name, known, n=1)
            raise ValueError(
                f"expected names of flags in {path}, got {name!r}"
                + (f"; did you mean {meant[0]!r}?" if meant else "; megagraph train --help-all lists them")
            )
    return TrainConfig.from_json({own.name: own.default for own in fields(TrainConfig)} | given)


def _parse_toml(path: Path, text: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"expected TOML such as epochs = 20 in {path}: {error}") from error
