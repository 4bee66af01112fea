"""CPU; the same facade on npu, where order is tracked, in tests/npu/test_streams_and_memory.py."""

from __future__ import annotations

import pytest
import torch

from turbogr_plugin.backend import streams

CPU = torch.device("cpu")


def test_the_cpu_has_one_stream_on_which_everything_is_done_at_once() -> None:
    stream, event = streams.new_stream(CPU, priority=-1), streams.new_event(CPU)
    assert stream is streams.current_stream(CPU)
    assert stream.device == CPU == event.device
    with streams.on_stream(stream):
        result = torch.ones(3) + 1
        event.record()
    stream.wait_event(event)  # type: ignore[arg-type]
    stream.wait_stream(stream)  # type: ignore[arg-type]
    streams.wait(stream, streams.new_stream(CPU))
    streams.record_stream(result, stream)
    stream.synchronize()
    event.synchronize()
    streams.synchronize(CPU)
    assert event.query()
    assert stream.query()
    assert stream.record_event().query()
    assert result.tolist() == [2, 2, 2]


def test_no_stream_means_the_current_one() -> None:
    with streams.on_stream(None):
        assert streams.current_stream(CPU) is streams.new_stream(CPU)


def test_a_tensor_on_cpu_is_recorded_for_nobody() -> None:
    class Stream:
        """Tensor.record_stream would refuse this."""

    streams.record_stream(torch.ones(1), Stream())  # type: ignore[arg-type]


def test_what_holds_tensors_is_told_who_uses_them() -> None:
    class Batch:
        users: list[object] = []  # noqa: RUF012

        def record_stream(self, stream: object) -> None:
            self.users.append(stream)

    user = object()
    streams.record_stream(Batch(), user)  # type: ignore[arg-type]
    assert Batch.users == [user]
    streams.record_stream(Batch(), streams.current_stream(CPU))
    assert Batch.users == [user]


def test_events_of_the_cpu_keep_no_time() -> None:
    with pytest.raises(ValueError, match="timing=True needs an accelerator"):
        streams.new_event(CPU, timing=True)


def test_a_device_without_a_module_is_named() -> None:
    with pytest.raises(ValueError, match="device meta has no module"):
        streams.current_stream(torch.device("meta"))
