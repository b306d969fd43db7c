"""A cluster's file, the cost model of what it names, and the plans of all of its devices."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import megagraph as mg
from megagraph.cli import main
from megagraph.planner import plots
from megagraph.planner.cluster import Cluster
from megagraph.planner.links import Links
from megagraph.planner.scaling import default_sizes, scaling
from megagraph.planner.searching import HEADROOM
from tests.planner import synthetic

CONFIG = mg.ModelConfig(
    in_features=32, num_classes=5, layers=4, dim=64, ffn_dim=64, heads=8, bias="bucket", bias_size=8
)
KIND = {"count": 2, "devices": 4, "cost": "fast.json", "memory_gib": 8}
ACROSS = {"gbit_per_second": 400, "latency_us": 12}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Cost models of two kinds of device, of which one takes three times as long."""
    place = tmp_path_factory.mktemp("cluster")
    fast = replace(mg.planner.fit(synthetic.rows()), model=CONFIG)
    slow = {way: {name: 3 * rate for name, rate in rates.items()} for way, rates in fast.seconds.items()}
    fast.save(place / "fast.json")
    replace(fast, seconds=slow).save(place / "slow.json")
    return place


def cluster(folder, **changes):
    values = {"nodes": [KIND], "between_nodes": ACROSS} | changes
    (folder / "cluster.json").write_text(json.dumps({name: x for name, x in values.items() if x != "gone"}))
    return Cluster.load(folder / "cluster.json")


def test_links_have_the_units_of_their_names(folder):
    given = cluster(folder, within_node={"gbit_per_second": 8, "latency_us": 3, "shared_by": "device"})
    cost = given.cost_model(8)
    assert given.world_size == 8 and given.per_node == 4 and cost.origin["ranks_per_node"] == "4"
    assert cost.links["across"] == pytest.approx({"transfer.call": 12e-6, "transfer.byte": 1 / 50e9}, rel=1e-12)
    assert cost.links["node"] == pytest.approx({"transfer.call": 3e-6, "transfer.byte": 1e-9}, rel=1e-12)
    measured = mg.planner.CostModel.load(folder / "fast.json").links["node"]
    assert cluster(folder).cost_model(8).links["node"] == measured


@pytest.mark.parametrize("shared_by", ["node", "device"])
def test_who_shares_a_link_waits_for_it(folder, shared_by):
    """Two replicas of a stage send to the next node: over one link one after the other, over two at once."""
    cost = cluster(folder, between_nodes=ACROSS | {"shared_by": shared_by}).cost_model(8)
    plan, rates = mg.Plan(pp=2, dp=4), {"across": {"transfer.byte": 1.0}}
    assert Links(rates, 4, own=cost.origin["links_of"] == "device").hop(mg.Plan(cp=8), 5.0).seconds == 5.0
    seconds = {
        own: sum(wire.seconds * links.groups(plan) for wire in links.boundaries(plan, 5.0))
        for own, links in ((own, Links(rates, 4, own)) for own in (True, False))
    }
    assert seconds == {True: 5.0, False: 20.0}
    shared = cluster(folder).cost_model(8)
    assert (cost.step_seconds(CONFIG, plan) < shared.step_seconds(CONFIG, plan)) == (shared_by == "device")


def test_kinds_of_devices_are_slower_and_smaller(folder):
    given = cluster(folder, nodes=[KIND | {"count": 1}, KIND | {"count": 1, "cost": "slow.json", "memory_gib": 4}])
    cost = given.cost_model(8)
    assert cost.slowness == pytest.approx([1, 1, 1, 1, 3, 3, 3, 3])
    assert given.memory_bytes(8) == [8 * 2**30] * 4 + [4 * 2**30] * 4
    assert given.cost_model(4).slowness == () and given.memory_bytes(4) == [8 * 2**30] * 4
    best = mg.planner.search(cost, CONFIG, 8, 1e15, fixed={"dp": 8}).best.plan
    assert best.shares == (12,) * 4 + (4,) * 4  # of 64 sequences
    assert cluster(folder, nodes=[KIND, KIND | {"memory_gib": 1}]).cost_model(16).slowness == ()


