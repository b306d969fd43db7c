"""What every engine is given: a step of attention, the softmax so far, and the gradients to add to (paper Eq. 3).

Each is a dataclass that travels whole, but through an operator of torch.library, whose arguments are its fields, in
order: ``schema`` says them, ``flat`` gives them, ``read`` takes them back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar, get_type_hints

import torch
from torch import Tensor
from torch.compiler import is_compiling

T = TypeVar("T", bound="Arguments")
Segments = list[tuple[int, int, int]]  # (key_start, column_start, length) of each
_IN_SCHEMA: dict[Any, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    Segments: "SymInt[]",
    str: "str",
    float: "float",
    int: "SymInt",
    bool: "bool",
}


def _names(kind: Any) -> list[str]:
    return [field.name for field in fields(kind)]


class Arguments:
    """A dataclass whose fields an operator takes as arguments. Nobody sets one later: it is not frozen, as the
    constructor would take several times as long."""

    WRITTEN: ClassVar[tuple[str, ...]] = ()  # fields that an operator writes to

    @classmethod
    def schema(cls) -> str:
        """Schema of the fields as arguments of an operator, as torch.library writes it."""
        hints = get_type_hints(cls)
        kinds = {name: _IN_SCHEMA[hints[name]] for name in _names(cls)}
        kinds |= {name: kinds[name].replace("Tensor", f"Tensor({name}!)") for name in cls.WRITTEN}
        return ", ".join(f"{kind} {name}" for name, kind in kinds.items())

    def flat(self) -> tuple[Any, ...]:
        """The fields in order."""
        return tuple(self.values().values())

    def values(self) -> dict[str, Any]:
        """The fields by name. PyTorch 2.11's compiler knows no ``vars``, which take half the time of anything else."""
        return {name: getattr(self, name) for name in _names(self)} if is_compiling() else vars(self)

    @classmethod
    def read(cls: type[T], values: Iterator[Any]) -> T:
        """An instance from the next values, as many as there are fields."""
        return cls(**{name: next(values) for name in _names(cls)})

    @classmethod
    def of(cls: type[T], values: dict[str, Any]) -> T:
        """An instance from all fields by name, past the constructor, which takes several times as long."""
        if is_compiling():
            return cls(**values)
        made = cls.__new__(cls)
        made.__dict__ = values
        return made

    def but(self: T, **values: Any) -> T:
        """These with others in place of some."""
        return self.of(self.values() | values)


@dataclass(kw_only=True)
class Step(Arguments):
    """This rank's queries against one visiting block of keys: what forward and backward share.

    H heads, M query rows here, N global columns. ``segments`` are (key_start, column_start, length): keys
    key_start.. of the visiting block stand in columns column_start.. of the bias and the masks.
    """

    engine: str  # of ``engines.ENGINES``
    short: bool  # where the engine has a path for such short sequences; only if all keys are here
    form: str  # "none", "dense", "bucket" or "projected"
    data: Tensor | None  # uint8 [B or 1, M, N], 255 = masked, or [B or 1, C, M, N]
    learned: Tensor | None  # [B or 1, H or 1, M, N], -inf = masked; [H, R] or [H, C]
    bias_mask: Tensor | None  # of a projected bias: bool [B or 1, M, N], True = masked
    key_padding_mask: Tensor | None  # bool [B, N], True = ignore
    segments: Segments
    scale: float
    dropout_p: float
    dropout_key: Tensor | None  # int32 [B]; None: no dropout
    row_ids: Tensor | None = None  # integer [M], global row of each local row; None: the same
    first_column: int = 0  # global column of column 0 of a dense bias and the masks; dropout asks for it
    first_head: int = 0  # global number of head 0; dropout asks for it, too
    tf32: bool = False  # products of fp32 may be of inputs cut to TF32 where PyTorch's own are rounded to it
    # of a sparse bias, as ``relation.Relation`` has them; data is then [P] or [P, C], a dense learned part [P, H]
    row_starts: Tensor | None = None
    columns: Tensor | None = None
    key_starts: Tensor | None = None
    key_rows: Tensor | None = None
    key_pairs: Tensor | None = None
    column_ids: Tensor | None = None  # int32 [N], global column of each of these; None: the same

    def flat(self) -> tuple[Any, ...]:
        values = self.values() | {"segments": [number for segment in self.segments for number in segment]}
        return tuple(values.values())

    @classmethod
    def read(cls, values: Iterator[Any]) -> Step:
        given = {name: next(values) for name in _names(cls)}
        if len(given["segments"]) % 3:
            raise ValueError(
                f"segments must be (key_start, column_start, length) of each in one list, got {given['segments']}"
            )
        numbers = iter(given["segments"])
        return cls(**given | {"segments": list(zip(numbers, numbers, numbers, strict=True))})

    def split(self) -> tuple[dict[str, Any], tuple[Tensor | None, ...]]:
        """Values of the fields, ``None`` for tensors, and the tensors, which autograd keeps."""
        values = self.values()
        return values | _NO_TENSORS, tuple(map(values.__getitem__, _NO_TENSORS))

    @classmethod
    def join(cls, values: dict[str, Any], tensors: Iterator[Tensor | None]) -> Step:
        """What :meth:`split` took apart, from the next tensors."""
        return cls.of(values | dict(zip(_NO_TENSORS, tensors, strict=False)))


