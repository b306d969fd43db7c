"""Generated input that is wrong, for `python -m bench.damage --bad-input`: flags, .npz contents, headers, JSON files.

Hypothesis draws the cases, the same ones for the same seed and sources. Paths stay in the working directory, no data
set is downloaded, and numbers that ask for honest work without end, such as 10^6 layers, are not drawn: they are small,
or so large that no machine could do it. `profile` shares the flags of `train` and takes 20 s: only its own are drawn.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bench.damage import Case
from bench.judge import COMMANDS, PROFILED, SIZES, seal
from megagraph import files
from megagraph.config import TrainConfig

NUMBERS = (
    "nan", "inf", "-inf", "-1", "0", "1", "2", "3", "-0.0", "0.5", "1.5", "1e-300", "1e300", "-1e300", "2147483647",
    "2147483648", "4294967296", "9223372036854775807", "9223372036854775808", "1" + "0" * 30, "1" + "0" * 400,
    "9" * 5000, "-2147483649",
)  # fmt: skip
WORDS = (
    "", " ", "x", "auto", "None", "true", "cora", "1,1", "1,1,1", "0,1,1", "-1,1,1", "2,1,1", "1,1,1,1",
    "9" * 30 + ",1,1",
    "nan,1,1", "0x10", "1_0", "\u0661", "\udcff", "\n", "a" * 5000, "3h", "-3h", "0s", "9" * 400 + "h", "1-00:00:00",
    "cuda", "cuda:99", "cpu:1", "meta", "mps", "cpu", "ring", "gpipe", "zero_bubble", "interleaved", "1f1b",
)  # fmt: skip
PATHS = (
    "missing", "store", "store/header.json", "store/indptr.npy", "graph.npz", "profile.json", "profile.json/under",
    "finished", "finished/model.safetensors", "finished/config.json", "stopped", "stopped/checkpoints", "link", "loop",
    "pipe", "a/b/c", ".", "n" * 300, "cost.json", "plan.json", "empty", "empty.npz", "empty.json",
)  # fmt: skip
HINTS = get_type_hints(TrainConfig)
TRAIN_FLAGS = {f.name.replace("_", "-"): f.name for f in fields(TrainConfig)}
FLAGS = {
    "train": tuple(TRAIN_FLAGS),
    "predict": ("out", "dataset", "root", "device"),
    "data import": ("out", "root", "features"),
    "data info": ("verify",),
    "data generate": ("nodes", "edges", "features", "classes", "out", "seed"),
    "fit": ("out",),
    "search": (
        "world-size", "memory-gib", "pp", "cp", "dp", "microbatches", "schedule", "batch-sequences", "layers", "strict",
        "explain", "out",
    ),
    "plot costmodel": ("rows", "out"),
    "plot pareto": ("world-size", "memory-gib", "out"),
    "plot stages": ("out",),
    "plot timeline": ("out",),
    "profile": ("rows", "seconds"),
}  # fmt: skip
GOOD = {
    "train": f"train {SIZES} --dataset store --max-steps 1 --out new",
    "predict": "predict finished --out made.npy",
    "data import": "data import graph.npz --out made",
    "data info": "data info store",
    "data generate": "data generate --nodes 100 --edges 200 --features 4 --classes 2 --out made",
    "fit": "fit profile.json --out made.json",
    "search": "search cost.json --world-size 4 --memory-gib 8 --out made.json",
    "plot costmodel": "plot costmodel cost.json --rows profile.json --out made.png",
    "plot pareto": "plot pareto cost.json --world-size 4 --memory-gib 8 --out made.png",
    "plot stages": "plot stages cost.json plan.json --out made.png",
    "plot timeline": "plot timeline finished --out made.png",
    "profile": f"profile {PROFILED} --dataset store --seconds 0.1 --no-cache --rows made.json",
}
POSITIONALS = {"predict": 1, "data import": 1, "data info": 1, "fit": 1, "search": 1, "plot costmodel": 1,
               "plot pareto": 1, "plot stages": 2, "plot timeline": 1}  # fmt: skip

values = st.one_of(st.sampled_from(NUMBERS), st.sampled_from(WORDS), st.sampled_from(PATHS))


@st.composite
def flags(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A command with one or two flags or files that are wrong."""
    name = draw(st.sampled_from([*["train"] * 20, *["search", "plot pareto", "data generate"] * 2, *FLAGS]))
    arguments = GOOD[name].split()
    if name in POSITIONALS and draw(st.integers(0, 3)) == 0:
        at = len(name.split()) + draw(st.integers(0, POSITIONALS[name] - 1))
        arguments[at] = draw(st.sampled_from(PATHS))
        return name, arguments
    for flag in draw(st.lists(st.sampled_from(FLAGS[name]), min_size=1, max_size=2, unique=True)):
        if f"--{flag}" in arguments:
            at = arguments.index(f"--{flag}")
            del arguments[at : at + 2]
        hint = HINTS.get(TRAIN_FLAGS.get(flag, "") if name in ("train", "profile") else "", str)
        if hint is bool or flag in ("strict", "verify"):
            arguments.append(f"--{flag}")
            continue
        kinds = {hint, *get_args(hint)}
        if draw(st.integers(0, 9)) == 0:
            picked = draw(values)
        elif Path in kinds or flag in ("out", "rows", "root", "dataset"):
            picked = draw(st.sampled_from(PATHS))
        elif kinds & {int, float} or (
            name not in ("train", "profile") and flag not in ("schedule", "explain", "features", "device")
        ):
            picked = draw(st.sampled_from(NUMBERS))
        else:
            choices = get_args(hint) if get_origin(hint) is Literal else ()
            picked = draw(st.sampled_from([*choices, *WORDS]))
        arguments.append(f"--{flag}={picked}")
    return name, arguments