def test_every_rank_has_its_own_limit(folder):
    """Half of the ranks have room for one layer of the pipeline's four, the others for three."""
    cost = cluster(folder).cost_model(2)
    fixed = {"pp": 2, "num_microbatches": 1, "checkpoint": False}

    def sizes(layers):
        return cost.memory_bytes(CONFIG, mg.Plan(pp=2, layers=layers))

    uneven = [size * 1.001 / (1 - HEADROOM) for size in sizes((3, 1))]
    assert mg.planner.search(cost, CONFIG, 2, uneven, fixed=fixed).best.plan.layers == (3, 1)
    with pytest.raises(mg.planner.NoFeasiblePlan, match="no room on rank 1 of a pipeline"):
        mg.planner.search(cost, CONFIG, 2, [uneven[0], sizes((3, 1))[1] * 0.99], fixed=fixed)
    other = [size * 1.001 / (1 - HEADROOM) for size in sizes((1, 3))]
    assert mg.planner.search(cost, CONFIG, 2, other, fixed=fixed).best.plan.layers == (1, 3)


def test_replicas_have_the_room_of_their_smallest_rank(folder):
    """Stages of which one has two small ranks, wherever these are; and a stage may be on a large and a small one."""
    cost, plenty = cluster(folder).cost_model(4), 1e12
    fixed = {"num_microbatches": 1, "checkpoint": False, "shard": False}
    large, small = (
        size * 1.001 / (1 - HEADROOM) for size in cost.memory_bytes(CONFIG, mg.Plan(pp=2, dp=2, layers=(3, 1)))
    )
    for limits, across in (([large, large, small, small], "pp"), ([large, small, large, small], "dp")):
        found = mg.planner.search(cost, CONFIG, 4, limits, fixed={"pp": 2, "dp": 2} | fixed).best.plan
        assert found.layers == (3, 1) and found.across == across
    (whole,) = cost.memory_bytes(CONFIG, mg.Plan(dp=2))
    for limits in ([plenty, whole], [whole, plenty]):
        with pytest.raises(mg.planner.NoFeasiblePlan, match="the lightest, pp 1, cp 1, dp 2"):
            mg.planner.search(cost, CONFIG, 2, limits, fixed={"dp": 2} | fixed)


def test_a_search_takes_all_devices_of_a_cluster_or_the_first(folder, capsys, monkeypatch):
    cluster(folder)
    for flags, ranks in (((), 8), (("--world-size", "4"), 4), (("--memory-gib", "0.5"), 8)):
        run(monkeypatch, "search", folder / "cluster.json", *flags, "--out", folder / "plan.json")
        assert mg.Plan.load(folder / "plan.json").world_size == ranks
    run(monkeypatch, "plot", "pareto", folder / "cluster.json", "--out", folder / "pareto.png")
    assert (folder / "pareto.png").stat().st_size > 1000
    with pytest.raises(SystemExit):
        run(monkeypatch, "search", folder / "fast.json", "--world-size", "4")
    assert "world_size and memory_gib must be given with a cost model" in capsys.readouterr().err


def run(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["megagraph", *map(str, arguments)])
    main()


