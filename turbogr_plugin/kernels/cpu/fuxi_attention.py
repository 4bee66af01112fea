"""FuXi's three attention channels in C++ on the CPU: csrc/fuxi_attention*.cpp, built on first use.

Serves what jagged_attention.py beside it serves, with its guarantees.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from turbogr_plugin.kernels.attention_call import FuxiAttentionCall
from turbogr_plugin.kernels.cpu import build, jagged_attention
from turbogr_plugin.kernels.dispatch import MissingTool

FAMILY = "fuxi_attention"


def refuses(call: FuxiAttentionCall) -> str | None:
    """Why this call cannot be served; None if it can. Builds nothing."""
    reason = jagged_attention.refuses_operands(call.q, call.v)
    if reason is not None:
        return reason
    missing = build.missing(FAMILY)
    return None if missing is None else MissingTool(missing)


def forward(call: FuxiAttentionCall) -> Tensor:
    """The output [T, H, 3E]: semantic, temporal, positional."""
    extension = build.load(FAMILY)
    return extension.forward(_arguments(extension, call))


def backward(grad: Tensor, call: FuxiAttentionCall) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of q, k, v, of `time_bias` or `time_decay`, and of `position_bias`; None where it is not asked for.

    Args:
        grad: of the output, [T, H, 3E].
        call: what `forward` got.
    """
    extension = build.load(FAMILY)
    dq, dk, dv, time, position = extension.backward(
        grad, _arguments(extension, call), call.time_gradient, call.position_gradient
    )
    times = call.time_bias if call.time_decay is None else call.time_decay
    return (
        dq,
        dk,
        dv,
        jagged_attention.in_dtype_of(times, time),
        jagged_attention.in_dtype_of(call.position_bias, position),
    )


def workspace_bytes() -> int:
    """The most memory that calls held at once since the last question; see jagged_attention.workspace_bytes."""
    peak: int = build.load(FAMILY).take_workspace_peak()
    return peak


def _arguments(extension: Any, call: FuxiAttentionCall) -> Any:
    channels = (call.bias_scale, call.time_decay)
    return extension.Arguments(*jagged_attention.shared_arguments(call), *channels)
