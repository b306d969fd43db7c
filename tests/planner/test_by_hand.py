"""Seconds and bytes of small plans against sums done by hand, from counts that the model itself or torch gives."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.distributed.pipelining._backward import stage_backward_input
from torch.utils.flop_counter import FlopCounterMode

import megagraph as mg
from megagraph.models.hierarchical import HierarchicalGT
from megagraph.planner.terms import embedding_terms, head_terms, layer_terms

CONFIG = mg.ModelConfig(
    in_features=3, num_classes=2, layers=2, dim=4, ffn_dim=6, heads=2, global_tokens=1, bias="bucket", bias_size=3
)
ONE_LAYER = replace(CONFIG, layers=1)
# cp = 2 leaves a rank 3 + 1 rows of a sequence, cp = 3 leaves it 2 + 1; all attend to 7 columns
WORKLOAD = mg.planner.Workload(batch_sequences=4, num_nodes=6, num_super=1, num_targets=1, feature_rows=5)


def cost_model(seconds=None, link=None, memory=None):
    """What is not given is free."""
    return mg.planner.CostModel(
        origin={},
        seconds=seconds or {},
        links={"node": {"all_reduce.byte": 0.0} | (link or {})},
        memory=memory or {},
        stall_seconds=0.0,
        ranges={},
        held_out={},
        workload=WORKLOAD,
        model=CONFIG,
    )


def parameters(config):
    """Parameters of the first stage alone, of a layer, and of the last stage alone; counted in a model of one layer."""
    counts = {"input_proj": 0, "global_tokens": 0, "layers": 0, "final_norm": 0, "head": 0}
    for name, parameter in HierarchicalGT(replace(config, layers=1)).named_parameters():
        counts[name.split(".")[0]] += parameter.numel()
    return counts["input_proj"] + counts["global_tokens"], counts["layers"], counts["final_norm"] + counts["head"]


# A model whose optimizer takes 5 s, on a batch of 4 sequences whose building takes the loader 12 s.
LOADER = {
    (mg.Plan(), "0"): 5 + 12,
    (mg.Plan(dp=2), "0"): 5 + 6,
    (mg.Plan(dp=2, shares=(1, 3)), "0"): 5 + 9,
    (mg.Plan(), "2"): 12,  # ahead of the step
    (mg.Plan(dp=2), "1"): 6,
    (mg.Plan(dp=4), "1"): 5,
}


@pytest.mark.parametrize(("plan", "workers"), LOADER)
def test_a_loader_builds_the_sequences_of_its_replica(plan, workers):
    cost = replace(cost_model({"forward": {"optimizer.call": 5.0}}), stall_seconds=12.0, origin={"workers": workers})
    assert cost.step_seconds(CONFIG, plan) == LOADER[plan, workers]
    work = cost.rank_work(CONFIG, plan)
    assert cost.step_bound(work, cost.stage_tables(work)) == LOADER[plan, workers]


# One layer, its target's row alone against the columns, 4 sequences of 2 heads: 4 * 2 scores a column, 1 s each
# forward and 10 s backward. A block's keys and values are 4 sequences * 2 nodes * 4 channels * 2 * 4 bytes = 256 bytes.
RING = {
    # own 3 rows, two visits of 2 rows; the link is awaited: blocks travel behind own rows and the first visit, and
    # backward gradients behind the second visit and then home
    ("ring", 1.0): (2 * 256 + 16) + (2 * 256 + 256 + 256),
    # the link is faster than the work: only the way home is awaited
    ("ring", 0.001): (24 + 2 * 16) + (240 + 2 * 160 + 0.256),
    # all columns at once, after two hops forward, and before two of gradients backward
    ("allgather", 1.0): (56 + 2 * 256) + (560 + 2 * 256),
}


@pytest.mark.parametrize(("comm", "seconds_per_byte"), RING)
def test_attention_of_three_ranks(comm, seconds_per_byte):
    scores = {"forward": {"attention.score": 1.0}, "backward": {"attention.score": 10.0}}
    cost = cost_model(scores, link={"transfer.byte": seconds_per_byte})
    got = cost.step_seconds(ONE_LAYER, mg.Plan(cp=3, comm=comm))
    assert got == pytest.approx(RING[comm, seconds_per_byte], rel=1e-12)


# two ranks: 3 nodes of 128 bytes behind 24 s for 3 columns beside their own 4 rows' each way, then gradients home;
# three: two blocks of 256 bytes behind more work than there is, and as above a gradient behind the last visit and home
HOPS = {2: 2 * (2 * 384 + 3 + 24) + (2 * 384 + 3), 3: 2 * (2 * 256 + 3) + 16 + 4 * (2 * 256 + 3)}


@pytest.mark.parametrize("cp", HOPS)
def test_ranks_of_a_ring_send_all_at_once(cp):
    """A hop may take longer than a message alone: here 2 s a byte, and 3 s until all are ready."""
    scores = {"forward": {"attention.score": 1.0}, "backward": {"attention.score": 1.0}}
    cost = cost_model(scores, link={"transfer.byte": 1e6, "hop.byte": 2.0, "hop.call": 3.0})
    assert cost.step_seconds(ONE_LAYER, mg.Plan(cp=cp)) == pytest.approx(HOPS[cp], rel=1e-12)


# to every other rank q, k and v of a block's 3 or 2 nodes, and results of these and the super node, of its channels
EXCHANGES = {2: 4 * 3 * 2 * 3 * 4 + 4 * 4 * 2 * 4, 4: 3 * (4 * 2 * 1 * 3 * 4 + 4 * 3 * 1 * 4)}


@pytest.mark.parametrize("cp", EXCHANGES)
def test_attention_of_ranks_that_share_out_heads(cp):
    """All 7 rows against 7 columns with a head each, whichever rows are wanted; the same messages both ways."""
    scores = {"forward": {"attention.score": 1.0}, "backward": {"attention.score": 10.0}}
    cost, config = cost_model(scores, link={"transfer.byte": 1.0}), replace(ONE_LAYER, heads=cp)
    got = cost.step_seconds(config, mg.Plan(cp=cp, comm="ulysses"))
    assert got == pytest.approx(11 * 4 * 7 * 7 + 2 * EXCHANGES[cp], rel=1e-12)


def test_what_does_not_fall_with_the_heads_of_a_rank():
    """Data of the bias are read for all pairs; and queries of all of a rank's 4 rows are made where one is wanted."""
    plan = mg.Plan(cp=2, comm="ulysses")
    bias = cost_model({"forward": {"attention.bias": 1.0}})
    assert bias.step_seconds(replace(ONE_LAYER, bias="projected"), plan) == 4 * 7 * 7 * 3
    products = cost_model({"forward": {"layer.product": 1.0}})
    more = products.step_seconds(ONE_LAYER, plan) - products.step_seconds(ONE_LAYER, mg.Plan(cp=2))
    assert more == 4 * (4 - 1) * 4 * 4


