"""Starts the launcher of one node out of several.

    python -m turbogr_plugin.components.node VARIABLE PORT [options of torch.distributed.run] PROGRAM

The first node's address is known on the nodes alone, in an environment variable whose name the scheduler chooses
(TorchX's `${rank0_env}`). Reading it here takes the place of a shell that would expand it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence


def launch_command(arguments: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """The command that a node runs.

    Args:
        arguments: name of the variable, port, and what follows the meeting point.
        environment: of this node; some schedulers leave the variable empty or unset on the first node itself, which
            then meets at its own port.
    """
    variable, port, *rest = arguments
    host = environment.get(variable) or "localhost"
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{host}:{port}"]
    return [sys.executable, "-m", "torch.distributed.run", *meeting, *rest]


def main() -> None:
    """Becomes the launcher: signals of the scheduler reach it directly."""
    command = launch_command(sys.argv[1:], os.environ)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
