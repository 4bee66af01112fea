"""Events."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch


def test_time_passes_between_two_events() -> None:
    first, second = (torch.npu.Event(enable_timing=True) for _ in range(2))
    first.record()
    torch.ones(1000, device="npu").sum()
    second.record()
    second.synchronize()
    assert first.query()  # the host has waited for a later one
    assert second.query()
    assert first.elapsed_time(second) > 0 > second.elapsed_time(first)


def test_time_since_an_event_that_was_not_recorded_is_refused() -> None:
    first, second = (torch.npu.Event(enable_timing=True) for _ in range(2))
    first.record()
    with pytest.raises(RuntimeError, match="must be recorded before"):
        first.elapsed_time(second)


def test_waiting_for_an_event_that_was_not_recorded_orders_nothing(npu: ModuleType) -> None:
    side, event = torch.npu.Stream(), torch.npu.Event()
    x = torch.ones(4, device="npu")
    event.wait(side)
    with torch.npu.stream(side):
        x.sum()
    assert [race.kind for race in npu.races()] == ["read before write ended"]


def test_an_event_stands_for_its_last_record(npu: ModuleType) -> None:
    side, event = torch.npu.Stream(), torch.npu.Event()
    event.record()
    x = torch.ones(4, device="npu")
    event.record()
    side.wait_event(event)
    with torch.npu.stream(side):
        x.sum()
    assert npu.races() == []


def test_an_event_of_torch_itself_serves_as_well(npu: ModuleType) -> None:
    side, event = torch.Stream(device="npu"), torch.Event(device="npu")
    x = torch.ones(4, device="npu")
    event.record()
    side.wait_event(event)
    with side:
        x.sum()
    event.synchronize()
    assert npu.races() == []
    assert [sync.operator for sync in npu.host_syncs()] == ["event synchronize"]


def test_the_host_that_waits_for_an_event_lets_every_stream_go_on(npu: ModuleType) -> None:
    side, other, event = torch.npu.Stream(), torch.npu.Stream(), torch.npu.Event()
    with torch.npu.stream(side):
        x = torch.ones(4, device="npu")
        event.record()
    event.synchronize()
    with torch.npu.stream(other):
        x.sum()
    assert npu.races() == []


def test_an_event_that_nobody_has_waited_for_is_over_when_it_is_asked_again() -> None:
    event = torch.npu.Event()
    assert event.query()
    for _ in range(2):
        torch.ones(4, device="npu")
        event.record()
        assert not event.query()
        assert event.query()


def test_looking_once_whether_an_event_is_over_hides_no_race(npu: ModuleType) -> None:
    side, event = torch.npu.Stream(), torch.npu.Event()
    x = torch.ones(4, device="npu")
    event.record()
    event.query()
    with torch.npu.stream(side):
        x.sum()
    assert [race.kind for race in npu.races()] == ["read before write ended"]
