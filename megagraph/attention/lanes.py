"""Eight numbers at a time in Numba: vectors of floats and of words for loops that LLVM would not vectorise by itself.

    load, store         eight neighbours of an array of float32 or uint32
    splat               one number in all lanes
    + - * /, >> ^ *     lane by lane, floats; words (uint32, which wrap)
    transposed          eight rows of eight floats become eight columns

Indices count elements from the start of an array and are not checked.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.extending import intrinsic, overload, register_model

LANES = 8
_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_WORDS = ir.VectorType(ir.IntType(32), LANES)


class _Vector(types.Type):
    def __init__(self, name: str, element: types.Type, vector: ir.VectorType) -> None:
        super().__init__(name)
        self.element, self.vector = element, vector


floats = _Vector("floats", types.float32, _FLOATS)
words = _Vector("words", types.uint32, _WORDS)
_OF = {kind.element: kind for kind in (floats, words)}


@register_model(_Vector)
class _Model(models.PrimitiveModel):
    def __init__(self, manager, kind) -> None:
        super().__init__(manager, kind, kind.vector)


def _constant(vector: ir.VectorType, value: float) -> ir.Constant:
    return ir.Constant(vector, [value] * LANES)


def _call(builder: ir.IRBuilder, name: str, *args: ir.Value) -> ir.Value:
    """An LLVM intrinsic on floats."""
    kind = ir.FunctionType(_FLOATS, [_FLOATS] * len(args))
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}.v{LANES}f32"), args)


def _pointer(context, builder: ir.IRBuilder, array_type, array, index) -> ir.Value:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), _OF[array_type.dtype].vector.as_pointer())


@intrinsic
def load(typing, array, index):
    """Eight neighbours from ``array[index]`` on."""

    def codegen(context, builder, signature, args):
        return builder.load(_pointer(context, builder, signature.args[0], *args), align=4)

    return _OF[array.dtype](array, types.intp), codegen


@intrinsic
def store(typing, array, index, x):
    """Eight neighbours from ``array[index]`` on become x."""

    def codegen(context, builder, signature, args):
        builder.store(args[2], _pointer(context, builder, signature.args[0], *args[:2]), align=4)

    return types.void(array, types.intp, _OF[array.dtype]), codegen


@intrinsic
def splat(typing, value):
    """A float32 or uint32 in all lanes."""
    kind = _OF[value]

    def codegen(context, builder, signature, args):
        undefined = ir.Constant(kind.vector, ir.Undefined)
        first = builder.insert_element(undefined, args[0], ir.IntType(32)(0))
        return builder.shuffle_vector(first, undefined, _constant(_WORDS, 0))

    return kind(value), codegen


def _lanewise(kind: _Vector, num_args: int, emit: Callable[..., ir.Value]) -> Any:
    """A function of vectors of one kind; ``emit`` writes its instructions."""

    def codegen(context, builder, signature, args):
        return emit(builder, *args)

    def signature(*args):
        return (kind(*[kind] * num_args), codegen) if args == (kind,) * num_args else None

    if num_args == 1:
        return intrinsic(lambda typing, a: signature(a))
    if num_args == 2:
        return intrinsic(lambda typing, a, b: signature(a, b))
    return intrinsic(lambda typing, a, b, c: signature(a, b, c))


multiply_add = _lanewise(floats, 3, lambda builder, *args: _call(builder, "fmuladd", *args))
maximum = _lanewise(floats, 2, lambda b, x, y: b.select(b.fcmp_ordered(">", x, y), x, y))
_round = _lanewise(floats, 1, lambda builder, x: _call(builder, "rint", x))


def _emit_zero_where(bad: float) -> Callable[..., ir.Value]:
    def emit(builder, x):
        return builder.select(builder.fcmp_ordered("==", x, _constant(_FLOATS, bad)), _constant(_FLOATS, 0.0), x)

    return emit


finite = _lanewise(floats, 1, _emit_zero_where(-np.inf))  # 0 for -inf


def _emit_not_zero(builder, x):
    zero = builder.fcmp_ordered("==", x, _constant(_FLOATS, 0.0))
    return builder.select(zero, _constant(_FLOATS, 1.0), x)


not_zero = _lanewise(floats, 1, _emit_not_zero)  # 1 for 0


def _emit_at_least(builder, x, least):
    return builder.select(builder.fcmp_ordered("<", x, least), least, x)


_at_least = _lanewise(floats, 2, _emit_at_least)  # nan stays


def _emit_power(builder, n):
    exponent = builder.add(builder.fptosi(n, _WORDS), _constant(_WORDS, 127))
    return builder.bitcast(builder.shl(exponent, _constant(_WORDS, 23)), _FLOATS)


_power = _lanewise(floats, 1, _emit_power)  # 2 ** n of whole n from -126 on, 0 for -127


def _overload_operator(symbol: Callable, of_floats: Any, of_words: Any) -> None:
    @overload(symbol)
    def overloaded(a, b):
        if a == b == floats and of_floats is not None:
            return lambda a, b: of_floats(a, b)
        if a == b == words and of_words is not None:
            return lambda a, b: of_words(a, b)
        return None


for _symbol, _of_floats, _of_words in (
    (operator.add, ir.IRBuilder.fadd, None),
    (operator.sub, ir.IRBuilder.fsub, None),
    (operator.mul, ir.IRBuilder.fmul, ir.IRBuilder.mul),
    (operator.truediv, ir.IRBuilder.fdiv, None),
    (operator.xor, None, ir.IRBuilder.xor),
    (operator.rshift, None, ir.IRBuilder.lshr),
):
    _overload_operator(
        _symbol,
        _of_floats and _lanewise(floats, 2, _of_floats),
        _of_words and _lanewise(words, 2, _of_words),
    )


@intrinsic
def keep_from(typing, x, value, threshold):
    """x where value >= threshold (words), else 0."""

    def codegen(context, builder, signature, args):
        x, value, threshold = args
        return builder.select(builder.icmp_unsigned(">=", value, threshold), x, _constant(_FLOATS, 0.0))

    return floats(floats, words, words), codegen


# exp(r) = 1 + r + r^2 sum of c_i r^i for |r| <= log(2) / 2, to 1e-9 relative (a Chebyshev fit)
_C0, _C1, _C2, _C3, _C4, _C5 = (
    np.float32(c) for c in (0.5, 1.666666672e-1, 4.166646419e-2, 8.333298339e-3, 1.393373173e-3, 1.989939314e-4)
)
_LOG2E, _LEAST, _ONE = np.float32(1.4426950408889634), np.float32(-88.0), np.float32(1.0)
_LN2, _LN2_REST = np.float32(0.693359375), np.float32(-2.1219444005e-4)  # few bits, so that n * _LN2 is exact


@njit(cache=True)
def exp(x):
    """exp(x) for x <= 88, 0 from some -87.7 down; nan stays."""
    x = _at_least(x, splat(_LEAST))
    n = _round(x * splat(_LOG2E))
    r = multiply_add(n, splat(-_LN2), x)
    r = multiply_add(n, splat(-_LN2_REST), r)
    y = multiply_add(splat(_C5), r, splat(_C4))
    y = multiply_add(y, r, splat(_C3))
    y = multiply_add(y, r, splat(_C2))
    y = multiply_add(y, r, splat(_C1))
    y = multiply_add(y, r, splat(_C0))
    return (multiply_add(y, r * r, r) + splat(_ONE)) * _power(n)


def _transpose(builder: ir.IRBuilder, rows: list[ir.Value]) -> list[ir.Value]:
    """Of an 8 x 8 matrix, in three rounds of shuffles within and across halves."""

    def shuffle(a, b, lanes):
        return builder.shuffle_vector(a, b, ir.Constant(_WORDS, lanes))

    pairs, quads = [], []
    for i in range(0, 8, 2):
        pairs += [shuffle(rows[i], rows[i + 1], [0, 8, 1, 9, 4, 12, 5, 13])]
        pairs += [shuffle(rows[i], rows[i + 1], [2, 10, 3, 11, 6, 14, 7, 15])]
    for i in (0, 4):
        for a, b in ((pairs[i], pairs[i + 2]), (pairs[i + 1], pairs[i + 3])):
            quads += [shuffle(a, b, [0, 1, 8, 9, 4, 5, 12, 13]), shuffle(a, b, [2, 3, 10, 11, 6, 7, 14, 15])]
    halves = list(zip(quads[:4], quads[4:], strict=True))
    low = [shuffle(a, b, [0, 1, 2, 3, 8, 9, 10, 11]) for a, b in halves]
    return low + [shuffle(a, b, [4, 5, 6, 7, 12, 13, 14, 15]) for a, b in halves]


@intrinsic
def transposed(typing, x, at, step, out, out_at, out_step):
    """Eight rows of eight floats, ``step`` apart in x from ``at`` on, become eight columns of out."""

    def codegen(context, builder, signature, args):
        x, at, step, out, out_at, out_step = args
        x_type, out_type = signature.args[0], signature.args[3]
        rows = []
        for _ in range(LANES):
            rows.append(builder.load(_pointer(context, builder, x_type, x, at), align=4))
            at = builder.add(at, step)
        for column in _transpose(builder, rows):
            builder.store(column, _pointer(context, builder, out_type, out, out_at), align=4)
            out_at = builder.add(out_at, out_step)

    return types.void(x, types.intp, types.intp, out, types.intp, types.intp), codegen
