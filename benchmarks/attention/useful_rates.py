"""HSTU attention against the machine's own speed: useful work per second as a share of brgemm and of torch.mm."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Literal

import torch

from benchmarks import harness
from benchmarks.attention import yardsticks
from benchmarks.attention.problems import Case, runner
from benchmarks.attention.report import BIASES, Options, Report, rate, share
from turbogr_plugin.kernels.cpu import build

DTYPES: dict[str, Literal["float32", "bfloat16"]] = {"fp32": "float32", "bf16": "bfloat16"}
AIMS = {"fp32, both biases": 0.70, "fp32, no bias": 0.73, "bf16, both biases": 0.58}
"""Shares of brgemm."""


def measure(report: Report, case: Case, options: Options) -> None:
    """Adds the shares of both yardsticks to the report of HSTU."""
    cases = dict(_cases(case))
    variants: dict[str, Callable[[], object]] = {name: runner(one) for name, one in cases.items()}
    brgemms: dict[str, yardsticks.Brgemm] = {}
    for precision, dtype in DTYPES.items():
        variants[f"mm {precision}"] = yardsticks.mm(getattr(torch, dtype))
        variants[f"brgemm {precision}"] = brgemms[precision] = yardsticks.Brgemm(getattr(torch, dtype))
    timings = report.steadily(
        "against the machine's speed", lambda: harness.take_turns(variants, rounds=options.fast_rounds), options
    )
    report.seconds({name: timings[name] for name in variants if not name.startswith("brgemm")})
    mm = {precision: rate(yardsticks.MM_FLOPS, timings[f"mm {precision}"]) for precision in DTYPES}
    brgemm = {precision: brgemms[precision].last(options.fast_rounds) for precision in DTYPES}
    report.figures["products"] = build.describe() | {"bfloat16 instructions": bf16_instructions()}
    gflops = {f"torch.mm {precision}": statistics.median(rates) / 1e9 for precision, rates in mm.items()}
    gflops |= {f"brgemm {precision}": statistics.median(rates) / 1e9 for precision, rates in brgemm.items()}
    rows: list[tuple[object, ...]] = [(name, f"{rates:.0f}", "", "") for name, rates in gflops.items()]
    for name, one in cases.items():
        precision = name[:4]
        of_brgemm, of_mm = (share(one.useful_flops, timings[name], rates[precision]) for rates in (brgemm, mm))
        gflops[name] = statistics.median(rate(one.useful_flops, timings[name])) / 1e9
        rows.append((name, f"{gflops[name]:.0f}", of_brgemm, of_mm))
        if name in AIMS:
            what = f"share of brgemm, {name}"
            report.ratio(f"brgemm_fraction{_suffix(name)}", what, of_brgemm, aim=(">=", AIMS[name]))
            report.ratio(f"gemm_fraction{_suffix(name)}", f"share of torch.mm, {name}", of_mm)
        else:
            report.figures[f"brgemm_fraction{_suffix(name)}"] = of_brgemm.median
            report.figures[f"gemm_fraction{_suffix(name)}"] = of_mm.median
    report.figures["gflops"] = gflops
    bf16 = f"{report.figures['products']['bfloat16']}, {bf16_instructions()}"
    title = f"Useful work of HSTU ({options.heads} x {options.dim}; bf16: {bf16})"
    report.details.append((title, ("", "GFLOP/s", "of brgemm", "of torch.mm"), rows))


def bf16_instructions() -> str:
    """The instructions that this machine has for products of bf16."""
    if torch.cpu._is_amx_tile_supported():
        return "AMX"
    return "AVX-512 BF16" if torch.cpu._is_avx512_bf16_supported() else "none"


def _cases(case: Case) -> Iterator[tuple[str, Case]]:
    for precision, dtype in DTYPES.items():
        for name, (_, bias) in BIASES.items():
            one = case.of("ours", bias=bias, dtype=dtype)
            yield f"{precision}, {name}", one
            yield f"{precision}, {name}, forward", one.of("ours", gradients=False)
        for heads, dim in ((case.heads // 2, case.dim * 2), (case.heads, case.dim // 2)):
            yield f"{precision}, both biases, {heads} x {dim}", case.of("ours", heads=heads, dim=dim, dtype=dtype)


def _suffix(name: str) -> str:
    """The end of a key: "bf16, no bias, forward" is "_nobias_bf16_forward"; fp32 and both biases go unsaid."""
    precision, bias, *rest = name.split(", ")
    parts = [BIASES[bias][0], "" if precision == "fp32" else f"_{precision}"]
    return "".join([*parts, *(f"_{part.replace(' x ', 'x')}" for part in rest)])
