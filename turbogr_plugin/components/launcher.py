"""Turns a program into a TorchX application that runs it on N nodes with R ranks each.

`torchx.components.dist.ddp` does nearly this, but starts a bare `torchrun` from PATH, which is the wrong one (or none)
unless the environment is activated. Here the ranks run under the interpreter that runs TorchX, or one that is named.
Left out: elastic sizes (`1:2x4`), host resources and mounts; a cluster profile that needs them brings its component.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence

import torchx
from torchx import specs
from torchx.specs import AppDef, Role, macros

from turbogr_plugin.errors import InputError


def parse_nodes_and_ranks(j: str) -> tuple[int, int]:
    """Reads TorchX's `-j`: "NODESxRANKS", or "RANKS" alone on one node.

    Returns:
        (nodes, ranks per node), both at least 1.

    Raises:
        InputError: any other text, elastic sizes included.
    """
    match = re.fullmatch(r"(?:([1-9]\d*)x)?([1-9]\d*)", j)
    if match is None:
        raise InputError(
            f"j={j!r}: expected NODESxRANKS or RANKS, each at least 1, such as 1x2; "
            "elastic sizes (1:2x4) are not supported"
        )
    return int(match[1] or 1), int(match[2])


def ranks_app(
    name: str,
    program: Sequence[str],
    *,
    j: str,
    env: Mapping[str, str] | None = None,
    python: str = "",
    threads: int = 1,
    rdzv_port: int = 29500,
) -> AppDef:
    """Runs `program` as one process per rank under `torch.distributed.run`.

    Args:
        name: Name of the job; the log folder and `${app_id}` start with it.
        program: What follows the options of `torch.distributed.run`: ["-m", "package.module", ...] or ["file.py", ...].
        j: NODESxRANKS or RANKS.
        env: Environment variables of the ranks, over the inherited ones.
        python: Interpreter on the nodes; empty means the one running now.
        threads: CPU threads per rank (OMP_NUM_THREADS), at least 1.
        rdzv_port: Port of the first node where the nodes meet; one node alone takes a free port by itself.

    Raises:
        InputError: `j` or `threads` is not one of the values named above.
    """
    nodes, ranks = parse_nodes_and_ranks(j)
    if threads < 1:
        raise InputError(f"threads={threads}: a rank needs at least 1")
    interpreter = python or sys.executable
    size = ["--nnodes", str(nodes), "--nproc-per-node", str(ranks)]
    # Both streams of every rank go to the console and to a file of its own under log_dir; an empty role makes the
    # prefix of the lines "[rank]:" and not "[defaultrank]:".
    tee = ["--tee", "3", "--role", ""]
    if nodes == 1:
        launch = ["-m", "torch.distributed.run", *size, "--standalone"]
    else:
        meeting = [macros.rank0_env, str(rdzv_port)]
        launch = ["-m", "turbogr_plugin.components.node", *meeting, *size, "--rdzv-id", macros.app_id]
    role = Role(
        name="ranks",
        image=torchx.IMAGE,
        min_replicas=nodes,
        num_replicas=nodes,
        entrypoint=interpreter,
        args=[*launch, *tee, *program],
        env={"OMP_NUM_THREADS": str(threads), "LOGLEVEL": "WARNING", **(env or {})},
        port_map={"c10d": rdzv_port},
        resource=specs.NULL_RESOURCE,
    )
    return AppDef(name=name, roles=[role])


def single_app(name: str, program: Sequence[str], *, env: Mapping[str, str] | None = None, python: str = "") -> AppDef:
    """Runs `program` once, with no process group: for work that uses the cores of one machine by itself.

    Args:
        name: Name of the job.
        program: Arguments of the interpreter: ["-m", "package.module", ...] or ["file.py", ...].
        env: Environment variables, over the inherited ones.
        python: Interpreter on the node; empty means the one running now.
    """
    role = Role(
        name="main",
        image=torchx.IMAGE,
        entrypoint=python or sys.executable,
        args=list(program),
        env=dict(env or {}),
        resource=specs.NULL_RESOURCE,
    )
    return AppDef(name=name, roles=[role])
