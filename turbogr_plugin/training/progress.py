"""How a run shows itself: a progress bar on a terminal, one plain line every ten seconds elsewhere."""

from __future__ import annotations

import sys
import time
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
        self._start = self._last_line = time.monotonic()
        self._tokens = 0
        self._loss = float("nan")
        self._bar = (
            tqdm(total=total, initial=done, unit="step", file=stream, smoothing=0.05) if stream.isatty() else None
        )

    def report(self, step: int, loss: float, tokens: int) -> None:
        """Tells where training stands: steps done, the latest loss, and the tokens since the last report."""
        self._tokens += tokens
        self._loss = loss
        now = time.monotonic()
        rate = self._tokens / max(now - self._start, 1e-9)
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {loss:.4f}, {rate:,.0f} tokens/s", refresh=False)
            self._bar.update(step - self._bar.n)
        elif now - self._last_line >= self._interval or step == self._total:
            self._last_line = now
            left = (now - self._start) / max(step - self._first, 1) * (self._total - step)
            self.say(
                f"epoch {-(-step // self._steps_per_epoch)}, step {step}/{self._total}, loss {loss:.4f}, "
                f"{rate:,.0f} tokens/s, at most {_clock(left)} left"
            )

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