def test_heads_of_a_rank_are_a_size_that_was_measured():
    cost = replace(cost_model(), ranges={"heads": (2.0, 2.0)})
    said = {comm: cost.extrapolated(CONFIG, mg.Plan(cp=2, comm=comm)) for comm in ("allgather", "ulysses")}
    assert "heads = 1 is outside the measured 2..2" in said["ulysses"]
    assert not any(what.startswith("heads") for what in said["allgather"])


# 12 listed pairs of 6 nodes, and a super node; a rank of two has 6 pairs and 3 nodes, and names 2 of the others
LISTED = replace(WORKLOAD, batch_sequences=1, num_targets=6, pairs=12, halo=(2, 5))


@pytest.mark.parametrize(
    ("comm", "seconds_per_byte", "messages"),
    [
        # 2 nodes * 4 channels * 2 * 4 bytes = 64 arrive and leave behind the work, of which backward has none here
        ("halo", 1.0, 64),
        ("halo", 100.0, 6400 - 1206 + 6400),
        # a block of 3 nodes is 96 bytes; its gradients go home
        ("ring", 1.0, 96 + 96),
        ("allgather", 1.0, 96 + 96),
    ],
)
def test_attention_along_listed_pairs_of_two_ranks(comm, seconds_per_byte, messages):
    """The last layer has regular rows alone: 3 of them to a super node, and 6 pairs of 100 s, of 2 heads."""
    cost = cost_model({"forward": {"attention.score": 1.0, "pair.score": 100.0}}, {"transfer.byte": seconds_per_byte})
    plan = mg.Plan(cp=2, comm=comm)
    got = cost.step_seconds(ONE_LAYER, plan, LISTED)
    assert got == pytest.approx(2 * (3 + 6 * 100) + messages, rel=1e-12)
    free = cost_model({"forward": {"attention.score": 1.0}})
    assert free.step_seconds(CONFIG, plan, LISTED) == 2 * (3 + 3 + 4)  # a super row before, to 3 nodes and itself


