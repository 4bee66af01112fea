"""Every kernel, at every tile shape that the product uses, becomes scheduled code for every SoC."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import pytest
import torch

from tests.ascend.kernel_cases import (
    ATTENTION,
    DTYPES,
    LOOKUP,
    SOCS,
    VARIANTS,
    all_cases,
    attention_kernel,
    lookup_kernel,
)
from tests.ascend.lowering import LoweringError, linalg_ir, scheduled_hivm
from turbogr_plugin.kernels.triton import row_tiles, tiles

_CASES = all_cases()


@pytest.mark.parametrize("soc", SOCS)
@pytest.mark.parametrize("name", [case.name for case in _CASES])
def test_kernel_is_scheduled_within_the_memory_of_the_core(
    name: str, soc: str, scheduled: dict[tuple[str, str], Future[str]], record_property: Callable[[str, object], None]
) -> None:
    module = scheduled[name, soc].result()
    assert "hivm" in module
    record_property("lowered", 1)


@pytest.mark.parametrize("soc", SOCS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("which", ATTENTION)
def test_at_least_three_tile_shapes_are_compiled(which: tiles.Pass, dtype: str, soc: str) -> None:
    entries = tiles.ascend_tiles(which, DTYPES[dtype], soc)
    assert len({(*tile, dim) for tile, dim in entries}) >= 3


def test_a_tile_that_does_not_fit_is_an_error() -> None:
    linalg = linalg_ir(attention_kernel("forward", "fp16", tiles.Tile(256, 256), 128))
    with pytest.raises(LoweringError, match="overflow"):
        scheduled_hivm(linalg, "Ascend910B3")


def test_wider_rows_than_are_served_do_not_fit() -> None:
    for name, dtype, width in (
        ("lookup_bags", "fp32", row_tiles.WIDEST),
        ("lookup_update", "fp16", row_tiles.WIDEST_ROUNDED),
    ):
        function, constants = LOOKUP[name]
        linalg = linalg_ir(lookup_kernel(function, dtype, 2 * width, **constants))
        with pytest.raises(LoweringError, match="overflow"):
            scheduled_hivm(linalg, "Ascend910B3")


def test_a_tile_that_fits_only_on_a_retry_is_an_error_though_the_compiler_returns_zero() -> None:
    linalg = linalg_ir(attention_kernel("query_gradient", "fp16", tiles.Tile(128, 64), 64, **VARIANTS["plain"]))
    with pytest.raises(LoweringError, match="ended with 0") as caught:
        scheduled_hivm(linalg, "Ascend910B3")
    assert "[NOTE]" in str(caught.value)


def test_an_unknown_soc_is_an_error() -> None:
    linalg = linalg_ir(attention_kernel("forward", "fp16", tiles.Tile(32, 32), 64))
    with pytest.raises(LoweringError, match="Ascend910X"):
        scheduled_hivm(linalg, "Ascend910X")


def test_all_dtypes_of_the_product_are_compiled() -> None:
    from turbogr_plugin.kernels.triton.targets import DTYPES as served

    assert set(DTYPES.values()) == set(served)
    assert torch.float64 not in served
