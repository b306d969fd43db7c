"""The kernels to check: the default configurations, and a cover of everything else they can be compiled for.

Every pair of values of two factors occurs in some variant of the cover (pairwise testing): most faults of a
specialised kernel need one or two of its options, and the product of all would be thousands.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

FORMS = ("none", "dense", "bucket", "projected")


class Variant(NamedTuple):
    """One compiled kernel. Factors that a kernel does not have are ignored."""

    kernel: str  # "fwd", "bwd" or "hidden_dropout"
    form: str
    dtype: str = "bfloat16"  # of torch, or "tf32": float32 whose products may be of rounded inputs
    head_dim: int = 64
    step: str = "only"  # of a ring: "only", "first", "middle" or "last"; backward writes at the first, else adds
    dropout: bool = False
    padding: bool = False  # key_padding_mask; with a projected bias, also its mask
    aligned: bool = True  # segments begin at multiples of 16 columns and the rows of the bias hold such a multiple
    rows_first: bool = True  # memory of q, k, v is [B, N, H, D], as projections leave it; else [B, H, N, D]
    plane: str = "own"  # dense backward: every head has a plane of its own, or "shared" by all
    # or "short", sequences of 32 nodes, whose tiles are others, step and aligned are ignored then; or "listed" pairs,
    # at the step "only" all columns in one segment
    path: str = "long"
    learned_grad: bool = True  # backward: the gradient of the learned part of the bias is wanted

    @property
    def name(self) -> str:
        """What pytest and the report print."""
        flags = [name for name in ("dropout", "padding") if getattr(self, name)]
        flags += [word for word, plain in (("odd", self.aligned), ("heads_first", self.rows_first)) if not plain]
        flags += [word for word in (self.plane, self.path) if word in ("shared", "short", "listed")]
        flags += [] if self.learned_grad else ["frozen"]
        return "-".join([self.kernel, self.form, self.dtype, f"D{self.head_dim}", self.step, *flags])


FACTORS: dict[str, tuple] = {
    "kernel": ("fwd", "bwd"),
    "form": FORMS,
    "dtype": ("bfloat16", "float16", "float32", "tf32"),
    "head_dim": (8, 4, 64, 1, 16, 40, 128, 256),
    "step": ("only", "first", "middle", "last"),
    "dropout": (False, True),
    "padding": (False, True),
    "aligned": (True, False),
    "rows_first": (True, False),
    "plane": ("own", "shared"),
    "path": ("long", "short"),
    "learned_grad": (True, False),
}


def defaults() -> list[Variant]:
    """What training runs, at the head dims of the benchmarks; a frozen projection stands before the learned one, whose
    gradient is what comes on top, and dropout of attention, which costs a hash a score, after both. Listed pairs have
    few variants, which compile from the same parts."""
    variants = [Variant("hidden_dropout", "none", dropout=True)]
    for D in (4, 8, 32, 64):
        variants += [Variant("bwd", "projected", head_dim=D, learned_grad=False)]
        for path in ("long", "short") if D <= 16 else ("long",):
            variants += [Variant(kernel, form, head_dim=D, path=path) for form in FORMS for kernel in ("fwd", "bwd")]
    listed = [
        Variant(kernel, "bucket", head_dim=D, path="listed") for D in (8, 16, 64, 128) for kernel in ("fwd", "bwd")
    ]
    for kernel in ("fwd", "bwd"):
        listed += [Variant(kernel, form, head_dim=16, path="listed") for form in ("dense", "projected")]
        listed += [
            Variant(kernel, "bucket", head_dim=16, step="middle", dropout=True, padding=True, path="listed"),
            Variant(kernel, "bucket", dtype="float32", head_dim=16, path="listed"),
        ]
    compact = itertools.product(("fwd", "bwd"), ("bucket", "projected"), (8, 64))
    return variants + listed + [Variant(kernel, form, head_dim=D, dropout=True) for kernel, form, D in compact]


def cover() -> list[Variant]:
    """A greedy pairwise cover of ``FACTORS``: each variant takes, factor by factor, the value that meets most pairs
    not met before."""
    names = list(FACTORS)
    missing = {((a, x), (b, y)) for a, b in itertools.combinations(names, 2) for x in FACTORS[a] for y in FACTORS[b]}
    variants = []
    while missing:
        (a, x), (b, y) = min(missing, key=lambda pair: [(names.index(n), FACTORS[n].index(v)) for n, v in pair])
        chosen = {a: x, b: y}
        for name in names:
            if name not in chosen:
                chosen[name] = max(
                    FACTORS[name], key=lambda value: len(missing & _pairs(names, chosen | {name: value}))
                )
        missing -= _pairs(names, chosen)
        variants.append(Variant(**chosen))
    return variants


def _pairs(names: list[str], chosen: dict) -> set:
    items = [(name, chosen[name]) for name in names if name in chosen]
    return set(itertools.combinations(items, 2))
