from __future__ import annotations

import io
from types import SimpleNamespace

import pytest

from turbogr_plugin.training import progress as module
from turbogr_plugin.training.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_elsewhere_than_on_a_terminal_one_line_comes_each_interval(clock: Clock) -> None:
    stream = io.StringIO()
    progress = Progress(100, done=0, steps_per_epoch=20, stream=stream)
    for step in range(1, 41):  # one step a second
        clock.now += 1
        progress.report(step, 2.0 / step, 500)
    progress.close()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 4
    assert lines[0] == "epoch 1, step 10/100, loss 0.2000, 500 tokens/s, about 1:30 of training left"
    assert lines[3] == "epoch 2, step 40/100, loss 0.0500, 500 tokens/s, about 1:00 of training left"


def test_the_last_step_is_told_whenever_it_comes(clock: Clock) -> None:
    stream = io.StringIO()
    progress = Progress(2, done=0, steps_per_epoch=2, stream=stream)
    for step in (1, 2):
        clock.now += 1
        progress.report(step, 1.0, 10)
    assert stream.getvalue() == "epoch 1, step 2/2, loss 1.0000, 10 tokens/s, about 0:00 of training left\n"


def test_the_estimate_of_a_resumed_run_counts_its_own_steps_alone(clock: Clock) -> None:
    stream = io.StringIO()
    progress = Progress(10_000, done=2000, steps_per_epoch=500, stream=stream)
    clock.now += 20
    progress.report(2020, 0.5, 40_000)
    assert (
        stream.getvalue() == "epoch 5, step 2020/10000, loss 0.5000, 2,000 tokens/s, about 2:13:00 of training left\n"
    )


def test_a_terminal_gets_a_bar_with_loss_rate_and_remaining_time(clock: Clock) -> None:
    stream = Terminal()
    progress = Progress(50, done=10, steps_per_epoch=5, stream=stream)
    clock.now += 4
    progress.report(30, 0.125, 4000)
    progress.say("epoch 6: validated")
    clock.now += 4
    progress.report(50, 0.0625, 4000)
    progress.close()
    text = stream.getvalue()
    assert "50/50" in text and "100%" in text
    assert "loss 0.0625, 1,000 tokens/s" in text
    assert "step/s" in text
    assert "epoch 6: validated\n" in text
    assert "about" not in text


def test_a_line_said_elsewhere_is_printed_at_once() -> None:
    stream = io.StringIO()
    progress = Progress(5, done=0, steps_per_epoch=5, stream=stream)
    progress.say("resumed at step 3")
    progress.close()
    assert stream.getvalue() == "resumed at step 3\n"


def test_standard_error_of_the_moment_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    Progress(5, done=0, steps_per_epoch=5).say("here")
    assert capsys.readouterr() == ("", "here\n")


def test_lines_come_between_reads_of_the_losses_and_pauses_do_not_count(clock: Clock) -> None:
    stream = io.StringIO()
    progress = Progress(100, done=0, steps_per_epoch=50, stream=stream)
    clock.now += 5
    progress.report(10, 2.0, 1000)
    with progress.pause():
        clock.now += 1000
    clock.now += 5
    progress.tick(20)  # the rate is that of the tokens reported so far
    clock.now += 5
    progress.report(30, 1.0, 2000)
    assert stream.getvalue().splitlines() == [
        "epoch 1, step 20/100, loss 2.0000, 200 tokens/s, about 0:40 of training left",
    ]


def test_before_the_losses_were_read_a_line_tells_no_loss_and_no_rate(clock: Clock) -> None:
    stream = io.StringIO()
    progress = Progress(10, done=0, steps_per_epoch=5, stream=stream)
    clock.now += 20
    progress.tick(1)
    assert stream.getvalue() == "epoch 1, step 1/10, about 3:00 of training left\n"
