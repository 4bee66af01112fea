"""The device facade on npu: the order that streams, events and pinned copies promise is the order that simnpu sees."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from turbogr_plugin import simnpu
from turbogr_plugin.backend import streams
from turbogr_plugin.backend.current_device import available_device_types, current_device
from turbogr_plugin.backend.device_facts import FACTS, device_facts
from turbogr_plugin.backend.matmul_precision import available_matmul_precisions
from turbogr_plugin.backend.memory import (
    copy_to_device,
    copy_to_host,
    memory_figures,
    pinned_empty,
    reset_peak,
)

pytestmark = pytest.mark.usefixtures("npu")

_TYPE = torch._C._get_privateuse1_backend_name()  # "npu" once that is loaded, and the same device before
NPU, SECOND = torch.device(_TYPE, 0), torch.device(_TYPE, 1)
MEBI = 1 << 20


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Each test begins with nothing outstanding on any device."""
    for device in (NPU, SECOND):
        streams.synchronize(device)
    simnpu.reset()
    yield
    for device in (NPU, SECOND):
        streams.synchronize(device)
    simnpu.reset()


def _kinds() -> set[str]:
    return {race.kind for race in simnpu.races()}


def test_a_new_stream_is_not_the_current_one_until_it_is_entered() -> None:
    stream = streams.new_stream(NPU, priority=-1)
    assert stream != streams.current_stream(NPU)
    assert stream.device == NPU
    with streams.on_stream(stream):
        assert streams.current_stream(NPU) == stream
    assert stream != streams.current_stream(NPU)


def test_a_stream_is_made_on_the_device_that_is_asked_for() -> None:
    assert streams.new_stream(SECOND).device == SECOND
    assert streams.current_stream(SECOND).device == SECOND
    assert streams.new_stream(torch.device("npu")).device == NPU


@pytest.mark.parametrize("waits", [True, False])
def test_a_reader_on_another_stream_has_to_wait_for_its_producer(waits: bool) -> None:
    side = streams.new_stream(NPU)
    values = torch.ones(64, device=NPU)
    if waits:
        streams.wait(side, streams.current_stream(NPU))
    with streams.on_stream(side):
        values.sum()
    assert _kinds() == (set() if waits else {"read before write ended"})


def test_an_event_orders_what_was_before_it() -> None:
    side, event = streams.new_stream(NPU), streams.new_event(NPU)
    values = torch.ones(64, device=NPU)
    event.record(streams.current_stream(NPU))  # type: ignore[arg-type]
    side.wait_event(event)  # type: ignore[arg-type]
    with streams.on_stream(side):
        values.sum()
    assert _kinds() == set()


def test_events_of_an_npu_keep_time_if_asked() -> None:
    first, last = streams.new_event(NPU, timing=True), streams.new_event(NPU, timing=True)
    first.record()
    last.record()
    streams.synchronize(NPU)
    assert first.elapsed_time(last) >= 0  # type: ignore[union-attr, arg-type]


@pytest.mark.parametrize("recorded", [True, False])
def test_recorded_memory_is_not_given_away_while_another_stream_reads(recorded: bool) -> None:
    side = streams.new_stream(NPU)
    values = torch.ones(4096, device=NPU)
    streams.wait(side, streams.current_stream(NPU))
    with streams.on_stream(side):
        values.sum()
    if recorded:
        streams.record_stream(values, side)
    del values
    gc.collect()
    torch.zeros(4096, device=NPU)  # takes the same memory where it is free
    assert _kinds() == (set() if recorded else {"buffer reused before its reader ended"})


def test_the_host_stream_waits_for_an_npu() -> None:
    cpu = streams.current_stream(torch.device("cpu"))
    torch.ones(3, device=NPU)
    before = simnpu.counters().host_syncs
    streams.wait(cpu, streams.current_stream(NPU))
    cpu.wait_event(streams.current_stream(NPU).record_event())  # type: ignore[arg-type]
    assert simnpu.counters().host_syncs == before + 2
    streams.wait(streams.current_stream(NPU), cpu)
    assert simnpu.counters().host_syncs == before + 2


def test_memory_figures_follow_the_tensors_of_a_device() -> None:
    reset_peak(SECOND)
    before = memory_figures(SECOND)
    values = torch.empty(4 * MEBI, dtype=torch.uint8, device=SECOND)
    with_values = memory_figures(SECOND)
    del values
    after = memory_figures(SECOND)
    assert before.allocated is not None and with_values.allocated is not None and with_values.peak is not None
    assert with_values.allocated - before.allocated == 4 * MEBI
    assert after.allocated == before.allocated
    assert after.peak == with_values.peak >= before.allocated + 4 * MEBI
    reset_peak(SECOND)
    assert memory_figures(SECOND).peak == after.allocated
    assert after.total is not None and after.free is not None and 0 < after.free <= after.total


def test_a_copy_to_the_device_is_ordered_by_its_use() -> None:
    side = streams.new_stream(NPU)
    source = torch.arange(64.0)
    copy = copy_to_device(source, NPU, stream=side)
    assert simnpu.counters().host_syncs == 0
    assert copy.source.is_pinned()
    total = copy.use().sum()
    assert _kinds() == set()
    assert total.item() == source.sum().item()


def test_a_copy_to_the_device_that_is_not_used_by_its_order_is_a_race() -> None:
    copy_to_device(torch.arange(64.0), NPU, stream=streams.new_stream(NPU)).result.sum()
    assert "read before write ended" in _kinds()


@pytest.mark.parametrize("waits", [True, False])
def test_the_host_may_write_to_the_source_once_it_has_waited(waits: bool) -> None:
    source = pinned_empty(64, dtype=torch.float32, device=NPU)
    assert source.is_pinned()
    source.fill_(1)
    copy = copy_to_device(source, NPU)
    if waits:
        assert copy.wait() is copy.result
        assert copy.done
    source.fill_(2)
    assert _kinds() == (set() if waits else {"host write before copy ended"})


@pytest.mark.parametrize("on_side", [True, False], ids=["on a stream of its own", "on the current stream"])
def test_a_copy_to_the_host_is_there_once_the_host_has_waited(on_side: bool) -> None:
    values = torch.arange(64.0, device=NPU) * 2
    copy = copy_to_host(values, stream=streams.new_stream(NPU) if on_side else None)
    assert simnpu.counters().host_syncs == 0
    with pytest.raises(ValueError, match="call wait"):
        copy.use()
    del values  # its memory stays until the copy is over
    torch.zeros(64, device=NPU)
    assert copy.wait().tolist() == [2.0 * i for i in range(64)]
    assert simnpu.counters().host_syncs == 1
    assert _kinds() == set()


def test_a_host_that_reads_too_early_is_found() -> None:
    copy_to_host(torch.ones(64, device=NPU)).result.sum()
    assert _kinds() == {"host read before copy ended"}


def test_the_cpu_stays_usable_beside_an_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert available_device_types() == ("cpu", "npu")
    assert current_device("cpu") == torch.device("cpu")
    try:
        assert current_device("npu") == SECOND
        assert torch.npu.current_device() == 1  # type: ignore[attr-defined]
    finally:
        torch.npu.set_device(0)  # type: ignore[attr-defined]


def test_facts_come_by_the_name_that_the_device_gives() -> None:
    facts = device_facts(NPU)
    assert facts.name == torch.npu.get_device_name(0)  # type: ignore[attr-defined]
    assert (facts.name in FACTS) == (facts.source is not None)


def test_an_npu_multiplies_in_float32_and_in_hf32() -> None:
    assert available_matmul_precisions(NPU)[0] == "fp32"
