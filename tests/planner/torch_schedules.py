"""What the ranks of a pipeline do, read off torch's own schedules line by line; an oracle of the planner's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.distributed.pipelining.schedules import (
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    _add_send_recv,
)

# (backward, stage, micro-batch): a work, or the message with its result
Name = tuple[bool, int, int]
# ("work", name), ("post", names to send, names to receive), ("wait", names)
Action = tuple[Any, ...]


def torch_slots(pp: int, per_rank: int, num: int, rank: int) -> list[Any]:
    """torch's actions of a rank in every time slot, None where it has none."""

    class Torch(ScheduleInterleaved1F1B):
        def __init__(self):  # only what the order is computed from
            self.pp_group_size, self.n_local_stages, self._n_microbatches = pp, per_rank, num
            self.number_of_rounds = max(1, num // pp)
            self.microbatches_per_round = num // self.number_of_rounds

    return Torch()._calculate_single_rank_operations(rank)


def torch_zero_bubble(pp: int, per_rank: int, num: int, rank: int) -> list[Any]:
    """torch's actions of a rank, gradients of inputs and of weights apart."""

    class Torch(ScheduleInterleavedZeroBubble):
        def __init__(self):
            self.pp_group_size, self.n_local_stages, self._n_microbatches = pp, per_rank, num
            self.number_of_rounds = max(1, num // pp)
            self.microbatches_per_round = num // self.number_of_rounds

    return Torch()._calculate_single_rank_operations(rank)


def gpipe(rank: int, pp: int, num: int) -> Iterator[Action]:
    """ScheduleGPipe._step_microbatches."""
    for backward, has_previous, has_next in ((False, rank > 0, rank < pp - 1), (True, rank < pp - 1, rank > 0)):
        previous = rank + 1 if backward else rank - 1
        sends = []
        for i in range(num):
            if has_previous:
                yield "post", [], [(backward, previous, i)]
                yield "wait", [(backward, previous, i)]
            yield "work", (backward, rank, i)
            if has_next:
                yield "post", [(backward, rank, i)], []
                sends.append((backward, rank, i))
        yield "wait", sends


def one_forward_one_backward(rank: int, pp: int, num: int) -> Iterator[Action]:
    """Schedule1F1B._step_microbatches."""

    def forward_receive(i):
        return [(False, rank - 1, i)] if rank else []

    def forward_send(i):
        return [(False, rank, i)] if rank < pp - 1 else []

    def backward_receive(i):
        return [(True, rank + 1, i)] if rank < pp - 1 else []

    def backward_send(i):
        return [(True, rank, i)] if rank else []

    warmup = min(num, pp - rank)
    f = b = 0
    send_work: list[Name] = []
    sends: list[Name] = []
    for _ in range(warmup):
        yield "post", [], forward_receive(f)
        yield "wait", forward_receive(f)
        yield "work", (False, rank, f)
        yield "wait", send_work
        sends = forward_send(f)
        if f != warmup - 1:
            yield "post", sends, []
            send_work = sends
        f += 1
    while True:
        receives = backward_receive(b)
        yield "post", sends, receives
        yield "wait", sends + receives
        yield "work", (True, rank, b)
        backward_sends = backward_send(b)
        b += 1
        if f == num:
            break
        receives = forward_receive(f)
        yield "post", backward_sends, receives
        yield "wait", backward_sends + receives
        yield "work", (False, rank, f)
        sends = forward_send(f)
        f += 1
    yield "post", backward_sends, []
    send_work = backward_sends
    while b < num:
        yield "post", [], backward_receive(b)
        yield "wait", backward_receive(b)
        yield "work", (True, rank, b)
        yield "wait", send_work
        yield "post", backward_send(b), []
        send_work = backward_send(b)
        b += 1
    yield "wait", send_work


def interleaved(rank: int, pp: int, num: int, per_rank: int) -> Iterator[Action]:
    """_PipelineScheduleRuntime._step_microbatches, of the actions that torch makes of the order."""
    orders = {other: torch_slots(pp, per_rank, num, other) for other in range(pp)}
    actions = _add_send_recv(orders, stage_to_rank=lambda stage: stage % pp, num_stages=pp * per_rank)[rank]
    sends = []
    for action in actions:
        stage, i = action.stage_index, action.microbatch_index
        match action.computation_type.name:
            case "SEND_F" | "SEND_B" as name:
                sends.append((name == "SEND_B", stage, i))
                yield "post", sends[-1:], []
            case "RECV_F":
                yield "post", [], [(False, stage - 1, i)]
            case "RECV_B":
                yield "post", [], [(True, stage + 1, i)]
            case "FORWARD":
                if stage > 0:
                    yield "wait", [(False, stage - 1, i)]
                yield "work", (False, stage, i)
            case "FULL_BACKWARD":
                if stage < pp * per_rank - 1:
                    yield "wait", [(True, stage + 1, i)]
                yield "work", (True, stage, i)
            case other:
                raise AssertionError(other)
    yield "wait", sends


def ticks(
    programs: list[Iterator[Action]],
    seconds: Callable[[Name], int],
    wire: Callable[[Name], tuple[int, int, int, int]],
    behind_data: bool,
) -> int:
    """When the last rank has done its program, a tick after the other.

    Args:
        seconds: of a work, at least 1.
        wire: sender and receiver of a message, ticks that it has the link, and ticks after which it is there.
    """
    busy = [0] * len(programs)
    waits: list[list[Name]] = [[] for _ in programs]
    finished = [False] * len(programs)
    sends, receives, arrived = set(), set(), set()
    announcing: list[tuple[Name, set[Name]]] = []
    told: list[tuple[Name, int]] = []  # of what its sender hears of at a tick
    queues: dict[tuple[int, int], list[Name]] = {}
    on_link: dict[tuple[int, int], tuple[Name, int]] = {}
    flying: list[tuple[Name, int]] = []
    tick = 0
    while True:
        changed = True
        while changed:
            changed = False
            for link, (name, until) in list(on_link.items()):
                if until <= tick:
                    del on_link[link]
                    flying.append((name, tick + wire(name)[3]))
                    changed = True
            for name, when in list(flying):
                if when <= tick:
                    flying.remove((name, when))
                    arrived.add(name)
                    changed = True
            leaving = {name for queue in queues.values() for name in queue} | {name for name, _ in on_link.values()}
            for name, before in list(announcing):
                if not before & leaving:
                    announcing.remove((name, before))
                    told.append((name, tick + (wire(name)[3] if behind_data else 0)))
                    changed = True
            for name, when in list(told):
                if when <= tick:
                    told.remove((name, when))
                    receives.add(name)
                    changed = True
            for name in sorted(sends & receives):
                sends.remove(name)
                receives.remove(name)
                queues.setdefault(wire(name)[:2], []).append(name)
                changed = True
            for link, queue in queues.items():
                if queue and link not in on_link:
                    name = queue.pop(0)
                    on_link[link] = name, tick + wire(name)[2]
                    changed = True
            for rank, program in enumerate(programs):
                if changed or finished[rank] or busy[rank] > tick or not arrived.issuperset(waits[rank]):
                    continue
                action = next(program, None)
                changed = True
                waits[rank] = []
                if action is None:
                    finished[rank] = True
                elif action[0] == "work":
                    busy[rank] = tick + seconds(action[1])
                elif action[0] == "wait":
                    waits[rank] = action[1]
                else:
                    sends.update(action[1])
                    for name in action[1]:
                        if name in receives:  # it leaves at once, before what is asked for with it is said
                            sends.remove(name)
                            receives.remove(name)
                            queues.setdefault(wire(name)[:2], []).append(name)
                    for name in action[2]:
                        back = (wire(name)[1], wire(name)[0])
                        before = set(queues.get(back, []))
                        if back in on_link and on_link[back][1] > tick:
                            before.add(on_link[back][0])
                        announcing.append((name, before if behind_data else set()))
        if all(finished):
            return tick
        tick += 1
