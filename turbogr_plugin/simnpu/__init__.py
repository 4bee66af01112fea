"""A simulated `npu` device on host memory: TorchRec code written for Ascend runs on any machine with a C++ compiler.

It answers which operators a script reaches, where it waits for the device, and whether its streams are ordered. It says
nothing about speed or about the numerics of a chip: every operator is torch's CPU kernel.
"""

from turbogr_plugin.simnpu.reports import (
    Counters,
    HostSync,
    Race,
    Use,
    check_streams,
    counters,
    cpu_fallbacks,
    executed,
    host_syncs,
    races,
    reset,
    trace_sources,
)
from turbogr_plugin.simnpu.simulation import Policy, is_loaded, load, set_policy

__all__ = [
    "Counters",
    "HostSync",
    "Policy",
    "Race",
    "Use",
    "check_streams",
    "counters",
    "cpu_fallbacks",
    "executed",
    "host_syncs",
    "is_loaded",
    "load",
    "races",
    "reset",
    "set_policy",
    "trace_sources",
]
