"""Eight numbers at a time in Numba: vectors of floats and of words for loops that LLVM would not vectorise by itself.

    load, store         eight neighbours of an array of float32, float64 or uint32
    fetch               what a load will want later, into the cache
    splat               one number in all lanes
    + - * /, >> ^ *     lane by lane, of floats or doubles; of words (uint32, which wrap)
    transposed          eight rows of eight numbers become eight columns
    product             the small matrix product that large ones are made of

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


@register_model(_Vector)
class _Model(models.PrimitiveModel):
    def __init__(self, manager, kind) -> None:
        super().__init__(manager, kind, kind.vector)


def _constant(vector: ir.VectorType, value: float) -> ir.Constant:
    return ir.Constant(vector, [value] * LANES)


def _call(builder: ir.IRBuilder, name: str, *args: ir.Value) -> ir.Value:
    """An LLVM intrinsic on floats or doubles."""
    vector = args[0].type
    suffix = "f32" if isinstance(vector.element, ir.FloatType) else "f64"
    kind = ir.FunctionType(vector, [vector] * len(args))
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}.v{LANES}{suffix}"), args)


def _pointer(context, builder: ir.IRBuilder, array_type, array, index) -> ir.Value:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), _OF[array_type.dtype].vector.as_pointer())


@intrinsic
def borrowed(typing, x):
    """The same arrays, in tuples of any depth, whose references nobody counts: the caller keeps them.

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
        return _splat(builder, kind.vector, args[0])

    return kind(value), codegen


def _splat(builder: ir.IRBuilder, vector: ir.VectorType, value: ir.Value) -> ir.Value:
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, value, ir.IntType(32)(0))
    return builder.shuffle_vector(first, undefined, _constant(_WORDS, 0))


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


multiply_add = _lanewise(_REAL, 3, lambda builder, *args: _call(builder, "fmuladd", *args))
maximum = _lanewise(_REAL, 2, _emit_maximum)
_round = _lanewise(_REAL, 1, lambda builder, x: _call(builder, "rint", x))


def _emit_replaced(bad: float, good: float) -> Callable[..., ir.Value]:
    def emit(builder, x):
        return builder.select(builder.fcmp_ordered("==", x, _constant(x.type, bad)), _constant(x.type, good), x)

    return emit


def _across(emit: Callable[..., ir.Value]) -> Any:
    """The lanes of a vector combined, in three halvings."""

    def codegen(context, builder, signature, args):
        (x,) = args
        for distance in (4, 2, 1):
            lanes = ir.Constant(_WORDS, [(lane + distance) % LANES for lane in range(LANES)])
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
    exponent = builder.add(builder.fptosi(n, integers), _constant(integers, bias))
    return builder.bitcast(builder.shl(exponent, _constant(integers, mantissa)), n.type)


_power = _lanewise(_REAL, 1, _emit_power)  # 2 ** n of whole n down to the smallest normal number, then 0


def _overload_operator(symbol: Callable, of_reals: Any, of_words: Any) -> None:
    @overload(symbol)
    def overloaded(a, b):
        if a == b and a in _REAL and of_reals is not None:
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
        _of_reals and _lanewise(_REAL, 2, _of_reals),
        _of_words and _lanewise((words,), 2, _of_words),
    )


@intrinsic
def counting(typing, first):
    """The words first, first + 1, ..."""

    def codegen(context, builder, signature, args):
        return builder.add(_splat(builder, _WORDS, args[0]), ir.Constant(_WORDS, list(range(LANES))))

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
        return builder.select(builder.icmp_unsigned(">=", value, threshold), x, _constant(x.type, 0.0))

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


def _emit_product(context, builder, signature, args, rows: int, vectors: int) -> None:
    """c [rows, 8 * vectors] = a b, or c += a b; the sums stay in registers."""
    _, a_at, a_row, a_k, length, _, b_at, b_k, _, c_at, c_row, add = args
    element = _OF[signature.args[0].dtype].vector
    a, b, c = (context.make_array(signature.args[i])(context, builder, args[i]).data for i in (0, 5, 8))

    def number(value: int) -> ir.Constant:
        return ir.Constant(a_at.type, value)

    def place(row: int, vector: int) -> ir.Value:
        at = builder.add(builder.add(c_at, builder.mul(c_row, number(row))), number(LANES * vector))
        return builder.bitcast(builder.gep(c, [at]), element.as_pointer())

    zero = _constant(element, 0.0)
    sums = {(row, i): cgutils.alloca_once(builder, element) for row in range(rows) for i in range(vectors)}
    for sum_ in sums.values():
        builder.store(zero, sum_)
    with cgutils.for_range(builder, length) as loop:
        b_first = builder.add(b_at, builder.mul(loop.index, b_k))
        b_vectors = []
        for i in range(vectors):
            at = builder.gep(b, [builder.add(b_first, number(LANES * i))])
            b_vectors.append(builder.load(builder.bitcast(at, element.as_pointer()), align=4))
        a_first = builder.add(a_at, builder.mul(loop.index, a_k))
        for row in range(rows):
            x = builder.load(builder.gep(a, [builder.add(a_first, builder.mul(a_row, number(row)))]))
            x = _splat(builder, element, x)
            for i in range(vectors):
                sum_ = sums[row, i]
                builder.store(_call(builder, "fmuladd", x, b_vectors[i], builder.load(sum_)), sum_)
    with builder.if_else(add) as (added, fresh):
        with added:  # last: one rounding where c is large, not one for each term
            for at, sum_ in sums.items():
                total = builder.fadd(builder.load(place(*at), align=4), builder.load(sum_))
                builder.store(total, place(*at), align=4)
        with fresh:
            for at, sum_ in sums.items():
                builder.store(builder.load(sum_), place(*at), align=4)


def _product(vectors: int) -> Any:
    @intrinsic
    def product(typing, a, a_at, a_row, a_k, length, b, b_at, b_k, c, c_at, c_row, add):
        def codegen(context, builder, signature, args):
            _emit_product(context, builder, signature, args, PRODUCT_ROWS, vectors)

        at = types.intp
        return types.void(a, at, at, at, at, b, at, at, c, at, at, types.boolean), codegen

    return product


PRODUCT_ROWS = 6  # with two vectors 12 sums, which hides the latency of the additions and fits into 16 registers
# c [6, 8] or [6, 16] = a [6, length] b [length, 8 or 16], added to c if ``add``. Numbers of a stand a_row and a_k
# apart, rows of b b_k and rows of c c_row.
product_8, product_16 = _product(1), _product(2)
