"""Triton HSTU attention on a CUDA card: bf16, 64k tokens, 4 heads x 128, causal, forward and backward, both biases.

    python -m benchmarks.attention.cuda [--json] [--tokens 65536] [--heads 4] [--dim 128] [--cap 2048]

Beside it, in turns: the same without biases; eager padded PyTorch with the dense bias; torch.mm in bf16, as yardstick;
and PyTorch's flex_attention over the same pairs. flex_attention always takes a softmax, so it cannot express HSTU's
pointwise SiLU: its figure says what a tuned kernel makes of the same two products, and is no speedup. Useful work
counts allowed pairs alone, as everywhere.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks import harness
from benchmarks.attention import lengths
from benchmarks.attention.problems import Case, problem, runner
from benchmarks.attention.report import Report, rate, share, times_faster

MM_SIZE = 8192


def rows_of(tokens: int, *, cap: int, seed: int) -> tuple[int, ...]:
    """Real lengths, capped, as many as make `tokens` in all; the last one is cut."""
    rows: list[int] = []
    for length in lengths.kuairand(tokens, cap=cap, seed=seed).values:
        rows.append(min(length, tokens - sum(rows)))
        if sum(rows) == tokens:
            break
    return tuple(rows)


def flex_step(case: Case) -> Callable[[], tuple[Tensor, ...]]:
    """Softmax attention of the same pairs by flex_attention: one long sequence whose rows do not see each other."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    counts = torch.tensor(case.lengths, device=case.device)
    row = torch.repeat_interleave(torch.arange(len(case.lengths), device=case.device), counts)

    def allowed(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (row[i] == row[j])

    mask = create_block_mask(allowed, None, None, case.tokens, case.tokens, device=case.device)
    shape = (1, case.heads, case.tokens, case.dim)
    q, k, v, grad = (torch.randn(shape, device=case.device, dtype=getattr(torch, case.dtype)) for _ in range(4))
    leaves = (q.requires_grad_(), k.requires_grad_(), v.requires_grad_())
    attention = torch.compile(flex_attention, fullgraph=True, dynamic=False)

    def step() -> tuple[Tensor, ...]:
        output = attention(q, k, v, block_mask=mask)
        return output, *torch.autograd.grad(output, leaves, grad)

    return step


def measure(case: Case, *, rounds: int, flex: bool, mm_size: int = MM_SIZE) -> Report:
    """All figures of one card.

    Args:
        case: ours, on the device to be measured.
        rounds: timed turns of each.
        flex: whether flex_attention takes part; it has no backward on CPU.
        mm_size: of the yardstick's square matrices.
    """
    report = Report("hstu")
    report.figures |= {"implementation": problem(case).explanation, "tokens": case.tokens, "rows": len(case.lengths)}
    left, right = (torch.randn(mm_size, mm_size, device=case.device).to(torch.bfloat16) for _ in range(2))
    variants: dict[str, Callable[[], object]] = {
        "both biases": runner(case),
        "no bias": runner(case.of("ours", bias=False)),
        "padded, both biases": runner(case.of("padded")),
        "mm": lambda: torch.mm(left, right),
    }
    if flex:
        variants["flex_attention, softmax"] = flex_step(case)
    wait = torch.cuda.synchronize if case.device == "cuda" else None
    timings = harness.take_turns(variants, rounds=rounds, warmup=3, synchronize=wait)
    report.seconds(timings)
    mm = rate(2.0 * mm_size**3, timings["mm"])
    rows: list[tuple[object, ...]] = [("torch.mm bf16", statistics.median(mm) / 1e12, "")]
    for name in variants:
        if name != "mm":
            teraflops = statistics.median(rate(case.useful_flops, timings[name])) / 1e12
            rows.append((name, teraflops, share(case.useful_flops, timings[name], mm)))
            report.figures.setdefault("tflops", {})[name] = teraflops
    report.details.append(("Useful work", ("", "TFLOP/s", "of torch.mm"), rows))
    report.ratio(
        "gemm_fraction", "share of torch.mm, both biases", share(case.useful_flops, timings["both biases"], mm)
    )
    ratio = times_faster(timings["padded, both biases"], timings["both biases"])
    report.ratio("speedup_vs_padded", "times faster than padded, both biases", ratio)
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints; returns the exit code (2: no CUDA device)."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.attention.cuda",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    for name, standard in (("tokens", 65_536), ("heads", 4), ("dim", 128), ("cap", 2048), ("rounds", 20), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=standard, help=f"(default {standard})")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA device, and torch sees none", file=sys.stderr)
        return 2
    case = Case(
        kernel="hstu",
        lengths=rows_of(options.tokens, cap=options.cap, seed=options.seed),
        cap=options.cap,
        heads=options.heads,
        dim=options.dim,
        dtype="bfloat16",
        device="cuda",
        seed=options.seed,
    )
    report = measure(case, rounds=options.rounds, flex=True)
    card = torch.cuda.get_device_name()
    report.print(f"{card}: {report.figures['implementation']}")
    harness.finish({"device": card, **report.figures}, drift=None, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
