"""Large results in C++ lie on memory that later calls use again, but never while they are alive."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from turbogr_plugin.kernels.cpu import build
from turbogr_plugin.kernels.gated_norm import gated_norm

if reason := build.missing("gated_norm"):
    pytest.skip(f"lane cpu: {reason}", allow_module_level=True)

WIDTH = 512  # 2 MiB are 1024 rows


def _call(rows: int, value: float) -> Tensor:
    """Rows of `value`: zeros normalised are zeros, so the result is the bias times the gate."""
    x = torch.zeros(rows, WIDTH)
    return gated_norm(x, torch.ones_like(x), bias=torch.full((WIDTH,), value), implementation="cpu")


def _memory() -> tuple[int, int, int]:
    gc.collect()
    found: tuple[int, int, int] = build.load("gated_norm").memory()
    return found


def test_results_that_are_alive_are_never_written_to() -> None:
    generator = torch.Generator().manual_seed(0)
    alive: dict[int, Tensor] = {}
    for step in range(60):
        rows = int(torch.randint(900, 4000, (), generator=generator))
        alive[step] = _call(rows, float(step))
        for old in torch.randint(0, 60, (2,), generator=generator).tolist():
            alive.pop(old, None)
    assert len(alive) > 10
    for step, result in alive.items():
        assert bool((result == step).all())


def test_what_is_freed_is_used_again_and_no_more_is_held_than_was_in_use() -> None:
    before, _, _ = _memory()
    first = _call(2048, 1.0)
    used, held, _ = _memory()
    assert used - before == first.nbytes
    view = first[1:]
    del first
    assert _memory()[0] == used  # a view holds it, too
    del view
    assert _memory()[0] == before
    second = _call(2048, 2.0)
    assert _memory()[:2] == (used, held)  # nothing new was asked for
    del second
    for rows in (1024, 4096, 2048, 8192, 1500, 3000):
        _call(rows, 3.0)
        used, held, most = _memory()
        assert used == before
        assert held <= most


def test_a_result_can_be_resized_and_outlive_its_thread() -> None:
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(lambda step: _call(1200 + 300 * (step % 5), float(step)), range(24)))
    for step, result in enumerate(results):
        assert bool((result == step).all())
    results[0].resize_(5000, WIDTH)
    assert bool((results[0][:1200] == 0).all())


def test_small_results_are_torchs_own() -> None:
    used = _memory()[0]
    result = _call(100, 1.0)
    assert _memory()[0] == used
    assert bool((result == 1).all())
