"""What a step works on, and what one rank of a plan holds of it."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

from megagraph import files
from megagraph.models.config import ModelConfig
from megagraph.planner.plan import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What a step works on, the same for every plan; paper symbols in brackets.

    Args:
        batch_sequences: sequences of a global batch [B].
        num_nodes, num_super: regular and super nodes of a sequence [N', N_s].
        num_targets: rows of a sequence that are read out.
        feature_rows: distinct rows of raw features per sequence; ``None``: one for every node.
    """

    batch_sequences: int
    num_nodes: int
    num_super: int = 0
    num_targets: int = 1
    feature_rows: float | None = None

    def __post_init__(self) -> None:
        lows = {"batch_sequences": 1, "num_nodes": 1, "num_super": 0, "num_targets": 0}
        for name, low in lows.items():
            if getattr(self, name) < low:
                raise ValueError(f"{name} must be at least {low}, got {getattr(self, name)}")
            if getattr(self, name) >= 1 << 31:
                raise ValueError(f"{name} must be below 2^31, got {getattr(self, name)}")
        if self.feature_rows is not None:
            check_number("feature_rows", self.feature_rows)

    @classmethod
    def from_json(cls, values: Any) -> Workload:
        """From the values of a JSON object; ValueError names a field that is not right."""
        if isinstance(values, dict):  # of a file written before, they may be there and say nothing
            values = {name: x for name, x in values.items() if x or name not in ("mean_nodes", "prefetch")}
        return files.typed(cls, values, "a workload")


def check_number(what: str, value: Any) -> None:
    """Raise ValueError for what is not a finite number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= sys.float_info.max:
        raise ValueError(f"{what} must be a number of at least 0, got {value!r}")


@dataclass(frozen=True, slots=True)
class RankWork:
    """What a rank of a plan holds, however the layers are split; paper symbols in brackets.

    Args:
        batch_sequences: sequences of the rank's part of a batch [B / P_dp].
        sequences: of a micro-batch [b].
        block: regular nodes of a sequence [N' / P_cp].
        rows, columns: nodes of a sequence that the rank computes, and those that they attend to [S, N' + N_s].
        targets: rows of a sequence that are read out.
        feature_rows: rows of raw features per sequence.
    """

    config: ModelConfig
    plan: Plan
    batch_sequences: float
    sequences: float
    block: int
    rows: int
    columns: int
    targets: int
    feature_rows: float

    @classmethod
    def of(cls, config: ModelConfig, plan: Plan, given: Workload) -> RankWork:
        """What a plan leaves each rank of a workload; the plan need not say how the layers are split."""
        block = math.ceil(given.num_nodes / plan.cp)
        rows = block + given.num_super
        return cls(
            config,
            plan,
            batch_sequences=given.batch_sequences / plan.dp,
            sequences=given.batch_sequences / (plan.dp * plan.num_microbatches),
            block=block,
            rows=rows,
            columns=given.num_nodes + given.num_super,
            targets=min(given.num_targets, block),
            feature_rows=rows if given.feature_rows is None else given.feature_rows / plan.cp,
        )

    @property
    def hidden_bytes(self) -> float:
        """Hidden states of a micro-batch, fp32 [S_act]."""
        return 4.0 * self.sequences * self.rows * self.config.dim

    @property
    def block_bytes(self) -> float:
        """Keys and values of a micro-batch's block, or their gradients, fp32."""
        return 8.0 * self.sequences * self.block * self.config.dim
