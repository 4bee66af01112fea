"""Device memory, its reuse and its figures; pinned memory."""

from __future__ import annotations

import copy
from types import ModuleType

import pytest
import torch


def test_new_memory_is_poisoned() -> None:
    values = torch.empty(300, dtype=torch.uint8, device="npu").cpu()
    assert (values == 0xC5).all()


def test_freed_memory_is_poisoned_and_handed_out_again() -> None:
    first = torch.ones(4096, device="npu")
    address = first.data_ptr()
    del first
    second = torch.empty(4096, device="npu")
    assert second.data_ptr() == address
    assert (second.view(torch.uint8).cpu() == 0xC5).all()


def test_memory_is_counted_in_steps_of_512_bytes() -> None:
    before = torch.npu.memory_allocated()
    tensors = [torch.empty(size, dtype=torch.uint8, device="npu") for size in (1, 512, 513)]
    assert torch.npu.memory_allocated() - before == 512 + 512 + 1024
    del tensors
    assert torch.npu.memory_allocated() == before


def test_an_empty_tensor_takes_no_memory() -> None:
    before = torch.npu.memory_allocated()
    empty = torch.empty(0, 7, device="npu")
    assert empty.data_ptr() == 0
    assert torch.npu.memory_allocated() == before


def test_every_device_has_figures_of_its_own() -> None:
    before = [torch.npu.memory_allocated(index) for index in range(3)]
    kept = torch.empty(1000, device="npu:2")
    assert [torch.npu.memory_allocated(index) - before[index] for index in range(3)] == [0, 0, 4096]
    del kept


def test_the_peak_stays_until_it_is_reset() -> None:
    torch.npu.reset_peak_memory_stats()
    before = torch.npu.memory_allocated()
    del_me = torch.empty(1 << 20, dtype=torch.uint8, device="npu")
    del del_me
    assert torch.npu.max_memory_allocated() == before + (1 << 20)
    torch.npu.reset_peak_memory_stats()
    assert torch.npu.max_memory_allocated() == before


def test_torch_accelerator_tells_the_same_figures() -> None:
    kept = torch.empty(5000, device="npu:1")
    assert torch.accelerator.memory_allocated(1) == torch.npu.memory_allocated(1)
    assert torch.accelerator.max_memory_allocated(1) == torch.npu.max_memory_allocated(1)
    stats = torch.accelerator.memory_stats(1)
    assert stats["allocated_bytes.all.current"] == torch.npu.memory_allocated(1)
    assert stats["allocated_bytes.all.allocated"] >= 20480
    free, total = torch.npu.mem_get_info(1)
    assert total == 64 << 30
    assert total - free == torch.npu.memory_reserved(1) >= torch.npu.memory_allocated(1)
    del kept


def test_the_cache_can_be_emptied() -> None:
    torch.empty(1 << 20, device="npu")
    torch.npu.empty_cache()
    assert torch.npu.memory_reserved() - torch.npu.memory_allocated() < 1 << 20


def test_more_than_the_device_has_is_out_of_memory() -> None:
    before = torch.npu.memory_allocated()
    with pytest.raises(torch.OutOfMemoryError, match=r"npu:0 is out of memory: tried to allocate \d+ bytes"):
        torch.empty(65 << 30, dtype=torch.uint8, device="npu")
    assert torch.npu.memory_allocated() == before


def test_a_recorded_block_waits_for_its_stream() -> None:
    side = torch.npu.Stream()
    block = torch.ones(70_000, device="npu")
    address = block.data_ptr()
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        block.sum()
    block.record_stream(side)
    del block
    other = torch.empty(70_000, device="npu")
    assert other.data_ptr() != address
    side.synchronize()
    assert torch.empty(70_000, device="npu").data_ptr() == address


def test_a_block_goes_back_to_the_stream_of_its_allocation() -> None:
    side = torch.npu.Stream()
    with torch.npu.stream(side):
        block = torch.empty(90_000, device="npu")
    address = block.data_ptr()
    del block
    assert torch.empty(90_000, device="npu").data_ptr() != address
    with torch.npu.stream(side):
        assert torch.empty(90_000, device="npu").data_ptr() == address


def test_only_pinned_memory_is_pinned() -> None:
    pageable = torch.arange(10)
    pinned = pageable.pin_memory()
    assert not pageable.is_pinned()
    assert pinned.is_pinned()
    assert pinned[3:5].is_pinned()
    assert torch.equal(pinned, pageable)
    assert torch.empty(3, pin_memory=True).is_pinned()
    assert not torch.empty(3, device="npu").is_pinned()
    assert not pinned.clone().is_pinned()


def test_a_loader_pins_its_batches() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(8))
    batches = list(torch.utils.data.DataLoader(data, batch_size=4, pin_memory=True))
    assert all(batch.is_pinned() for (batch,) in batches)
    assert torch.cat([batch.to("npu", non_blocking=True) for (batch,) in batches]).cpu().tolist() == list(range(8))


def test_storage_can_be_resized_to_nothing_and_back() -> None:
    tensor = torch.arange(1000.0, device="npu")
    before = torch.npu.memory_allocated()
    tensor.untyped_storage().resize_(0)
    assert torch.npu.memory_allocated() == before - 4096
    tensor.untyped_storage().resize_(4000)
    tensor.fill_(2)
    assert tensor.sum().item() == 2000


@pytest.mark.parametrize("shape", [(3,), (0, 4), (2, 1, 5)])
def test_tensors_go_from_meta_to_npu(shape: tuple[int, ...]) -> None:
    meta = torch.empty(shape, device="meta")
    assert torch.empty_like(meta, device="npu").shape == shape
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        meta.to("npu")
    linear = torch.nn.Linear(3, 2, device="meta").to_empty(device="npu")
    assert linear.weight.device.type == "npu"


def test_a_deep_copy_owns_its_memory() -> None:
    module = torch.nn.Linear(3, 2, device="npu")
    twin = copy.deepcopy(module)
    assert twin.weight.device == module.weight.device
    assert torch.equal(twin.weight, module.weight)
    twin.weight.data.zero_()
    assert module.weight.abs().sum().item() > 0


def test_copies_are_counted_by_direction(npu: ModuleType) -> None:
    there = torch.arange(5).to("npu")
    there.clone()
    there.to("npu:1")
    there.cpu()
    there.to("npu", non_blocking=True)  # already there
    assert npu.counters() == npu.Counters(h2d=1, d2h=1, d2d=2, host_syncs=2)
