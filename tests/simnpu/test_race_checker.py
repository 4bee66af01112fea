"""The happens-before checker: planted faults, each with its corrected twin, and what a use of memory is."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch


def kinds(npu: ModuleType) -> list[str]:
    return [race.kind for race in npu.races()]


@pytest.fixture
def side() -> torch.Stream:
    return torch.npu.Stream()


# ---------------------------------------------------------------------------------- planted faults, each with its twin


@pytest.mark.parametrize("ordered", [False, True])
def test_a_read_before_its_producer_ended(npu: ModuleType, side: torch.Stream, ordered: bool) -> None:
    x = torch.ones(10, device="npu")
    if ordered:
        side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        x.sum()
    assert kinds(npu) == ([] if ordered else ["read before write ended"])


@pytest.mark.parametrize("ordered", [False, True])
def test_a_write_before_a_reader_ended(npu: ModuleType, side: torch.Stream, ordered: bool) -> None:
    main = torch.npu.current_stream()
    x = torch.ones(10, device="npu")
    side.wait_stream(main)
    with torch.npu.stream(side):
        x.sum()
    if ordered:
        main.wait_stream(side)
    x.add_(1)
    assert kinds(npu) == ([] if ordered else ["write before reader ended"])


@pytest.mark.parametrize("ordered", [False, True])
def test_two_writes_at_once(npu: ModuleType, side: torch.Stream, ordered: bool) -> None:
    main = torch.npu.current_stream()
    x = torch.empty(10, device="npu")
    x.zero_()
    if ordered:
        side.wait_stream(main)
    with torch.npu.stream(side):
        x.fill_(1)
    assert kinds(npu) == ([] if ordered else ["write before write ended"])


@pytest.mark.parametrize("cure", ["none", "record_stream", "wait", "host"])
@pytest.mark.parametrize("size", [1, 1000, 300_000])
def test_a_buffer_reused_before_its_reader_ended(npu: ModuleType, side: torch.Stream, size: int, cure: str) -> None:
    main = torch.npu.current_stream()
    x = torch.ones(size, device="npu")
    side.wait_stream(main)
    with torch.npu.stream(side):
        y = x.sum()
    if cure == "record_stream":
        x.record_stream(side)
    elif cure == "wait":
        main.wait_stream(side)
    elif cure == "host":
        side.synchronize()
    del x
    torch.zeros(size, device="npu")
    assert kinds(npu) == (["buffer reused before its reader ended"] if cure == "none" else [])
    del y


def test_a_buffer_written_elsewhere_and_reused(npu: ModuleType, side: torch.Stream) -> None:
    x = torch.empty(5000, device="npu")
    with torch.npu.stream(side):
        x.fill_(1)
    del x
    torch.zeros(5000, device="npu")
    assert kinds(npu) == ["buffer reused before its writer ended"]


@pytest.mark.parametrize("read", ["sum", "tolist", "add", "item", "copy", "index"])
@pytest.mark.parametrize("ordered", [False, True])
def test_a_host_read_before_the_copy_ended(npu: ModuleType, ordered: bool, read: str) -> None:
    host = torch.zeros(4).pin_memory()
    host.copy_(torch.ones(4, device="npu"), non_blocking=True)
    if ordered:
        torch.npu.current_stream().synchronize()
    reads: dict[str, Callable[[], object]] = {
        "sum": lambda: host.sum(),
        "tolist": lambda: host.tolist(),
        "add": lambda: torch.add(torch.ones(4), host),
        "item": lambda: host[2].item(),
        "copy": lambda: torch.empty(4).copy_(host),
        "index": lambda: torch.arange(9)[host.long()],
    }
    reads[read]()
    assert kinds(npu) == ([] if ordered else ["host read before copy ended"])


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("to_device", [False, True])
def test_a_host_write_before_the_copy_ended(npu: ModuleType, ordered: bool, to_device: bool) -> None:
    host, device = torch.zeros(4).pin_memory(), torch.ones(4, device="npu")
    if to_device:
        device.copy_(host, non_blocking=True)
    else:
        host.copy_(device, non_blocking=True)
    if ordered:
        torch.npu.synchronize()
    host.fill_(2)
    assert kinds(npu) == ([] if ordered else ["host write before copy ended"])


def test_the_host_may_read_what_it_has_sent_and_touch_what_is_beside_it(npu: ModuleType) -> None:
    host = torch.zeros(8).pin_memory()
    device = host[:4].to("npu", non_blocking=True)
    host.sum()
    host[4:].fill_(1)
    host[4:].copy_(device, non_blocking=True)
    host[:4].sum()
    assert kinds(npu) == []
    host.sum()
    assert kinds(npu) == ["host read before copy ended"]


def test_pageable_memory_is_not_read_behind_the_back_of_the_host(npu: ModuleType) -> None:
    host, device = torch.zeros(4), torch.ones(4, device="npu")
    host.copy_(device, non_blocking=True)
    host.sum()
    device.copy_(host, non_blocking=True)
    host.zero_()
    assert kinds(npu) == []


@pytest.mark.parametrize("ordered", [False, True])
def test_a_pinned_buffer_that_two_streams_use(npu: ModuleType, side: torch.Stream, ordered: bool) -> None:
    host = torch.zeros(4).pin_memory()
    host.copy_(torch.ones(4, device="npu"), non_blocking=True)
    if ordered:
        side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        host.to("npu", non_blocking=True)
    assert kinds(npu) == ([] if ordered else ["read before write ended"])


def test_a_freed_pinned_buffer_is_no_race(npu: ModuleType) -> None:
    for _ in range(20):
        host = torch.zeros(1000).pin_memory()
        host.to("npu", non_blocking=True)
        del host
        torch.zeros(1000).pin_memory().fill_(1)
    assert kinds(npu) == []


# ----------------------------------------------------------------------------------------------- what a use consists of


@pytest.mark.parametrize(
    ("ours", "theirs", "meet"),
    [
        (lambda x: x[:5], lambda x: x[5:], False),
        (lambda x: x[:6], lambda x: x[5:], True),
        (lambda x: x[:, :4], lambda x: x[:, 4:], False),
        (lambda x: x[:, :5], lambda x: x[:, 4:], True),
        (lambda x: x[2:4, 1:3], lambda x: x[3:9, 3:7], False),
        (lambda x: x[2:4, 1:3], lambda x: x[4:9, 1:3], False),
        (lambda x: x[2:4, 1:3], lambda x: x[3:9, 2:7], True),
        (lambda x: x.t()[:4], lambda x: x.t()[4:], False),
        (lambda x: x.view(5, 2, 8)[..., :4], lambda x: x.view(5, 2, 8)[..., 4:], False),
        (lambda x: x.view(5, 2, 8)[..., :4], lambda x: x.view(5, 2, 8)[..., 3:], True),
        (lambda x: x.view(5, 2, 8)[:, 0], lambda x: x.view(5, 2, 8)[:, 1], False),
        (lambda x: x.view(5, 4, 4).transpose(0, 1)[..., :2], lambda x: x.view(5, 4, 4)[..., 2:], False),
        (lambda x: x.view(-1)[3:11], lambda x: x[1, 3:], False),
        (lambda x: x.view(-1)[3:12], lambda x: x[1, 3:], True),
        (lambda x: x[:0], lambda x: x, False),
    ],
    ids=[
        "rows",
        "rows_meet",
        "columns",
        "columns_meet",
        "boxes",
        "boxes_apart",
        "boxes_meet",
        "transposed",
        "columns_3d",
        "columns_3d_meet",
        "slices",
        "columns_3d_transposed",
        "flat",
        "flat_meet",
        "empty",
    ],
)
def test_only_bytes_that_both_use_race(
    npu: ModuleType, side: torch.Stream, ours: object, theirs: object, meet: bool
) -> None:
    assert callable(ours)
    assert callable(theirs)
    x = torch.zeros(10, 8, device="npu")
    torch.npu.synchronize()
    ours(x).fill_(1)
    with torch.npu.stream(side):
        theirs(x).fill_(2)
    assert bool(npu.races()) == meet


@pytest.mark.parametrize(
    "operate",
    [
        lambda x: torch.cat([torch.zeros(1, device="npu"), x]),
        lambda x: torch._foreach_add([x, x], 1.0),
        lambda x: torch.zeros(4, device="npu").index_put((x.long(),), torch.tensor(1.0, device="npu")),
        lambda x: torch.add(x, 1, out=torch.empty(4, device="npu")),
        lambda x: torch.nn.functional.linear(x, torch.ones(2, 4, device="npu"), None),
        lambda x: x.cpu(),
        lambda x: x.clone(),
        lambda x: x.sum().item() if x.sum().item() else None,
        lambda x: torch.zeros(4, device="npu").set_(x).sum(),
        lambda x: x.view(2, 2).t().contiguous(),
        lambda x: x.to("npu:1"),
    ],
    ids=[
        "list",
        "foreach",
        "optional_list",
        "out",
        "linear",
        "to_host",
        "clone",
        "item",
        "set",
        "view",
        "other_device",
    ],
)
def test_every_way_to_read_is_seen(npu: ModuleType, side: torch.Stream, operate: object) -> None:
    assert callable(operate)
    x = torch.zeros(4, device="npu")
    with torch.npu.stream(side):
        operate(x)
    assert set(kinds(npu)) == {"read before write ended"}


@pytest.mark.parametrize(
    "operate",
    [
        lambda x: x.add_(1),
        lambda x: torch.add(torch.zeros(4, device="npu"), 1, out=x),
        lambda x: torch._foreach_mul_([x], 2.0),
        lambda x: x.copy_(torch.zeros(4)),
        lambda x: x.copy_(torch.zeros(4, device="npu:1")),
        lambda x: x[1:].zero_(),
        lambda x: x.index_add_(0, torch.zeros(1, dtype=torch.long, device="npu"), torch.ones(1, device="npu")),
        lambda x: x.uniform_(),
    ],
    ids=["inplace", "out", "foreach", "from_host", "other_device", "view", "index_add", "random"],
)
def test_every_way_to_write_is_seen(npu: ModuleType, side: torch.Stream, operate: object) -> None:
    assert callable(operate)
    x = torch.zeros(4, device="npu")
    side.wait_stream(torch.npu.current_stream())
    y = x + 1
    with torch.npu.stream(side):
        operate(x)
    assert "write before reader ended" in kinds(npu)
    del y


def test_a_report_names_operators_streams_sizes_and_source_lines(npu: ModuleType, side: torch.Stream) -> None:
    npu.trace_sources(True)
    x = torch.empty(100, device="npu").fill_(1)
    with torch.npu.stream(side):
        x.sum()
    (race,) = npu.races()
    assert (race.earlier.operator, race.later.operator) == ("aten::fill_.Scalar", "aten::sum")
    assert race.earlier.stream == "npu:0 stream 0"
    assert race.later.stream == f"npu:0 stream {side.stream_id}"
    assert (race.earlier.bytes, race.earlier.writes, race.later.writes) == (400, True, False)
    assert race.later.where[0].startswith(f"{__file__}:")
    assert race.later.where[0].endswith("in test_a_report_names_operators_streams_sizes_and_source_lines")
    for part in ("read before write ended", "aten::fill_.Scalar", "aten::sum", "400 bytes", __file__):
        assert part in race.detail


def test_the_same_race_again_is_counted(npu: ModuleType, side: torch.Stream) -> None:
    x = torch.zeros(100, device="npu")
    for _ in range(3):
        x.zero_()
        with torch.npu.stream(side):
            x.sum()
        torch.npu.synchronize()
    assert [(race.kind, race.count) for race in npu.races()] == [("read before write ended", 3)]


def test_nothing_is_reported_while_checking_is_off(npu: ModuleType, side: torch.Stream) -> None:
    npu.check_streams(False)
    x = torch.zeros(100, device="npu")
    with torch.npu.stream(side):
        x.sum()
    npu.check_streams(True)
    with torch.npu.stream(side):
        x.sum()
    assert npu.races() == []
