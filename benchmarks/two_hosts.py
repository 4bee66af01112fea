"""Two emulated hosts on one machine: ranks in two network namespaces with a slow link between them.

    with TwoHosts(rate_mbit=100) as hosts:
        code = wait(hosts.start([sys.executable, "-m", "benchmarks.hierarchical.ranks"], ranks_per_host=2), timeout=300)

A pair of virtual Ethernet devices joins the namespaces, and a token bucket (tc tbf) limits each direction. Traffic
inside a host is free: gloo listens on the address of the device that GLOO_SOCKET_IFNAME names, and what goes to an
address of the own namespace is delivered through `lo`, past that device and its limit. The devices' counters tell what
crossed the link, to the byte.

Needs root, `ip` and `tc`, and a kernel with network namespaces and tbf; `why_not` says what is missing. Nothing is left
in the machine's own network: both ends are made inside their namespaces, and namespaces of a killed owner are removed
by the next one. Left out: more than two hosts, and latency (netem).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

INTERFACE = "eth0"
"""The end of the link, by the same name in each namespace."""
TIMED_OUT = 124
_PREFIX = "turbogr-host"
_ADDRESSES = ("10.77.0.1", "10.77.0.2")
_WINDOW = 512 * 1024
_SEGMENT = 65536 + 2048
_KILL_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG


class TwoHosts(contextlib.AbstractContextManager["TwoHosts"]):
    """The two namespaces, which last as long as the block."""

    def __init__(self, rate_mbit: int = 0) -> None:
        """Args:
        rate_mbit: limit of each direction of the link in Mbit/s; 0: none.
        """
        if rate_mbit < 0:
            raise ValueError(f"rate_mbit must be at least 0, got {rate_mbit}")
        self._rate = rate_mbit
        self._names = [f"{_PREFIX}-{os.getpid()}-{number}" for number in range(2)]

    def __enter__(self) -> TwoHosts:
        _remove_leftovers()
        try:
            for name in self._names:
                _run("ip", "netns", "add", name)
            first, second = self._names
            _run(
                *("ip", "-n", first, "link", "add", INTERFACE),
                *("type", "veth", "peer", "name", INTERFACE, "netns", second),
            )
            for name, address in zip(self._names, _ADDRESSES, strict=True):
                _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", INTERFACE)
                for device in ("lo", INTERFACE):
                    _run("ip", "-n", name, "link", "set", device, "up")
                # A small window in place of dropped packets: drops cost retransmission timeouts (half of the rate at
                # 100 Mbit/s), and without a limit a bulk transfer delays every small collective behind it. bbr, the
                # default of some kernels, fits a token bucket badly.
                _run(
                    *("ip", "netns", "exec", name, "sysctl", "-qw"),
                    *(f"net.ipv4.tcp_rmem=4096 131072 {_WINDOW}", "net.ipv4.tcp_congestion_control=reno"),
                )
            if self._rate:
                self._limit()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def _remove(self) -> None:
        for name in self._names:  # the link goes with its namespaces
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL, check=False)

    def _limit(self) -> None:
        # What may pass at once after a pause: a millisecond, and no less than one segment.
        burst = max(_SEGMENT, int(self._rate * 1e6 / 8 * 1e-3))
        for name in self._names:
            _run(
                *("tc", "-n", name, "qdisc", "replace", "dev", INTERFACE, "root", "tbf"),
                *("rate", f"{self._rate}mbit", "burst", str(burst), "limit", str(64 * _WINDOW)),
            )

    def start(
        self, command: Sequence[str], ranks_per_host: int, *, port: int = 29500, environment: Mapping[str, str] = {}
    ) -> list[subprocess.Popen[bytes]]:
        """Starts the ranks with the environment that torchrun sets.

        Args:
            command: of each rank.
            ranks_per_host: consecutive ranks are on one host.
            port: of the store on rank 0.
            environment: added to this process's own.

        Returns:
            The processes, in the order of ranks.
        """
        ranks = []
        for rank in range(2 * ranks_per_host):
            host, local = divmod(rank, ranks_per_host)
            variables = {
                "RANK": rank,
                "WORLD_SIZE": 2 * ranks_per_host,
                "LOCAL_RANK": local,
                "LOCAL_WORLD_SIZE": ranks_per_host,
                "GROUP_RANK": host,
                "MASTER_ADDR": _ADDRESSES[0],
                "MASTER_PORT": port,
                "GLOO_SOCKET_IFNAME": INTERFACE,
                "TP_SOCKET_IFNAME": INTERFACE,
                "OMP_NUM_THREADS": 1,
                "TORCH_CPP_LOG_LEVEL": "ERROR",  # a namespace has no name service, and c10d warns at each connection
            }
            # `ip netns exec` becomes the command, so that the process is the rank itself.
            ranks.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", self._names[host], *command],
                    env={**os.environ, **{name: str(value) for name, value in variables.items()}, **environment},
                    start_new_session=True,
                    preexec_fn=_die_with_parent,
                )
            )
        return ranks


def sent_bytes() -> int:
    """Bytes that this rank's host has sent over the link so far; to be called on a rank."""
    return int(Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes").read_text(encoding="ascii"))


def why_not() -> str | None:
    """What keeps this machine from emulating two hosts; None if nothing does."""
    if os.geteuid() != 0:
        return "needs root for network namespaces"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"needs the program `{tool}` of iproute2"
    try:
        with TwoHosts(rate_mbit=100):
            return None
    except subprocess.CalledProcessError as error:
        return f"`{' '.join(error.cmd)}` failed: {error.stderr.strip()}"


def wait(ranks: Sequence[subprocess.Popen[bytes]], *, timeout: float) -> int:
    """Waits for all ranks; the first failure, or `timeout` seconds, ends the others.

    Returns:
        0, the code of the first rank that failed, or TIMED_OUT.
    """
    end = time.monotonic() + timeout
    try:
        while True:
            codes = [rank.poll() for rank in ranks]
            failed = [code for code in codes if code]
            if failed:
                return failed[0]
            if None not in codes:
                return 0
            if time.monotonic() > end:
                return TIMED_OUT
            time.sleep(0.05)
    finally:
        _stop(ranks)


def _stop(ranks: Sequence[subprocess.Popen[bytes]], *, grace: float = 2.0) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        running = [rank for rank in ranks if rank.poll() is None]
        for rank in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.pid, number)
        end = time.monotonic() + grace
        while any(rank.poll() is None for rank in running) and time.monotonic() < end:
            time.sleep(0.02)


def _remove_leftovers() -> None:
    for line in _run("ip", "netns", "list").splitlines():
        name = line.split()[0] if line.split() else ""
        owner = name.removeprefix(f"{_PREFIX}-").split("-")[0]
        if name.startswith(f"{_PREFIX}-") and not Path(f"/proc/{owner}").exists():
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL, check=False)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, text=True, capture_output=True).stdout


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_KILL_WITH_PARENT, signal.SIGKILL)
