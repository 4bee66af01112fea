"""Training code on one and on several streams: correct code is not reported, a forgotten wait is."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch


def kinds(npu: ModuleType) -> list[str]:
    return [race.kind for race in npu.races()]


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1)
    ).to("npu")


def batches(count: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randn(32, 8, generator=generator).pin_memory()


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_ordinary_training_is_clean(npu: ModuleType, optimizer: type[torch.optim.Optimizer]) -> None:
    net = model()
    optim = optimizer(net.parameters(), lr=0.01)  # type: ignore[call-arg]
    losses = []
    for batch in batches(10):
        x = batch.to("npu", non_blocking=True)
        loss = (net(x) - x.sum(-1, keepdim=True)).square().mean()
        optim.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optim.step()
        losses.append(loss.detach())
    assert torch.stack(losses[-3:]).mean().item() < losses[0].item()
    assert npu.races() == []


@pytest.mark.parametrize("fault", [None, "record_stream", "wait_stream"])
def test_prefetching_on_a_stream_of_its_own(npu: ModuleType, fault: str | None) -> None:
    """The next batch is copied while this one trains, as TorchRec's pipelines do it."""
    main, copies = torch.npu.current_stream(), torch.npu.Stream(priority=-1)
    net = model()
    optim = torch.optim.SGD(net.parameters(), lr=0.01)
    copies.wait_stream(main)
    coming = batches(12)

    def fetch() -> torch.Tensor | None:
        host = next(coming, None)
        if host is None:
            return None
        with torch.npu.stream(copies):
            return host.to("npu", non_blocking=True)

    following = fetch()
    while following is not None:
        x = following
        if fault != "wait_stream":
            main.wait_stream(copies)
        if fault != "record_stream":
            x.record_stream(main)
        loss = net(x).square().mean()
        optim.zero_grad()
        loss.backward()
        optim.step()
        del loss, x  # before the next copy starts: its memory is free on the stream of the copies
        following = fetch()
    found = set(kinds(npu))
    if fault is None:
        assert not found
    elif fault == "wait_stream":
        assert "read before write ended" in found
    else:
        assert found == {"buffer reused before its reader ended"}


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
def test_backward_of_a_forward_on_two_streams_is_clean(npu: ModuleType) -> None:
    main, side = torch.npu.current_stream(), torch.npu.Stream()
    weights = [torch.nn.Parameter(torch.randn(8, 8, device="npu")) for _ in range(3)]
    for _ in range(4):
        side.wait_stream(main)
        with torch.npu.stream(side):
            x = torch.randn(4, 8, device="npu")
            left = (x @ weights[0]).relu()
        right = (torch.randn(4, 8, device="npu") @ weights[1]).relu()
        main.wait_stream(side)
        left.record_stream(main)
        (left @ weights[2] + right @ weights[0]).square().sum().backward()
        for weight in weights:
            assert weight.grad is not None
            weight.data.sub_(weight.grad, alpha=0.01)
            weight.grad = None
    assert npu.races() == []


def test_backward_over_two_devices_is_clean(npu: ModuleType) -> None:
    first, second = torch.nn.Linear(4, 4).to("npu:0"), torch.nn.Linear(4, 4).to("npu:1")
    for _ in range(3):
        second(first(torch.randn(2, 4, device="npu:0")).relu().to("npu:1")).sum().backward()
    assert first.weight.grad is not None
    assert first.weight.grad.abs().sum().item() > 0
    assert npu.races() == []


def test_backward_with_python_functions_and_accumulation_is_clean(npu: ModuleType) -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            return grad * 2

    side = torch.npu.Stream()
    weight = torch.nn.Parameter(torch.ones(4, device="npu"))
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        for _ in range(3):
            Double.apply(weight).sum().backward()
    torch.npu.current_stream().wait_stream(side)
    assert weight.grad is not None
    assert weight.grad.tolist() == [6.0] * 4
    assert npu.races() == []
