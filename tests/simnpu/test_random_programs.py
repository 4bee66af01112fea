"""The happens-before checker against reachability, on random programs and on a pipeline that loses its waits."""

from __future__ import annotations

import random
from types import ModuleType

import pytest
import torch


def kinds(npu: ModuleType) -> list[str]:
    return [race.kind for race in npu.races()]


class Program:
    """A random program on buffers and streams, and by reachability what of it is unordered.

    Independent of vector clocks: every action is a node, and an action comes after another if a path of edges leads
    there (the order of a stream, waits, what the host has waited for before it launched).
    """

    def __init__(self, seed: int, waits: float, reuse: float) -> None:
        self.random = random.Random(seed)
        self.waits, self.reuse = waits, reuse
        self.streams = [torch.npu.default_stream(), *(torch.npu.Stream() for _ in range(3))]
        self.buffers = [torch.zeros(16, device="npu") for _ in range(3)]
        self.own = [torch.zeros(16, device="npu") for _ in self.streams]
        torch.npu.synchronize()
        self.after: list[set[int]] = []  # node -> all nodes before it
        self.last: list[int | None] = [None] * len(self.streams)
        self.host: set[int] = set()
        self.extra: list[set[int]] = [set() for _ in self.streams]  # waited for, before the next action
        self.uses: list[tuple[int, int, bool]] = []  # node, address, writes

    def node(self, stream: int) -> int:
        before = set(self.extra[stream]) | self.host
        if (last := self.last[stream]) is not None:
            before |= {last} | self.after[last]
        self.after.append(before)
        self.last[stream] = len(self.after) - 1
        return len(self.after) - 1

    def done(self, stream: int) -> set[int]:
        last = self.last[stream]
        return set(self.extra[stream]) | self.host | (set() if last is None else {last} | self.after[last])

    def step(self) -> None:
        stream = self.random.randrange(len(self.streams))
        if self.random.random() < self.reuse:
            self.allocate_anew(stream)
        elif self.random.random() < self.waits:
            other = self.random.randrange(len(self.streams))
            match self.random.choice(["stream", "event", "host", "event on host"]):
                case "stream":
                    self.streams[stream].wait_stream(self.streams[other])
                    self.extra[stream] |= self.done(other)
                case "event":
                    event = torch.npu.Event()
                    event.record(self.streams[other])
                    recorded = self.done(other)
                    self.use(other)  # later than the event, so not waited for
                    event.wait(self.streams[stream])
                    self.extra[stream] |= recorded
                case "host":
                    self.streams[stream].synchronize()
                    self.host |= self.done(stream)
                case _:
                    self.streams[stream].record_event().synchronize()
                    self.host |= self.done(stream)
        else:
            self.use(stream)

    def allocate_anew(self, stream: int) -> None:
        """Another buffer takes the memory of this one, if the allocator hands it out; no operator touches it."""
        buffer = self.random.randrange(len(self.buffers))
        if self.random.random() < 0.5:
            for other in self.streams:
                self.buffers[buffer].record_stream(other)
        self.buffers[buffer] = torch.empty(0, device="npu")
        with torch.npu.stream(self.streams[stream]):
            self.buffers[buffer] = torch.empty(16, device="npu")

    def use(self, stream: int) -> None:
        buffer, writes = self.random.randrange(len(self.buffers)), self.random.random() < 0.4
        with torch.npu.stream(self.streams[stream]):
            if writes:
                self.buffers[buffer].fill_(1)
            else:
                self.own[stream].copy_(self.buffers[buffer])
        self.uses.append((self.node(stream), self.buffers[buffer].data_ptr(), writes))

    def has_race(self) -> bool:
        return any(
            a[1] == b[1] and (a[2] or b[2]) and a[0] not in self.after[b[0]]
            for i, b in enumerate(self.uses)
            for a in self.uses[:i]
        )


@pytest.mark.parametrize("reuse", [0.0, 0.2, 0.5])
@pytest.mark.parametrize("waits", [0.3, 0.6, 0.8])
def test_a_random_program_is_reported_if_and_only_if_it_is_unordered(
    npu: ModuleType, waits: float, reuse: float
) -> None:
    outcomes: list[bool] = []
    found: set[str] = set()
    for seed in range(60):
        npu.reset()
        program = Program(seed, waits, reuse)
        for length in range(16):
            program.step()
            assert bool(npu.races()) == program.has_race(), (seed, length)
        outcomes.append(program.has_race())
        found.update(kinds(npu))
        torch.npu.synchronize()
    assert sum(outcomes) > 5
    assert waits < 0.8 or sum(outcomes) < 55  # both outcomes are met
    assert any(kind.startswith("buffer reused") for kind in found) == (reuse > 0)


@pytest.mark.parametrize("seed", range(8))
def test_a_pipeline_that_has_lost_one_of_its_waits_is_found(npu: ModuleType, seed: int) -> None:
    """Producer and consumer over two buffers, each wait of which is needed."""
    rng = random.Random(seed)
    steps = 6
    waits = [*range(1, 2 * steps, 2), *range(4, 2 * steps, 2)]  # for a filled buffer, for a consumed one
    for dropped in [None, *rng.sample(waits, 3)]:
        npu.reset()
        producer, consumer = torch.npu.Stream(), torch.npu.Stream()
        buffers = [torch.zeros(rng.randrange(1, 2000), device="npu") for _ in range(2)]
        torch.npu.synchronize()
        consumed: list[torch.Event] = []
        for i in range(steps):
            buffer = buffers[i % 2]
            if i >= 2 and dropped != 2 * i:
                producer.wait_event(consumed[i - 2])
            with torch.npu.stream(producer):
                buffer.fill_(i)
                filled = producer.record_event()
            if dropped != 2 * i + 1:
                consumer.wait_event(filled)
            with torch.npu.stream(consumer):
                buffer.sum()
                consumed.append(consumer.record_event())
        assert bool(npu.races()) == (dropped is not None), (dropped, kinds(npu))
        torch.npu.synchronize()
