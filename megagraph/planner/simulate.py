"""A step of a pipeline on paper: who computes, sends and waits when, as torch's schedules do it.

A message starts when both ends have asked for it and its link is free, and has the link for itself for as long as its
bytes take, less what the link makes up for after it was idle. Several pipelines may share links. A rank asks for what
it receives when its schedule does: GPipe just before the work that needs it, 1F1B together with what it sends,
interleaved and zero-bubble works ahead, without waiting for what they send. Over gloo the receiver says so on the way
of its own data, behind what it sends at the time, and is heard after a latency: two ranks that trade at the same moment
do so both ways at once, else one after the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum, auto
from functools import cache
from heapq import heappop, heappush
from typing import Any, NamedTuple

from megagraph.planner.links import Wire
from megagraph.planner.plan import Plan
from megagraph.planner.schedule import AHEAD, Work, order_of, slots_of

Messages = tuple[Work, ...]  # a message is named after the work whose result it carries


class Ask(NamedTuple):
    """Ask for messages to be sent and to be received, the former first."""

    send: Messages
    receive: Messages


class Wait(NamedTuple):
    """Until these have come, or have gone."""

    messages: Messages


Program = tuple[Work | Ask | Wait, ...]


class Event(IntEnum):
    """A message is there, one end of it is ready, or a rank goes on; of what happens at the same time in this order."""

    ARRIVED = auto()
    READY = auto()
    GOES_ON = auto()


@dataclass(frozen=True)
class Timeline:
    """When every work and every message of a step ends, each rank's last work, and all."""

    ends: dict[Work, float]
    arrivals: dict[Work, float]
    rank_ends: list[float]
    seconds: float


def programs(plan: Plan) -> tuple[Program, ...]:
    """What every rank of the pipeline does, in torch's order; without one each micro-batch goes forward and back."""
    schedule = plan.schedule if plan.pp > 1 else "1f1b"
    return _programs(plan.pp, plan.stages_per_rank, plan.num_microbatches, schedule)


@cache
def _programs(pp: int, per_rank: int, num: int, schedule: str) -> tuple[Program, ...]:
    last = pp * per_rank - 1
    if schedule in AHEAD:
        slots = [
            slots_of(pp, per_rank, num, rank) if per_rank > 1 else order_of(pp, 1, num, False, rank)
            for rank in range(pp)
        ]
        return tuple(map(tuple, _as_it_comes(slots, last)))
    make = _gpipe if schedule == "gpipe" else _one_forward_one_backward
    return tuple(tuple(make(order_of(pp, 1, num, schedule == "gpipe", rank), last)) for rank in range(pp))


def needed(work: Work, last: int) -> Work | None:
    """The message that a work needs, if it does."""
    if work.backward:
        return Work(True, work.stage + 1, work.microbatch) if work.stage < last else None
    return Work(False, work.stage - 1, work.microbatch) if work.stage else None


def sent(work: Work, last: int) -> Messages:
    """The message that carries the result of a work, if it goes anywhere."""
    return (work,) if (work.stage > 0 if work.backward else work.stage < last) else ()


def _gpipe(works: Sequence[Work], last: int) -> Iterator[Work | Ask | Wait]:
    half = len(works) // 2
    for phase in (works[:half], works[half:]):
        for work in phase:
            yield from _receive(work, last)
            yield work
            yield Ask(sent(work, last), ())
        yield Wait(tuple(message for work in phase for message in sent(work, last)))


def _receive(work: Work, last: int) -> Iterator[Ask | Wait]:
    message = needed(work, last)
    if message is not None:
        yield Ask((), (message,))
        yield Wait((message,))


def _one_forward_one_backward(works: Sequence[Work], last: int) -> Iterator[Work | Ask | Wait]:
    """From the last forward pass before the first backward pass on, to the last forward pass, what one work sends and
    what the next one receives are asked for together, and waited for."""
    first = next(i for i, work in enumerate(works) if work.backward) - 1
    final = max(i for i, work in enumerate(works) if not work.backward)
    for i, work in enumerate(works):
        if i <= first or i > final + 1:
            yield from _receive(work, last)
        yield work
        if i < first or i > final:
            yield from [Wait(sent(works[i - 1], last))] if i > 0 and i - 1 != final else []
            yield Ask(sent(work, last), ())
        else:
            message = needed(works[i + 1], last)
            ask = Ask(sent(work, last), () if message is None else (message,))
            yield ask
            yield Wait(ask.send + ask.receive)
    yield Wait(sent(works[-1], last))


def _as_it_comes(slots: Sequence[Sequence[Work | None]], last: int) -> list[list[Work | Ask | Wait]]:
    """Programs of all ranks, which take turns of a slot each: with the work that makes a message its receiver asks for
    it, so that it comes while the receiver works on something else, and is awaited before the work that needs it."""
    made: list[list[Work | Ask | Wait]] = [[] for _ in slots]
    asked: set[Work] = set()
    left = [deque(slots_of_rank) for slots_of_rank in slots]
    while any(left):
        for program, todo in zip(made, left, strict=True):
            if not todo:
                continue
            work = todo[0]
            message = None if work is None else needed(work, last)
            if message is not None and message not in asked:
                continue
            todo.popleft()
            if work is None:
                continue
            program += [work] if message is None else [Wait((message,)), work]
            for result in sent(work, last):
                asked.add(result)
                program.append(Ask((result,), ()))
                to = work.stage + (-1 if work.backward else 1)
                made[to % len(slots)].append(Ask((), (result,)))
    for program in made:
        program.append(Wait(tuple(message for step in program if isinstance(step, Ask) for message in step.send)))
    return made


