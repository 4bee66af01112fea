"""Random numbers of a device."""

from __future__ import annotations

import threading

import pytest
import torch


@pytest.mark.parametrize(
    "draw",
    [
        lambda generator: torch.randn(50, device="npu", generator=generator),
        lambda generator: torch.rand(50, device="npu", generator=generator),
        lambda generator: torch.randint(9, (50,), device="npu", generator=generator),
        lambda generator: torch.randperm(50, device="npu", generator=generator),
        lambda generator: torch.empty(50, device="npu").exponential_(generator=generator),
        lambda generator: torch.bernoulli(torch.full((50,), 0.5, device="npu"), generator=generator),
        lambda generator: torch.multinomial(torch.ones(50, device="npu"), 20, generator=generator),
    ],
    ids=["randn", "rand", "randint", "randperm", "exponential", "bernoulli", "multinomial"],
)
def test_a_seed_gives_the_same_numbers_as_on_the_cpu(draw: object) -> None:
    assert callable(draw)
    generator = torch.Generator(device="npu").manual_seed(7)
    first, second = draw(generator), draw(generator)
    assert not torch.equal(first, second)
    assert torch.equal(draw(torch.Generator(device="npu").manual_seed(7)), first)
    torch.npu.manual_seed(7)
    assert torch.equal(draw(None), first)
    assert torch.equal(draw(None), second)


def test_numbers_are_those_of_a_cpu_generator_with_the_seed() -> None:
    ours = torch.randn(20, device="npu", generator=torch.Generator(device="npu").manual_seed(3))
    assert torch.equal(ours.cpu(), torch.randn(20, generator=torch.Generator().manual_seed(3)))


def test_devices_and_the_cpu_have_independent_generators() -> None:
    torch.manual_seed(5)
    on_cpu = torch.rand(4)
    torch.manual_seed(5)
    one = torch.rand(4, device="npu:1")
    torch.rand(100, device="npu:2")
    assert torch.equal(torch.rand(4), on_cpu)
    torch.npu.set_device(1)
    torch.npu.manual_seed(5)
    assert torch.equal(torch.rand(4, device="npu:1"), one)


def test_torch_manual_seed_seeds_every_device() -> None:
    torch.manual_seed(11)
    first = [torch.rand(3, device=f"npu:{index}").cpu() for index in (0, 6)]
    torch.manual_seed(11)
    assert [torch.rand(3, device=f"npu:{index}").tolist() for index in (0, 6)] == [x.tolist() for x in first]


def test_a_state_brings_the_numbers_back() -> None:
    state = torch.npu.get_rng_state(2)
    first = torch.rand(3, device="npu:2").cpu()
    torch.npu.set_rng_state(state, 2)
    assert torch.equal(torch.rand(3, device="npu:2").cpu(), first)
    with torch.random.fork_rng(devices=[2], device_type="npu"):
        torch.rand(3, device="npu:2")
    after = torch.npu.get_rng_state(2)
    torch.npu.set_rng_state_all(torch.npu.get_rng_state_all())
    assert torch.equal(torch.npu.get_rng_state(2), after)


def test_dropout_draws_from_the_device_and_leaves_the_cpu_alone() -> None:
    x = torch.ones(200, device="npu")
    before = torch.get_rng_state()
    torch.npu.manual_seed(1)
    first = torch.nn.functional.dropout(x, 0.5)
    assert torch.equal(torch.get_rng_state(), before)
    torch.npu.manual_seed(1)
    assert torch.equal(torch.nn.functional.dropout(x, 0.5), first)
    assert 50 < (first == 0).sum().item() < 150
    assert not torch.equal(torch.nn.functional.dropout(x, 0.5), first)


def test_a_generator_of_the_cpu_is_refused_for_npu_and_the_reverse() -> None:
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(3, device="npu", generator=torch.Generator())
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(3, generator=torch.Generator(device="npu"))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_dropout_is_computed_again_with_the_same_numbers(reentrant: bool) -> None:
    x = torch.ones(500, device="npu", requires_grad=True)
    y = torch.utils.checkpoint.checkpoint(lambda z: torch.nn.functional.dropout(z, 0.5), x, use_reentrant=reentrant)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad != 0, y != 0)


def test_dropout_neither_draws_from_the_generator_of_the_cpu_nor_depends_on_what_other_threads_draw() -> None:
    def masks() -> torch.Tensor:
        torch.manual_seed(1)
        return torch.stack([torch.nn.functional.dropout(torch.ones(50, device="npu")) for _ in range(200)])

    def draw() -> None:
        while not over.is_set():
            torch.rand(100)

    alone = masks()
    over = threading.Event()
    thread = threading.Thread(target=draw)
    thread.start()
    beside = masks()
    over.set()
    thread.join()
    assert torch.equal(alone, beside)
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    torch.nn.functional.dropout(torch.ones(50, device="npu"))
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_dropout_is_that_of_a_cpu_with_the_same_seed(p: float) -> None:
    torch.manual_seed(4)
    x = torch.linspace(-1, 1, 40).requires_grad_()
    on_cpu = torch.nn.functional.dropout(x, p)
    torch.npu.manual_seed(4)
    on_npu = torch.nn.functional.dropout(x.npu(), p)
    assert torch.equal(on_npu.cpu(), on_cpu)
    assert torch.equal(torch.nn.functional.dropout(x.npu(), p, training=False).cpu(), x)
    (gradient,) = torch.autograd.grad(on_cpu.sum(), x)
    assert torch.equal(torch.autograd.grad(on_npu.sum(), x)[0], gradient)
