"""HSTU attention in C++ on the CPU: csrc/jagged_attention*.cpp, built on first use.

Serves float32, bfloat16 and float16 with every mask and bias of the call; sums are in float32 throughout. The plain
PyTorch implementation serves float64. Results do not depend on the number of threads, and in float32 no bit of a row's
output depends on the rows around it. Memory beyond inputs and outputs: `workspace_bytes` tells.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from turbogr_plugin.kernels.attention_call import AttentionCall, HSTUAttentionCall
from turbogr_plugin.kernels.cpu import build
from turbogr_plugin.kernels.dispatch import MissingTool

FAMILY = "jagged_attention"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def refuses(call: HSTUAttentionCall) -> str | None:
    """Why this call cannot be served; None if it can. Builds nothing."""
    reason = refuses_operands(call.q, call.v)
    if reason is not None:
        return reason
    missing = build.missing(FAMILY)
    return None if missing is None else MissingTool(missing)


def forward(call: HSTUAttentionCall) -> Tensor:
    """The output [T, H, E]."""
    extension = build.load(FAMILY)
    return extension.forward(extension.Arguments(*shared_arguments(call)))


def backward(grad: Tensor, call: HSTUAttentionCall) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of q, k, v and of the two tables (None where there is none or it is not asked for).

    Args:
        grad: [T, H, E], that of the output.
        call: what `forward` got.
    """
    extension = build.load(FAMILY)
    dq, dk, dv, time, position = extension.backward(
        grad, extension.Arguments(*shared_arguments(call)), call.time_gradient, call.position_gradient
    )
    return dq, dk, dv, in_dtype_of(call.time_bias, time), in_dtype_of(call.position_bias, position)


def workspace_bytes() -> int:
    """The most memory that calls held at once since the last question, beyond inputs and outputs, all threads together.

    Gradients in bfloat16 and float16 count the float32 sums of dq.
    """
    peak: int = build.load(FAMILY).take_workspace_peak()
    return peak


def refuses_operands(q: Tensor, v: Tensor) -> str | None:
    """Why tensors of these types and shapes cannot be served; None if they can."""
    if q.dtype not in DTYPES:
        return f"it serves float32, bfloat16 and float16, q is {q.dtype}"
    if 0 in (q.shape[1], q.shape[2], v.shape[2]):
        return f"it needs at least one head and dim, q is {tuple(q.shape)} and v {tuple(v.shape)}"
    return None


def shared_arguments(call: AttentionCall) -> tuple[Any, ...]:
    """What both attentions hand to C++, in the order of AttentionArguments in csrc/attention_call.h."""
    bias = (call.timestamps, call.query_timestamps, call.time_bias, call.time_borders, call.position_bias)
    mask = (call.causal, call.num_targets, call.num_contextual, call.window, call.full_tail)
    return (call.q, call.k, call.v, call.offsets, call.alpha, call.scale, *mask, *bias)


def in_dtype_of(table: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    """The gradient of a table in its dtype, None where there is none."""
    return None if gradient is None or table is None else gradient.to(table.dtype)