def simulate(
    plan: Plan,
    forward: Sequence[float],
    backward: Sequence[float],
    wires: Sequence[Wire],
    *,
    behind_data: bool = False,
    pipelines: int = 1,
) -> Timeline:
    """Run the schedule of a plan.

    Args:
        forward, backward: seconds of one micro-batch on every stage of the model.
        wires: from every stage to the next, and back; one less than stages.
        behind_data: a rank says that it is ready to receive behind what it sends (gloo).
        pipelines: that do the same at once and share the links that wires name; the first one's works are returned.
    """
    return _Simulation(plan, forward, backward, wires, behind_data, pipelines).run()


class _Simulation:
    """What has happened up to now, and what will at which time."""

    def __init__(
        self,
        plan: Plan,
        forward: Sequence[float],
        backward: Sequence[float],
        wires: Sequence[Wire],
        behind_data: bool,
        pipelines: int,
    ) -> None:
        self.pp, self.seconds, self.wires, self.behind_data = plan.pp, (forward, backward), wires, behind_data
        self.todo = programs(plan) * pipelines  # of every rank, one pipeline after the other
        self.at = [0] * len(self.todo)  # next instruction
        self.missing = [0] * len(self.todo)  # messages that it waits for
        self.ends: dict[tuple[int, Work], float] = {}  # by pipeline
        self.arrivals: dict[tuple[int, Work], float] = {}
        self.rank_ends = [0.0] * len(self.todo)
        self.last_wait = 0.0
        self.asked: set[tuple[int, Work]] = set()  # messages of which one end is ready
        self.waiting: dict[tuple[int, Work], list[int]] = {}
        self.drained: dict[Any, float] = {}  # links: when they have sent all that they have to
        self.events: list[tuple[float, Event, int, int, Work | None]] = []
        self.count = 0

    def run(self) -> Timeline:
        for rank in range(len(self.todo)):
            self.later(0.0, Event.GOES_ON, rank)
        while self.events:
            time, event, _, rank, message = heappop(self.events)
            if message is None:
                self.go_on(rank, time)
            elif event is Event.READY:
                self.ready(rank // self.pp, message, time)
            else:
                self.arrive(rank // self.pp, message, time)
        assert self.at == [len(program) for program in self.todo], "the schedule waits for itself"
        ends, arrivals = (
            {work: time for (pipeline, work), time in times.items() if not pipeline}
            for times in (self.ends, self.arrivals)
        )
        latest = [max(self.rank_ends[rank :: self.pp]) for rank in range(self.pp)]
        return Timeline(ends, arrivals, latest, self.last_wait)

    def later(self, time: float, event: Event, rank: int, message: Work | None = None) -> None:
        heappush(self.events, (time, event, self.count, rank, message))
        self.count += 1

    def go_on(self, rank: int, time: float) -> None:
        """A rank's instructions, up to the next that takes time."""
        while self.at[rank] < len(self.todo[rank]):
            step = self.todo[rank][self.at[rank]]
            self.at[rank] += 1
            if isinstance(step, Work):
                end = time + self.seconds[step.backward][step.stage]
                self.ends[rank // self.pp, step] = self.rank_ends[rank] = end
                self.later(end, Event.GOES_ON, rank)
                return
            if isinstance(step, Ask):
                self.ask(rank, step, time)
            elif self.wait(rank, step.messages):
                return
        self.last_wait = max(self.last_wait, time)

    def ask(self, rank: int, step: Ask, time: float) -> None:
        pipeline = rank // self.pp
        for message in step.send:
            self.ready(pipeline, message, time)
        for message in step.receive:
            _, way_back, wire = self.way_of(pipeline, message)
            if self.behind_data:
                said = max(time, self.drained.get(way_back, 0.0)) + wire.latency
                self.later(said, Event.READY, rank, message)
            else:
                self.ready(pipeline, message, time)

    def wait(self, rank: int, messages: Messages) -> bool:
        """Whether any of these messages is still on its way; the rank goes on when none is."""
        for message in messages:
            name = rank // self.pp, message
            if name not in self.arrivals:
                self.waiting.setdefault(name, []).append(rank)
                self.missing[rank] += 1
        return self.missing[rank] > 0

    def ready(self, pipeline: int, message: Work, time: float) -> None:
        """One end of a message is ready; it goes when both are."""
        if (pipeline, message) not in self.asked:
            self.asked.add((pipeline, message))
            return
        link, _, wire = self.way_of(pipeline, message)
        drained = max(time - wire.burst, self.drained.get(link, -wire.burst)) + wire.seconds
        self.drained[link] = drained
        self.later(max(time, drained) + wire.latency, Event.ARRIVED, pipeline * self.pp, message)

    def arrive(self, pipeline: int, message: Work, time: float) -> None:
        self.arrivals[pipeline, message] = time
        for rank in self.waiting.pop((pipeline, message), ()):
            self.missing[rank] -= 1
            if not self.missing[rank]:
                self.later(time, Event.GOES_ON, rank)

    def way_of(self, pipeline: int, message: Work) -> tuple[Any, Any, Wire]:
        """The link that a message takes, the one back, and its wire."""
        to = message.stage + (-1 if message.backward else 1)
        wire = self.wires[min(message.stage, to)]
        source, target = message.stage % self.pp, to % self.pp
        ways = (wire.back, wire.out) if message.backward else (wire.out, wire.back)
        own = (pipeline, source, target), (pipeline, target, source)
        there, back = (own if shared is None else shared for own, shared in zip(own, ways, strict=True))
        return there, back, wire