_NO_TENSORS = {name: None for name, kind in get_type_hints(Step).items() if kind == Tensor | None}


@dataclass(kw_only=True)
class State(Arguments):
    """The softmax of the keys met so far, which a step reads unless it is ``first`` and writes unless it is ``last``;
    the last one writes its result instead. What is neither is None."""

    WRITTEN = ("m", "l", "acc", "out", "lse")

    first: bool
    last: bool
    m: Tensor | None = None  # [B, H, M], running max of the scores; contiguous, fp32 (fp64 for fp64 q)
    l: Tensor | None = None  # [B, H, M], running sum of their exponentials; as m
    acc: Tensor | None = None  # [B, H, M, D], unnormalised output; as m
    out: Tensor | None = None  # [B, H, M, D] in q's dtype, any strides; 0 for a row that met no valid key
    lse: Tensor | None = None  # [B, H, M], natural log, as m; -inf for a row that met no valid key

    def at(self, *, first: bool, last: bool) -> State:
        """The part that this step is to read and write."""
        m, l, acc = (None,) * 3 if first and last else (self.m, self.l, self.acc)
        out, lse = (self.out, self.lse) if last else (None, None)
        return State(first=first, last=last, m=m, l=l, acc=acc, out=out, lse=lse)


@dataclass(kw_only=True)
class Gradients(Arguments):
    """What backward of a step reads, and what it writes, or adds to.

    d_learned of a table or a weight is as dq. A dense one with a plane for each sequence and head is written, for the
    columns of these keys; to any other dense one the step's share is added, in lse's dtype.
    """

    WRITTEN = ("dq", "dk", "dv", "d_learned")

    d_out: Tensor  # [B, H, M, D] in q's dtype, any strides
    lse: Tensor  # [B, H, M] of the whole softmax; contiguous, fp32 (fp64 for fp64 q)
    delta: Tensor  # [B, H, M], as the engine's ``delta`` gives it; as lse
    dq: Tensor  # shaped as q, k, v; any strides and floating dtype
    dk: Tensor
    dv: Tensor
    d_learned: Tensor | None  # shaped as the learned part; None: not wanted
    accumulate: bool  # add to dq, dk and dv, in lse's dtype, instead of writing them

    def of_no_keys(self) -> None:
        """What is written where there is nothing to attend to."""
        if not self.accumulate:
            for x in (self.dq, self.dk, self.dv, self.d_learned):
                if x is not None:
                    x.zero_()

    def sum_of_learned(self, shares: Tensor) -> None:
        """``shares`` [any number, *d_learned.shape] of a table's or a weight's gradient, in a fixed order."""
        if self.d_learned is not None and self.accumulate:
            self.d_learned.add_(shares.sum(dim=0))
        elif self.d_learned is not None:
            torch.sum(shares, dim=0, out=self.d_learned)


@dataclass(kw_only=True)
class DeltaOf:
    """What delta is made of, beside d_out."""

    out: Tensor  # as d_out
    d_lse: Tensor | None  # as lse; None: 0