def test_scaling(folder, monkeypatch, capsys):
    """Sequences a second grow as devices do, at most, and a step of the same batch is no slower."""
    given = cluster(folder, nodes=[KIND | {"count": 8}], within_node=ACROSS)
    assert default_sizes(given) == [4, 8, 16, 32] and default_sizes(cluster(folder, nodes=[KIND | {"count": 3}])) == [
        4, 8, 12
    ]  # fmt: skip
    points = list(scaling(given, [32, 4, 8]))
    assert [(point.kind, point.world_size, point.sequences) for point in points] == [
        ("strong", 4, 64), ("weak", 4, 64), ("strong", 8, 64), ("weak", 8, 128), ("strong", 32, 64), ("weak", 32, 512)
    ]  # fmt: skip
    first = points[0].throughput
    for point in points:
        cost = given.cost_model(point.world_size)
        workload = replace(cost.workload, batch_sequences=point.sequences)
        told = cost.step_seconds(CONFIG, point.best.plan, workload)
        assert point.best.step_seconds == pytest.approx(told, rel=1e-12)
        assert sum(point.terms.values()) == pytest.approx(point.best.step_seconds)
        assert point.throughput <= first * point.world_size / 4 * (1 + 1e-9)
        name, part = point.binds
        assert 0 <= part < 1 and point.terms[name] == pytest.approx(part * point.best.step_seconds)
    given.save(folder / "cluster.json")
    sizes = ("--world-sizes", "4", "8")
    run(monkeypatch, "plot", "scaling", folder / "cluster.json", *sizes, "--out", folder / "scaling.png")
    said = capsys.readouterr().out
    assert said.count("strong") == said.count("weak") == 2 and "100% of ideal" in said
    assert (folder / "scaling.png").stat().st_size > 1000


def test_a_full_batch_does_not_grow_with_the_devices(folder):
    cost = mg.planner.CostModel.load(folder / "fast.json")
    whole = mg.planner.Workload(batch_sequences=1, num_nodes=1000, num_targets=1000, pairs=3000)
    replace(cost, workload=whole).save(folder / "whole.json")
    points = scaling(cluster(folder, nodes=[KIND | {"cost": "whole.json"}]), [2, 4])
    assert [(point.kind, point.world_size, point.sequences) for point in points] == [("strong", 2, 1), ("strong", 4, 1)]


def test_bars_stand_over_the_devices_that_they_are_of(folder, tmp_path, monkeypatch):
    figure, (throughput, terms) = plots._figure(2)
    monkeypatch.setattr(plots, "_figure", lambda columns: (figure, (throughput, terms)))
    points = list(scaling(cluster(folder, within_node=ACROSS), [2, 4, 8]))
    points[2] = replace(points[2], best="no plan", terms={})  # strong, on four
    plots.scaling(points, tmp_path / "scaling.png")
    places = {bar.get_x() + bar.get_width() / 2 for bar in terms.patches}
    assert sorted(places) == pytest.approx([-0.2, 0.2, 1.2, 1.8, 2.2])
    assert [label.get_text() for label in terms.get_xticklabels()] == ["2", "4", "8"]
    assert [text.get_text() for text in terms.get_legend().get_texts()] == list(points[0].terms)


def test_the_legend_of_stages_hides_no_bar_and_their_sum_is_that_of_the_rank(folder, tmp_path, monkeypatch):
    figure, (axis,) = plots._figure(1)
    monkeypatch.setattr(plots, "_figure", lambda columns: (figure, [axis]))
    cost, plan = mg.planner.CostModel.load(folder / "fast.json"), mg.Plan(pp=2)
    plots.stages(cost, *(CONFIG, plan, cost.workload), tmp_path / "stages.png")
    (legend,) = figure.legends
    assert legend.get_window_extent().y1 <= axis.get_window_extent().y0
    tops = {round(bar.get_x(), 6): bar.get_y() + bar.get_height() for bar in axis.patches}  # the last is the highest
    assert [2**30 * top for top in tops.values()] == pytest.approx(cost.memory_bytes(CONFIG, plan))


def test_stages_of_a_plan_that_the_batch_of_the_profile_does_not_fill_are_not_drawn(folder, monkeypatch, capsys):
    mg.Plan(dp=65).save(folder / "wide.json")
    with pytest.raises(SystemExit):
        run(monkeypatch, "plot", "stages", folder / "fast.json", folder / "wide.json", "--out", folder / "wide.png")
    assert "every replica must have a sequence for each of num_microbatches = 1, got 0 of the 64" in (
        capsys.readouterr().err
    )


