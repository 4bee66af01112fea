"""Commands of `turbogr` in one process per rank that has the simulated npu, started as `runs.run_commands` starts them.

Leaves beside their outcomes what simnpu saw of all of them, `npu-RANK.json`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tests import runs
from tests.npu.ranks import with_npu


def main(commands: list[list[str]]) -> None:
    with_npu()
    from turbogr_plugin import simnpu

    simnpu.reset()
    runs._serve(commands)
    seen = {
        "host_syncs": [[sync.operator, list(sync.where), sync.count] for sync in simnpu.host_syncs()],
        "cpu_fallbacks": simnpu.cpu_fallbacks(),
        "races": [race.detail for race in simnpu.races()],
        "executed": sorted(simnpu.executed()),
    }
    Path(f"npu-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
