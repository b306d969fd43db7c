"""Compile the attention kernels for sm_90 without a GPU and print what each takes, one JSON object per line.

Run in a process without TRITON_INTERPRET. The launchers themselves are called, on CPU tensors, with kernels
whose launch is replaced by a compilation: same arguments, same specialisation, same binary as on the device.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
import time
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget

from megagraph.kernels import biased_attention

TARGET = GPUTarget("cuda", 90, 32)
FORMS = ("none", "dense", "bucket", "projected")


class CompileOnly:
    """Stands in for a kernel; a launch compiles it for ``TARGET`` and keeps the binary."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        def compile_(*args, **kwargs):
            self.binary = self.kernel.warmup(*args, grid=grid, **kwargs)

        return compile_


class StubDriver:
    """Stands in for the GPU driver, which ``warmup`` asks for the target."""

    def get_current_target(self):
        return TARGET

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0


def resources(binary) -> dict[str, int]:
    """Shared memory and warps from the metadata; registers, stack and spill instructions from the cubin."""
    cuobjdump = triton.knobs.nvidia.cuobjdump.path
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(binary.asm["cubin"])

        def dump(flag: str) -> str:
            return subprocess.run([cuobjdump, flag, cubin], capture_output=True, text=True, check=True).stdout

        usage, sass = dump("-res-usage"), dump("-sass")
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
    count = {name.lower(): len(re.findall(rf"\b{name}\b", sass)) for name in ("STL", "LDL", "HGMMA", "HMMA")}
    return {
        "shared": binary.metadata.shared,
        "warps": binary.metadata.num_warps,
        "registers": int(registers),
        "stack": int(stack),
        **count,
    }


def compile_step(
    form: str, dtype: torch.dtype, D: int, dropout_p: float, only_step: bool, B=2, H=4, N=512
) -> dict[str, dict]:
    """Compile one forward and one backward step; ``only_step``: first and last at once, else in between."""
    q, k, v, d_out, out = (torch.empty(B, H, N, D, dtype=dtype) for _ in range(5))
    lse, delta = (torch.empty(B, H, N) for _ in range(2))
    dq, dk, dv = (torch.empty(B, H, N, D) for _ in range(3))
    data, learned, bias_mask = {
        "none": (None, None, None),
        "dense": (None, torch.empty(B, H, N, N, dtype=dtype), None),
        "bucket": (torch.empty(B, N, N, dtype=torch.uint8), torch.empty(H, 40), None),
        "projected": (
            torch.empty(1, 5, N, N, dtype=dtype),
            torch.empty(H, 5),
            torch.empty(1, N, N, dtype=torch.bool),
        ),
    }[form]
    inputs = dict(
        form=form,
        data=data,
        learned=learned,
        bias_mask=bias_mask,
        key_padding_mask=torch.empty(B, N, dtype=torch.bool),
        segments=[(0, 0, N - 128), (N - 128, N - 128, 128)],
        scale=D**-0.5,
        dropout_p=dropout_p,
        dropout_key=torch.empty(B, dtype=torch.int32) if dropout_p else None,
        row_ids=torch.empty(N, dtype=torch.int32) if dropout_p else None,
    )
    d_learned = None if learned is None else torch.empty(learned.shape)
    if only_step:
        carried = dict(m=None, l=None, acc=None, out=out, lse=lse)
    else:
        carried = dict(m=torch.empty_like(lse), l=torch.empty_like(lse), acc=dq, out=None, lse=None)
    biased_attention.launch_step_fwd(q, k, v, **inputs, first=only_step, last=only_step, **carried)
    biased_attention.launch_step_bwd(
        q, k, v, **inputs, d_out=d_out, lse=lse, delta=delta, dq=dq, dk=dk, dv=dv, d_learned=d_learned
    )
    return {name: resources(getattr(biased_attention, name).binary) for name in ("_step_fwd", "_step_bwd")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="+", help="form:dtype:head_dim:dropout_p:step; step: only, middle")
    triton.runtime.driver.set_active(StubDriver())
    biased_attention._step_fwd = CompileOnly(biased_attention._step_fwd)
    biased_attention._step_bwd = CompileOnly(biased_attention._step_bwd)
    for case in parser.parse_args().cases:
        form, dtype, D, dropout_p, step = case.split(":")
        start = time.perf_counter()
        kernels = compile_step(form, getattr(torch, dtype), int(D), float(dropout_p), step == "only")
        seconds = round(time.perf_counter() - start, 1)
        for name, row in kernels.items():
            print(json.dumps({"case": case, "kernel": name, **row, "seconds_both": seconds}), flush=True)


if __name__ == "__main__":
    main()
