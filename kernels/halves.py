"""Two 16-bit numbers to an instruction, which the compiler does not do by itself.

The helper has two forms, one of NVIDIA's assembly and one of plain Triton, which agree in every bit; ``x.ASSEMBLY``
says which runs (``tiles.has_halves``). The interpreter runs the plain one, and AMD compiles it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# or'ed with a bucket: 256 distinct finite numbers, as bit patterns
CODES = {torch.bfloat16: 0x4300, torch.float16: 0x6400}


@triton.jit
def equal(x, a, b, dtype: tl.constexpr):
    """1 where the int16 patterns a and b agree, else 0, in ``dtype``; patterns of ``CODES`` where it has 16 bits."""
    a, b = tl.broadcast(a, b)
    if x.ASSEMBLY and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "set.eq.bf16x2.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    elif x.ASSEMBLY and dtype == tl.float16:
        return tl.inline_asm_elementwise(
            "set.eq.f16x2.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        return (a == b).to(dtype)
