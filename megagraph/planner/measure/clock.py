"""How long something took on a device, and what that is on average."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch


class Clock:
    """Seconds between two marks on a device."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self._marks: dict[str, Any] = {}

    def mark(self, name: str) -> None:
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks[name] = event
        else:
            self._marks[name] = time.perf_counter()

    def between(self, start: str, end: str) -> float:
        if self.cuda:
            self._marks[end].synchronize()
            return self._marks[start].elapsed_time(self._marks[end]) / 1e3
        return self._marks[end] - self._marks[start]


def average(samples: list[float]) -> dict[str, Any]:
    """seconds, without the slowest tenth of more than four; spread (quartiles, of the median); how many there are.

    Not the median: of a process that may run for a part of the time only, short calls are either whole or interrupted,
    and it is their mean that adds up to a step.
    """
    slowest = -(-len(samples) // 10) if len(samples) > 4 else 0
    seconds = float(np.mean(sorted(samples)[: len(samples) - slowest]))
    low, middle, high = np.quantile(samples, (0.25, 0.5, 0.75)).tolist()
    return {"seconds": seconds, "spread": (high - low) / middle if middle else 0.0, "samples": len(samples)}
