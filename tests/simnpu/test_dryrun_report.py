"""The report merges the records of all processes and fits a terminal."""

from __future__ import annotations

from pathlib import Path

from turbogr_plugin.simnpu.dryrun_record import Place, ProcessRecord, Use, read_all
from turbogr_plugin.simnpu.dryrun_report import WIDTH, DryRunReport

SETTINGS = {"devices": 2, "memory_gb": 64.0, "policy": "report", "nproc_per_node": 2}
HERE = Place("script", "/somewhere/far/away/" + "deep/" * 20 + "train.py", 12)
TORCHREC = Place("torchrec", "/x/site-packages/torchrec/distributed/dist_data.py", 189)


def _report(*records: ProcessRecord, exit_code: int = 0, interrupted: bool = False) -> DryRunReport:
    return DryRunReport(Path("train.py"), SETTINGS, exit_code, interrupted, list(records), [])


def _record(pid: int, **values: object) -> ProcessRecord:
    return ProcessRecord(pid, operators={"aten::add.Tensor": 1}, **values)  # type: ignore[arg-type]


def test_equal_uses_of_ranks_are_added_up_and_the_most_frequent_come_first() -> None:
    rare, often = Use("a", HERE, HERE, 1), Use("b", HERE, HERE, 3)
    report = _report(_record(1, host_syncs=[rare, often]), _record(2, host_syncs=[often]))
    assert [(use.name, use.count) for use in report.host_syncs(of_torchrec=False)] == [("b", 6), ("a", 1)]


def test_synchronisations_of_torchrec_are_added_up_over_the_lines_that_lead_there() -> None:
    other = Place("script", HERE.path, 99)
    uses = [Use("sync", TORCHREC, HERE, 2), Use("sync", TORCHREC, other, 3)]
    assert [use.count for use in _report(_record(1, host_syncs=uses)).host_syncs(of_torchrec=True)] == [5]


def test_no_line_is_wider_than_a_terminal_of_100_columns() -> None:
    use = Use("fbgemm::" + "a_very_long_operator_name_" * 6, HERE, TORCHREC, 1_234_567, "detail " * 30)
    failure = Use("RuntimeError", HERE, HERE, 1, "message " * 40)
    record = _record(1, missing=[use], fallbacks=[use], host_syncs=[use], races=[use], failures=[failure])
    assert max(map(len, _report(record, exit_code=1).lines())) <= WIDTH


def test_long_lists_are_cut_and_their_rest_is_counted() -> None:
    uses = [Use("sync", Place("script", "train.py", line), None, 2) for line in range(40)]
    lines = _report(_record(1, host_syncs=uses)).lines()
    assert any(line.endswith("56  in 28 more places (--json lists all)") for line in lines), lines


def test_a_script_that_is_killed_would_fail_and_the_signal_is_named() -> None:
    assert _report(_record(1), exit_code=-11).reasons == ["it is killed by SIGSEGV"]


def test_an_interrupted_script_is_not_one_that_would_fail() -> None:
    report = _report(_record(1), exit_code=1, interrupted=True)
    assert report.reasons == []
    assert "Interrupted: what follows is what ran until then." in report.lines()


def test_the_launchers_own_exception_is_left_out() -> None:
    record = _record(1, failures=[Use("ChildFailedError", None, None, 1, "====\ntrain.py FAILED")])
    assert _report(record, exit_code=1).reasons == ["it exits with code 1"]


def test_the_error_of_a_spawned_process_is_told_by_its_last_line() -> None:
    text = "\n\n-- Process 1 terminated with the following error:\nTraceback\n  File ...\nValueError: no more\n"
    record = _record(1, failures=[Use("ProcessRaisedException", None, None, 1, text)])
    assert _report(record, exit_code=1).reasons == ["it exits with code 1", "ValueError: no more"]


def test_a_script_that_has_used_no_npu_is_told_so() -> None:
    assert any(line.startswith("NOTHING RAN ON AN NPU") for line in _report(ProcessRecord(1)).lines())


def test_devices_that_processes_share_are_summed() -> None:
    lines = _report(_record(1, peak_bytes={"npu:0": 1 << 20}), _record(2, peak_bytes={"npu:0": 2 << 20})).lines()
    assert any(line.split() == ["all", "of", "them", "together", "npu:0", "3.0", "MiB"] for line in lines), lines


def test_a_record_survives_the_way_over_the_disk(tmp_path: Path) -> None:
    use = Use("a", HERE, None, 2, "detail", TORCHREC)
    record = ProcessRecord(
        7, "name", 1, {"op": 3}, [use], [use], [use], [use], [use], {"npu:0": 5}, ["m.py"], [use], [use], [HERE]
    )
    record.write(tmp_path)
    ProcessRecord(3).write(tmp_path)
    assert read_all(tmp_path) == [record, ProcessRecord(3)]  # ranks first
