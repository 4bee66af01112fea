"""The C++ of the lookup and its parts: the reference's bits, for any number of threads and whatever the vectors."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from tests.kernels.cpu import lookup_shapes
from turbogr_plugin.kernels.cpu import build, jagged_lookup
from turbogr_plugin.kernels.fused_optimizers import Settings
from turbogr_plugin.kernels.lookup_call import SEQUENCE, FusedUpdate, Lookup
from turbogr_plugin.kernels.table_rows import FlatTables, Tables

if reason := build.missing("jagged_lookup"):
    pytest.skip(f"lane cpu: {reason}", allow_module_level=True)

LEVELS = ("DEFAULT", "AVX2", "AVX512")


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Tests may set the number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_results_are_those_of_the_reference() -> None:
    lookup_shapes.assert_like_the_reference()


def test_results_are_the_same_bits_for_any_number_of_threads() -> None:
    for name, _, call in lookup_shapes.calls():
        torch.set_num_threads(1)
        alone = call("cpu")
        for count in (2, 3, 5):
            torch.set_num_threads(count)
            for found, wanted in zip(call("cpu"), alone, strict=True):
                assert torch.equal(found, wanted), f"{name}, {count} threads"


@pytest.mark.full
@pytest.mark.timeout(900)  # the first time, it builds
@pytest.mark.parametrize("capability", ["avx2", "default"])
def test_results_on_lesser_vectors_are_those_of_the_reference_and_on_avx2_the_same_bits(capability: str) -> None:
    if LEVELS.index(capability.upper()) >= LEVELS.index(build.capability()):
        pytest.skip(f"lane cpu: this machine's own vectors are {build.capability()}, which all tests take")
    program = "from tests.kernels.cpu import lookup_shapes; print(lookup_shapes.assert_like_the_reference())"
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    if capability == "avx2":  # the plain variant differs in last bits
        assert done.stdout.splitlines()[-1] == lookup_shapes.assert_like_the_reference()


def _call(indices: torch.Tensor, offsets: torch.Tensor, *, first_row: int = 0, rows: int = 20) -> Lookup:
    generator = torch.Generator().manual_seed(0)
    return Lookup(
        weights=FlatTables(torch.randn(rows * 8, generator=generator), torch.tensor([0])),
        tables=Tables(torch.tensor([0, 8]), torch.tensor([first_row, first_row + rows]), 8, 8),
        indices=indices,
        offsets=offsets,
        pooling=SEQUENCE,
        indice_weights=None,
        feature_requires_grad=None,
        output_dtype=torch.float32,
        variable=None,
    )


def _trained(call: Lookup) -> tuple[torch.Tensor, torch.Tensor]:
    update = FusedUpdate(optimizer="sgd", states=(), settings=Settings(learning_rate=0.5))
    (output,), kept = jagged_lookup.forward(call)
    jagged_lookup.fused_backward(call, kept, (torch.ones_like(output),), update, False)
    return output, call.weights.values


def test_row_numbers_of_more_than_32_bits_are_sorted_in_wide_entries() -> None:
    ids = torch.randint(-1, 22, (5000,), generator=torch.Generator().manual_seed(1))
    near, far = (_trained(_call(ids, torch.tensor([0, 5000]), first_row=first)) for first in (0, 1 << 40))
    assert torch.equal(near[0], far[0])
    assert torch.equal(near[1], far[1])


def test_positions_that_no_bag_claims_give_zeros_and_change_nothing() -> None:
    ids = torch.arange(10)
    output, weights = _trained(_call(ids, torch.tensor([3, 7])))
    untouched = _call(ids, torch.tensor([0, 0])).weights.values.view(20, 8)
    assert torch.equal(output[3:7], untouched[3:7])
    assert not output[:3].any() and not output[7:].any()
    changed = (weights.view(20, 8) != untouched).any(1)
    assert changed.nonzero().flatten().tolist() == [3, 4, 5, 6]


def test_offsets_that_leave_the_ids_are_held_to_them() -> None:
    output, _ = _trained(_call(torch.arange(6), torch.tensor([-5, 1 << 40])))
    assert torch.equal(output, _call(torch.arange(6), torch.tensor([0, 6])).weights.values.view(20, 8)[:6])


def test_tables_that_leave_their_buffer_are_refused() -> None:
    call = _call(torch.arange(6), torch.tensor([0, 6]))
    outside = call._replace(weights=FlatTables(call.weights.values[:80], call.weights.begin))
    with pytest.raises(ValueError, match="weights has 80 elements, the table of feature 0 ends at 160"):
        jagged_lookup.forward(outside)


def test_a_row_of_gradients_that_stands_for_all_is_not_copied_out() -> None:
    call = _call(torch.zeros(1000, dtype=torch.int64), torch.tensor([0, 1000]))
    before = call.weights.values.clone()
    update = FusedUpdate(optimizer="sgd", states=(), settings=Settings(learning_rate=1.0))
    row = torch.arange(8.0)
    jagged_lookup.fused_backward(call, (), (row.expand(1000, 8),), update, False)
    assert torch.equal(call.weights.values[:8], before[:8] - 1000 * row)
