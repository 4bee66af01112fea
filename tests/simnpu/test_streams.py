"""Streams: which one is current, and what waiting for one orders."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import ModuleType

import pytest
import torch


def test_operators_run_on_the_stream_of_the_context() -> None:
    default = torch.npu.current_stream()
    side = torch.npu.Stream()
    assert default == torch.npu.default_stream()
    assert side != default
    with torch.npu.stream(side):
        assert torch.npu.current_stream() == side
        with torch.npu.stream(None):
            assert torch.npu.current_stream() == side
    assert torch.npu.current_stream() == default
    with side:
        assert torch.accelerator.current_stream() == side
    assert isinstance(side, torch.Stream)
    assert side.device == torch.device("npu", 0)


def test_a_stream_of_another_device_makes_that_device_current() -> None:
    side = torch.npu.Stream(device=3)
    with torch.npu.stream(side):
        assert torch.npu.current_device() == 3
        assert torch.npu.current_stream(0) == torch.npu.default_stream(0)
    assert torch.npu.current_device() == 0
    assert torch.npu.current_stream(3) == torch.npu.default_stream(3)


def test_streams_are_handed_out_in_turn_from_a_pool() -> None:
    streams = [torch.npu.Stream() for _ in range(33)]
    assert len({stream.stream_id for stream in streams[:32]}) == 32
    assert streams[32] == streams[0]
    assert torch.npu.Stream(priority=-1).stream_id not in {stream.stream_id for stream in streams}


def test_every_thread_starts_on_the_default_stream() -> None:
    seen = []
    with torch.npu.stream(torch.npu.Stream()):
        thread = threading.Thread(target=lambda: seen.append(torch.npu.current_stream()))
        thread.start()
        thread.join()
    assert seen == [torch.npu.default_stream()]


@pytest.mark.parametrize("wait", ["stream", "event", "host", "device", "query", "item"])
def test_what_is_waited_for_is_no_race(npu: ModuleType, wait: str) -> None:
    main, side = torch.npu.current_stream(), torch.npu.Stream()
    x = torch.ones(10, device="npu")
    if wait == "stream":
        side.wait_stream(main)
    elif wait == "event":
        side.wait_event(main.record_event())
    elif wait == "host":
        main.synchronize()
    elif wait == "device":
        torch.npu.synchronize()
    elif wait == "query":
        assert main.query()
    else:
        x.sum().item()
    with torch.npu.stream(side):
        y = x * 2
    assert npu.races() == []
    main.wait_stream(side)
    y.add_(1)
    assert npu.races() == []


def test_a_wait_orders_what_was_before_it_and_nothing_later(npu: ModuleType) -> None:
    main, side = torch.npu.current_stream(), torch.npu.Stream()
    x = torch.ones(10, device="npu")
    side.wait_stream(main)
    x.add_(1)
    with torch.npu.stream(side):
        x.sum()
    assert [race.kind for race in npu.races()] == ["read before write ended"]


def test_waiting_is_passed_on_from_stream_to_stream(npu: ModuleType) -> None:
    main, one, two = torch.npu.current_stream(), torch.npu.Stream(), torch.npu.Stream()
    x = torch.ones(10, device="npu")
    one.wait_stream(main)
    two.wait_stream(one)
    with torch.npu.stream(two):
        x.add_(1)
    main.wait_stream(two)
    x.add_(1)
    assert npu.races() == []


def test_a_copy_between_devices_is_ordered_on_both(npu: ModuleType) -> None:
    x = torch.ones(1000, device="npu:0")
    y = x.to("npu:1")
    x.add_(1)
    y.add_(1)
    z = torch.zeros(1000, device="npu:1").copy_(x)
    z.add_(y)
    assert npu.races() == []


def test_waits_of_the_host_are_counted_with_their_place(npu: ModuleType) -> None:
    npu.trace_sources(True)
    x = torch.ones(3, device="npu")
    for _ in range(2):
        x.sum().item()
    torch.npu.current_stream().synchronize()
    torch.npu.synchronize()
    x.cpu()
    x.nonzero()
    x[x > 0]
    syncs = {sync.operator: sync for sync in npu.host_syncs()}
    assert set(syncs) == {
        *("aten::_local_scalar_dense", "stream synchronize", "device synchronize"),
        *("aten::copy_ (device to host)", "aten::nonzero", "aten::index.Tensor"),
    }
    assert syncs["aten::_local_scalar_dense"].count == 2
    assert syncs["aten::_local_scalar_dense"].where[0].startswith(f"{__file__}:")
    assert npu.counters().host_syncs == 7


@pytest.mark.parametrize(
    ("copy", "syncs"),
    [
        (lambda: torch.ones(3).to("npu"), 1),
        (lambda: torch.ones(3).to("npu", non_blocking=True), 0),
        (lambda: torch.ones(3).pin_memory().to("npu", non_blocking=True), 0),
        (lambda: torch.tensor([1, 2], device="npu"), 1),
        (lambda: torch.zeros(3, device="npu"), 0),
        (lambda: torch.empty(3).copy_(torch.ones(3, device="npu"), non_blocking=True), 1),
        (lambda: torch.ones(3, device="npu").to("cpu", non_blocking=True), 0),  # torch pins what it makes for this
        (lambda: torch.empty(3, pin_memory=True).copy_(torch.ones(3, device="npu"), non_blocking=True), 0),
        (lambda: torch.arange(3, device="npu")[torch.arange(2, device="npu")], 0),
        (lambda: torch.repeat_interleave(torch.arange(3, device="npu"), output_size=3), 0),
        (lambda: torch.repeat_interleave(torch.arange(3, device="npu")), 1),
        (lambda: torch.equal(torch.zeros(2, device="npu"), torch.zeros(2, device="npu")), 1),
    ],
    ids=[
        "blocking",
        "pageable",
        "pinned",
        "literal",
        "factory",
        "to_pageable",
        "to_new",
        "to_pinned",
        "index",
        "repeat_sized",
        "repeat",
        "equal",
    ],
)
def test_the_host_waits_where_a_real_device_makes_it_wait(npu: ModuleType, copy: object, syncs: int) -> None:
    assert callable(copy)
    copy()
    assert npu.counters().host_syncs == syncs


def _in_a_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work, name="lane")
    thread.start()
    thread.join()


@pytest.mark.parametrize("by_thread", [False, True])
@pytest.mark.parametrize("waits", ["stream", "device", "event"])
def test_by_thread_a_wait_of_the_host_orders_what_its_own_thread_launches(
    npu: ModuleType, waits: str, by_thread: bool
) -> None:
    npu.check_streams(True, by_thread=by_thread)
    main, side = torch.npu.current_stream(), torch.npu.Stream()
    x = torch.ones(10, device="npu")
    wait = {"stream": main, "device": torch.npu, "event": main.record_event()}[waits]

    _in_a_thread(wait.synchronize)
    with torch.npu.stream(side):
        x.sum()
    assert [race.kind for race in npu.races()] == (["read before write ended"] if by_thread else [])
    npu.reset()
    y = torch.ones(10, device="npu")
    main.synchronize()
    with torch.npu.stream(side):
        y.sum()
    assert npu.races() == []


def test_by_thread_events_order_what_other_threads_launch(npu: ModuleType) -> None:
    npu.check_streams(True, by_thread=True)
    side = torch.npu.Stream()
    x = torch.ones(10, device="npu")
    done = torch.npu.current_stream().record_event()

    def use() -> None:
        side.wait_event(done)
        with torch.npu.stream(side):
            x.sum()

    _in_a_thread(use)
    assert npu.races() == []


def test_by_thread_a_backward_pass_knows_what_any_thread_has_waited_for(npu: ModuleType) -> None:
    npu.check_streams(True, by_thread=True)
    side = torch.npu.Stream()
    weight = torch.ones(10, device="npu", requires_grad=True)
    with torch.npu.stream(side):
        factor = torch.full((10,), 2.0, device="npu")
    side.synchronize()
    (weight * factor).sum().backward()  # autograd's thread reads the factor
    assert npu.races() == []


def test_waits_of_the_host_are_told_by_thread(npu: ModuleType) -> None:
    npu.trace_sources(True)
    x = torch.ones(3, device="npu")
    _in_a_thread(x.cpu)
    x.cpu()
    assert sorted(sync.thread for sync in npu.host_syncs()) == ["MainThread", "lane"]
