"""norm(x) times gate, with dropout, as one operator: what HSTU does between attention and output projection.

    out = keep * (norm(x) * weight + bias) * gate / (1 - p)

with LayerNorm, RMSNorm or group norm (per head) of each row. The mask `keep` is that of keyed_dropout.keep_mask, a
function of (seed, step, sample id, layer, element): it is drawn again in backward, as is the norm, so that nothing is
kept between the two but the inputs.

Left out: an activation of the gate, which HSTU takes of the whole projection before; the concatenation of gate and x
beside the product that some published variants have.

Letters: T tokens, W width (heads times value dim of a head).
"""

from __future__ import annotations

from torch import Tensor

from turbogr_plugin.kernels.dense_operator import DenseFamily, define
from turbogr_plugin.kernels.gated_norm_call import GatedNormCall, Norm, check_shapes, check_values
from turbogr_plugin.kernels.keyed_dropout import DropoutKey

_operator = define(
    DenseFamily(
        name="gated_norm",
        record=GatedNormCall,
        fields=GatedNormCall._fields,
        arguments=(
            "Tensor x, Tensor gate, Tensor? weight, Tensor? bias, str norm, SymInt groups, float eps, "
            "Tensor? samples=None, Tensor? positions=None, SymInt seed=0, SymInt step=0, SymInt layer=0, float p=0.0"
        ),
        check_shapes=check_shapes,
        check_values=check_values,
        outputs=lambda call: (call.x.new_empty(call.x.shape),),
        kept=0,
        differentiable=("x", "gate", "weight", "bias"),
    ),
    outputs=1,
)


def gated_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    norm: Norm = "layer",
    groups: int = 1,
    eps: float = 1e-6,
    dropout_key: DropoutKey | None = None,
    layer: int = 0,
    p: float = 0.0,
    implementation: str | None = None,
) -> Tensor:
    """Normalises each row, multiplies it by its gate and drops elements.

    Args:
        x: [T, W], floating point.
        gate: [T, W], dtype of x.
        weight: [W], or with norm="group" also [groups], one per group; None: ones.
        bias: as `weight`; None: zeros.
        norm: layer: (x - mean) / sqrt(variance + eps) of each row; rms: x / sqrt(mean square + eps); group: as layer,
            of each of `groups` parts of a row by itself.
        groups: number of heads with norm="group", else 1; divides W.
        eps: at least 0.
        dropout_key: seed, step, and the sample id and position of each token; None: nothing is dropped.
        layer: number of this dropout in the model: each place takes its own.
        p: probability in [0, 1) to drop an element.
        implementation: reference, cpu or triton; None: the fastest that serves the call.

    Returns:
        [T, W], contiguous, dtype of x. Computed in float32 (float64 for float64) and rounded once.

    Raises:
        ValueError: an argument that does not fit, naming what was given and what is allowed, or an `implementation`
            that does not serve the call.
    """
    if not 0 <= p < 1:
        raise ValueError(f"p must be in [0, 1), got {p}")
    weight, bias = _per_element(weight, x, norm, groups), _per_element(bias, x, norm, groups)
    dropout: tuple[object, ...] = ()
    if dropout_key is not None and p > 0:
        key = dropout_key
        dropout = (key.samples, key.positions, key.seed, key.step, layer, p)
    result: Tensor = _operator(x, gate, weight, bias, norm, groups, eps, *dropout, implementation=implementation)
    return result


def _per_element(parameter: Tensor | None, x: Tensor, norm: Norm, groups: int) -> Tensor | None:
    """A parameter per group, as some published models have it, as one per element."""
    if parameter is None or norm != "group" or parameter.shape != (groups,) or x.dim() != 2 or x.shape[1] == groups:
        return parameter
    return parameter.repeat_interleave(x.shape[1] // groups)