# ---- files


NESTED: Any = [[[[]]]]
ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 0.5, -0.5, 1e300, float("nan"), float("inf"), 1 << 31, 1 << 63, 10**30, 10**400, "",
    "x", "1", "auto", "missing", "..", "a" * 5000, "\x00", "\ud800", [], [1], [1, 2, 3], ["x"], {}, {"x": 1},
    NESTED, "__0_0.distcp", [1 << 40], [-1],
)  # fmt: skip
JSON_FILES = {
    "cost.json": ("search", "pareto", "stages", "costmodel"),
    "plan.json": ("stages",),
    "profile.json": ("fit", "costmodel"),
    "store/header.json": ("train", "info"),
    "store/cache/index.json": ("train",),
    "finished/config.json": ("predict", "again"),
    "finished/model.json": ("predict", "again"),
    "finished/run.json": ("predict", "again"),
    "finished/summary.json": ("again",),
    "finished/plan.json": ("timeline",),
    "stopped/config.json": ("resume", "auto"),
    "stopped/model.json": ("resume", "auto"),
    "stopped/run.json": ("resume", "auto"),
    "stopped/metrics.jsonl": ("resume", "auto"),
    "stopped/checkpoints/step-000003/manifest.json": ("resume",),
    "stopped/checkpoints/step-000003/metadata.json": ("resume",),
    "stopped/checkpoints/step-000003/metrics.jsonl": ("resume", "auto"),
    "stopped/checkpoints/step-000003/begun.json": ("resume",),
    "finished/trace/rank-0.json.gz": ("timeline",),
}


@st.composite
def json_file(draw: st.DrawFn) -> tuple[str, str, int, bool]:
    """A file, a command that reads it, what else is drawn, and whether its checksum is made anew."""
    name = draw(st.sampled_from(sorted(JSON_FILES)))
    return name, draw(st.sampled_from(JSON_FILES[name])), draw(st.integers(0, 1 << 30)), draw(st.integers(0, 4)) > 0


def change(draw: random.Random, values: Any) -> str:
    """Put something odd somewhere into a JSON value."""
    place, where, steps = values, "", 0
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            return "nothing"
        key = draw.choice(keys)
        inner, steps = place[key], steps + 1
        where += f"/{key}"
        if isinstance(inner, (dict, list)) and inner and draw.random() < 0.8:
            place = inner
            continue
        break
    kind = draw.random()
    if kind < 0.15:
        del place[key]
        return f"without {where}"
    if kind < 0.25 and isinstance(place, dict):
        place["added"] = draw.choice(ODD)
        return f"added beside {where}"
    if kind < 0.3 and isinstance(place, list):
        place.append(copy.deepcopy(draw.choice(place)))
        return f"one more beside {where}"
    if kind < 0.4 and type(inner) in (int, float):
        place[key] = draw.choice([-inner, inner + 1, inner * 2, inner * 10**6, type(inner)(0), str(inner)])
    else:
        place[key] = draw.choice(ODD)
    return f"{where} = {str(place[key])[:40]!r}"


