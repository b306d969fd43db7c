"""The small matrix product that large ones are made of, its sums in registers."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from megagraph.simd import LANES, VECTORS, call, constant, splatted


def _emit_product(context, builder, signature, args, rows: int, vectors: int) -> None:
    """c [rows, 8 * vectors] = a b, or c += a b; the sums stay in registers."""
    _, a_at, a_row, a_k, length, _, b_at, b_k, _, c_at, c_row, add = args
    element = VECTORS[signature.args[0].dtype]
    a, b, c = (context.make_array(signature.args[i])(context, builder, args[i]).data for i in (0, 5, 8))

    def number(value: int) -> ir.Constant:
        return ir.Constant(a_at.type, value)

    def place(row: int, vector: int) -> ir.Value:
        at = builder.add(builder.add(c_at, builder.mul(c_row, number(row))), number(LANES * vector))
        return builder.bitcast(builder.gep(c, [at]), element.as_pointer())

    zero = constant(element, 0.0)
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
            x = splatted(builder, element, x)
            for i in range(vectors):
                sum_ = sums[row, i]
                builder.store(call(builder, "fmuladd", x, b_vectors[i], builder.load(sum_)), sum_)
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
