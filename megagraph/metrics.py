"""Lines of metrics.jsonl: what they say, and whether they are as we write them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from types import NoneType
from typing import Any, TypedDict, TypeVar, cast, get_type_hints

from megagraph.objective import OF_CLASSES, OF_LABELS, SOMETIMES

T = TypeVar("T")


class StepLine(TypedDict):
    """What metrics.jsonl says of a step; ``None`` where it was skipped."""

    step: int
    loss: float | None
    learning_rate: float
    gradient_norm: float | None
    step_seconds: float
    stall_seconds: float


class EpochLine(TypedDict):
    """What metrics.jsonl says of an epoch, after its steps, beside how good it was (``megagraph.objective.measures``);
    no loss where all of them were skipped."""

    epoch: int
    loss: float | None
    skipped_steps: int
    train_seconds: float
    evaluation_seconds: float


def _types(kind: Any, measures: Iterable[str] = ()) -> dict[str, tuple[Any, ...]]:
    """Types of the values of a line, looked at by hand: typeguard takes 50 us a line, and a run may have millions."""
    hints: dict[str, Any] = get_type_hints(kind)
    hints |= {f"{part}_{name}": None if name in SOMETIMES else float for name in measures for part in ("val", "test")}
    return {name: {int: (int,), float: (float, int)}.get(hint, (float, int, NoneType)) for name, hint in hints.items()}


_TYPES = {StepLine: [_types(StepLine)], EpochLine: [_types(EpochLine, names) for names in (OF_CLASSES, OF_LABELS)]}


def checked(kind: type[T], line: dict[str, Any], path: Path) -> T:
    """A line of a step or an epoch, read from ``path``; ValueError where it is not as we write it."""
    types = next((types for types in _TYPES[kind] if line.keys() == types.keys()), None)
    if types is None or not all(
        type(value) in types[name] and (value is None or abs(value) <= sys.float_info.max)
        for name, value in line.items()
    ):
        raise ValueError(f"expected steps and epochs as we note them in {path}, got {line}")
    return cast(T, line)
