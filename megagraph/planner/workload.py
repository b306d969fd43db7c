"""What a step works on, and what one rank of a plan holds of it."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from megagraph import files
from megagraph.attention.ways import check_comm
from megagraph.models.config import ModelConfig, ModelName
from megagraph.planner.plan import Plan

Precision = Literal["fp32", "bf16", "fp64"]
NUMBER_BYTES = {"fp32": 4, "bf16": 2, "fp64": 8}  # of queries, keys, values, results of attention
SUM_BYTES = {"fp32": 4, "bf16": 4, "fp64": 8}  # of hidden states, parameters, moments, gradients, also those of keys


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What a step works on, the same for every plan; paper symbols in brackets.

    Args:
        batch_sequences: sequences of a global batch [B].
        num_nodes, num_super: regular and super nodes of a sequence [N', N_s].
        num_targets: rows of a sequence that are read out.
        feature_rows: distinct rows of raw features per sequence; ``None``: one for every node.
        filled: part of the places for regular nodes that have one, the others are padding.
        pairs: listed pairs of regular nodes in a sequence, beside which all attend to super nodes; 0: all to all.
        halo: of listed pairs, rows that a rank receives, at most, where 2, 4, 8, ... ranks share a sequence.
        dtype: as ``--dtype``; bf16 is mixed precision.
        model: as ``--model``.

    Raises:
        ValueError: a number out of its range; it is named.

    Examples:
        >>> mg.planner.Workload(batch_sequences=16, num_nodes=1024, num_super=64, num_targets=1024).dtype
        'fp32'
    """

    batch_sequences: int
    num_nodes: int
    num_super: int = 0
    num_targets: int = 1
    feature_rows: float | None = None
    filled: float = 1.0
    pairs: int = 0
    halo: tuple[int, ...] = ()
    dtype: Precision = "fp32"
    model: ModelName = "hierarchical"

    def __post_init__(self) -> None:
        lows = {"batch_sequences": 1, "num_nodes": 1, "num_super": 0, "num_targets": 0, "pairs": 0}
        for name, low in lows.items():
            if getattr(self, name) < low:
                raise ValueError(f"{name} must be at least {low}, got {getattr(self, name)}")
            if getattr(self, name) >= 1 << 31:
                raise ValueError(f"{name} must be below 2^31, got {getattr(self, name)}")
        if self.feature_rows is not None:
            check_number("feature_rows", self.feature_rows)
        check_number("filled", self.filled)
        if not 0.0 < self.filled <= 1.0:
            raise ValueError(f"filled must be above 0 and at most 1, got {self.filled}")
        for rows in self.halo:
            check_number("halo", rows)
        if self.dtype not in NUMBER_BYTES:
            raise ValueError(f"dtype must be one of {sorted(NUMBER_BYTES)}, got {self.dtype!r}")
        if self.model not in get_args(ModelName):
            raise ValueError(f"model must be hierarchical or graphormer, got {self.model!r}")

    def halo_of(self, ranks: int) -> float:
        """Rows that one of so many ranks receives; all others' where nobody has counted."""
        if ranks == 1:
            return 0.0
        place = (ranks - 1).bit_length() - 1  # of the next power of two
        most = self.num_nodes * (ranks - 1) / ranks
        return min(float(self.halo[place]), most) if place < len(self.halo) else most

    @classmethod
    def from_json(cls, values: Any) -> Workload:
        """A workload from the values of a JSON object; ValueError names a field that is not right."""
        if isinstance(values, dict):  # of a file written before, they may be there and say nothing
            values = {name: x for name, x in values.items() if x or name not in ("mean_nodes", "prefetch")}
        return files.typed(cls, values, "a workload")


