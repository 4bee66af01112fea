"""The report of a dry run: the records of all processes merged, as text of 100 columns or as JSON."""

from __future__ import annotations

import linecache
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from textwrap import wrap
from typing import Any

from turbogr_plugin.simnpu import cuda_literals
from turbogr_plugin.simnpu.dryrun_record import Place, ProcessRecord, Use
from turbogr_plugin.simnpu.operators import TORCH_NPU_VERSION

WIDTH = 100
NAME_WIDTH = 30
MOST_ROWS = 12
TORCHREC = ("torchrec", "fbgemm_gpu")
_LAUNCHER = "ChildFailedError"  # torchrun: a rank has failed, which has its own record
DISCLAIMER = (
    "This was a simulation on CPU memory. It says nothing about the speed or the accuracy of an NPU,",
    "and a kernel that torch_npu registers may still refuse a dtype or a shape on the chip.",
)


@dataclass(frozen=True)
class ReachedLiteral:
    """A CUDA literal of the sources, and whether the run has come there; None where that was not watched."""

    literal: cuda_literals.CudaLiteral
    reached: bool | None


def literals_of(script: Path, records: Sequence[ProcessRecord]) -> list[ReachedLiteral]:
    """The CUDA literals of the script, of what it imports from its folder, and of its modules that the run imported."""
    sources = {path.resolve() for path in cuda_literals.imported_from_folder(script)}
    sources |= {Path(module).resolve() for record in records for module in record.modules}
    reached = {
        (os.path.realpath(use.place.path), use.place.line)
        for record in records
        for use in record.cuda_reached
        if use.place is not None
    }
    return [
        ReachedLiteral(literal, (literal.path, literal.line) in reached if "torch.cuda." in literal.text else None)
        for source in sorted(sources)
        for literal in cuda_literals.find(source)
    ]


@dataclass(frozen=True)
class DryRunReport:
    """What a script has met on the simulated npu."""

    script: Path
    settings: dict[str, Any]
    exit_code: int
    interrupted: bool
    processes: list[ProcessRecord]
    literals: list[ReachedLiteral]

    def merged(self, uses: Callable[[ProcessRecord], Iterable[Use]]) -> list[Use]:
        """The uses of all processes, equal ones added up, the most frequent first."""
        counts: Counter[Use] = Counter()
        for record in self.processes:
            for use in uses(record):
                counts[replace(use, count=0)] += use.count
        return [replace(use, count=count) for use, count in counts.most_common()]

    def host_syncs(self, *, of_torchrec: bool) -> list[Use]:
        """Host synchronisations that TorchRec makes, or all others."""

        def wanted(record: ProcessRecord) -> Iterable[Use]:
            for use in record.host_syncs:
                if (use.place is not None and use.place.owner in TORCHREC) is of_torchrec:
                    yield replace(use, script=None) if of_torchrec else use

        return self.merged(wanted)

    @property
    def ran_on_npu(self) -> list[ProcessRecord]:
        """The processes that have called an operator there."""
        return [record for record in self.processes if record.operators]

    @property
    def reasons(self) -> list[str]:
        """Why the script would fail on an NPU; empty where it would not."""
        reasons = []
        if self.exit_code != 0 and not self.interrupted:
            reasons.append(f"it {_exit_text(self.exit_code)}")
            reasons += [_failure(use) for use in self.merged(lambda record: record.failures) if use.name != _LAUNCHER]
        if missing := self.merged(lambda record: record.missing):
            reasons.append(f"no kernel for {', '.join(sorted({use.name for use in missing}))}")
        if races := self.merged(lambda record: record.races):
            reasons.append(f"unordered uses of streams, at {_plural(len(races), 'place')}")
        return reasons

    def as_json(self) -> dict[str, Any]:
        """The whole report as values for JSON."""
        parts = {
            "missing_operators": self.merged(lambda record: record.missing),
            "cpu_fallbacks": self.merged(lambda record: record.fallbacks),
            "lacking_dtypes": self.merged(lambda record: record.lacking_dtypes),
            "host_syncs_of_script": self.host_syncs(of_torchrec=False),
            "host_syncs_of_torchrec": self.host_syncs(of_torchrec=True),
            "unordered_stream_uses": self.merged(lambda record: record.races),
            "failures": self.merged(lambda record: record.failures),
        }
        return {
            "script": str(self.script),
            "settings": self.settings,
            "torch_npu": TORCH_NPU_VERSION,
            "exit_code": self.exit_code,
            "interrupted": self.interrupted,
            "would_fail": bool(self.reasons),
            "reasons": self.reasons,
            **{name: [asdict(use) for use in uses] for name, uses in parts.items()},
            "cuda": [asdict(found.literal) | {"reached": found.reached} for found in self.literals],
            "operators": dict(sum((Counter(record.operators) for record in self.processes), Counter())),
            "processes": [
                {"rank": record.rank, "name": record.name, "pid": record.pid, "peak_bytes": record.peak_bytes}
                for record in self.processes
            ],
        }

    def lines(self) -> list[str]:
        """The report as text."""
        reasons = self.reasons
        lines = [_rule(f"dry run of {self.script}"), *self._summary(), ""]
        lines += _section("operators without any kernel (the call raises)", self.merged(lambda r: r.missing))
        lines += _section(
            "operators that fall back to the CPU (every call copies its tensors to the host and back)",
            self.merged(lambda record: record.fallbacks),
        )
        lines += _section("dtypes that the chips have no arithmetic for", self.merged(lambda r: r.lacking_dtypes))
        lines += _section("host synchronisations: the host waits for the device", self.host_syncs(of_torchrec=False))
        lines += _section(
            "host synchronisations of TorchRec (expected: it reads the sizes of its all-to-alls on the host)",
            self.host_syncs(of_torchrec=True),
        )
        lines += _section("unordered uses of streams", self.merged(lambda record: record.races))
        lines += self._cuda() + self._memory()
        lines.append(
            _rule("the script would fail on an NPU" if reasons else "nothing found that would stop the script")
        )
        for reason in reasons:
            lines += wrap(reason, WIDTH, initial_indent="  - ", subsequent_indent="    ", max_lines=4)
        return [*lines, *DISCLAIMER]

    def _summary(self) -> list[str]:
        used = self.ran_on_npu
        kinds = {name for record in used for name in record.operators}
        calls = sum(sum(record.operators.values()) for record in used)
        settings = self.settings
        lines = [
            f"{settings['devices']} simulated devices of {settings['memory_gb']:g} GB each, with the operators of "
            f"torch_npu {TORCH_NPU_VERSION}; policy {settings['policy']}"
        ]
        if self.interrupted:
            lines.append("Interrupted: what follows is what ran until then.")
        if not used:
            lines.append("NOTHING RAN ON AN NPU: the script has used no device of type npu (did it choose the CPU?).")
        else:
            work = f"{_plural(calls, 'call')} of {_plural(len(kinds), 'operator')}"
            lines.append(f"{_plural(len(used), 'process')} used npu: {work}")
        for place in sorted({place for record in self.processes for place in record.torch_npu_imports}, key=_short):
            lines.append(f"torch_npu was imported ({_short(place)}): an empty stand-in took its place")
        return lines

    def _cuda(self) -> list[str]:
        if not self.literals:
            return []
        words = {True: "reached", False: "not reached", None: ""}
        lines = ["CUDA in the sources"]
        for found in self.literals:
            place = _short(Place("script", found.literal.path, found.literal.line))
            lines.append(_cut(f"  {place:<40} {found.literal.text:<44} {words[found.reached]}".rstrip()))
        return [*lines, ""]

    def _memory(self) -> list[str]:
        rows = [
            (_who(record), device, peak)
            for record in self.ran_on_npu
            for device, peak in sorted(record.peak_bytes.items())
            if peak
        ]
        if not rows:
            return []
        lines = ["peak memory of tensors, by process and device"]
        lines += [f"  {who:<24} {device:<8} {_bytes(peak):>12}" for who, device, peak in rows]
        devices: Counter[str] = Counter()
        for _, device, peak in rows:
            devices[device] += peak
        if len(rows) > len(devices):
            lines += [
                f"  {'all of them together':<24} {device:<8} {_bytes(peak):>12}"
                for device, peak in sorted(devices.items())
            ]
        return [*lines, ""]


