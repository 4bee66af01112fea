"""`turbogr dryrun` finds in small scripts what was put there.

Each script is a run of seconds, so there are few, and many tests look at each.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import runs
from turbogr_plugin.errors import InputError
from turbogr_plugin.simnpu import dryrun
from turbogr_plugin.simnpu.dryrun_report import DryRunReport

pytestmark = pytest.mark.timeout(400)  # the first run may build the simulated npu

CLEAN = '''
"""DLRM as TorchRec's examples write it."""
import os

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward


class Random(IterableDataset):
    def __iter__(self):
        for seed in range(4):
            generator = torch.Generator().manual_seed(seed)
            lengths = torch.randint(0, 4, (2 * 8,), generator=generator)
            ids = torch.randint(0, 100, (int(lengths.sum()),), generator=generator)
            sparse = KeyedJaggedTensor.from_lengths_sync(["a", "b"], ids, lengths)
            yield Batch(torch.rand(8, 13, generator=generator), sparse, torch.randint(0, 2, (8,), generator=generator))


def main():
    device = torch.device("npu", int(os.environ["LOCAL_RANK"]))
    torch.npu.set_device(device)
    dist.init_process_group("cpu:gloo,npu:hccl")
    tables = [EmbeddingBagConfig(name=f"t_{f}", embedding_dim=8, num_embeddings=100, feature_names=[f]) for f in "ab"]
    collection = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    model = DLRMTrain(DLRM(collection, 13, [16, 8], [16, 1], dense_device=device))
    apply_optimizer_in_backward(torch.optim.Adagrad, collection.parameters(), {"lr": 0.1})
    model = DistributedModelParallel(model, device=device)
    dense = [parameter for name, parameter in model.named_parameters() if "embedding" not in name]
    pipeline = TrainPipelineSparseDist(model, torch.optim.SGD(dense, lr=0.1), device)
    batches = iter(DataLoader(Random(), batch_size=None, num_workers=1))
    try:
        while True:
            loss, _, _ = pipeline.progress(batches)
    except StopIteration:
        assert 0 < loss.item() < 2
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
'''

FAULTY = """
import sys

import torch
import torch_npu
from helper import double_elsewhere

device = torch.device("npu")
layer = torch.nn.Linear(8, 8).to(device)
for step in range(4):
    loss = torch.logcumsumexp(layer(torch.ones(2, 8, device=device)), 0).sum()
    loss.backward()
    if loss.item() < 0:
        break
if torch.cuda.is_available():
    torch.cuda.synchronize()
double_elsewhere(torch.ones(1000, device=device))
torch.library.define("mine::nothing", "(Tensor x) -> Tensor")
try:
    torch.ops.mine.nothing(loss)
except NotImplementedError:
    print("arguments:", *sys.argv[1:])
torch.ones(3, dtype=torch.float64, device=device).exp()
"""

HELPER = """
import torch


def double_elsewhere(x):
    with torch.npu.stream(torch.npu.Stream()):
        return x * 2
"""

# The parent fails; its child has ended by os._exit before, as multiprocessing's children do.
SPAWNING = """
import torch
import torch.multiprocessing


def work(rank):
    x = torch.ones(1000, device=torch.device("npu", rank + 1))
    assert x.sum().item() == 1000


if __name__ == "__main__":
    y = torch.ones(2000, device="npu")
    torch.multiprocessing.spawn(work, nprocs=1)
    raise ValueError("the script has had enough")
"""


def _line_of(script: str, text: str) -> int:
    return next(number for number, line in enumerate(script.splitlines(), 1) if text in line)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dryrun")
    scripts = {"clean": CLEAN, "faulty": FAULTY, "helper": HELPER, "spawning": SPAWNING}
    for name, text in scripts.items():
        (folder / f"{name}.py").write_text(text)
    (folder / "sitecustomize.py").write_text("from pathlib import Path\nPath(__file__).with_name('came').touch()\n")
    return folder


@pytest.fixture(scope="module")
def clean(folder: Path) -> DryRunReport:
    return dryrun.run(folder / "clean.py", [], dryrun.DryRunSettings(devices=4, nproc_per_node=2))


@pytest.fixture(scope="module")
def faulty(folder: Path) -> tuple[int, dict[str, Any], str]:
    """Exit code, the JSON on stdout, and the text of the same report."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))  # there is a sitecustomize of the user's own
        patch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")  # the command sets it, and here it has to be undone
        patch.chdir(folder)
        reports: list[DryRunReport] = []
        run = dryrun.run
        patch.setattr(
            dryrun, "run", lambda *arguments, **options: reports.append(run(*arguments, **options)) or reports[0]
        )
        outcome = runs.run_here("dryrun", "--json", "--devices", "2", "faulty.py", "--json", "--epochs", "3")
        return outcome.code, json.loads(outcome.out), "\n".join(reports[0].lines())


@pytest.fixture(scope="module")
def spawning(folder: Path) -> DryRunReport:
    return dryrun.run(folder / "spawning.py", [], dryrun.DryRunSettings(devices=2))


def test_an_unchanged_torchrec_script_has_nothing_that_would_stop_it(clean: DryRunReport) -> None:
    assert clean.exit_code == 0
    assert clean.reasons == []


def test_an_unchanged_torchrec_script_runs_on_operators_of_the_npu_alone(clean: DryRunReport) -> None:
    report = clean.as_json()
    assert report["cpu_fallbacks"] == report["missing_operators"] == report["lacking_dtypes"] == []
    assert not [name for name in report["operators"] if name.startswith("fbgemm::")]


def test_each_rank_has_its_peak_memory_on_its_own_device(clean: DryRunReport) -> None:
    ranks = [record for record in clean.processes if record.operators]
    assert [record.rank for record in ranks] == [0, 1]
    assert [list(record.peak_bytes) for record in ranks] == [["npu:0"], ["npu:1"]]
    assert all(peak > 2 * 100 * 8 * 4 / 2 for record in ranks for peak in record.peak_bytes.values())


def test_host_synchronisations_of_torchrec_are_told_apart_from_the_scripts(clean: DryRunReport) -> None:
    own = clean.host_syncs(of_torchrec=False)
    assert [(use.name, use.count, use.place.line if use.place else None) for use in own] == [
        ("aten::_local_scalar_dense", 2, _line_of(CLEAN, "loss.item()"))
    ]
    assert {use.place.owner for use in clean.host_syncs(of_torchrec=True) if use.place} <= {"torchrec", "fbgemm_gpu"}
    assert any("dist_data.py" in use.place.path for use in clean.host_syncs(of_torchrec=True) if use.place)


def test_a_script_with_faults_ends_the_command_with_code_1(faulty: tuple[int, dict[str, Any], str]) -> None:
    code, report, _ = faulty
    assert code == 1
    assert report["exit_code"] == 0  # the script itself has got through
    assert report["would_fail"]
    assert report["reasons"] == ["no kernel for mine::nothing", "unordered uses of streams, at 1 place"]


@pytest.mark.parametrize(
    ("part", "name", "text", "count"),
    [
        ("host_syncs_of_script", "aten::_local_scalar_dense", "loss.item()", 4),
        ("cpu_fallbacks", "aten::_logcumsumexp", "torch.logcumsumexp", 4),
    ],
)
def test_a_finding_names_the_line_of_the_script(
    faulty: tuple[int, dict[str, Any], str], part: str, name: str, text: str, count: int
) -> None:
    found = [use for use in faulty[1][part] if use["name"] == name and use["place"] is not None]
    assert [(use["count"], use["place"]["line"], Path(use["place"]["path"]).name) for use in found] == [
        (count, _line_of(FAULTY, text), "faulty.py")
    ]


def test_an_operator_without_any_kernel_is_found_even_if_the_script_catches_its_exception(
    faulty: tuple[int, dict[str, Any], str],
) -> None:
    assert [(use["name"], use["count"]) for use in faulty[1]["missing_operators"]] == [("mine::nothing", 1)]


def test_an_unordered_use_of_a_stream_names_both_operators(faulty: tuple[int, dict[str, Any], str]) -> None:
    (race,) = faulty[1]["unordered_stream_uses"]
    assert race["name"] == "read before write ended"
    assert race["detail"] == "aten::mul.Tensor after aten::fill_.Scalar"
    assert (Path(race["place"]["path"]).name, race["place"]["line"]) == ("helper.py", _line_of(HELPER, "x * 2"))
    assert (Path(race["other"]["path"]).name, race["other"]["line"]) == (
        "faulty.py",
        _line_of(FAULTY, "torch.ones(1000"),
    )


def test_cuda_in_the_sources_is_found_and_what_was_reached_is_told(faulty: tuple[int, dict[str, Any], str]) -> None:
    places = {(Path(one["path"]).name, one["text"]): one["reached"] for one in faulty[1]["cuda"]}
    assert places == {
        ("faulty.py", "torch.cuda.is_available"): True,
        ("faulty.py", "torch.cuda.synchronize"): False,
    }


def test_arithmetic_in_float64_is_reported(faulty: tuple[int, dict[str, Any], str]) -> None:
    assert [use["name"] for use in faulty[1]["lacking_dtypes"]] == ["aten::exp (Double)"]


def test_the_text_tells_every_finding_within_100_columns(faulty: tuple[int, dict[str, Any], str]) -> None:
    text = faulty[2]
    assert max(map(len, text.splitlines())) <= 100
    line = _line_of(FAULTY, "loss.item()")
    for expected in (
        f"faulty.py:{line}  if loss.item() < 0:",
        "mine::nothing",
        "aten::_logcumsumexp",
        "read before write ended",
        "torch.cuda.synchronize",
        "torch_npu was imported (faulty.py:5)",
        "npu:0",
        "the script would fail on an NPU",
        "nothing about the speed or the accuracy",
    ):
        assert expected in text


def test_options_after_the_script_are_the_scripts(faulty: tuple[int, dict[str, Any], str]) -> None:
    assert faulty[1]["settings"]["devices"] == 2


def test_the_users_own_sitecustomize_still_runs(faulty: tuple[int, dict[str, Any], str], folder: Path) -> None:
    assert (folder / "came").exists()


def test_processes_that_multiprocessing_ends_leave_their_record(spawning: DryRunReport) -> None:
    peaks = {record.name: record.peak_bytes for record in spawning.ran_on_npu}
    assert [name.partition("-")[0] for name in peaks] == ["script", "SpawnProcess"]
    main, child = peaks.values()
    assert 8000 <= main["npu:0"] < 10_000
    assert 4000 <= child["npu:1"] < 6000
    assert (len(main), len(child)) == (1, 1)


def test_a_script_that_raises_would_fail_with_its_own_message(spawning: DryRunReport) -> None:
    line = _line_of(SPAWNING, "had enough")
    assert spawning.reasons[0] == "it exits with code 1"
    assert spawning.reasons[1].startswith("ValueError: the script has had enough (")
    assert spawning.reasons[1].endswith(f"spawning.py:{line})")


def test_a_script_that_is_not_there_is_bad_input() -> None:
    with pytest.raises(InputError, match=r"SCRIPT nowhere\.py is not a file"):
        dryrun.run(Path("nowhere.py"), [], dryrun.DryRunSettings())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"devices": 0}, "--devices 0: 1 to 64"),
        ({"devices": 65}, "--devices 65: 1 to 64"),
        ({"memory_gb": 0.0}, "--memory-gb 0.0"),
        ({"memory_gb": float("nan")}, "--memory-gb nan"),
        ({"nproc_per_node": 9}, "--nproc-per-node 9: 1 to 8"),
    ],
)
def test_settings_out_of_range_are_bad_input(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        dryrun.DryRunSettings(**settings)
