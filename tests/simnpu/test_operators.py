"""The lists of what torch_npu registers."""

from __future__ import annotations

import pytest
import torch

from turbogr_plugin.simnpu import operators


def test_the_lists_hold_the_operators_of_both_namespaces() -> None:
    names = operators.torch_npu_operators()
    assert {"aten::add.Tensor", "aten::embedding_dense_backward", "npu::npu_fusion_attention"} <= names
    assert {name.partition("::")[0] for name in names} == {"aten", "npu"}
    assert len(names) > 1900


def test_operators_that_torch_npu_lacks_are_not_in_the_lists() -> None:
    assert not {"aten::_embedding_bag_dense_backward", "aten::_fused_adagrad_"} & operators.torch_npu_operators()


def test_no_list_names_an_operator_of_fbgemm() -> None:
    assert not [name for name in operators.torch_npu_operators() if name.startswith("fbgemm")]


@pytest.mark.parametrize("chip", operators.LACKING_DTYPES)
def test_every_chip_has_the_dtypes_of_training_and_lacks_float64(chip: str) -> None:
    lacking = operators.LACKING_DTYPES[chip]
    assert torch.float64 in lacking
    assert not {torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool} & lacking


def test_what_takes_any_dtype_is_an_operator_of_this_torch() -> None:
    assert set(torch._C._dispatch_get_all_op_names()) >= operators.ANY_DTYPE
