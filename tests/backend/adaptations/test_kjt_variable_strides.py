"""`from_jt_dict` on CPU, told that batch sizes vary or not; across ranks and on npu: tests/conformance."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest
import torch
from torchrec.sparse.jagged_tensor import ComputeJTDictToKJT, JaggedTensor, KeyedJaggedTensor

from tests.stock import ours, without
from turbogr_plugin.backend.adaptations import kjt_variable_strides


@pytest.fixture(autouse=True)
def _adapted() -> None:
    ours(kjt_variable_strides.ADAPTATIONS)


def features(rows: list[int], *, weighted: bool = False) -> dict[str, JaggedTensor]:
    """A feature for each number of rows, the rows of which have 0, 1, ... values."""
    made = {}
    for number, of_feature in enumerate(rows):
        lengths = torch.arange(of_feature)
        values = torch.arange(int(lengths.sum())) + 10 * number
        made[f"f{number}"] = JaggedTensor(values, values / 2 if weighted else None, lengths)
    return made


def parts(made: KeyedJaggedTensor) -> list[Any]:
    weights = made.weights_or_none()
    numbers = [None if part is None else part.tolist() for part in (made.values(), made.lengths(), weights)]
    return [made.keys(), *numbers, made.stride_per_key(), made.length_per_key(), made.offset_per_key()]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("rows", [[3, 3], [2], [0, 0], [3, 1]])
def test_told_so_it_has_the_same_parts_and_knows_the_sizes(rows: list[int], weighted: bool) -> None:
    plain = KeyedJaggedTensor.from_jt_dict(features(rows, weighted=weighted))
    told = KeyedJaggedTensor.from_jt_dict(features(rows, weighted=weighted), force_variable_stride=True)
    assert parts(told) == parts(plain)
    assert told.variable_stride_per_key()
    assert told.stride_per_key_per_rank() == [[size] for size in rows]


@pytest.mark.parametrize("rows", [[3, 3], [3, 1]])
def test_not_told_it_is_as_torchrec_has_it(rows: list[int]) -> None:
    found = KeyedJaggedTensor.from_jt_dict(features(rows))
    signature = inspect.signature(KeyedJaggedTensor.from_jt_dict)
    with without(kjt_variable_strides.ADAPTATIONS):
        stock = KeyedJaggedTensor.from_jt_dict(features(rows))
        assert inspect.signature(KeyedJaggedTensor.from_jt_dict) == signature
    assert parts(found) == parts(stock)
    assert found.variable_stride_per_key() == stock.variable_stride_per_key()


def test_torchscript_still_compiles_it() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(ComputeJTDictToKJT())
    assert scripted(features([3, 3])).values().tolist() == [0, 1, 2, 10, 11, 12]