def test_heads_of_two_ranks_along_listed_pairs():
    """A head a rank: all 6 rows to the super node and 12 pairs, and the super row, which nobody reads, to all; messages
    of 3 nodes, and of 3 and the super node."""
    cost = cost_model({"forward": {"attention.score": 1.0, "pair.score": 100.0}}, {"transfer.byte": 1.0})
    got = cost.step_seconds(ONE_LAYER, mg.Plan(cp=2, comm="ulysses"), LISTED)
    assert got == pytest.approx(6 + 12 * 100 + 7 + 2 * (3 * 2 * 3 * 4 + 4 * 2 * 4), rel=1e-12)
    num, first = sum(p.numel() for p in HierarchicalGT(ONE_LAYER).parameters()), 5 / 2 * 3 * 4
    data, messages = 13 * 12 + 2 * 7 + 16 * 7, 2 * 3 * 4 * 3 * 4
    got = cost_model().memory_bytes(ONE_LAYER, mg.Plan(cp=2, comm="ulysses"), LISTED)
    assert got == pytest.approx([3 * 4 * num + 2 * 4 * num + data + messages + first], rel=1e-12)


@pytest.mark.parametrize(("dtype", "each"), [("fp32", 4), ("bf16", 2)])
def test_bytes_of_listed_pairs(dtype, each):
    """A halo is kept in both layers, and given back before gradients of parameters are there; its own gradients, which
    are always fp32, are there once. 13 bytes a pair, 2 a node and super node."""
    many = replace(LISTED, num_nodes=6000, num_targets=6000, pairs=12_000, halo=(2000,), dtype=dtype)
    num, halo = sum(p.numel() for p in HierarchicalGT(CONFIG).parameters()), 2000 * 4 * 2
    data = 13 * 6000 + 2 * 3001 + 16 * 3001
    got = cost_model().memory_bytes(CONFIG, mg.Plan(cp=2, comm="halo"), many)
    assert got == pytest.approx([4 * 3 * num + 2 * each * halo + data + 4 * halo + 5 / 2 * 3 * 4], rel=1e-12)


@pytest.mark.parametrize("comm", ["ring", "halo"])
def test_a_convolution_of_two_ranks(comm):
    """Another product of 4 rows, a layer's weight, and 2 nodes * 4 channels * 4 bytes that arrive, and as many of their
    gradients; the lists of 6 pairs and 4 rows once more, and weights."""
    plan, config = mg.Plan(cp=2, comm=comm), replace(ONE_LAYER, convolution=True)
    cost = cost_model({way: {"layer.product": 1.0, "pair.score": 1e6} for way in ("forward", "backward")})
    more = cost.step_seconds(config, plan, LISTED) - cost.step_seconds(ONE_LAYER, plan, LISTED)
    assert more == pytest.approx(2 * 4 * 4 * 4)
    cost = cost_model({way: {"pair.score": 1e6} for way in ("forward", "backward")}, {"transfer.byte": 1.0})
    more = cost.step_seconds(config, plan, LISTED) - cost.step_seconds(ONE_LAYER, plan, LISTED)
    assert more == pytest.approx(2 * 2 * 4 * 4)
    free, weight = cost_model(), 4 * 4
    (more,) = (a - b for a, b in zip(*(free.memory_bytes(x, plan, LISTED) for x in (config, ONE_LAYER)), strict=True))
    assert more == pytest.approx(5 * 4 * weight + 16 * (6 + 4))  # moments, gradients and the buckets of those
    counted = [sum(p.numel() for p in HierarchicalGT(x).parameters()) for x in (config, ONE_LAYER)]
    assert counted[0] - counted[1] == weight


def test_ranks_that_were_measured_are_those_of_a_plan():
    """All that sum gradients, a ring's among them; and of unequal speed as many as were measured, no fewer."""
    cost = replace(cost_model(), ranges={"all-reduce ranks": (2.0, 2.0)}, slowness=(1.0, 1.0, 2.0))
    said = {plan.world_size: cost.extrapolated(CONFIG, plan) for plan in (mg.Plan(cp=2, dp=2), mg.Plan(dp=2))}
    assert "all-reduce ranks = 4 is outside the measured 2..2" in said[4]
    assert not any(what.startswith("all-reduce") for what in said[2])
    assert all("ranks of unequal speed were measured, and not these" in what for what in said.values())


