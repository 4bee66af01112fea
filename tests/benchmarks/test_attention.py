"""The attention benchmark: its arithmetic against direct computations, its draws, and the keys of its record."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import harness
from benchmarks.attention import __main__ as benchmark
from benchmarks.attention import cuda, dense, fuxi, hstu, lengths, memory, useful_rates, yardsticks
from benchmarks.attention.memory import StepMemory
from benchmarks.attention.problems import Case, problem
from benchmarks.attention.report import Options, Report, share, times_faster
from benchmarks.harness import Drift, Timing

SMALL = Options(
    cap=32,
    batch=3,
    heads=2,
    dim=8,
    caps=(16, 32),
    long_row=32,
    short_batch=4,
    tokens=70,
    rounds=1,
    implementation="reference",
    compiled=False,
    attempts=1,
)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the parts that build C++, start processes or run for the machine's speed."""
    monkeypatch.setattr(harness, "probe", lambda: 1.0)
    monkeypatch.setattr(yardsticks, "MM_SIZE", 16)
    monkeypatch.setattr(yardsticks, "_brgemm_rate", lambda dtype: 1e9)
    monkeypatch.setattr(useful_rates.build, "describe", lambda: {"bfloat16": "brgemm"})
    monkeypatch.setattr(hstu, "PAIRS_PER_SAMPLE", 1)
    sizes = {"ours": 2_000_000, "padded": 50_000_000, "eager": 4_000_000}
    monkeypatch.setattr(memory, "measure", lambda case, *, threads: StepMemory(added=sizes[case.side], results=500_000))


def test_lengths_are_drawn_with_their_seed_and_capped() -> None:
    drawn = lengths.kuairand(1000, cap=2048, seed=3)
    assert len(drawn.values) == 1000 and max(drawn.values) == 2048 and "seed 3" in drawn.source
    assert drawn == lengths.kuairand(1000, cap=2048, seed=3) != lengths.kuairand(1000, cap=2048, seed=4)


@pytest.mark.skipif(not lengths.DATA.is_dir(), reason="the folder shared/data beside the checkout is missing")
def test_without_the_real_lists_their_quantiles_give_nearly_the_same_lengths(tmp_path: Path) -> None:
    for draw, tolerance in (
        (lambda **folder: lengths.kuairand(40_000, cap=1 << 20, seed=0, **folder), 0.03),
        (lambda **folder: lengths.beauty(40_000, seed=0, **folder), 0.05),
    ):
        real, generated = draw(), draw(folder=tmp_path)
        assert "generated" in generated.source and "generated" not in real.source
        assert np.mean(generated.values) == pytest.approx(np.mean(real.values), rel=tolerance)
        assert np.quantile(generated.values, 0.9) == pytest.approx(np.quantile(real.values, 0.9), rel=tolerance)


def test_useful_work_counts_the_allowed_pairs_alone() -> None:
    case = Case(kernel="hstu", lengths=(4, 0, 7), cap=7, heads=3, dim=5)
    pairs = sum(1 for length in case.lengths for i in range(length) for j in range(length) if j <= i)
    assert case.pairs == pairs
    assert case.of("ours", gradients=False).useful_flops == 4 * 5 * 3 * pairs
    assert case.useful_flops == 3.5 * 4 * 5 * 3 * pairs
    assert Case(kernel="fuxi", lengths=(4, 0, 7), cap=7, heads=3, dim=5).useful_flops == 2 * case.useful_flops


def test_ratios_are_taken_turn_by_turn() -> None:
    slow, fast = Timing.of([2.0, 20.0, 3.0]), Timing.of([1.0, 10.0, 1.0])
    assert times_faster(slow, fast).median == 2.0
    assert share(4e9, fast, [8e9, 0.8e9, 4e9]).median == 0.5


def test_the_cost_counts_processor_time_and_not_the_clock() -> None:
    def work() -> None:
        until = time.process_time() + 0.02
        while time.process_time() < until:
            pass

    seconds = hstu.processor_seconds({1: lambda: time.sleep(0.03), 2: work}, {1: 1, 2: 2}, rounds=2)
    assert seconds[1] < 0.01 and 0.02 <= seconds[2] < 0.03


def test_memory_of_a_step_holds_results_and_the_scores_of_all_pairs_of_the_padded_form() -> None:
    case = Case(kernel="hstu", side="padded", lengths=(512, 512), cap=512, heads=4, dim=8, bias=False)
    found = memory.measure(case, threads=1)
    results = 4 * (2 * 512 * 4 * 8) * 4  # the output and three gradients in float32
    scores = 2 * 4 * 512 * 512 * 4
    assert found.results == results
    # At least two tensors of all pairs are alive at once (scores and their activation), at most eight, which take 8 MiB
    # each; the process takes some pages beside them.
    assert results + 2 * scores < found.added < results + 8 * scores + (1 << 20)
    assert found.workspace == found.added - results


