"""Only the named warnings of host packages are dropped, and only inside the block."""

from __future__ import annotations

import logging
import warnings

import pytest

from turbogr_plugin.training.host_warnings import quiet_host_warnings

PLANNER = "torchrec.distributed.planner.planners"
RESERVATION = "HeuristicalStorageReservation is known to cause issues, particularly during dry run"
TOPOLOGY = "The topology was constructed directly rather than via TopologyFactory.create_topology()."


def _warned(message: str, module: str) -> bool:
    """Whether a FutureWarning of `module` gets through."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with quiet_host_warnings():
            warnings.warn_explicit(message, FutureWarning, f"{module}.py", 1, module=module)
    return bool(caught)


@pytest.mark.parametrize(
    ("message", "module", "passes"),
    [
        (RESERVATION, PLANNER, False),
        ("something new", PLANNER, True),
        (RESERVATION, f"{PLANNER}_of_others", True),
        (RESERVATION, "turbogr_plugin.training.assembly", True),
    ],
    ids=["known", "another message", "another module", "our module"],
)
def test_a_warning_is_dropped_by_message_and_module(message: str, module: str, passes: bool) -> None:
    assert _warned(message, module) == passes


def test_log_records_are_dropped_by_message_and_logger(caplog: pytest.LogCaptureFixture) -> None:
    logger, other = logging.getLogger("torchrec.distributed.planner.types"), logging.getLogger("turbogr_plugin.tests")
    with quiet_host_warnings():
        logger.warning(TOPOLOGY)
        logger.warning("something new")
        other.warning(TOPOLOGY)
    logger.warning(TOPOLOGY)
    assert [(record.name, record.getMessage()) for record in caplog.records] == [
        (logger.name, "something new"),
        (other.name, TOPOLOGY),
        (logger.name, TOPOLOGY),
    ]
    assert not logger.filters