def test_rows_that_ranks_name():
    assert [LISTED.halo_of(ranks) for ranks in (1, 2, 3, 4)] == [0, 2, 4, 4.5]  # no more than others have
    assert LISTED.halo_of(5) == pytest.approx(6 * 4 / 5)  # nobody has counted


# hidden states of 4 rows beside gradients of a block's 3 keys and values, of those of a named node, or a head's q, k, v
@pytest.mark.parametrize(("comm", "sent"), [("ring", 96), ("halo", 32), ("ulysses", 72)])
def test_messages_of_stages_and_of_attention_are_sizes_that_were_measured(comm, sent):
    workload, plan = replace(LISTED, halo=(1,)), mg.Plan(pp=2, cp=2, comm=comm)
    cost = replace(cost_model(), ranges={"transfer bytes": (1.0, 1.0)})
    said = [what for what in cost.extrapolated(CONFIG, plan, workload) if what.startswith("transfer")]
    assert said == [f"transfer bytes = {size} is outside the measured 1..1" for size in (64, sent)]
    assert cost_model().extrapolated(CONFIG, plan, workload).count("transfer bytes was not measured") == 1


def test_a_search_looks_at_halos_of_listed_pairs_and_heads_that_can_be_dealt_out_only():
    every, of_three_heads = {"ring", "allgather", "halo", "ulysses"}, replace(CONFIG, dim=6, heads=3)
    for config, workload, ways in (
        (CONFIG, LISTED, every),
        (CONFIG, WORKLOAD, every - {"halo"}),
        (of_three_heads, LISTED, every - {"ulysses"}),
    ):
        found = mg.planner.search(cost_model(), config, 2, 1e9, workload=workload)
        assert {candidate.plan.comm for candidate in found.candidates if candidate.plan.cp == 2} == ways


def test_a_search_deals_out_heads_where_that_is_fastest():
    """To each of three others a rank of four sends 4 rows of a fourth of the channels, not 2 of all; where it reads the
    bias of all rows for them, that may take longer."""
    config, many = replace(CONFIG, heads=4), replace(WORKLOAD, num_nodes=600, num_super=0)
    for bias_seconds, dealt_out in ((0.0, True), (1.0, False)):
        cost = cost_model({"forward": {"attention.bias": bias_seconds}}, {"transfer.byte": 1.0})
        best = mg.planner.search(cost, config, 4, 1e9, workload=many, fixed={"cp": 4}).best.plan
        assert (best.comm == "ulysses") == dealt_out


def test_what_the_ends_take_beside_a_layer():
    """A layer of 2 + 10 s a call; an embedding of 3 + 9 and a read-out of 5 + 19."""
    forward = {"layer.call": 2.0, "embedding.call": 3.0, "head.call": 5.0}
    backward = {"layer.call": 10.0, "embedding.call": 9.0, "head.call": 19.0}
    cost = cost_model({"forward": forward, "backward": backward})
    assert cost.extra_layers(CONFIG, WORKLOAD) == pytest.approx((1.0, 2.0), rel=1e-12)


def test_gradients_are_summed_over_dp_and_cp():
    """A ring of 4: 3 parts to sum and 3 to spread, each a quarter of the fp32 gradients, and 100 s a part."""
    cost = cost_model(link={"all_reduce.call": 100.0, "all_reduce.byte": 1.0})
    num = sum(p.numel() for p in HierarchicalGT(CONFIG).parameters())
    got = cost.step_seconds(CONFIG, mg.Plan(cp=2, dp=2))
    assert got == pytest.approx(6 * 100 + 6 * 4 * num / 4, rel=1e-12)


@pytest.mark.parametrize(("device", "sums"), [("cpu", 6), ("cuda", 3)])
def test_sharded_parameters_are_gathered_forward_and_backward(device, sums):
    """With 4 ranks 3 fourths of all parameters come, twice, and gradients go to whom they belong, as many; gloo, which
    only sums for all, sends them back as well."""
    cost = replace(cost_model(link={"all_reduce.byte": 1.0}), origin={"device_type": device})
    num = sum(p.numel() for p in HierarchicalGT(CONFIG).parameters())
    got = cost.step_seconds(CONFIG, mg.Plan(dp=4, shard=True))
    assert got == pytest.approx((3 + 3 + sums) * 4 * num / 4, rel=1e-12)
    # a pipeline keeps what it gathered until its last micro-batch has come back
    first, layer, last = parameters(CONFIG)
    got = cost.step_seconds(CONFIG, mg.Plan(pp=2, dp=2, shard=True, num_microbatches=2))
    assert got == pytest.approx((1 + sums / 3) * 4 * (layer + max(first, last)) / 2, rel=1e-12)


