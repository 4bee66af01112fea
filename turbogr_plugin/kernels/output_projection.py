"""residual + y W^T + b as one operator: the end of an HSTU block.

Letters: T tokens, D model dim, I width of what is projected (heads times value dim of a head).
"""

from __future__ import annotations

from torch import Tensor

from turbogr_plugin.kernels.dense_operator import DenseFamily, autocast, define
from turbogr_plugin.kernels.projection_call import OutputProjectionCall, check_output

_operator = define(
    DenseFamily(
        name="output_projection",
        record=OutputProjectionCall,
        fields=OutputProjectionCall._fields,
        arguments="Tensor y, Tensor weight, Tensor? bias, Tensor residual",
        check_shapes=check_output,
        check_values=lambda _: None,
        outputs=lambda call: (call.residual.new_empty(call.residual.shape),),
        kept=0,
        differentiable=("y", "weight", "bias"),
        passed_through="residual",
    ),
    outputs=1,
)


def output_projection(
    y: Tensor, weight: Tensor, residual: Tensor, *, bias: Tensor | None = None, implementation: str | None = None
) -> Tensor:
    """Multiplies rows by a weight and adds them to the residual.

    Args:
        y: [T, I], floating point.
        weight: [D, I], dtype of y (autocast sets that of both).
        residual: [T, D].
        bias: [D]; None: zeros.
        implementation: reference or cpu; None: the fastest that serves the call.

    Returns:
        [T, D], contiguous, in the dtype of residual.

    Raises:
        ValueError: an argument that does not fit, naming what was given and what is allowed, or an `implementation`
            that does not serve the call.
    """
    operands = (autocast(y, y), autocast(y, weight), autocast(y, bias))
    result: Tensor = _operator(*operands, residual, implementation=implementation)
    return result
