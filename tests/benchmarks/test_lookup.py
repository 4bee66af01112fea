"""The lookup benchmark: its batch, its two sides, and the keys of its record."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import harness
from benchmarks.lookup import __main__ as benchmark
from benchmarks.lookup import bytes as counted_bytes
from benchmarks.lookup.popularity import PADDING, draw, popularity

SMALL = ["--tables", "2", "--rows", "50", "--dim", "8", "--batch", "6", "--length", "20", "--padding", "100"]


def test_a_batch_has_exactly_the_padding_asked_for_and_the_same_ids_with_and_without_it() -> None:
    ids = draw(3, 7, 50, 400, 1000, seed=2)
    assert ids.padding == 400
    assert torch.equal(ids.padded[ids.padded != PADDING], ids.jagged)
    assert int(ids.jagged.min()) > 0 and int(ids.jagged.max()) < 1000
    assert int(ids.jagged_offsets[-1]) == ids.jagged.numel()
    lengths = (ids.padded.view(21, 50) != PADDING).sum(1)
    assert torch.equal(lengths, ids.jagged_offsets.diff())
    assert [len(part) for part in ids.by_feature(3)] == lengths.view(3, 7).sum(1).tolist()


def test_without_the_real_list_popularity_has_the_published_shares(tmp_path: Path) -> None:
    drawn, source = popularity(200_000, np.random.default_rng(0), tmp_path)
    assert "published shares" in source
    assert (drawn >= 2).mean() == pytest.approx(0.46, abs=0.01)
    assert (drawn >= 100).mean() == pytest.approx(0.0171, abs=0.002)


def test_the_record_has_every_figure_and_both_sides_agree(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(harness, "probe", lambda: 1.0)
    monkeypatch.setattr(counted_bytes, "measure", lambda: {"bytes_ratio": 0.5, "bytes": {}})
    threads = torch.get_num_threads()
    try:
        benchmark.main([*SMALL, "--json", "--rounds", "1", "--implementation", "reference", "--bag", "4"])
    finally:
        torch.set_num_threads(threads)
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(benchmark.AIMS) <= set(record)
    assert record["positions"] == 240 and record["padding"] == 100 and record["bytes_ratio"] == 0.5
    assert record["largest_difference"] < 1e-5
