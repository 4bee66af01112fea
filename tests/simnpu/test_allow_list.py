"""What raises under "strict", is counted under "report" and runs under "permissive"."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from turbogr_plugin.simnpu import operators


def test_what_torch_npu_lacks_raises_and_is_named(npu: ModuleType) -> None:
    x = torch.tensor([1.0, 2.0], device="npu")
    with pytest.raises(NotImplementedError, match=r"operator 'aten::lgamma\.out' has no kernel on npu"):
        x.lgamma()
    assert npu.cpu_fallbacks() == {}


def test_under_report_it_runs_and_is_counted_as_a_wait_of_the_host(npu: ModuleType) -> None:
    npu.set_policy("report")
    x = torch.tensor([1.0, 2.0], device="npu")
    npu.reset()
    y = x.digamma()
    assert torch.equal(y.cpu(), torch.tensor([1.0, 2.0]).digamma())
    assert y.device == x.device
    assert npu.cpu_fallbacks() == {"aten::digamma.out": 1}
    assert {sync.operator for sync in npu.host_syncs()} == {"aten::digamma.out", "aten::copy_ (device to host)"}


def test_under_permissive_it_runs(npu: ModuleType) -> None:
    npu.set_policy("permissive")
    x = torch.tensor([1.0, 2.0], device="npu", dtype=torch.float64)
    npu.reset()
    assert (x.digamma() + x).dtype == torch.float64
    assert npu.cpu_fallbacks() == {}
    assert npu.host_syncs() == []
    assert npu.executed() == {"aten::digamma.out": 1, "aten::add.Tensor": 1}


def test_another_policy_is_refused(npu: ModuleType) -> None:
    with pytest.raises(ValueError, match="strict, report, permissive, got 'lenient'"):
        npu.set_policy("lenient")


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128, torch.complex64])
def test_a_dtype_that_chips_lack_may_be_stored_copied_and_cast(dtype: torch.dtype) -> None:
    x = torch.arange(4, device="npu").to(dtype)
    host = torch.arange(4).to(dtype)
    assert torch.equal(x.cpu(), host)
    assert torch.equal(host.to("npu").cpu(), host)
    assert torch.equal(torch.cat([x, x.clone()]).cpu(), torch.cat([host, host]))
    assert torch.equal(torch.ones(3, dtype=dtype, device="npu").cpu(), torch.ones(3, dtype=dtype))
    assert torch.equal(torch.full((3,), 2, dtype=dtype, device="npu").cpu(), torch.full((3,), 2, dtype=dtype))
    assert torch.equal(x[1:].view(3, 1).t().contiguous().cpu(), host[1:].view(1, 3))


@pytest.mark.parametrize(
    "compute",
    [
        lambda: torch.ones(3, dtype=torch.float64, device="npu") + 1,
        lambda: (
            torch.ones(2, 2, dtype=torch.float64, device="npu") @ torch.ones(2, 2, dtype=torch.float64, device="npu")
        ),
        lambda: torch.ones(3, device="npu").sum(dtype=torch.float64),
        lambda: torch.ones(3, device="npu") * torch.ones((), dtype=torch.float64, device="npu"),
        lambda: torch.rand(3, dtype=torch.float64, device="npu"),
        lambda: torch.view_as_complex(torch.ones(3, 2, device="npu")).abs(),
    ],
    ids=["add", "matmul", "result", "scalar", "random", "complex"],
)
def test_arithmetic_in_it_raises_and_under_report_is_counted(npu: ModuleType, compute: object) -> None:
    assert callable(compute)
    with pytest.raises(NotImplementedError, match="the chip has no arithmetic in this dtype"):
        compute()
    npu.set_policy("report")
    compute()
    (name,) = npu.cpu_fallbacks()
    assert name.endswith(("(Double)", "(ComplexFloat)"))


def test_numbers_of_python_are_no_float64(npu: ModuleType) -> None:
    x = torch.ones(3, device="npu")
    assert ((x + 1.5) * 2 / torch.tensor(2.0, dtype=torch.float64)).tolist() == [2.5] * 3
    assert torch.where(x > 0, 1.0, 0.0).dtype == torch.float32


def test_composite_operators_decompose_as_with_torch_npu(npu: ModuleType) -> None:
    x = torch.randn(3, 4, device="npu", requires_grad=True)
    torch.nn.functional.linear(x, torch.randn(2, 4, device="npu")).sum().backward()
    ran = npu.executed()
    assert "aten::linear" not in ran
    assert {"aten::mm", "aten::sum"} <= set(ran)


@pytest.mark.parametrize("name", ["aten::native_layer_norm", "aten::add.Tensor", "aten::embedding", "aten::mm"])
def test_an_operator_that_torch_npu_registers_is_executed_under_that_name(npu: ModuleType, name: str) -> None:
    x, ids = torch.randn(3, 3, device="npu"), torch.zeros(2, dtype=torch.long, device="npu")
    torch.nn.functional.layer_norm(x, (3,)) + torch.nn.functional.embedding(ids, x).sum() + x @ x
    assert npu.executed()[name] >= 1


def test_whatever_ran_under_strict_is_in_the_lists_of_torch_npu(npu: ModuleType) -> None:
    torch.manual_seed(0)
    net = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, device="npu")
    optimizer = torch.optim.AdamW(net.parameters())
    for _ in range(2):
        net(torch.randn(2, 5, 8, device="npu")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert set(npu.executed()) <= operators.torch_npu_operators()


def test_a_kernel_that_a_library_registers_is_used(npu: ModuleType) -> None:
    library = torch.library.Library("simnpu_test_kernels", "FRAGMENT")
    library.define("twice(Tensor x) -> Tensor")
    x = torch.ones(2, device="npu")
    with pytest.raises(NotImplementedError, match="operator 'simnpu_test_kernels::twice' has no kernel on npu"):
        torch.ops.simnpu_test_kernels.twice(x)
    library.impl("twice", lambda x: x * 2, "CPU")
    with pytest.raises(NotImplementedError, match="has no kernel on npu"):
        torch.ops.simnpu_test_kernels.twice(x)
    npu.set_policy("report")
    assert torch.ops.simnpu_test_kernels.twice(x).tolist() == [2, 2]
    assert npu.cpu_fallbacks() == {"simnpu_test_kernels::twice": 1}
    npu.set_policy("strict")
    library.impl("twice", lambda x: x * 2, "PrivateUse1")
    assert torch.ops.simnpu_test_kernels.twice(x).tolist() == [2, 2]


def test_an_operator_without_any_kernel_says_so_under_report(npu: ModuleType) -> None:
    library = torch.library.Library("simnpu_test_kernels_none", "FRAGMENT")
    library.define("nothing(Tensor x) -> Tensor")
    npu.set_policy("report")
    with pytest.raises(NotImplementedError, match="simnpu_test_kernels_none::nothing"):
        torch.ops.simnpu_test_kernels_none.nothing(torch.ones(2, device="npu"))
