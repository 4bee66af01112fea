"""How a run shows itself: a progress bar on a terminal, one plain line every ten seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from tqdm import tqdm

_INTERVAL = 10.0  # seconds between plain lines


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Progress:
    """Progress of rank 0; other ranks make none.

    Args:
        total: steps of the whole run.
        done: steps done before, when resuming.
        steps_per_epoch: to tell the epoch.
        stream: where to write, standard error by default; a terminal gets a bar.
        interval: seconds between plain lines.
    """

    def __init__(
        self, total: int, *, done: int, steps_per_epoch: int, stream: TextIO | None = None, interval: float = _INTERVAL
    ) -> None:
        stream = sys.stderr if stream is None else stream
        self._total, self._first, self._steps_per_epoch = total, done, steps_per_epoch
        self._stream, self._interval = stream, interval
        self._trained = 0.0  # seconds of training, without the pauses
        self._since = self._last_line = time.monotonic()
        self._step, self._tokens = done, 0
        self._loss: float | None = None  # not reported yet
        self._bar = (
            tqdm(total=total, initial=done, unit="step", file=stream, smoothing=0.05) if stream.isatty() else None
        )

    def report(self, step: int, loss: float, tokens: int) -> None:
        """Takes in the latest loss and the tokens trained since the last report, and shows where training stands."""
        self._tokens += tokens
        self._loss = loss
        now = time.monotonic()
        self._trained += now - self._since
        self._since = now
        self.tick(step)

    def tick(self, step: int) -> None:
        """Shows where training stands, where a line is due: cheap enough for every step."""
        self._step = step
        now = time.monotonic()
        if self._loss is None:
            standing = ""
        else:
            standing = f"loss {self._loss:.4f}, {self._tokens / max(self._trained, 1e-9):,.0f} tokens/s"
        if self._bar is not None:
            self._bar.set_postfix_str(standing, refresh=False)
            self._bar.update(step - self._bar.n)
        elif now - self._last_line >= self._interval or step == self._total:
            self._last_line = now
            seconds = self._trained + now - self._since
            left = seconds / max(step - self._first, 1) * (self._total - step)
            self.say(
                f"epoch {-(-step // self._steps_per_epoch)}, step {step}/{self._total}, "
                f"{standing + ', ' if standing else ''}about {_clock(left)} of training left"
            )

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leaves the time of the block (a validation, a checkpoint) out of the rate and of the time left."""
        self._trained += time.monotonic() - self._since
        try:
            yield
        finally:
            self._since = time.monotonic()

    def say(self, line: str) -> None:
        """Writes one line, above the bar where there is one."""
        if self._bar is not None:
            self._bar.write(line, file=self._stream)
        else:
            print(line, file=self._stream, flush=True)

    def close(self) -> None:
        """Ends the bar."""
        if self._bar is not None:
            self._bar.close()