def test_what_does_not_fit_is_said(folder, tmp_path):
    points = list(scaling(cluster(folder, nodes=[KIND | {"memory_gib": 1e-3}]), [4]))
    plots.scaling(points, tmp_path / "scaling.png")  # without a warning of an empty legend
    assert all(point.best.startswith("no plan of 4 processes fits 1.02 MiB") for point in points)
    assert not any(point.terms or point.throughput for point in points)


def test_a_saved_cluster_is_the_same(folder):
    given = cluster(folder, nodes=[KIND, KIND | {"cost": "slow.json"}], within_node=ACROSS | {"shared_by": "device"})
    given.save(folder / "again.json")
    assert Cluster.load(folder / "again.json") == given
    values = json.loads((folder / "again.json").read_text())
    assert values["nodes"][0]["cost"] == "fast.json"
    values["nodes"][0]["count"] = 5  # by hand
    (folder / "again.json").write_text(json.dumps(values))
    assert Cluster.load(folder / "again.json").nodes[0].count == 5


BAD = {
    "nodes": (dict(nodes="gone"), "expected a cluster with a list of nodes in .*, got None"),
    "no nodes": (dict(nodes=[]), r"expected a cluster with a list of nodes in .*, got \[\]"),
    "count": (dict(nodes=[KIND | {"count": 0}]), "count of nodes must be at least 1, got 0"),
    "huge": (dict(nodes=[KIND | {"count": 10**20}]), "at most 1048576 devices together, got 4000"),
    "devices": (dict(nodes=[KIND, KIND | {"devices": 8}]), r"nodes must all have as many devices, got \[4, 8\]"),
    "memory": (dict(nodes=[KIND | {"memory_gib": 0}]), "memory_gib must be above 0, got 0"),
    "unit": (dict(nodes=[KIND | {"memory": 8}]), "must hold nodes of the cluster in .* with the fields"),
    "missing": (dict(nodes=[{"count": 1}]), "expected nodes of the cluster in .*, got one that is not whole"),
    "text": (dict(nodes=[KIND | {"count": "2"}]), "expected nodes of the cluster in .* whose count is right, got '2'"),
    "bandwidth": (dict(between_nodes=ACROSS | {"gbit_per_second": 0}), "gbit_per_second must be above 0, got 0"),
    "latency": (dict(between_nodes=ACROSS | {"latency_us": -1}), "latency_us must be a number of at least 0, got -1"),
    "shared": (
        dict(between_nodes=ACROSS | {"shared_by": "rack"}),
        "the link between_nodes .* whose shared_by is",
    ),
    "field": (dict(links={}), "must hold a cluster in .* with the fields"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_clusters(case, folder):
    changes, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        cluster(folder, **changes)


def test_devices_that_are_not_there(folder):
    with pytest.raises(ValueError, match="at least 1 and at most the cluster's 8 devices, got 9"):
        cluster(folder).cost_model(9)
    with pytest.raises(ValueError, match="and at most the cluster's 8 devices, got 0"):
        list(scaling(cluster(folder), [0]))
    with pytest.raises(FileNotFoundError):
        cluster(folder, nodes=[KIND | {"cost": "none.json"}]).cost_model(8)
    replace(cluster(folder).cost_model(4), seconds={"forward": {}, "backward": {}}).save(folder / "free.json")
    with pytest.raises(ValueError, match=r"free\.json must say what a layer takes, and has no seconds"):
        cluster(folder, nodes=[KIND | {"cost": "free.json"}]).cost_model(8)
    with pytest.raises(ValueError, match="memory_limit_bytes must be one, or one for each of 4 ranks, got 3"):
        mg.planner.search(cluster(folder).cost_model(4), CONFIG, 4, [1e9, 1e9, 1e9])
