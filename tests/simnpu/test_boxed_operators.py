"""Operators that run by their CPU kernel on npu memory, against the CPU."""

from __future__ import annotations

import threading
from types import ModuleType

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


def on(device: str, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.detach().clone().to(device) for tensor in tensors]


def attention(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """By its decomposition on both devices: the fused kernel of the CPU sums in another order."""
    with sdpa_kernel(SDPBackend.MATH):
        q, k, v = (x.view(1, 2, 4, 3) for x in (a, b, a))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


CASES = {
    "elementwise": lambda a, b, i: (a * b + a.sin()).sigmoid(),
    "reduction": lambda a, b, i: a.sum(0) + b.amax(0) + a.mean(0).var(),
    "matmul": lambda a, b, i: a @ b.t(),
    "sort": lambda a, b, i: a.sort(dim=1, descending=True),
    "topk": lambda a, b, i: b.topk(2, dim=1),
    "unique": lambda a, b, i: i.unique(return_inverse=True, return_counts=True),
    "nonzero": lambda a, b, i: (a > 0).nonzero(),
    "gather": lambda a, b, i: a.gather(1, i.view(1, -1)),
    "index": lambda a, b, i: a[:, i] + b[i.view(1, -1) * 0, i],
    "mask": lambda a, b, i: a[a > b],
    "index_add": lambda a, b, i: a.index_add(1, i, b[:, : i.numel()]),
    "index_put": lambda a, b, i: a.index_put((i % 3,), b[0], accumulate=True),
    "scatter": lambda a, b, i: torch.zeros_like(a).scatter_add(1, i.expand(4, -1), b[:, : i.numel()]),
    "where": lambda a, b, i: torch.where(a > 0, a, b),
    "cat": lambda a, b, i: torch.cat([a, b], 1).split([2, 10], 1),
    "stack": lambda a, b, i: torch.stack([a, b]).unbind(0),
    "cumsum": lambda a, b, i: (a.cumsum(1), i.cumsum(0)),
    "bucketize": lambda a, b, i: torch.bucketize(a, torch.linspace(-1, 1, 5, device=a.device)),
    "searchsorted": lambda a, b, i: torch.searchsorted(i.sort().values, i),
    "embedding": lambda a, b, i: torch.nn.functional.embedding(i % 4, a),
    "layer_norm": lambda a, b, i: torch.nn.functional.layer_norm(a, (6,)),
    "softmax": lambda a, b, i: torch.log_softmax(a, 1) + torch.softmax(b, 0),
    "attention": lambda a, b, i: attention(a, b),
    "conversion": lambda a, b, i: (a.half().float(), a.to(torch.int32), i.bool(), a.bfloat16() * 2),
    "views": lambda a, b, i: (a.unfold(1, 2, 2), a.t()[1:3], a.view(2, 12)[:, ::3], a.expand(2, 4, 6), a.diagonal()),
    "arange": lambda a, b, i: (
        torch.arange(2, 20, 3, device=a.device) + torch.zeros(6, dtype=torch.long, device=a.device)
    ),
    "tril": lambda a, b, i: (a.tril(), torch.tril_indices(3, 3, device=a.device)),
    "repeat": lambda a, b, i: (a.repeat(2, 1), a.repeat_interleave(2, 0), i.repeat_interleave(i)),
    "norms": lambda a, b, i: (a.norm(), torch.linalg.vector_norm(b, dim=1), a.abs().max()),
    "foreach": lambda a, b, i: torch._foreach_addcmul([a, b], [b, a], [a, a], 0.5),
    "comparison": lambda a, b, i: (torch.equal(a, a.clone()), torch.allclose(a, b), bool((a == a).all())),
    "complex": lambda a, b, i: torch.view_as_real(torch.view_as_complex(a.view(4, 3, 2))[1:]),
    "einsum": lambda a, b, i: torch.einsum("ij,kj->ik", a, b),
    "lerp": lambda a, b, i: a.lerp(b, 0.3).clamp(-1, 1).nan_to_num(),
    "flip": lambda a, b, i: a.flip(0).roll(1, 1),
    "loss": lambda a, b, i: torch.nn.functional.cross_entropy(a, torch.arange(4, device=a.device)),
    "empty": lambda a, b, i: (a[:0] * 2, torch.cat([i[:0], i]), a[:, :0] @ b[:, :0].t(), a[:0].sum()),
    "bags": lambda a, b, i: torch.nn.functional.embedding_bag(
        i % 4, a, torch.arange(0, 4, 2, device=a.device), mode="sum"
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_values_and_layouts_are_those_of_the_cpu(npu: ModuleType, case: str) -> None:
    torch.manual_seed(3)
    inputs = torch.randn(4, 6), torch.randn(4, 6), torch.tensor([4, 0, 3, 3, 1])
    expected, ours = CASES[case](*inputs), CASES[case](*on("npu:1", *inputs))
    for want, got in zip(*(x if isinstance(x, tuple | list) else [x] for x in (expected, ours)), strict=True):
        if isinstance(want, torch.Tensor):
            assert got.device == torch.device("npu", 1)
            assert got.stride() == want.stride()
            got = got.cpu()
        assert torch.equal(got, want) if isinstance(want, torch.Tensor) else got == want
    assert npu.cpu_fallbacks() == {}
    assert npu.races() == []


@pytest.mark.parametrize(
    "case", ["elementwise", "matmul", "gather", "index", "where", "layer_norm", "attention", "bags", "cat"]
)
def test_gradients_are_those_of_the_cpu(npu: ModuleType, case: str) -> None:
    # torch_npu has no kernel for the backward pass of EmbeddingBag.
    npu.set_policy("report" if case == "bags" else "strict")
    torch.manual_seed(4)
    inputs = torch.randn(4, 6), torch.randn(4, 6), torch.tensor([4, 0, 3, 3, 1])
    gradients = []
    for device in ("cpu", "npu"):
        a, b, i = on(device, *inputs)
        result = CASES[case](a.requires_grad_(), b.requires_grad_(), i)
        results = result if isinstance(result, tuple | list) else [result]
        sum((x * x).sum() for x in results).backward()
        gradients.append([x.grad.cpu() if x.grad is not None else None for x in (a, b)])
    for want, got in zip(*gradients, strict=True):
        assert (want is None) == (got is None)
        assert want is None or torch.equal(want, got)


def test_in_place_operators_return_their_argument_and_out_its_tensor() -> None:
    x = torch.ones(3, device="npu")
    address = x.data_ptr()
    assert x.add_(1) is x
    assert x.data_ptr() == address
    out = torch.empty(3, device="npu")
    assert torch.mul(x, 2, out=out) is out
    assert out.tolist() == [4, 4, 4]


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("shape", [(0,), (2, 3), (7, 7), (6,)])
def test_an_output_of_another_shape_is_resized(shape: tuple[int, ...]) -> None:
    x = torch.arange(6.0, device="npu").view(2, 3)
    out = torch.empty(shape, device="npu")
    torch.add(x, 1, out=out)
    assert out.shape == (2, 3)
    assert out.tolist() == [[1, 2, 3], [4, 5, 6]]
    values, indices = torch.empty(0, device="npu"), torch.empty(0, dtype=torch.long, device="npu")
    torch.sort(x, descending=True, out=(values, indices))
    assert indices.tolist() == [[2, 1, 0], [2, 1, 0]]
    assert (out + values).sum().item() == 36


def test_views_alias_and_results_do_not() -> None:
    x = torch.zeros(4, 6, device="npu")
    for view in (
        x.view(-1),
        x.t(),
        x[1:],
        x.as_strided((2,), (3,)),
        x.unfold(0, 2, 1),
        x.detach(),
        x.squeeze(),
        x.real,
    ):
        assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    for other in (x + 0, x.clone(), x.relu(), x.contiguous().abs(), x.reshape(2, 12).repeat(1, 1)):
        assert other.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    x.view(-1)[7] = 5
    assert x[1, 1].item() == 5


def test_overlapping_outputs_are_refused_as_on_the_cpu() -> None:
    x = torch.zeros(4, device="npu")
    with pytest.raises(RuntimeError, match="refer to a single memory location"):
        torch.add(x[:3], 1, out=x[1:])
    with pytest.raises(RuntimeError, match="refers to a single memory location"):
        torch.zeros(1, device="npu").expand(3).add_(1)


def test_an_error_of_the_kernel_is_passed_on() -> None:
    with pytest.raises(RuntimeError, match="must match the size"):
        torch.ones(3, device="npu") + torch.ones(4, device="npu")
    with pytest.raises(IndexError, match="out of range"):
        torch.ones(3, device="npu").sum(2)


def test_changes_in_place_are_known_to_autograd() -> None:
    x = torch.ones(3, device="npu", requires_grad=True)
    y = x * x
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_training_gives_the_losses_of_the_cpu() -> None:
    losses: dict[str, list[float]] = {}
    for device in ("cpu", "npu"):
        torch.manual_seed(0)
        net = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.SiLU(), torch.nn.Linear(16, 1)
        )
        x = torch.randn(32, 8)
        net, x = net.to(device), x.to(device)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        losses[device] = []
        for _ in range(10):
            loss = (net(x) - x.sum(-1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[device].append(loss.item())
    assert losses["npu"] == pytest.approx(losses["cpu"], rel=1e-6)


def test_threads_work_side_by_side(npu: ModuleType) -> None:
    failed: list[BaseException] = []

    def work(index: int) -> None:
        try:
            torch.npu.set_device(index)
            stream = torch.npu.Stream()
            with torch.npu.stream(stream):
                for step in range(50):
                    x = torch.full((100,), float(step), device="npu")
                    assert (x * 2).sum().item() == 200 * step
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(index % 3,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert npu.races() == []
    assert npu.executed()["aten::mul.Tensor"] == 300
