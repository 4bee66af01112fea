"""What communication stays exposed under the fine-grained pipeline, against TorchRec's SparseDist and SemiSync.

    python -m benchmarks.pipeline [--json] [--seed N] [--timelines FOLDER]

Two ranks on two emulated hosts (network namespaces) with a link of 200 Mbit/s train one table, row-wise over both. The
dense part is a timed wait: what an accelerator looks like to its host. Real compute on a machine of few cores fights
with gloo, lookup and update for them; that variant is printed, too, and judged by nothing. The time of the dense part
is set so that the communication of a step that computes nothing is 45 % of it (50 and 26 % in the paper's Table 6). All
tables are stale under tau 1 (no table is kept exact). The step is timed without the profiler, the pipelines in turns;
the shares come from one more run with all threads profiled (turbogr_plugin.pipeline.timeline).

The control trains the same over a link without limit: nothing is exposed then, and the losses are the same.
Needs root, `ip` and `tc`; says so and ends where they are missing. docs/pipeline.md: a run.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.pipeline.ranks import EXACT, PIPELINES, SEMI_SYNC, SPARSE_DIST, STALE, Settings
from benchmarks.pipeline.workload import PROCESSOR, WAIT
from benchmarks.two_hosts import TwoHosts, wait, why_not

RATE = 200
RATIO = 0.45
AT_MOST = {"exposed_share": 0.03}
AT_LEAST = {"compute_share": 0.96, "speedup_vs_sparsedist": 1.40, "speedup_vs_semisync": 1.15}
"""What the project wants of the figures of tau 1."""
# Kineto notes every start and stop of the profiler; TorchRec uses an argument that torch deprecates.
_SILENT = {"KINETO_LOG_LEVEL": "99", "PYTHONWARNINGS": "ignore::FutureWarning"}


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pipeline", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--seed", type=int, default=0, help="of the ids (default 0)")
    parser.add_argument("--rate", type=int, default=RATE, help=f"of the link, Mbit/s (default {RATE})")
    parser.add_argument("--ratio", type=float, default=RATIO, help=f"communication by compute (default {RATIO})")
    parser.add_argument("--lookups", type=int, default=4096, help="per rank and step (default 4096)")
    parser.add_argument("--steps", type=int, default=12, help="per run (default 12)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each pipeline by the clock (default 3)")
    parser.add_argument("--attempts", type=int, default=2, help="at most, on a machine that drifts (default 2)")
    parser.add_argument("--timelines", help="folder for numbers, traces and pictures of rank 0")
    return parser.parse_args(arguments)


def on_two_hosts(settings: Settings, rate: int) -> dict[str, Any]:
    """Runs the ranks and reads what rank 0 has found.

    Args:
        settings: of the ranks.
        rate: of the link in Mbit/s; 0: no limit.

    Raises:
        RuntimeError: a rank failed, or all together took more than ten minutes.
    """
    with tempfile.TemporaryDirectory() as folder, TwoHosts(rate) as hosts:
        output = Path(folder, "figures.json")
        command = [sys.executable, "-m", "benchmarks.pipeline.ranks", settings.as_json(), str(output)]
        code = wait(hosts.start(command, 1, environment=_SILENT), timeout=600)
        if code:
            raise RuntimeError(f"the ranks ended with code {code}")
        found: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
        return found


def step_of(found: dict[str, Any], name: str) -> harness.Timing:
    """Milliseconds of a step of a pipeline, by the clock."""
    return harness.Timing.of(found["pipelines"][name]["step_ms"])


def speedup(found: dict[str, Any], over: str, name: str) -> harness.Ratio:
    """How many times as fast a pipeline is as another one, turn by turn."""
    pipelines = found["pipelines"]
    return harness.Ratio.of(pipelines[over]["step_ms"], pipelines[name]["step_ms"])


def print_found(title: str, found: dict[str, Any]) -> None:
    """A table of all pipelines: step by the clock, and where the time goes."""
    rows = []
    for name in PIPELINES:
        shares, step = found["pipelines"][name]["profiled"], step_of(found, name)
        rows.append(
            (
                name,
                f"{step.median:.1f} [{step.lower:.1f} .. {step.upper:.1f}]",
                *(f"{shares[f'{column}_share']:.3f}" for column in ("compute", "communication", "exposed", "other")),
                f"{speedup(found, SPARSE_DIST, name).median:.2f}",
                f"{speedup(found, SEMI_SYNC, name).median:.2f}",
            )
        )
    header = ("pipeline", "step ms", "compute", "communication", "exposed", "other", "x SparseDist", "x SemiSync")
    harness.print_table(title, header, rows)


def losses_of(found: dict[str, Any], name: str) -> list[float]:
    """Of all batches, under one pipeline."""
    losses: list[float] = found["pipelines"][name]["losses"]
    return losses


def figures_of(found: dict[str, Any]) -> dict[str, Any]:
    """The figures of tau 1, and those of the others beside them."""
    pipelines = {
        name: {
            "step_ms": each["step_ms"],
            **each["profiled"],
            "speedup_vs_sparsedist": speedup(found, SPARSE_DIST, name).median,
            "speedup_vs_semisync": speedup(found, SEMI_SYNC, name).median,
        }
        for name, each in found["pipelines"].items()
    }
    keys = ("exposed_share", "compute_share", "other_share", "speedup_vs_sparsedist", "speedup_vs_semisync")
    return {
        **{key: pipelines[STALE][key] for key in keys},
        "shares_sum": sum(pipelines[STALE][key] for key in ("exposed_share", "compute_share", "other_share")),
        "tau_0": pipelines[EXACT],
        "pipelines": pipelines,
        "dense_ms": 1e3 * found["dense_seconds"],
        "communication_alone_ms": found.get("communication_ms"),
    }


def agreements(found: dict[str, Any], control: dict[str, Any]) -> dict[str, bool]:
    """Which losses are the same to the last bit."""
    return {
        "tau_0_equals_sparsedist": losses_of(found, EXACT) == losses_of(found, SPARSE_DIST),
        "tau_1_equals_semisync": losses_of(found, STALE) == losses_of(found, SEMI_SYNC),
        "tau_1_is_stale": losses_of(found, STALE) != losses_of(found, EXACT),
        "runs_agree": all(
            each["runs_agree"] for each in (*found["pipelines"].values(), *control["pipelines"].values())
        ),
        "control_has_the_same_losses": all(losses_of(found, name) == losses_of(control, name) for name in PIPELINES),
    }


def main(arguments: list[str] | None = None) -> int:
    """Measures and prints."""
    parsed = parse_arguments(arguments)
    if missing := why_not():
        print(f"skipped: two hosts cannot be emulated here: {missing}")
        harness.finish({"skipped": missing}, drift=None, as_json=parsed.json)
        return 0
    settings = Settings(
        lookups=parsed.lookups,
        rows=131_090,
        dim=128,
        steps=parsed.steps,
        rounds=parsed.rounds,
        ratio=parsed.ratio,
        dense_seconds=None,
        kind=WAIT,
        seed=parsed.seed,
        timelines=parsed.timelines,
    )
    print(
        f"2 ranks on 2 emulated hosts, {parsed.rate} Mbit/s; {settings.lookups:,} lookups of {settings.dim} values per "
        f"rank and step; {settings.steps} steps a run, {settings.rounds} runs by the clock and one profiled on all "
        f"threads; seed {settings.seed}"
    )
    found, drift = harness.steadily(lambda: on_two_hosts(settings, parsed.rate), attempts=parsed.attempts)
    print(
        f"communication of a step that computes nothing: {found['communication_ms']:.1f} ms; the dense part is a timed "
        f"wait of {1e3 * found['dense_seconds']:.1f} ms\n(an accelerator, as its host sees it), so that the ratio is "
        f"{settings.ratio}; tau 1 with all tables stale\n"
    )
    print_found(
        "Timed wait (median of the step; shares of the profiled run, mean over ranks; the paper's Table 6: compute "
        "0.943, communication 0.469, exposed 0.056)",
        found,
    )
    print()
    once = replace(settings, rounds=1, dense_seconds=found["dense_seconds"], timelines=None)
    control = on_two_hosts(once, 0)
    print_found("Control: the same over a link without limit", control)
    print()
    processor = on_two_hosts(replace(once, kind=PROCESSOR), parsed.rate)
    print_found(
        "Matrix products in place of the wait, on the cores that gloo and the tables need, too: no bar", processor
    )
    print()
    figures = {"seed": parsed.seed, "rate_mbit": parsed.rate, "ratio": settings.ratio, **figures_of(found)}
    figures |= {"control": figures_of(control), "processor": figures_of(processor)}
    figures |= agreements(found, control)
    for name, agrees in agreements(found, control).items():
        print(f"  {name.replace('_', ' ')}: {'yes' if agrees else 'NO'}")
    print()
    harness.print_table(
        "What is to be reached, tau 1",
        ("figure", "measured", "aim", ""),
        [_judged(key, figures[key], aim, most=True) for key, aim in AT_MOST.items()]
        + [_judged(key, figures[key], aim, most=False) for key, aim in AT_LEAST.items()],
    )
    harness.finish(figures, drift=drift, as_json=parsed.json)
    return 0


def _judged(key: str, value: float, aim: float, *, most: bool) -> tuple[str, str, str, str]:
    reached = value <= aim if most else value >= aim
    return key, f"{value:.4f}", f"{'<=' if most else '>='} {aim:.2f}", "reached" if reached else "MISSED"


if __name__ == "__main__":
    sys.exit(main())
