"""The flags of a run in the groups of --help, the usual ones or all, and a file with some of them."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, make_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import docstring_parser
import tyro

from megagraph import files
from megagraph.cli.job import Job
from megagraph.config import LAYOUT_FIELDS, SEARCH_FIELDS, TrainConfig
from megagraph.flags import closest


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
            "bad_steps", "timeout", "cuda_graphs", "trace", "tensorboard", "wandb",
        ),
    ),
    "model": _Group(
        "What is trained.",
        ("model", "layers", "dim", "heads"),
        (
            "embedding", "ffn_dim", "global_tokens", "dropout", "input_dropout", "attention_dropout", "init",
            "max_degree", "convolution",
        ),
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
            "top", "max_pairs", "partitions", "propagate", "degree_input", "label_input",
        ),
    ),
    "training": _Group(
        "How long, and how.",
        ("epochs", "learning_rate", "patience"),
        ("max_steps", "evaluate_every", "warmup", "weight_decay", "bias_lr_scale", "clip_norm", "metric"),
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


NOT_OF_PROFILE = (  # of a run folder and its training, and of the plan, which a profile is there to find
    "out", "resume", "resume_step", "weights", "checkpoint_every", "keep", "time_limit", "lock_wait", "bad_steps",
    "cuda_graphs", "trace", "tensorboard", "wandb", "epochs", "max_steps", "evaluate_every", "patience",
    "learning_rate", "warmup", "weight_decay", "bias_lr_scale", "clip_norm",
    *GROUPS["processes"].usual, *GROUPS["processes"].rare,
)  # fmt: skip


def in_groups(command: Callable[..., Job], flags: Any, *, usual: bool) -> Callable[..., Job]:
    """A command whose first argument is a ``TrainConfig``, with the fields of that as ``flags_of_a_run``."""
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
    about, args, values = inspect.cleandoc(command.__doc__ or "").partition("\nArgs:\n")
    hint = "\nThe usual flags; --help-all shows all of them.\n" if usual else ""
    run.__doc__ = about + hint + args + values
    return run


def flags_of_a_run(defaults: Any, *, usual: bool, without: tuple[str, ...] = ()) -> Any:
    """The fields of a ``TrainConfig`` in groups, each group an attribute.

    Args:
        defaults: what flags are that are not given, each an attribute.
        usual: without the rare ones, to be looked at only.
        without: those that a command does not have.
    """
    hints = get_type_hints(TrainConfig)
    said = {
        part.arg_name: " ".join((part.description or "").split())
        for part in docstring_parser.parse_from_object(TrainConfig).params
    }
    groups: dict[str, Any] = {}
    for title, group in GROUPS.items():
        names = [name for name in group.usual + group.rare * (not usual) if name not in without]
        if names:
            kinds = [(name, Annotated[hints[name], tyro.conf.arg(help=said.get(name))]) for name in names]
            kind = make_dataclass(title, kinds, frozen=True, kw_only=True, namespace={"__doc__": group.about})
            groups[title] = kind(**{name: getattr(defaults, name) for name in names})
    whole = [(title, Annotated[type(values), tyro.conf.OmitArgPrefixes]) for title, values in groups.items()]
    return make_dataclass("Flags", whole, frozen=True, kw_only=True)(**groups)


def read_config(path: Path, *, new_plan: bool = False) -> dict[str, Any]:
    """The flags in a TOML file of their names, or in the config.json of a run; whether they go together is seen once
    those of the command line have taken the place of some.

    Args:
        new_plan: another plan will be put in, so the layout of a run is not taken over.

    Raises:
        FileNotFoundError, ValueError: there is no such file, or a name or the type of a value is wrong.
    """
    if path.suffix == ".json":
        given = files.read_json(path, "the config.json of a run", by_hand=True)
        not_taken = {"run_id", "resume", "resume_step", "out"}  # of that run, not of this one
        not_taken |= {*LAYOUT_FIELDS, *SEARCH_FIELDS} if new_plan else set()
        given = {name: value for name, value in given.items() if name not in not_taken}
    else:
        given = _read_toml(path)
    hints = get_type_hints(TrainConfig)
    known = [own.name for own in fields(TrainConfig)]
    for name, value in given.items():
        if name not in known:
            said = meant(name, known) or "; megagraph train --help-all lists them"
            raise ValueError(f"expected names of flags in {path}, got {name!r}{said}")
        given[name] = files.of_type(hints[name], value, f"flags in {path}", name)
    return given


def _read_toml(path: Path) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        values = tomllib.loads(files.read_text(path, "flags"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"expected TOML such as epochs = 20 in {path}: {error}") from error
    given = {name.replace("-", "_"): value for name, value in values.items()}
    if at := [name for name in ("resume", "resume_step") if name in given]:
        raise ValueError(f"{at[0]} is a flag of the command line, got it in {path}; take it away there")
    if len(given) < len(values):
        raise ValueError(f"expected each flag once in {path}, got one with - and with _: {', '.join(values)}")
    return given


_LISTS = ("--label", "--drop", "--ablate", "--rows", "--world-sizes")  # flags with several values


def check_once(words: list[str]) -> None:
    """Raise ValueError for a list that is given in parts, of which tyro would take the last one alone."""
    given = [word.partition("=")[0].replace("_", "-") for word in words]
    for flag in _LISTS:
        if given.count(flag) > 1:
            raise ValueError(f"expected {flag} once, with all of its values after it, as in {flag} a b; got it again")


_OTHER_NAMES = {"lr": "learning_rate", "hidden_dim": "dim", "num_layers": "layers", "num_heads": "heads"}


def meant(name: str, known: Iterable[str]) -> str:
    """What an error says of a name that is none: which one it may mean, or nothing."""
    found = _OTHER_NAMES.get(name.lower()) or closest(name, known)
    return f"; did you mean {found}?" if found else ""


def unknown(words: list[str], said: str) -> str | None:
    """In place of what tyro says of a command or a flag that there is not: what there is, and which is meant."""
    said = said.replace("│", " ")  # of the box
    wrong = re.search(r"Unrecognized (?:or misplaced )?options:\s+([^\s,]+)", said)
    if wrong is None:
        return None
    word, there = wrong[1], re.search(r"Available subcommands:([\w,\s]+)", said)
    if there is not None:
        commands = re.findall(r"\w+", there[1])
        return f"expected one of the commands {', '.join(commands)}, got {word!r}{meant(word, commands)}"
    if not word.startswith("--"):
        return None
    command, name = words[0], word.partition("=")[0][2:].replace("-", "_")
    own = [own.name for own in fields(TrainConfig) if command != "profile" or own.name not in NOT_OF_PROFILE]
    own.append("config")
    if command == "profile" and name in NOT_OF_PROFILE:
        found = "; it is of megagraph train, and changes nothing that a profile measures"
        found += "; what profile writes is named by --rows" if name == "out" else ""
    elif command in ("train", "profile"):
        found = meant(name, own).replace("mean ", "mean --").replace("_", "-")
    else:  # tyro's suggestions are good where flags are few
        near = re.search(r"Perhaps you meant:\s+(--[\w-]+)", said)
        found = "" if near is None else f"; did you mean {near[1]}?"
        found = "; other commands have it" if near is not None and near[1] == word else found
    return f"expected flags of megagraph {command}, got {word}{found or '; --help lists them'}"
