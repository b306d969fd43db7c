"""A step of a pipeline on paper: who computes, sends and waits when, as torch's schedules do it.

A message starts when both ends have asked for it and its link is free, and has the link for itself for as long as its
bytes take. A rank asks for what it receives when its schedule does: GPipe just before the work that needs it, 1F1B
together with what it sends, schedules of several stages a rank in time slots, at whose ends all ranks that trade wait
for each other. Over gloo the receiver says so on the way of its own data, and behind what it sends at the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from heapq import heappop, heappush
from itertools import zip_longest
from typing import NamedTuple

from megagraph.planner.links import Wire
from megagraph.planner.plan import Plan
from megagraph.planner.schedule import Work, order_of, slots_of

Messages = tuple[Work, ...]  # a message is named after the work whose result it carries


class Ask(NamedTuple):
    """Ask for messages to be sent and to be received, the former first."""

    send: Messages
    receive: Messages


class Wait(NamedTuple):
    """Until these have come, or have gone."""

    messages: Messages


Program = tuple[Work | Ask | Wait, ...]


@dataclass(frozen=True)
class Timeline:
    """When every work and every message of a step ends, each rank's last work, and all."""

    ends: dict[Work, float]
    arrivals: dict[Work, float]
    rank_ends: list[float]
    seconds: float


def programs(plan: Plan) -> tuple[Program, ...]:
    """What every rank of the pipeline does, in torch's order."""
    return _programs(plan.pp, plan.stages_per_rank, plan.num_microbatches, plan.schedule)


@cache
def _programs(pp: int, per_rank: int, num: int, schedule: str) -> tuple[Program, ...]:
    last = pp * per_rank - 1
    if per_rank > 1:
        return tuple(map(tuple, _in_slots([slots_of(pp, per_rank, num, rank) for rank in range(pp)], last)))
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


def _in_slots(slots: Sequence[Sequence[Work | None]], last: int) -> list[list[Work | Ask | Wait]]:
    """Of all ranks: a slot is a work and the messages that works of this slot let go."""
    made: list[list[Work | Ask | Wait]] = [[] for _ in slots]
    for now in zip_longest(*slots):
        send: list[list[Work]] = [[] for _ in slots]
        receive: list[list[Work]] = [[] for _ in slots]
        for rank, work in enumerate(now):
            if work is not None:
                made[rank].append(work)
                for message in sent(work, last):
                    send[rank].append(message)
                    receive[(rank + (-1 if work.backward else 1)) % len(slots)].append(message)
        for program, going, coming in zip(made, send, receive, strict=True):
            if going or coming:
                program += [Ask(tuple(going), tuple(coming)), Wait((*going, *coming))]
    return made


def simulate(
    plan: Plan,
    forward: Sequence[float],
    backward: Sequence[float],
    wires: Sequence[Wire],
    *,
    behind_data: bool = False,
) -> Timeline:
    """Run the schedule of a plan.

    Args:
        forward, backward: seconds of one micro-batch on every stage of the model.
        wires: from every stage to the next, and back; one less than stages.
        behind_data: a rank says that it is ready to receive behind what it sends (gloo).
    """
    todo = programs(plan)
    at = [0] * plan.pp  # next instruction of every rank
    clock = [0.0] * plan.pp  # end of its last work
    done = 0.0
    ends: dict[Work, float] = {}
    arrivals: dict[Work, float] = {}
    asked: dict[Work, int] = {}  # ends of a message that are ready
    waiting: dict[Work, list[int]] = {}
    missing = [0] * plan.pp
    drained: dict[tuple[int, int], float] = {}  # links: when they have sent all that they have to
    events: list[tuple[float, int, int, Work | None]] = []
    count = 0

    def later(time: float, rank: int, message: Work | None = None) -> None:
        nonlocal count
        heappush(events, (time, count, rank, message))
        count += 1

    def ends_of(message: Work) -> tuple[int, int, Wire]:
        to = message.stage + (-1 if message.backward else 1)
        return message.stage % plan.pp, to % plan.pp, wires[min(message.stage, to)]

    def ready(message: Work, time: float) -> None:
        asked[message] = asked.get(message, 0) + 1
        if asked[message] == 2:
            source, target, wire = ends_of(message)
            start = max(time, drained.get((source, target), 0.0))
            drained[source, target] = start + wire.seconds
            later(start + wire.seconds + wire.latency, ARRIVED, message)

    def run(rank: int, time: float) -> None:
        nonlocal done
        while at[rank] < len(todo[rank]):
            step = todo[rank][at[rank]]
            at[rank] += 1
            if isinstance(step, Work):
                end = time + (backward if step.backward else forward)[step.stage]
                ends[step] = clock[rank] = end
                later(end, rank)
                return
            if isinstance(step, Ask):
                for message in step.send:
                    ready(message, time)
                for message in step.receive:
                    source, target, _ = ends_of(message)
                    free = drained.get((target, source), 0.0) if behind_data else 0.0
                    if free > time:
                        later(free, READY, message)
                    else:
                        ready(message, time)
                continue
            missing[rank] = 0
            for message in step.messages:
                if message not in arrivals:
                    waiting.setdefault(message, []).append(rank)
                    missing[rank] += 1
            if missing[rank]:
                return
        done = max(done, time)

    for rank in range(plan.pp):
        later(0.0, rank)
    while events:
        time, _, who, message = heappop(events)
        if message is None:
            run(who, time)
        elif who == READY:
            ready(message, time)
        else:
            arrivals[message] = time
            for rank in waiting.pop(message, ()):
                missing[rank] -= 1
                if not missing[rank]:
                    run(rank, time)
    assert at == [len(program) for program in todo], "the schedule waits for itself"
    return Timeline(ends, arrivals, clock, done)


READY, ARRIVED = -1, -2  # events that are of no rank
