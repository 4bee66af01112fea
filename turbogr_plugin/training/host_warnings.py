"""Warnings of host packages that a user can do nothing about, kept off the terminal.

Each entry names one message of one module and why it is no concern of a run. Everything else passes: our own warnings,
unknown ones, and these messages from anywhere else.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple


class _Known(NamedTuple):
    source: str
    """Module that warns, or the logger it warns through: a name of the module tree."""
    message: str
    """Regular expression for the beginning of the message."""


_WARNINGS: tuple[_Known, ...] = (
    # The planner's own default. What it may estimate wrongly are dry runs without tensors; ours has them.
    _Known("torchrec.distributed.planner.planners", "HeuristicalStorageReservation is known to cause issues"),
    # TorchRec passes the argument to DDP; no call of ours can change it.
    _Known("torchrec.distributed.model_parallel", "`broadcast_buffers` is deprecated"),
    # TorchRec's state dicts hold ShardedTensors.
    _Known(r"torch(rec)?\..*", "Please use DTensor instead"),
)

_LOG_RECORDS: tuple[_Known, ...] = (
    # The factory looks hardware up that is listed by name; a topology made from the number of ranks is complete.
    _Known("torchrec.distributed.planner.types", "The topology was constructed directly rather than via"),
    # Of dry runs again, see above.
    _Known("torchrec.distributed.planner.storage_reservations", "There is a known issue with TorchRec's dense tensor"),
    # TorchRec asks this of torch at each KeyedJaggedTensor.
    _Known("torch.fx._symbolic_trace", "is_fx_tracing will return true for both"),
)


@contextmanager
def _filtered(known: _Known) -> Iterator[None]:
    logger = logging.getLogger(known.source)

    def passes(record: logging.LogRecord) -> bool:
        return re.match(known.message, record.getMessage()) is None

    logger.addFilter(passes)
    try:
        yield
    finally:
        logger.removeFilter(passes)


@contextmanager
def quiet_host_warnings() -> Iterator[None]:
    """Drops the warnings named in this module while the block runs, in this process and in those forked from it."""
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        for known in _WARNINGS:
            # The module of a warning is matched from its beginning, so that the end has to be named.
            warnings.filterwarnings("ignore", message=known.message, module=rf"{known.source}$")
        for known in _LOG_RECORDS:
            stack.enter_context(_filtered(known))
        yield
