"""The mutants of ``bench.mutants``, and which tests are of which file.

Twelve survived an audit of the tests before (``AUDITED``). The others were drawn: a function of a core file, and one
change of a line there (a comparison's bound, an operator, a number, a branch, a call left out), in the order of seed
0 when the list was made, but for three that change nothing that can be seen: a threshold that nobody reads, the scale
of a coefficient that is fitted, bits that torch cuts off. Where code has moved since, so have they;
``transfer_seconds`` stands for one that is gone.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

BATCHES = ("batch", "build", "ego", "cluster", "prepare", "options")
AREAS = {
    "kernels": ("tile", "heads", "forward", "backward", "learned", "projection", "hidden_dropout"),
    "megagraph/attention": ("ring", "operator", "engines", "layout", "bias", "dropout", "packing"),
    "megagraph/attention/cpu": ("tile", "tiles", "row", "rows"),
    "megagraph/data": (
        *BATCHES,
        *("sample", "structure", "coarsen", "loader", "store", "header", "check", "cache"),
    ),
    "megagraph/parallel": ("pipeline", "replicate", "embedding"),
    "megagraph/planner": (
        "workload",
        "terms",
        "seconds",
        "memory",
        "cost",
        "search",
        "split",
        "schedule",
        "links",
        "simulate",
    ),
    "megagraph": ("epochs", "checkpoint", "state", "run", "weights", "files"),
}
STEPS = (
    "tests/attention/test_step.py",
    "tests/attention/test_operator.py",
    "tests/attention/test_operator_input.py",
    "tests/attention/test_checks.py",
)
PLANS = (
    "tests/planner/test_by_hand.py",
    "tests/planner/test_cost.py",
    "tests/planner/test_search.py",
    "tests/planner/test_schedule.py",
    "tests/planner/test_simulate.py",
    "tests/planner/test_links.py",
)
FIT = ("tests/planner/test_profile.py", "tests/planner/test_cost.py", "tests/planner/test_bad_input.py")
RUNS = ("tests/test_checkpoint.py", "tests/test_run.py", "tests/test_starts.py")
STORES = ("tests/data/test_store.py", "tests/data/test_store_check.py", "tests/data/test_store_replace.py")
TESTS = {
    "kernels/hidden_dropout.py": ("tests/kernels/test_hidden_dropout.py",),
    "kernels/": ("tests/kernels/test_variants.py", *STEPS),
    **dict.fromkeys(
        (f"megagraph/attention/{name}.py" for name in ("rank", "ring", "comm", "ulysses", "context_parallel")),
        ("tests/attention/test_ring.py", "tests/attention/test_halo.py"),
    ),
    "megagraph/attention/halo.py": ("tests/attention/test_halo.py",),
    "megagraph/attention/bordered.py": ("tests/attention/test_halo.py", "tests/attention/test_pairs.py"),
    "megagraph/attention/module.py": ("tests/attention/test_dropout.py", "tests/attention/test_operator.py"),
    "megagraph/attention/layout.py": ("tests/attention/test_layout.py", "tests/attention/test_ring.py"),
    "megagraph/attention/dropout.py": ("tests/attention/test_dropout.py", *STEPS),
    "megagraph/attention/": (*STEPS, "tests/test_simd.py", "tests/attention/test_short.py"),
    "megagraph/simd.py": ("tests/test_simd.py", *STEPS),
    "megagraph/models/": ("tests/models", "tests/attention/test_packing.py"),
    **dict.fromkeys(
        (f"megagraph/data/{name}.py" for name in BATCHES), ("tests/data/test_batch.py", "tests/data/test_shares.py")
    ),
    "megagraph/data/structure.py": ("tests/data/test_structure.py", "tests/data/test_batch.py"),
    "megagraph/data/coarsen.py": ("tests/data/test_coarsen.py", "tests/data/test_batch.py"),
    "megagraph/data/": (*STORES, "tests/data/test_store_damage.py"),
    "megagraph/parallel/embedding.py": ("tests/parallel/test_embedding.py", "tests/parallel/test_layouts.py"),
    "megagraph/parallel/": ("tests/parallel/test_pipeline.py", "tests/parallel/test_embedding.py"),
    "megagraph/planner/fitting.py": FIT,
    "megagraph/planner/measure/": FIT,
    "megagraph/planner/profile.py": FIT,
    "megagraph/planner/rows.py": FIT,
    "megagraph/planner/": (*PLANS, "tests/planner/test_split.py"),
    "megagraph/epochs.py": ("tests/test_train.py", *RUNS),
    "megagraph/": (*RUNS, "tests/test_train.py"),
}  # of the file, or of the first folder here that holds it


@dataclass(frozen=True, slots=True)
class Mutant:
    """A text of a file, there once, and what stands in its place."""

    name: str
    file: str
    old: str
    new: str

    @property
    def tests(self) -> tuple[str, ...]:
        return next(tests for place, tests in TESTS.items() if self.file.startswith(place))

    def apply(self, root: Path) -> str:
        """Change the file below ``root``; returns what it was."""
        path = root / self.file
        before = path.read_text()
        if before.count(self.old) != 1:
            raise SystemExit(
                f"{self.name}: expected once in {self.file}, got {before.count(self.old)} times: {self.old}"
            )
        path.write_text(before.replace(self.old, self.new))
        return before


AUDITED = (
    Mutant(
        "one dropout mask for all layers",
        "megagraph/attention/dropout.py",
        "mix_key(aligned[None], layer_ids[:, None])",
        "mix_key(aligned[None], 0 * layer_ids[:, None])",
    ),
    Mutant(
        "one mask for all places of a layer",
        "megagraph/attention/dropout.py",
        "mix_key(of_layers[:, None], place_ids[:, None])",
        "mix_key(of_layers[:, None], 0 * place_ids[:, None])",
    ),
    Mutant(
        "dropout keys without the step",
        "megagraph/epochs.py",
        "dropout_keys(config.seed, self.step, batch",
        "dropout_keys(config.seed, 0, batch",
    ),
    Mutant(
        "no attention dropout in training",
        "megagraph/attention/module.py",
        "self.dropout if self.training else 0.0",
        "self.dropout if not self.training else 0.0",
    ),
    Mutant(
        "held-out time judged on fitted rows",
        "megagraph/planner/fitting.py",
        "held_out |= time_errors(fit_seconds(train), test)",
        "held_out |= time_errors(fit_seconds(train), train)",
    ),
    Mutant(
        "the last gradients of a ring are home at once",
        "megagraph/planner/seconds.py",
        "_behind(visit, hop_of_gradients) + hop_of_gradients.total",
        "_behind(visit, hop_of_gradients)",
    ),
    Mutant(
        "no headroom", "megagraph/planner/searching.py", "self.limits = limits * (1 - HEADROOM)", "self.limits = limits"
    ),
    Mutant(
        "all-reduce over dp alone",
        "megagraph/planner/links.py",
        "ranks = plan.cp * plan.dp\n        flows",
        "ranks = plan.dp\n        flows",
    ),
    Mutant(
        "features of the first stage are free",
        "megagraph/planner/memory.py",
        "    boundary[0] += _batches(rates, work) * work.batch_sequences * features\n",
        "",
    ),
    Mutant(
        "cp does not shard the bias",
        "megagraph/planner/memory.py",
        "data = dense_bytes(rows, work.columns,",
        "data = dense_bytes(work.columns, work.columns,",
    ),
    Mutant(
        "bytes of an all-reduce",
        "megagraph/planner/terms.py",
        '"all_reduce.byte": 2 * (ranks - 1) / ranks * size',
        '"all_reduce.byte": size',
    ),
    Mutant(
        "a layer's time without its FFN",
        "megagraph/planner/terms.py",
        "queries * (2 * d**2 + 2 * d * config.ffn_dim)",
        "queries * 2 * d**2",
    ),
)

DRAWN = (
    Mutant(
        "_interpreted_range",
        "kernels/tile.py",
        "bounds = (int(x.handle.data.item()) if isinstance(x, tl.tensor) else int(x) for x in (start, stop, step))",
        "bounds = (int(x.handle.data.item()) for x in (start, stop, step))",
    ),
    Mutant(
        "_key_tile",
        "kernels/backward.py",
        "row_key = row_keys(x, b, h, tl.minimum(row + offs_m, x.M - 1))",
        "row_key = row_keys(x, b, h, tl.maximum(row + offs_m, x.M - 1))",
    ),
    Mutant(
        "dropped",
        "kernels/dropout.py",
        "_fold(cols.to(tl.uint32) * 0x9E3779B9)) < x.THRESHOLD",
        "_fold(cols.to(tl.uint32) + 0x9E3779B9)) < x.THRESHOLD",
    ),
    Mutant(
        "_padding",
        "kernels/tile.py",
        "ptrs = (x.padding.ptr + b * stride_b + col * stride_n) + offs_n * stride_n",
        "ptrs = (x.padding.ptr + b * stride_b + col * stride_n) - (offs_n * stride_n)",
    ),
    Mutant("_check_plane", "megagraph/attention/fields.py", "check_strided(name, tensor)", "pass"),
    Mutant(
        "backward",
        "megagraph/attention/rank.py",
        "ranks, results[0::2], results[1::2], grads[0::2], grads[1::2], strict=True",
        "ranks, results[0::2], results[2::2], grads[0::2], grads[1::2], strict=True",
    ),
    Mutant(
        "_exponentials",
        "megagraph/attention/cpu/row.py",
        "m = maximum(m, load(s, LANES * j))",
        "m = minimum(m, load(s, LANES * j))",
    ),
    Mutant(
        "whole_rows",
        "megagraph/attention/cpu/rows.py",
        "return Rows.whole(len(q), q.shape[2]), keys",
        "return Rows.whole(len(q), q.shape[3]), keys",
    ),
    Mutant(
        "num_local",
        "megagraph/attention/layout.py",
        "return self.block_size + self.num_super",
        "return (self.block_size) - (self.num_super)",
    ),
    Mutant(
        "_copy_panels",
        "megagraph/attention/cpu/tile.py",
        "row, to = start + i * stride, i * WIDE\n        for d in range(0, whole, LANES):",
        "row, to = start + i * stride, i * WIDE\n        for d in range(1, whole, LANES):",
    ),
    Mutant(
        "as_bias",
        "megagraph/attention/sums.py",
        "return DenseBias(bias.reshape((1,) * (4 - bias.ndim) + tuple(bias.shape)))",
        "return DenseBias(bias.reshape(((1,)) + (4 - bias.ndim) + tuple(bias.shape)))",
    ),
    Mutant("rule", "megagraph/data/check.py", "if at >= 0:", "if at > 0:"),
    Mutant(
        "num_nodes",
        "megagraph/data/batch.py",
        "return self.key_padding_mask.shape[1]",
        "return self.key_padding_mask.shape[2]",
    ),
    Mutant(
        "__init__",
        "megagraph/data/ego.py",
        "self.sequence_nodes = self.num_regular + options.num_super",
        "self.sequence_nodes = (self.num_regular) - (options.num_super)",
    ),
    Mutant(
        "num_sequences",
        "megagraph/data/batch.py",
        "-(-len(self.sequences(number)) // self.num_microbatches)",
        "len(self.sequences(number)) // self.num_microbatches",
    ),
    Mutant(
        "__call__",
        "megagraph/data/structure.py",
        "blocks, loops = self._within(np.where(first == np.arange(m), nodes, -1))",
        "blocks, loops = self._within(np.where(first == np.arange(m), nodes, 1))",
    ),
    Mutant(
        "aligned_columns",
        "megagraph/attention/bias.py",
        "return -(-columns // _ALIGNMENT) * _ALIGNMENT",
        "return (-(-columns // _ALIGNMENT)) + (_ALIGNMENT)",
    ),
    Mutant(
        "known_nodes",
        "megagraph/data/sample.py",
        "known[:, 1] = np.diff(graph.indptr) + 1",
        "known[:, 1] = (np.diff(graph.indptr)) - (1)",
    ),
    Mutant(
        "__init__",
        "megagraph/parallel/pipeline.py",
        'self._group = None if mesh is None or plan.pp == 1 else mesh["pp"]',
        'self._group = None if mesh is None or plan.pp == 2 else mesh["pp"]',
    ),
    Mutant(
        "whole",
        "megagraph/parallel/embedding.py",
        "part, self.replicas, [Shard(0)], run_check=False, shape=shape, stride=(part.shape[1], 1)",
        "part, self.replicas, [Shard(0)], run_check=False, shape=shape, stride=(part.shape[1], 2)",
    ),
    Mutant("add", "megagraph/parallel/pipeline.py", "gradient.add_(leaf.grad)", "pass"),
    Mutant(
        "extra_layers",
        "megagraph/planner/cost.py",
        "first, layer, last = (tables.forward + tables.backward)[:, 1].tolist()",
        "first, layer, last = ((tables.forward) - (tables.backward))[:, 1].tolist()",
    ),
    Mutant(
        "transfer_seconds",
        "megagraph/planner/links.py",
        "return Wire(per_byte * size * self._sharing(flows)",
        "return Wire(-per_byte * size * self._sharing(flows)",
    ),
    Mutant(
        "read",
        "megagraph/checkpoint.py",
        'if not all(isinstance(manifest[name], dict) for name in ("progress", "files", "config")):',
        'if not all(isinstance(manifest[name], dict) for name in ("progress", "config")):',
    ),
    Mutant("load", "megagraph/state.py", "if not isinstance(value, Tensor):", "if isinstance(value, Tensor):"),
    Mutant("make_pipeline", "megagraph/train_step.py", "stage.to(device, config.parameter_dtype)", "pass"),
    Mutant(
        "_names",
        "megagraph/checkpoint.py",
        'first = latest.read_text(errors="replace") if latest.is_file() else None',
        "first = latest.read_text(errors='replace')",
    ),
    Mutant(
        "finished",
        "megagraph/epochs.py",
        "return self.batch == 0 and (self.epoch == self.config.epochs or self._no_more_steps",
        "return self.batch == 1 and (self.epoch == self.config.epochs or self._no_more_steps",
    ),
)
MUTANTS = AUDITED + DRAWN
