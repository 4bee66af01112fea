"""How many ranks of a run share the tables: one keyword-only dataclass, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from turbogr_plugin.errors import InputError

Wire = Literal["fp32", "bf16", "fp16"]
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(kw_only=True)
class GroupsConfig:
    """Groups of ranks that hold a replica of the tables each and train as one; docs/hierarchical.md."""

    size: int | Literal["auto"] = 0
    "Ranks that share the tables; 0: all ranks. auto: as many as the planner finds fastest by the topology."
    wire: Wire = "fp32"
    "Of gradients between groups: fp32, or bf16 or fp16 for about half the bytes."
    topology: str = ""
    "File that `turbogr measure-links` has written on the same hosts, for auto."

    def __post_init__(self) -> None:
        if isinstance(self.size, bool) or (self.size != "auto" and not (isinstance(self.size, int) and self.size >= 0)):
            raise InputError(f"groups.size must be a number of ranks, 0 or auto, got {self.size!r}")
        if self.wire not in get_args(Wire):
            raise InputError(f"groups.wire must be one of {', '.join(get_args(Wire))}, got {self.wire!r}")
        if (self.size == "auto") != bool(self.topology):
            raise InputError(
                "groups.size auto and groups.topology, a file that `turbogr measure-links` writes, belong together, "
                f"got size {self.size!r} and topology {self.topology!r}"
            )
        if self.size == 0 and self.wire != "fp32":
            raise InputError(f"groups.wire is of groups: it needs a groups.size, got wire {self.wire!r} and size 0")

    @property
    def wire_dtype(self) -> torch.dtype:
        """Of gradients between groups."""
        return _DTYPES[self.wire]
