from __future__ import annotations

from torchrec.distributed.planner.stats import EmbeddingStats
from torchrec.distributed.planner.types import Perf, Topology

from tests.stock import without
from turbogr_plugin.sharding.adaptations import plan_statistics

GB = 1 << 30


def line(device: str) -> str:
    """What is printed for one device of 8 GB of which 2 GB are used."""
    table: list[str] = EmbeddingStats()._log_rank_mem_usage_and_perf(
        topology=Topology(1, device, hbm_cap=8 * GB),
        used_ddr=[0],
        used_hbm=[2 * GB],
        perf=[Perf(0, 0, 0, 0)],
        stats=[{"type": {}, "input_sizes": 1.0, "output_sizes": 1.0}],
        used_sharding_types=set(),
        reserved_hbm_percent=0.0,
    )
    return "\n".join(table)


def test_the_printed_share_of_hbm_of_an_npu_is_the_real_one() -> None:
    with without(plan_statistics.ADAPTATIONS):
        assert "2.0 (0%)" in line("npu")
        on_cuda, on_cpu = line("cuda"), line("cpu")
    assert "2.0 (25%)" in line("npu")
    assert line("npu") == line("cuda") == on_cuda
    assert line("cpu") == on_cpu