def test_every_layer_of_a_rank_gathers_its_parameters():
    """Two stages of a layer, and an end of the model: 3 messages of 100 s from the other, beside the one that sums
    gradients and the one that sends them back."""
    cost = cost_model(link={"all_reduce.call": 100.0})
    plan = mg.Plan(pp=2, dp=2, stages_per_rank=2, num_microbatches=2, schedule="interleaved", shard=True)
    terms = cost.explain(replace(CONFIG, layers=4), plan)
    assert terms["parameter gathers"] == 3 * 100 and sum(terms.values()) == (3 + 1 + 1) * 100


def test_the_slowest_replica_has_what_a_batch_leaves():
    """7 sequences in two micro-batches: two each of a replica that takes 1 s for one, and of one that takes 1.4 s, as
    three of the first would take longer; the second has a micro-batch of one."""
    cost = replace(cost_model({"forward": {"attention.score": 1 / 98}}), slowness=(1.0, 1.4))
    work = cost.rank_work(CONFIG, mg.Plan(dp=2, num_microbatches=2), replace(WORKLOAD, batch_sequences=7))
    assert cost.best_shares(work, [2], 9) == (4, 3)


@pytest.mark.parametrize(
    ("comm", "bias", "rows", "pair_bytes"),
    [("ring", "bucket", 3 + 1, 1), ("allgather", "projected", 3 + 1, 3 * 4), ("ulysses", "projected", 7, 3 * 4)],
)
def test_bytes_of_two_stages(comm, bias, rows, pair_bytes):
    config = replace(CONFIG, bias=bias)
    first, layer, last = parameters(config)
    data = 4 * rows * 16 * pair_bytes  # sequences, rows, 7 columns as memory has them
    hidden = 2 * (3 + 1) * 4 * 4  # 2 sequences of a micro-batch, rows, channels, fp32
    block = 2 * 3 * 4 * 4 * 2  # the same of regular nodes, keys and values
    # a message of queries, keys and values as it leaves, and as it comes
    once = data + {"ring": 4 * block + hidden, "allgather": 2 * block, "ulysses": 2 * block * 3 / 2}[comm]
    # all gathered, a layer keeps keys and values of the 3 + 1 rows of the other rank, too, of the micro-batch before;
    # and the first stage its result, where the last one has its input in a buffer
    gathered = 2 * (3 + 1) * 4 * 4 * 2
    # heads dealt out, it keeps 4 tensors of 7 rows and half of the channels, and one of 4 rows, not 4 of 4 rows; the
    # last one beside these 4 one of 1 row, not 2 of 4 rows and 3 of 1
    whole, row = 2 * 7 * 2 * 4, 2 * 1 * 4 * 4
    dealt_out = 4 * whole - 3 * hidden, 4 * whole - 2 * hidden - 2 * row
    kept, of_last = {"ring": (0, 0), "allgather": (gathered, gathered), "ulysses": dealt_out}[comm]
    first_kept, last_kept = kept + hidden, max(0, of_last - hidden)
    # parameters, two moments, gradients and DDP's buckets; buffers for gradients or hidden states of 2 micro-batches
    either = [4 * 5 * num + 2 * hidden + once for num in (first + layer, layer + last)]
    features = 4 * 5 / 2 * 3 * 4  # a rank has half of each sequence's 5 rows of 3 features
    plan = mg.Plan(pp=2, cp=2, comm=comm, num_microbatches=2)
    got = cost_model().memory_bytes(config, plan)
    assert got == pytest.approx([either[0] + first_kept + features, either[1] + last_kept], rel=1e-12)


def test_two_batches_are_on_a_gpu_as_the_next_one_is_copied_ahead():
    plan = mg.Plan(pp=2)
    one, two = (cost_model(memory=memory).memory_bytes(CONFIG, plan) for memory in ({}, {"batches": 2.0}))
    index, features = 4 * 7 * 16, 4 * 5 * 3 * 4  # of 4 sequences; the last stage reads no features
    assert [b - a for a, b in zip(one, two, strict=True)] == [index + features, index]


# the first stage: inputs of a layer and results of 3 micro-batches beside gradients of all parameters, or of 2
IN_FLIGHT = {"gpipe": 3, "1f1b": 2}


