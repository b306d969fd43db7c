"""Eight numbers at a time in Numba: vectors of floats and of words for loops that LLVM would not vectorise by itself.

    load, store         eight neighbours of an array of float32, float64 or uint32
    item                one number of an array
    fetch               what a load will want later, into the cache
    splat               one number in all lanes
    + - * /, >> ^ *     lane by lane, of floats or doubles; of words (uint32, which wrap)
    transposed          eight rows of eight numbers become eight columns
    load_wide, twice,   sixteen neighbours; eight numbers two times side by side; and back: the sum of both halves.
    folded              A register of AVX-512, or two of AVX2

Indices count elements from the start of an array and are not checked.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.extending import intrinsic, overload, register_model

from megagraph.jit import jit

LANES = 8
_WORDS = ir.VectorType(ir.IntType(32), LANES)


class _Vector(types.Type):
    def __init__(self, name: str, element: types.Type, vector: ir.VectorType) -> None:
        super().__init__(name)
        self.element, self.vector = element, vector


floats = _Vector("floats", types.float32, ir.VectorType(ir.FloatType(), LANES))
doubles = _Vector("doubles", types.float64, ir.VectorType(ir.DoubleType(), LANES))
words = _Vector("words", types.uint32, _WORDS)
_REAL = (floats, doubles)
_OF = {kind.element: kind for kind in (*_REAL, words)}
_WIDE_OF = {
    kind.element: _Vector(f"wide_{kind.name}", kind.element, ir.VectorType(kind.vector.element, 2 * LANES))
    for kind in _REAL
}
_WIDE = tuple(_WIDE_OF.values())
VECTORS = {kind.element: kind.vector for kind in _REAL}


@register_model(_Vector)
class _Model(models.PrimitiveModel):
    def __init__(self, manager, kind) -> None:
        super().__init__(manager, kind, kind.vector)


def constant(vector: ir.VectorType, value: float) -> ir.Constant:
    return ir.Constant(vector, [value] * vector.count)


def call(builder: ir.IRBuilder, name: str, *args: ir.Value) -> ir.Value:
    """Call an LLVM intrinsic on a vector of floats or doubles."""
    vector = args[0].type
    suffix = "f32" if isinstance(vector.element, ir.FloatType) else "f64"
    kind = ir.FunctionType(vector, [vector] * len(args))
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}.v{vector.count}{suffix}")
    return builder.call(function, args)


def _pointer(context, builder: ir.IRBuilder, array_type, array, index, kinds=_OF) -> ir.Value:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), kinds[array_type.dtype].vector.as_pointer())


@intrinsic
def borrowed(typing, x):
    """The arrays x, in tuples of any depth, with references that nobody counts: the caller keeps them.

    Numba counts one wherever an array is handed on within a loop, and each time all loads and stores wait for it.
    """

    def lent(context, builder, kind, value):
        if isinstance(kind, types.Array):
            array = context.make_array(kind)(context, builder, value)
            array.meminfo = cgutils.get_null_value(array.meminfo.type)
            array.parent = cgutils.get_null_value(array.parent.type)
            return array._getvalue()
        if isinstance(kind, types.BaseTuple):
            values = zip(kind.types, cgutils.unpack_tuple(builder, value, len(kind)), strict=True)
            return context.make_tuple(builder, kind, [lent(context, builder, *part) for part in values])
        return value

    def codegen(context, builder, signature, args):
        return lent(context, builder, signature.args[0], args[0])

    return x(x), codegen


def _loading(kinds: dict[types.Type, _Vector]) -> Any:
    def codegen(context, builder, signature, args):
        return builder.load(_pointer(context, builder, signature.args[0], args[0], args[1], kinds), align=4)

    return intrinsic(lambda typing, array, index: (kinds[array.dtype](array, types.intp), codegen))


load, load_wide = _loading(_OF), _loading(_WIDE_OF)


@intrinsic
def store(typing, array, index, x):
    """Neighbours from ``array[index]`` on become x, as many as it has."""

    def codegen(context, builder, signature, args):
        kinds = _WIDE_OF if signature.args[2] in _WIDE else _OF
        builder.store(args[2], _pointer(context, builder, signature.args[0], args[0], args[1], kinds), align=4)

    return types.void(array, types.intp, x), codegen


@intrinsic
def item(typing, array, index):
    """``array[index]`` for an index that is not negative, which Numba would look for."""

    def codegen(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.load(builder.gep(data, [args[1]]))

    return array.dtype(array, types.intp), codegen


def _lanes(*numbers: int) -> ir.Constant:
    return ir.Constant(ir.VectorType(ir.IntType(32), len(numbers)), numbers)


@intrinsic
def twice(typing, x):
    """A vector and the same again."""

    def codegen(context, builder, signature, args):
        return builder.shuffle_vector(args[0], args[0], _lanes(*range(LANES), *range(LANES)))

    return (_WIDE_OF[x.element](x), codegen) if x in _REAL else None


@intrinsic
def folded(typing, x):
    """The sum of the halves of a wide vector."""

    def codegen(context, builder, signature, args):
        (x,) = args
        low, high = (builder.shuffle_vector(x, x, _lanes(*range(at, at + LANES))) for at in (0, LANES))
        return builder.fadd(low, high)

    return (_OF[x.element](x), codegen) if x in _WIDE else None


@intrinsic
def fetch(typing, array, index):
    """Ask for the cache line of ``array[index]``; nothing waits for it, and an index beyond the array does no harm.

    For short pieces that are far apart, of which the processor itself foresees nothing.
    """

    def codegen(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        at = builder.bitcast(builder.gep(data, [args[1]]), ir.IntType(8).as_pointer())
        word = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [at.type, word, word, word])
        prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(prefetch, [at, word(0), word(2), word(1)])  # to read, into the second level, data

    return types.void(array, types.intp), codegen


@intrinsic
def splat(typing, value):
    """A number in all lanes."""
    kind = _OF[value]

    def codegen(context, builder, signature, args):
        return splatted(builder, kind.vector, args[0])

    return kind(value), codegen


def splatted(builder: ir.IRBuilder, vector: ir.VectorType, value: ir.Value) -> ir.Value:
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, value, ir.IntType(32)(0))
    return builder.shuffle_vector(first, undefined, constant(_WORDS, 0))


def _lanewise(kinds: tuple[_Vector, ...], num_args: int, emit: Callable[..., ir.Value]) -> Any:
    """A function of vectors of one of these kinds; ``emit`` writes its instructions."""

    def codegen(context, builder, signature, args):
        return emit(builder, *args)

    def signature(*args):
        kind = args[0]
        return (kind(*args), codegen) if kind in kinds and args == (kind,) * num_args else None

    if num_args == 1:
        return intrinsic(lambda typing, a: signature(a))
    if num_args == 2:
        return intrinsic(lambda typing, a, b: signature(a, b))
    return intrinsic(lambda typing, a, b, c: signature(a, b, c))


def _emit_maximum(builder, x, y):
    return builder.select(builder.fcmp_ordered(">", x, y), x, y)


multiply_add = _lanewise((*_REAL, *_WIDE), 3, lambda builder, *args: call(builder, "fmuladd", *args))
maximum = _lanewise(_REAL, 2, _emit_maximum)
_round = _lanewise(_REAL, 1, lambda builder, x: call(builder, "rint", x))


def _emit_replaced(bad: float, good: float) -> Callable[..., ir.Value]:
    def emit(builder, x):
        return builder.select(builder.fcmp_ordered("==", x, constant(x.type, bad)), constant(x.type, good), x)

    return emit


def _across(emit: Callable[..., ir.Value]) -> Any:
    """The lanes of a vector combined, in three halvings."""

    def codegen(context, builder, signature, args):
        (x,) = args
        for distance in (4, 2, 1):
            lanes = _lanes(*((lane + distance) % LANES for lane in range(LANES)))
            x = emit(builder, x, builder.shuffle_vector(x, x, lanes))
        return builder.extract_element(x, ir.IntType(32)(0))

    return intrinsic(lambda typing, x: (x.element(x), codegen) if x in _REAL else None)


sum_of = _across(ir.IRBuilder.fadd)
largest_of = _across(_emit_maximum)
finite = _lanewise(_REAL, 1, _emit_replaced(-np.inf, 0.0))  # 0 for -inf
not_zero = _lanewise(_REAL, 1, _emit_replaced(0.0, 1.0))  # 1 for 0


def _emit_at_least(builder, x, least):
    return builder.select(builder.fcmp_ordered("<", x, least), least, x)


_at_least = _lanewise(_REAL, 2, _emit_at_least)  # nan stays


def _emit_power(builder, n):
    bits, mantissa, bias = (32, 23, 127) if isinstance(n.type.element, ir.FloatType) else (64, 52, 1023)
    integers = ir.VectorType(ir.IntType(bits), LANES)
    exponent = builder.add(builder.fptosi(n, integers), constant(integers, bias))
    return builder.bitcast(builder.shl(exponent, constant(integers, mantissa)), n.type)


_power = _lanewise(_REAL, 1, _emit_power)  # 2 ** n of whole n down to the smallest normal number, then 0


def _overload_operator(symbol: Callable, of_reals: Any, of_words: Any) -> None:
    @overload(symbol)
    def overloaded(a, b):
        if a == b and a in (*_REAL, *_WIDE) and of_reals is not None:
            return lambda a, b: of_reals(a, b)
        if a == b == words and of_words is not None:
            return lambda a, b: of_words(a, b)
        return None


for _symbol, _of_reals, _of_words in (
    (operator.add, ir.IRBuilder.fadd, ir.IRBuilder.add),
    (operator.sub, ir.IRBuilder.fsub, None),
    (operator.mul, ir.IRBuilder.fmul, ir.IRBuilder.mul),
    (operator.truediv, ir.IRBuilder.fdiv, None),
    (operator.xor, None, ir.IRBuilder.xor),
    (operator.rshift, None, ir.IRBuilder.lshr),
):
    _overload_operator(
        _symbol,
        _of_reals and _lanewise((*_REAL, *_WIDE), 2, _of_reals),
        _of_words and _lanewise((words,), 2, _of_words),
    )


@intrinsic
def counting(typing, first):
    """The words first, first + 1, ..."""

    def codegen(context, builder, signature, args):
        return builder.add(splatted(builder, _WORDS, args[0]), ir.Constant(_WORDS, list(range(LANES))))

    return words(types.uint32), codegen


def _entries(context, builder: ir.IRBuilder, kinds, width: int, table, first, index, at) -> list[ir.Value]:
    """Pointers to the entries of a table that eight neighbours of index, uint8, name; lane i in column i % width."""
    table = context.make_array(kinds[0])(context, builder, table).data
    index = context.make_array(kinds[1])(context, builder, index).data
    entries = []
    for lane in range(LANES):
        i = builder.load(builder.gep(index, [builder.add(at, ir.Constant(at.type, lane))]))
        i = builder.mul(builder.zext(i, at.type), ir.Constant(at.type, width))
        i = builder.add(builder.add(first, i), ir.Constant(at.type, lane % width))
        entries.append(builder.gep(table, [i]))
    return entries


@intrinsic
def look_up(typing, table, first, index, at):
    """table[first + index[at]], table[first + index[at + 1]], ...; index uint8."""

    def codegen(context, builder, signature, args):
        kinds = signature.args[0], signature.args[2]
        x = ir.Constant(_OF[signature.args[0].dtype].vector, ir.Undefined)
        for lane, entry in enumerate(_entries(context, builder, kinds, 1, *args)):
            x = builder.insert_element(x, builder.load(entry), ir.IntType(32)(lane))
        return x

    return _OF[table.dtype](table, types.intp, index, types.intp), codegen


@intrinsic
def add_up(typing, sums, index, at, x):
    """sums[8 * index[at] + 0] += x[0], sums[8 * index[at + 1] + 1] += x[1], ...: no two lanes meet; index uint8."""

    def codegen(context, builder, signature, args):
        sums, index, at, x = args
        zero = ir.Constant(at.type, 0)
        entries = _entries(context, builder, signature.args[:2], LANES, sums, zero, index, at)
        for lane, entry in enumerate(entries):
            share = builder.extract_element(x, ir.IntType(32)(lane))
            builder.store(builder.fadd(builder.load(entry), share), entry)

    return types.void(sums, index, types.intp, _OF[sums.dtype]), codegen


@intrinsic
def keep_from(typing, x, value, threshold):
    """x where value >= threshold (words), else 0."""

    def codegen(context, builder, signature, args):
        x, value, threshold = args
        return builder.select(builder.icmp_unsigned(">=", value, threshold), x, constant(x.type, 0.0))

    return (x(x, words, words), codegen) if x in _REAL else None


def exp(x):
    """exp(x) of floats for x <= 88, 0 from some -87.7 down; of doubles for x <= 709, 0 from -708.7 down; nan stays."""
    raise NotImplementedError("compiled code only")


# exp(r) = 1 + r + r^2 sum of c_i r^i for |r| <= log(2) / 2, to 1e-9 relative (a Chebyshev fit)
_C0, _C1, _C2, _C3, _C4, _C5 = (
    np.float32(c) for c in (0.5, 1.666666672e-1, 4.166646419e-2, 8.333298339e-3, 1.393373173e-3, 1.989939314e-4)
)
_LOG2E, _LEAST, _ONE = np.float32(1.4426950408889634), np.float32(-88.0), np.float32(1.0)
_LN2, _LN2_REST = np.float32(0.693359375), np.float32(-2.1219444005e-4)  # few bits, so that n * _LN2 is exact


@jit()
def _exp_floats(x):
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


_TAYLOR = tuple(1 / math.factorial(i) for i in range(13, -1, -1))  # to 5e-18 for |r| <= log(2) / 2
_LN2_DOUBLE, _LN2_DOUBLE_REST = 6.93145751953125e-1, 1.42860682030941723212e-6


@jit()
def _exp_doubles(x):
    x = _at_least(x, splat(-709.0))
    n = _round(x * splat(math.log2(math.e)))
    r = multiply_add(n, splat(-_LN2_DOUBLE), x)
    r = multiply_add(n, splat(-_LN2_DOUBLE_REST), r)
    y = splat(_TAYLOR[0])
    for c in _TAYLOR[1:]:
        y = multiply_add(y, r, splat(c))
    return y * _power(n)


@overload(exp)
def _exp(x):
    return {floats: lambda x: _exp_floats(x), doubles: lambda x: _exp_doubles(x)}.get(x)


def _transpose(builder: ir.IRBuilder, rows: list[ir.Value]) -> list[ir.Value]:
    """Transpose an 8 x 8 matrix, in three rounds of shuffles within and across halves."""

    def shuffle(a, b, lanes):
        return builder.shuffle_vector(a, b, _lanes(*lanes))

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
    """Eight rows of eight numbers, ``step`` apart in x from ``at`` on, become eight columns of out."""

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
