"""Mutants of the planner and of the shares of a batch, for ``bench.mutants --plans``.

One a function, in the order in which seed 25 drew them from the files, without measuring; left out are scales of
coefficients that are fitted, and budgets of time.
"""

from __future__ import annotations

from bench.mutant_list import Mutant

PLANS_AND_SHARES = (
    Mutant(
        "listed pairs of all rows, super rows among them",
        "megagraph/planner/fitting.py",
        "config, supers=queries > block)",
        "config, supers=queries >= block)",
    ),
    Mutant(
        "a rank goes on with a message missing",
        "megagraph/planner/simulate.py",
        "self.missing[rank] -= 1",
        "self.missing[rank] -= 2",
    ),
    Mutant(
        "ranks of unequal speed everywhere",
        "megagraph/planner/cost.py",
        "return plan.dp > 1 and self.knows_ranks(plan) and len(set(self._slowness(plan))) > 1",
        "return plan.dp > 1 or self.knows_ranks(plan) or len(set(self._slowness(plan))) > 1",
    ),
    Mutant(
        "the first uneven plan is taken",
        "megagraph/planner/searching.py",
        "if best is not None and _rank(found) >= _rank(best):",
        "if best is not None or _rank(found) >= _rank(best):",
    ),
    Mutant(
        "the last visit of a ring is free",
        "megagraph/planner/seconds.py",
        "return first + (plan.cp - 2) * _behind(visit, hop) + visit",
        "return first + (plan.cp - 2) * _behind(visit, hop) - visit",
    ),
    Mutant(
        "a model without a workload is a profile",
        "megagraph/planner/cost.py",
        "if self.model is None or self.workload is None:",
        "if self.model is None and self.workload is None:",
    ),
    Mutant(
        "gradients go to the next stage",
        "megagraph/planner/simulate.py",
        "to = message.stage + (-1 if message.backward else 1)",
        "to = message.stage - (-1 if message.backward else 1)",
    ),
    Mutant(
        "an all-reduce sends more",
        "megagraph/planner/terms.py",
        '"all_reduce.byte": 2 * (ranks - 1) / ranks * size',
        '"all_reduce.byte": 2 * (ranks + 1) / ranks * size',
    ),
    Mutant(
        "a stage of one layer is refused", "megagraph/planner/plan.py", "if min(layers) < 1:", "if min(layers) < 2:"
    ),
    Mutant(
        "stages are ranks and stages",
        "megagraph/planner/plan.py",
        "return self.pp * self.stages_per_rank",
        "return self.pp + self.stages_per_rank",
    ),
    Mutant(
        "channels of a bench",
        "megagraph/planner/rows.py",
        '"bias_size": 4 if row["form"] == "projected" else 32',
        '"bias_size": 5 if row["form"] == "projected" else 32',
    ),
    Mutant(
        "no interleaved plan of one layer a stage",
        "megagraph/planner/shapes.py",
        "if per_rank * pp <= num_layers:",
        "if per_rank * pp < num_layers:",
    ),
    Mutant(
        "ranks wait for a message that nobody sends",
        "megagraph/planner/simulate.py",
        "self.missing = [0] * len(self.todo)",
        "self.missing = [1] * len(self.todo)",
    ),
    Mutant(
        "rings of one rank gather",
        "megagraph/planner/shapes.py",
        'if cp > 1 else ("ring",)',
        'if cp >= 1 else ("ring",)',
    ),
    Mutant(
        "splits of more stages",
        "megagraph/planner/searching.py",
        "combinations(range(1, num_layers), plan.num_stages - 1)",
        "combinations(range(1, num_layers), plan.num_stages + 1)",
    ),
    Mutant(
        "a process takes twice its tensors",
        "megagraph/planner/memory.py",
        'return rates.get("process.byte", 1.0)',
        'return rates.get("process.byte", 2.0)',
    ),
    Mutant(
        "a batch of one sequence is refused",
        "megagraph/planner/workload.py",
        'lows = {"batch_sequences": 1,',
        'lows = {"batch_sequences": 2,',
    ),
    Mutant(
        "the read-out in layers",
        "megagraph/planner/cost.py",
        "return first / layer - 1, last / layer - 1",
        "return first / layer - 1, last / layer + 1",
    ),
    Mutant(
        "a halo leaves the node it is in",
        "megagraph/planner/links.py",
        "min(self.per_node or 1, plan.cp) if spans else 0).total",
        "min(self.per_node or 1, plan.cp)).total",
    ),
    Mutant("nothing is fitted", "megagraph/planner/fitting.py", "if not values:", "if values:"),
    Mutant(
        "the last forward pass sends alone",
        "megagraph/planner/simulate.py",
        "if i < first or i > final:",
        "if i < first or i >= final:",
    ),
    Mutant(
        "a bound of ranks twice as slow",
        "megagraph/planner/cost.py",
        "min(self.slowness) if self.knows_ranks(plan) else 1.0",
        "min(self.slowness) if self.knows_ranks(plan) else 2.0",
    ),
    Mutant(
        "a last layer is taken away",
        "megagraph/planner/fitting.py",
        "layers * value + last[name] for",
        "layers * value - last[name] for",
    ),
    Mutant(
        "weights of a fit are added",
        "megagraph/planner/fitting.py",
        "matrix *= weights[:, None]",
        "matrix += weights[:, None]",
    ),
    Mutant(
        "a workspace of all rows",
        "megagraph/planner/fitting.py",
        'return workspace_terms(row["sequences"], row["rows"], targets, row_config(row))',
        'return workspace_terms(row["sequences"], row["rows"], row["rows"], row_config(row))',
    ),
    Mutant(
        "channels of two bytes",
        "megagraph/planner/memory.py",
        '(2 if dtype == "bf16" else 4) * config.bias_size',
        "2 * config.bias_size",
    ),
    Mutant(
        "a lightest split with too little room",
        "megagraph/planner/split.py",
        "np.partition(memory, num_layers - 1, axis=None)[num_layers - 1]",
        "np.partition(memory, num_layers - 1, axis=None)[num_layers - 2]",
    ),
    Mutant(
        "one message on a link is two groups",
        "megagraph/planner/links.py",
        "return 2 if max(flows) > 1 else 1",
        "return 2 if max(flows) >= 1 else 1",
    ),
    Mutant(
        "a profile is not kept",
        "megagraph/planner/profile.py",
        "            save_rows(path, rows)\n",
        "            pass\n",
    ),
    Mutant(
        "more sequences than there are",
        "megagraph/data/options.py",
        "number * end // ends[-1] for end in ends",
        "number * end // ends[-2] for end in ends",
    ),
    Mutant(
        "an empty sequence is the last one",
        "megagraph/data/build.py",
        "min(own.start, size - 1), ids)",
        "max(own.start, size - 1), ids)",
    ),
    Mutant(
        "weights are ignored",
        "megagraph/data/batch.py",
        "deal(number, self.weights or (1,) * self.dp)",
        "deal(number, (1,) * self.dp)",
    ),
    Mutant(
        "weights of nothing",
        "megagraph/data/batch.py",
        "len(self.weights) != self.dp or min(self.weights) < 1",
        "len(self.weights) != self.dp and min(self.weights) < 1",
    ),
    Mutant(
        "node 0 is no node",
        "megagraph/data/build.py",
        "        padding = slots < 0\n",
        "        padding = slots <= 0\n",
    ),
    Mutant(
        "a batch as long as a sequence",
        "megagraph/data/batch.py",
        "    def batch_size(self) -> int:\n        return self.key_padding_mask.shape[0]",
        "    def batch_size(self) -> int:\n        return self.key_padding_mask.shape[1]",
    ),
)