@pytest.mark.parametrize("schedule", IN_FLIGHT)
def test_a_rank_computes_one_layer_again_at_a_time(schedule):
    """A layer keeps 1000 times its input, which is there alone until it runs again; 4 buffers for hidden states, in
    which the last stage has its inputs, or for gradients."""
    cost = cost_model(memory={"kept.element": 4000.0})
    first, layer, last = parameters(CONFIG)
    hidden = 7 * 4 * 4  # of the one sequence of a micro-batch
    expected = [4 * 4 * num + 4 * hidden + 1000 * hidden + 4 * 7 * 16 for num in (first + layer, layer + last)]
    expected[0] += IN_FLIGHT[schedule] * 2 * hidden + 4 * 5 * 3 * 4
    plan = mg.Plan(pp=2, num_microbatches=4, schedule=schedule, checkpoint=True)
    assert cost.memory_bytes(CONFIG, plan) == pytest.approx(expected, rel=1e-12)


def test_interleaved_stages_hold_what_they_send():
    """Four stages of a layer on two ranks, each of which has 3 ends of a boundary: what 2 micro-batches send and
    receive there is all held at the end."""
    four = replace(CONFIG, layers=4)
    first, layer, last = parameters(four)
    hidden = 2 * 7 * 4 * 4  # of the two sequences of a micro-batch
    expected = [4 * 4 * num + 2 * 2 * 3 * hidden + 4 * 7 * 16 for num in (first + 2 * layer, 2 * layer + last)]
    expected[0] += 4 * 5 * 3 * 4
    plan = mg.Plan(pp=2, stages_per_rank=2, num_microbatches=2, schedule="interleaved")
    assert cost_model().memory_bytes(four, plan) == pytest.approx(expected, rel=1e-12)


def run(model, m, nodes):
    """A forward pass of m random sequences, whose first node is the target."""
    model(
        torch.randn(11, CONFIG.in_features),
        torch.randint(11, (m, nodes - CONFIG.global_tokens)),
        torch.zeros(m, nodes, nodes, dtype=torch.uint8),
        torch.zeros(m, nodes, dtype=torch.bool),
    )


def test_zero_bubble_keeps_the_gradients_that_torch_keeps():
    """Bytes are as many as torch's split of a backward pass has for weights of a layer, and of one whose queries are
    targets: of one micro-batch on the first rank, whose last stage is not the first, and of two on the second."""
    late, model = [], HierarchicalGT(CONFIG).eval()

    def split(layer, args, result):
        _, groups = stage_backward_input([result], [torch.ones_like(result)], [args[0]], layer.parameters())
        kept = [grad for group in groups for grads in group["grads"] for grad in grads if grad is not None]
        late.append(sum(grad.nbytes for grad in kept))

    for layer in model.layers.values():
        layer.register_forward_pre_hook(lambda _, args: (args[0].detach().requires_grad_(), *args[1:]))
        layer.register_forward_hook(split)
    m = 2
    run(model, m, nodes=7)
    four, plan = replace(CONFIG, layers=4), mg.Plan(pp=2, stages_per_rank=2, num_microbatches=2, schedule="zero_bubble")
    in_one = replace(plan, schedule="interleaved")
    more = [a - b for a, b in zip(*(cost_model().memory_bytes(four, p) for p in (plan, in_one)), strict=True)]
    assert more == [late[0], pytest.approx(2 * late[1], rel=0.05)]
    # a stage a rank: the first of all makes its gradients at once, and holds what it sends and receives until the end
    one = replace(plan, stages_per_rank=1)
    first, layer, _ = parameters(CONFIG)
    expected = 4 * 4 * (first + layer) + 2 * 2 * (m * 7 * 4 * 4) + 4 * 7 * 16 + 4 * 5 * 3 * 4
    assert cost_model().memory_bytes(CONFIG, one)[0] == pytest.approx(expected, rel=1e-12)


def test_products_are_those_that_torch_counts():
    m, nodes = 3, 5
    model = HierarchicalGT(CONFIG).eval()
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        run(model, m, nodes)
    terms = [
        embedding_terms(m, nodes, CONFIG.dim, CONFIG.in_features, 11),
        *(layer_terms(m, nodes, queries, CONFIG) for queries in (nodes, 1)),
        head_terms(m, 1, CONFIG.dim, CONFIG.num_classes),
    ]
    products = sum(value for part in terms for name, value in part.items() if name.endswith(".product"))
    assert 2 * products == counter.get_total_flops()
