"""Values of flags: times, lists of numbers, devices, and how much of them an error shows; and sizes in words."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch  # takes longer to import than to say what a flag means


def seconds(text: str) -> float:
    """Seconds of "3h", "90m", "1h30m", "45s" or, as schedulers write it, "[days-]hours:minutes:seconds"."""
    number = r"(\d{1,9})"
    words = re.fullmatch(rf"(?:{number}h)?(?:{number}m)?(?:{number}s)?", text) if text else None
    clock = re.fullmatch(rf"(?:{number}-)?{number}:(\d\d):(\d\d)", text)
    if words is not None:
        days, (hours, minutes, seconds) = 0, (int(part or 0) for part in words.groups())
    elif clock is not None:
        days, hours, minutes, seconds = (int(part or 0) for part in clock.groups())
    else:
        raise ValueError(f"time_limit must be as 3h, 90m, 1h30m or 2-12:00:00, got {short(text)}")
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def integers(name: str, text: str, expected: str, count: int) -> tuple[int, ...]:
    """The numbers of a flag such as "3,7,7,7"."""
    try:
        numbers = tuple(int(word) for word in text.split(","))
    except ValueError:
        numbers = ()
    if len(numbers) != count:
        raise ValueError(f"{name} must be {expected} such as {','.join(map(str, range(1, count + 1)))}, got {text!r}")
    return numbers


def closest(name: str, known: Iterable[str]) -> str | None:
    """Which of the known ones a name may mean that is none of them."""
    return next(iter(difflib.get_close_matches(name.lower(), list(known), n=1)), None)


def listed(names: Iterable[str]) -> str:
    """The first twenty names, and how many more there are."""
    found = list(names)
    return (", ".join(found[:20]) or "none") + (f" and {len(found) - 20} more" if len(found) > 20 else "")


def in_words(size: float) -> str:
    """Bytes in words: GiB, and below a tenth of one MiB."""
    return f"{size / 2**30:.2f} GiB" if size >= 0.1 * 2**30 else f"{size / 2**20:.2f} MiB"


def short(value: Any) -> str:
    """A value as messages show it: at most 100 characters of its repr."""
    shown = hex(value) if isinstance(value, int) and value.bit_length() > 100 else repr(value)
    return shown if len(shown) <= 100 else f"{shown[:100]}..."


def processes_here() -> int:
    """How many torchrun started on this machine; 1 where it started none."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def device(name: str) -> torch.device:
    """What --device means for this process: "auto" and "cuda" are a GPU of its own.

    Raises:
        ValueError: there is no such device.
    """
    import torch

    if name == "auto" and not torch.cuda.is_available():
        return torch.device("cpu")
    if name == "auto" or (name == "cuda" and torch.cuda.is_available()):
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        if local_rank >= torch.cuda.device_count():
            raise ValueError(
                f"process {local_rank} of this machine needs a GPU of its own, but there are "
                f"{torch.cuda.device_count()}; start fewer, or pass --device cuda:0 to share one, or --device cpu"
            )
        return torch.device("cuda", local_rank)
    try:
        found = torch.device(name)
        if found.type not in ("cpu", "cuda"):
            raise ValueError(f"nothing is computed on {found.type}")
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, ValueError) as error:
        raise ValueError(f"device must be auto, cpu or a CUDA device that is here, got {name!r}: {error}") from error
    processes = processes_here()
    if found.type == "cuda" and 1 < processes <= torch.cuda.device_count():
        raise ValueError(
            f"{processes} processes cannot share {found} where each can have its own; pass --device cuda, "
            f"or hide the other GPUs with CUDA_VISIBLE_DEVICES={found.index}"
        )
    return found
