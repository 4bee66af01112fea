"""The forward pass of a sharded module in TrainPipelineFineGrained: its result is there when the dense part asks.

The stage lookup has looked up and waited; the dense part gets the values cut off from the graph of the lookup, and the
stage embedding_backward hands that graph the gradients that have come. The awaitable that TorchRec's modules return is
returned here, too, with its result in it, so that whatever looks into it (backward hooks) finds what it expects.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torchrec.distributed.train_pipeline.runtime_forwards import EmbeddingPipelinedForward
from torchrec.distributed.types import LazyAwaitable
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor
from torchrec.streamable import Multistreamable

from turbogr_plugin.backend.streams import HostStream, Stream, record_stream
from turbogr_plugin.pipeline.fine_grained_context import FineGrainedContext, KeptGradient


class _Cut(torch.autograd.Function):
    """The values of an output, whose gradient is kept. `anchor` makes the result require one.

    Not a leaf, as in TorchRec's: models may write to their embeddings, and nothing is added up into `.grad`.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, kept: KeptGradient, values: tuple[Tensor]) -> Tensor:
        ctx.kept = kept
        return values[0].detach()  # in a tuple autograd does not see it: it is no input

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        kept: KeptGradient = ctx.kept
        kept.gradient = grads[0] if kept.gradient is None else kept.gradient + grads[0]
        return None, None, None


class ReadyForward(EmbeddingPipelinedForward):
    """Stands in for the forward of a sharded module while the pipeline is attached."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        with torch.inference_mode(False):
            self._anchor = torch.zeros((), requires_grad=True)

    def __call__(self, *input: Any, **kwargs: Any) -> Any:
        """The looked-up embeddings of the batch; the arguments are ignored, as the stage feature_dist has used them.

        Raises:
            RuntimeError: they are not there: the module is called twice in a forward pass, or outside of progress.
        """
        context = self._context
        assert isinstance(context, FineGrainedContext)
        if self._name not in context.outputs:
            raise RuntimeError(
                f"module {self._name!r} has no embeddings for this call: with a pipeline attached a sharded module is "
                "called once per forward pass, by progress (detach the pipeline to call the model yourself)"
            )
        output = context.outputs.pop(self._name)
        # modules with managed collision give two awaitables; ids have no gradient
        embeddings = output[0] if isinstance(output, tuple) else output
        result = arrived(embeddings)
        if context.has_graph and torch.is_grad_enabled():
            for values, holder in _values_of(result):
                if values.requires_grad:
                    kept = KeptGradient(values)
                    context.gradients.append(kept)
                    holder._values = _Cut.apply(self._anchor, kept, (values,))
        return output


def arrived(awaitable: Any) -> Any:
    """The result of an awaitable that has been waited for."""
    return LazyAwaitable._wait_async(awaitable)


def wait_for_output(output: Any) -> None:
    """Waits for the outputs of a sharded module; they stay in their awaitables."""
    for awaitable in output if isinstance(output, tuple) else (output,):
        result = arrived(awaitable)
        if isinstance(awaitable, LazyAwaitable):
            # Whoever calls wait() gets the result, too: the communication cannot be waited for twice.
            awaitable._wait_impl = lambda result=result: result
            awaitable._callbacks = []


def record_output(value: Any, stream: Stream) -> None:
    """Tells the allocator that `stream` uses what another stream has allocated.

    Args:
        value: a tensor, what can record streams itself, an awaitable that has been waited for, or a collection of them.
        stream: the user.
    """
    if isinstance(stream, HostStream):
        return
    value = arrived(value)
    if isinstance(value, (Tensor, Multistreamable)):
        record_stream(value, stream)
    elif isinstance(value, (list, tuple)):
        for each in value:
            record_output(each, stream)
    elif isinstance(value, dict):
        for each in value.values():
            record_output(each, stream)


def differentiable(output: Any) -> list[Tensor]:
    """The tensors of a module's output that have a graph."""
    embeddings = output[0] if isinstance(output, tuple) else output
    return [values for values, _ in _values_of(arrived(embeddings)) if values.requires_grad]


def _values_of(result: Any) -> Iterator[tuple[Tensor, JaggedTensor | KeyedTensor]]:
    """The values of each output and the object that holds them."""
    for holder in result.values() if isinstance(result, dict) else (result,):
        assert isinstance(holder, (JaggedTensor, KeyedTensor)), type(holder)
        yield holder.values(), holder