def check_number(what: str, value: Any) -> None:
    """Raise ValueError for what is not a finite number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= sys.float_info.max:
        raise ValueError(f"{what} must be a number of at least 0, got {value!r}")


def listed_scores(block: float, num_super: float, pairs: float) -> float:
    """Scores of a head where pairs are listed: these, and those of super nodes, which see, and are seen by, all."""
    return pairs + block * num_super + num_super * (block + num_super)


@dataclass(frozen=True, slots=True)
class RankWork:
    """What a rank of a plan holds, however the layers are split; paper symbols in brackets.

    Args:
        whole_batch: sequences of a batch [B].
        batch_sequences: of the largest part that a replica has [B / P_dp].
        sequences: of a micro-batch of it [b].
        num_nodes: regular nodes of a sequence [N'].
        block: those of the rank [N' / P_cp].
        rows, columns: nodes of a sequence that the rank computes, and those that they attend to [S, N' + N_s], on
            average where pairs are listed.
        targets: rows of a sequence that are read out.
        feature_rows: rows of raw features per sequence.
        pairs: listed pairs of a sequence; 0: all attend to all.
        halo: rows of other ranks that these name.
        codes: degrees that have a vector of their own.
    """

    config: ModelConfig
    plan: Plan
    whole_batch: int
    batch_sequences: int
    sequences: int
    num_nodes: int
    block: int
    num_super: int
    rows: int
    columns: float
    targets: int
    feature_rows: float
    pairs: float
    halo: float
    dtype: Precision
    codes: int

    @classmethod
    def of(cls, config: ModelConfig, plan: Plan, given: Workload) -> RankWork:
        """What a plan leaves each rank of a workload; the plan need not say how the layers are split."""
        check_comm(plan.comm, heads=config.heads, ranks=plan.cp)
        block = math.ceil(given.num_nodes / plan.cp)
        rows = block + given.num_super
        own = plan.most_sequences(given.batch_sequences)
        pairs = given.pairs / plan.cp  # ranks begin where it makes their work equal
        listed = listed_scores(block, given.num_super, pairs) / rows
        return cls(
            config,
            plan,
            whole_batch=given.batch_sequences,
            batch_sequences=own,
            sequences=-(-own // plan.num_microbatches),
            num_nodes=given.num_nodes,
            block=block,
            num_super=given.num_super,
            rows=rows,
            columns=listed if given.pairs else given.num_nodes + given.num_super,
            targets=min(given.num_targets, block),
            feature_rows=rows if given.feature_rows is None else given.feature_rows / plan.cp,
            pairs=pairs,
            halo=given.halo_of(plan.cp) if given.pairs else 0.0,
            dtype=given.dtype,
            codes=config.max_degree + 1 if given.model == "graphormer" else 0,
        )

    def of_sequences(self, number: int) -> RankWork:
        """The work of a rank of a replica that has so many sequences."""
        return replace(self, batch_sequences=number, sequences=-(-number // self.plan.num_microbatches))

    @property
    def number_bytes(self) -> int:
        return NUMBER_BYTES[self.dtype]

    @property
    def sum_bytes(self) -> int:
        return SUM_BYTES[self.dtype]

    @property
    def hidden_bytes(self) -> float:
        """Hidden states of a micro-batch [S_act]."""
        return float(self.sum_bytes * self.sequences * self.rows * self.config.dim)

    @property
    def query_bytes(self) -> float:
        """Queries of a micro-batch, or results of attention."""
        return float(self.number_bytes * self.sequences * self.rows * self.config.dim)

    @property
    def halo_bytes(self) -> float:
        """Keys and values that a micro-batch's pairs name."""
        return 2.0 * self.number_bytes * self.sequences * self.halo * self.config.dim

    @property
    def block_bytes(self) -> float:
        """Keys and values of a micro-batch's block."""
        return 2.0 * self.number_bytes * self.sequences * self.block * self.config.dim

    @property
    def by_heads(self) -> bool:
        """Whether every rank attends from all rows, with a part of the heads."""
        return self.plan.cp > 1 and self.plan.comm == "ulysses"

    @property
    def all_rows(self) -> int:
        """Nodes of a sequence, on whichever rank."""
        return self.num_nodes + self.num_super

    @property
    def head_bytes(self) -> float:
        """Queries, keys and values of a micro-batch's block, of the heads of one rank."""
        return 1.5 * self.block_bytes / self.plan.cp

    @property
    def gradients_of_keys(self) -> float:
        """Bytes of the gradients of keys and values, or of those of a halo, for every byte of them."""
        return self.sum_bytes / self.number_bytes