def _section(title: str, uses: Sequence[Use]) -> list[str]:
    if not uses:
        return []
    lines = [title]
    for use in uses[:MOST_ROWS]:
        where = _where(use)
        if len(use.name) > NAME_WIDTH or len(where) > WIDTH - NAME_WIDTH - 13:
            lines += [_cut(f"  {use.count:>7,}  {use.name}"), f"           {_cut(where, WIDTH - 11)}"]
        else:
            lines.append(f"  {use.count:>7,}  {use.name:<{NAME_WIDTH}}  {where}")
        if use.detail and (use.place is not None or use.other is not None):
            at = f" ({_short(use.other)})" if use.other is not None else ""
            lines.append(f"           {_cut(use.detail + at, WIDTH - 11)}")
    if len(uses) > MOST_ROWS:
        rest = uses[MOST_ROWS:]
        lines.append(f"  {sum(use.count for use in rest):>7,}  in {len(rest)} more places (--json lists all)")
    return [*lines, ""]


def _where(use: Use) -> str:
    """The place with the text of its line, or a package's place and the line of the script that has led there."""
    if use.place is None:
        return use.detail or "no line of Python (a backward pass runs in C++)"
    ours = use.place.owner in ("script", "turbogr_plugin")
    if use.script is not None and not ours:
        return f"{_short(use.place)} from {_short(use.script)}"
    text = linecache.getline(use.place.path, use.place.line).strip() if ours else ""
    return f"{_short(use.place)}  {text}".rstrip()


def _short(place: Place) -> str:
    """The path from here, or from the folder of its package, and the line."""
    path = os.path.relpath(place.path)
    parts = Path(place.path).parts
    for folder in ("site-packages", "dist-packages", "turbogr_plugin"):
        if folder in parts and place.owner != "script":
            path = "/".join(parts[parts.index(folder) + (folder != "turbogr_plugin") :])
            break
    return f"{place.path if path.startswith('..') else path}:{place.line}"


def _who(record: ProcessRecord) -> str:
    return f"rank {record.rank}" if record.rank is not None else f"{record.name} ({record.pid})"


def _exit_text(code: int) -> str:
    if code >= 0:
        return f"exits with code {code}"
    return f"is killed by {signal.Signals(-code).name}"


def _failure(use: Use) -> str:
    lines = [line.strip() for line in use.detail.splitlines() if line.strip()]
    # torch.multiprocessing.spawn raises the traceback of the child as text: there the error comes last.
    message = "" if not lines else lines[-1] if use.name == "ProcessRaisedException" else f"{use.name}: {lines[0]}"
    return f"{message or use.name}" + (f" ({_short(use.script)})" if use.script is not None else "")


def _rule(title: str) -> str:
    return f"--- {title} ".ljust(WIDTH, "-")


def _cut(text: str, width: int = WIDTH) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."


def _bytes(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count / 1024:,.1f} KiB"


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 'es' if noun.endswith('s') else 's'}"
