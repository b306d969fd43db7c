"""Values of flags: times, lists of numbers, and how much of them an error shows."""

from __future__ import annotations

import re
from typing import Any


def seconds(text: str) -> float:
    """Of "3h", "90m", "1h30m", "45s" or, as schedulers write it, "[days-]hours:minutes:seconds"."""
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


def short(value: Any) -> str:
    shown = hex(value) if isinstance(value, int) and value.bit_length() > 100 else repr(value)
    return shown if len(shown) <= 100 else f"{shown[:100]}..."