def test_a_step_that_fails_in_its_process_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = tmp_path / "python"
    failing.write_text("#!/bin/sh\necho no memory >&2\nexit 7\n", encoding="utf-8")
    failing.chmod(0o755)
    monkeypatch.setattr(memory.sys, "executable", str(failing))
    with pytest.raises(RuntimeError, match=r"exit code 7:\nno memory"):
        memory.measure(Case(kernel="hstu", lengths=(3,), cap=3), threads=1)


def test_meta_style_attention_has_no_bias() -> None:
    with pytest.raises(ValueError, match="no bias"):
        problem(Case(kernel="hstu", side="meta", lengths=(3,), cap=3, heads=1, dim=4))


@pytest.mark.usefixtures("quick")
def test_the_figures_of_hstu_have_the_promised_keys(capsys: pytest.CaptureFixture[str]) -> None:
    report = hstu.measure(SMALL)
    promised = {
        "speedup_vs_padded",
        "speedup_vs_padded_nobias",
        "speedup_vs_meta_style",
        "memory_saving_vs_padded",
        "brgemm_fraction",
        "brgemm_fraction_nobias",
        "brgemm_fraction_bf16",
        "gemm_fraction",
        "workspace_bytes_per_thread",
        "cost_vs_work_spread",
        "speedup_short",
    }
    assert promised <= report.figures.keys()
    assert all(report.figures[key] > 0 for key in promised)
    assert report.figures["memory_saving_vs_padded"] == 0.96
    assert report.figures["workspace_bytes_per_thread"] == 750_000
    printed = {"brgemm_fraction_1x16", "brgemm_fraction_nobias_bf16_forward", "gemm_fraction_bf16_2x4"}
    assert printed <= report.figures.keys()
    assert json.loads(json.dumps(report.figures))["lengths"] == list(lengths.kuairand(3, cap=32, seed=0).values)
    report.print("hstu")
    assert "times faster than padded, both biases" in capsys.readouterr().out


@pytest.mark.usefixtures("quick")
def test_the_figures_of_fuxi_and_of_the_dense_neighbours_have_the_promised_keys() -> None:
    found = fuxi.measure(SMALL).figures
    assert found["speedup_vs_padded"] > 0 and found["memory_saving_vs_padded"] == 0.96
    for measure in (dense.measure_gate, dense.measure_uvqk):
        found = measure(SMALL).figures
        assert found["tokens"] == 70 and found["speedup_vs_eager"] > 0 and found["peak_memory_ratio"] == 0.5


@pytest.mark.usefixtures("quick")
def test_the_command_prints_a_table_and_one_json_object(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    threads = torch.get_num_threads()
    seen: list[Options] = []

    def measure(name: str, options: Options) -> Report:
        seen.append(options)
        report = Report(name, drifts=[Drift(1.0, 1.0 + 0.01 * len(seen), 1, True)])
        report.figures["implementation"] = f"{name}: reference"
        report.figure("speedup_vs_padded", "times faster", float(len(seen)), aim=(">=", 14))
        return report

    for name in benchmark.KERNELS:
        monkeypatch.setitem(benchmark.KERNELS, name, lambda options, name=name: measure(name, options))
    try:
        assert benchmark.main(["--json", "--cap", "64", "--threads", "1", "--no-compiled"]) == 0
        record = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert benchmark.main(["--kernel", "fuxi", "--json"]) == 0
        one = json.loads(capsys.readouterr().out.splitlines()[-1])
    finally:
        torch.set_num_threads(threads)
    assert record["speedup_vs_padded"] == 1.0 and record["fuxi"]["speedup_vs_padded"] == 2.0
    assert record["drift"]["after"] == 1.04 and "cpu" in record["machine"]
    assert (seen[0].cap, seen[0].compiled, seen[-1].cap, seen[-1].compiled) == (64, False, 2048, True)
    assert one["kernel"] == "fuxi" and one["speedup_vs_padded"] == 5.0


def test_beauty_is_short() -> None:
    drawn = lengths.beauty(256, seed=0)
    assert len(drawn.values) == 256 and min(drawn.values) == 5 and Counter(drawn.values).most_common(1)[0][0] in (5, 6)


def test_the_cuda_benchmark_measures_what_it_is_given() -> None:
    rows = cuda.rows_of(150, cap=64, seed=0)
    assert sum(rows) == 150 and max(rows) <= 64
    case = Case(kernel="hstu", lengths=rows, cap=64, heads=2, dim=8, dtype="bfloat16", implementation="reference")
    report = cuda.measure(case, rounds=1, flex=False, mm_size=16)
    assert report.figures["tokens"] == 150 and report.figures["gemm_fraction"] > 0
    assert report.figures["tflops"].keys() == {"both biases", "no bias", "padded, both biases"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
def test_the_cuda_benchmark_says_that_there_is_no_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert cuda.main([]) == 2 and "needs a CUDA device" in capsys.readouterr().err
