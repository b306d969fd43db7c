"""Which messages share the link of a node, against a list of every message of a plan."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

import megagraph as mg
from megagraph.planner.links import Links, Wire

ACROSS = {"transfer.call": 0.5, "transfer.byte": 2.0, "all_reduce.call": 0.25, "all_reduce.byte": 3.0}
NODE = {"transfer.call": 0.125, "transfer.byte": 0.0625, "all_reduce.call": 0.0078125, "all_reduce.byte": 0.03125}
RATES = {"node": NODE, "across": ACROSS}
PLANS = [(1, 2, 1), (1, 4, 1), (2, 1, 2), (2, 2, 1), (4, 1, 1), (1, 1, 4), (2, 2, 2), (1, 4, 2), (3, 2, 2), (2, 3, 2)]


def rank_of(plan, stage, replica, place):
    """Those who are near each other differ in what is named last."""
    first, second = {"pp": (stage * plan.dp, replica), "dp": (replica * plan.pp, stage)}[plan.across]
    return (first + second) * plan.cp + place


def rings(plan):
    for stage in range(plan.pp):
        for replica in range(plan.dp):
            yield [rank_of(plan, stage, replica, place) for place in range(plan.cp)]


def busiest(messages, per_node):
    """How many messages cross the busiest link of a node in one direction."""
    out, into = Counter(), Counter()
    for source, target in messages:
        if source // per_node != target // per_node:
            out[source // per_node] += 1
            into[target // per_node] += 1
    return max([*out.values(), *into.values()], default=0)


def seconds(messages, per_node, size):
    """Seconds of messages that start at once: those that share a link are through when all of their bytes are."""
    crossing = busiest(messages, per_node)
    if crossing:
        return crossing * size * ACROSS["transfer.byte"], ACROSS["transfer.call"]
    return size * NODE["transfer.byte"], NODE["transfer.call"]


@pytest.mark.parametrize("per_node", [1, 2, 3, 4, 12])
@pytest.mark.parametrize("across", ["pp", "dp"])
@pytest.mark.parametrize("sizes", PLANS, ids=str)
def test_every_message_of_a_plan(sizes, across, per_node):
    pp, cp, dp = sizes
    if across == "dp" and min(pp, dp) == 1:
        with pytest.raises(ValueError, match="across must be 'pp' unless pp and dp are above 1"):
            mg.Plan(pp=pp, cp=cp, dp=dp, across=across)
        return
    plan = mg.Plan(pp=pp, cp=cp, dp=dp, num_microbatches=1 if pp == 1 else 2, across=across)
    links = Links(RATES, per_node)
    for stage, wire in enumerate(links.boundaries(plan, 8.0)):
        pairs = [
            (rank_of(plan, stage, replica, place), rank_of(plan, stage + 1, replica, place))
            for replica in range(plan.dp)
            for place in range(plan.cp)
        ]
        want, latency = seconds(pairs, per_node, 8.0)
        if busiest(pairs, per_node):  # those that share a link are simulated in groups, one after the other
            want /= links.groups(plan)
        assert (wire.seconds, wire.latency) == (want, latency)
    around = [(ring[i - 1], ring[i]) for ring in rings(plan) for i in range(plan.cp) if plan.cp > 1]
    hop = links.hop(plan, 8.0)
    assert (hop.seconds, hop.latency) == seconds(around, per_node, 8.0)
    sums = []  # around all replicas of a stage
    for stage in range(pp):
        ranks = [rank_of(plan, stage, replica, place) for replica in range(dp) for place in range(cp)]
        sums += [pair for pair in pairwise([*ranks, ranks[0]]) if len(ranks) > 1]
    calls, per_byte = links.all_reduce(plan)
    crossing, parts = busiest(sums, per_node), 2 * (cp * dp - 1)
    rates = ACROSS if crossing else NODE
    assert calls == parts * rates["all_reduce.call"]
    assert per_byte == pytest.approx(parts / (cp * dp) * max(crossing, 1) * rates["all_reduce.byte"], rel=1e-12)


def test_all_to_all_has_every_message_that_leaves():
    # two nodes of two ranks in one ring: from each node 2 * 2 messages leave, of 8 bytes each
    plan = mg.Plan(cp=4)
    assert Links(RATES, 2).to_all(plan, 8.0) == 4 * 8 * 2.0 + 0.5
    # in one node a rank's own three messages
    assert Links(RATES, 4).to_all(plan, 8.0) == 3 * 8 * 0.0625 + 0.125


def test_a_sum_over_all_replicas_goes_around_the_nodes():
    # six messages of a fourth of the bytes, one after the other, over the link between neighbours
    assert Links(RATES, 2).all_reduce(mg.Plan(cp=2, dp=2)) == (6 * 0.25, 6 / 4 * 3.0)
    # two messages of half of them: of both stages' pairs of ranks 0 1 | 2 3 one crosses, then, on nodes 0 1 2 | 3
    assert Links(RATES, 3).all_reduce(mg.Plan(pp=2, dp=2, num_microbatches=2)) == (2 * 0.25, 2 / 2 * 3.0)
    # none does
    assert Links(RATES, 2).all_reduce(mg.Plan(pp=2, dp=2, num_microbatches=2)) == (2 * 0.0078125, 2 / 2 * 0.03125)
    # the ring of six ranks on two nodes leaves each of them once
    assert Links(RATES, 3).all_reduce(mg.Plan(cp=3, dp=2)) == (10 * 0.25, 10 / 6 * 3.0)


def test_what_was_not_measured_is_taken_from_what_was():
    plan = mg.Plan(dp=2)
    assert Links({"node": NODE}, 1).all_reduce(plan) == Links({"node": NODE}).all_reduce(plan)
    sends = {"transfer.call": 0.5, "transfer.byte": 2.0}
    # a sum is two exchanges of half of the bytes
    assert Links({"across": sends}, 1).all_reduce(plan) == (2 * 0.5, 2.0)
    assert Links({}, 1).boundaries(mg.Plan(pp=2, num_microbatches=2), 8.0) == [Wire(out=0, back=1)]


def test_a_halo_inside_a_node_takes_its_links():
    """Rings of two ranks lie in nodes of four; those of eight leave them, and four ranks share a link."""
    links = Links(RATES, 4)
    assert links.shared(mg.Plan(cp=2, dp=4), 8.0) == 8 * NODE["transfer.byte"] + NODE["transfer.call"]
    assert links.shared(mg.Plan(cp=8), 8.0) == 4 * 8 * ACROSS["transfer.byte"] + ACROSS["transfer.call"]


def test_replicas_are_in_groups_where_they_share_a_link():
    assert Links(RATES, 1).groups(mg.Plan(pp=2)) == 1 and Links(RATES, 2).groups(mg.Plan(pp=2, dp=2)) == 2
    assert Links(RATES).groups(mg.Plan(pp=2, dp=2)) == Links(RATES, 4).groups(mg.Plan(pp=2, dp=2)) == 1
    assert Links(RATES, 2, own=True).groups(mg.Plan(pp=2, dp=2)) == 1