def json_case(name: str, command: str, number: int, sealed: bool) -> Case:
    def prepare(place: Path) -> tuple[str, str]:
        import gzip

        draw = random.Random(number)
        path = place / name
        text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
        lines = path.suffix == ".jsonl"
        found: Any = [json.loads(line) for line in text.splitlines()] if lines else json.loads(text)
        whole: Any = [found]
        done = change(draw, whole) if draw.random() < 0.1 else change(draw, found)
        found = whole[0] if whole else None
        if sealed and isinstance(found, dict) and "checksum" in found:
            text = seal(found)
        elif sealed and name == "profile.json" and isinstance(found, list):
            rows = [
                {k: v for k, v in row.items() if k != "checksum"} if isinstance(row, dict) else row for row in found
            ]
            text = json.dumps([files.add_checksum(row) if isinstance(row, dict) else row for row in rows])
        elif lines and isinstance(found, list):
            text = "".join(json.dumps(line) + "\n" for line in found)
        else:
            text = json.dumps(found)
        content = text.encode(errors="surrogatepass")
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
        if sealed and "/step-" in name:  # as who writes the file could do it
            folder = path.parent
            manifest = json.loads((folder / "manifest.json").read_text()) if path.name != "manifest.json" else None
            if manifest is not None:
                manifest["files"][path.name] = files.checksum(path)
                (folder / "manifest.json").write_text(json.dumps(manifest))
            (folder / "committed").write_text(files.checksum(folder / "manifest.json"))
        return f"JSON {name.replace('step-000003', 'step')}", done + (", checksum anew" if sealed else "")

    return Case(command, COMMANDS[command].arguments.split(), prepare, known=False)


dtypes = ["i1", "u1", ">i4", "i8", "u8", "f2", "f4", ">f8", "g", "?", "c8", "U3", "S2", "M8[s]", "f4,i4", "O"]
arrays = hnp.arrays(st.sampled_from(dtypes[:-1]), hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=4))
KEYS = [f"{key}_{part}" for key in ("adj", "attr") for part in ("data", "indices", "indptr", "shape")] + ["labels"]
EDITS: dict[str, Callable[[np.ndarray], Any]] = {
    "negated": lambda x: -x.astype(np.int64),
    "reversed": lambda x: x[::-1].copy(),
    "cut": lambda x: x[: len(x) // 2],
    "twice": lambda x: np.concatenate([x, x]),
    "plus 2^31": lambda x: x.astype(np.int64) + (1 << 31),
    "huge": lambda x: x.astype(np.int64) + (1 << 62),
    "floats": lambda x: x.astype(np.float64) + 0.5,
    "nan": lambda x: x * np.nan,
    "1e300": lambda x: x * 0.0 + 1e300,
    "objects": lambda x: x.astype(object),
    "zeros": lambda x: x * 0,
    "column": lambda x: x[:, None],
    "gone": lambda x: None,
}
npz = st.dictionaries(st.sampled_from(KEYS), st.sampled_from(sorted(EDITS)) | arrays, min_size=1, max_size=2)


def npz_case(changes: dict[str, Any], command: str) -> Case:
    arguments = {
        "train": f"train {SIZES} --dataset graph.npz --max-steps 1 --out new",
        "import": "data import graph.npz --out made",
    }[command]

    def prepare(place: Path) -> tuple[str, str]:
        with np.load(place / "graph.npz") as found:
            content: dict[str, Any] = dict(found)
        for key, edit in changes.items():
            with np.errstate(all="ignore"):
                content[key] = EDITS[edit](content[key]) if isinstance(edit, str) else edit
        np.savez(place / "graph.npz", **{key: value for key, value in content.items() if value is not None})
        return ".npz", str({key: edit if isinstance(edit, str) else repr(edit) for key, edit in changes.items()})

    return Case(command, arguments.split(), prepare, known=False)


def flag_case(name: str, arguments: list[str]) -> Case:
    def prepare(place: Path) -> tuple[str, str]:
        import os

        (place / "empty").mkdir()
        (place / "empty.npz").touch()
        (place / "empty.json").touch()
        (place / "link").symlink_to("nothing")
        (place / "loop").symlink_to("loop")
        os.mkfifo(place / "pipe")
        return f"flags of {name}", ""

    return Case(name, [*arguments, *(["--no-such-flag"] if not arguments else [])], prepare, known=False)


cases = st.one_of(
    st.tuples(st.just("flags"), flags()),
    st.tuples(st.just("flags"), flags()),
    st.tuples(st.just("json"), json_file()),
    st.tuples(st.just("json"), json_file()),
    st.tuples(st.just("npz"), st.tuples(npz, st.sampled_from(["train", "import"]))),
)
MAKERS: dict[str, Callable[..., Case]] = {"flags": flag_case, "json": json_case, "npz": npz_case}


def inputs(seed: int, count: int) -> Iterator[Case]:
    """``count`` cases."""
    drawn: list[tuple[str, tuple[Any, ...]]] = []

    @seeded(seed)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases)
    def collect(case: tuple[str, tuple[Any, ...]]) -> None:
        drawn.append(case)

    collect()
    for kind, values in drawn[:count]:
        yield MAKERS[kind](*values)
