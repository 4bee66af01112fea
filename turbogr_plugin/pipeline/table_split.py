"""One collection of tables as two, so that a pipeline may look some of its tables up stale and the others exactly.

One sharded module is one lookup and one all-to-all for all of its tables, whatever they hold: choosing per table inside
it would mean looking it up twice. `SplitTables` takes the place of an EmbeddingCollection or EmbeddingBagCollection
before sharding: it holds two of the same class, which are planned and sharded each for itself, and gives what the one
gave. Names of weights in state dicts, and of the fused optimizer's states, stay those of the one collection, so that
checkpoints fit both. What changes: plans and constraints name the modules `NAME.stale` and `NAME.exact`, as does
`named_parameters`, and an output of bags is copied once, to put the two parts side by side.

Left out: a feature that tables of both parts read, since its two outputs would be renamed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias, cast

import torch
from torch import nn
from torchrec.distributed.types import Awaitable
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.fused import FusedOptimizerModule
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

Collection: TypeAlias = EmbeddingCollection | EmbeddingBagCollection

_PARTS = ("stale", "exact")


def _arrived(value: Any) -> Any:
    """The value of what a sharded module may hand out before it is there."""
    return value.wait() if isinstance(value, Awaitable) else value


def _sequences_of(stale: Any, exact: Any) -> dict[str, JaggedTensor]:
    """The outputs of two sequence collections as one."""
    return {**_arrived(stale), **_arrived(exact)}


def _bags_of(stale: Any, exact: Any) -> KeyedTensor:
    """The outputs of two bag collections as one."""
    first, second = _arrived(stale), _arrived(exact)
    return KeyedTensor(
        keys=[*first.keys(), *second.keys()],
        length_per_key=[*first.length_per_key(), *second.length_per_key()],
        values=torch.cat([first.values(), second.values()], dim=1),
    )


# TorchRec's pipelines trace the modules around a sharded one; what follows a lookup is one call to them.
torch.fx.wrap("_sequences_of")
torch.fx.wrap("_bags_of")


class SplitTables(nn.Module, FusedOptimizerModule):
    """Stands in for a collection, whose tables it looks up by two; see the module.

        model.tables = SplitTables(model.tables, exact=["gender", "age"])      # before sharding

    The tables' parameters are taken over, with the optimizers that were attached to them.
    """

    def __init__(self, collection: Collection, *, exact: Iterable[str]) -> None:
        """Args:
        collection: not sharded; not to be used any more.
        exact: tables that become the module `exact`; all others become `stale`.

        Raises:
            TypeError: another kind of module.
            ValueError: an unknown table, a part without tables, a feature that tables of both parts read.
        """
        super().__init__()
        if type(collection) not in (EmbeddingCollection, EmbeddingBagCollection):
            raise TypeError(
                "collection must be an EmbeddingCollection or EmbeddingBagCollection that is not sharded, got "
                f"{type(collection).__name__}"
            )
        self._pooled = isinstance(collection, EmbeddingBagCollection)
        self._tables = "embedding_bags" if self._pooled else "embeddings"
        names, wanted = [config.name for config in _configs(collection)], set(exact)
        if not wanted <= set(names):
            raise ValueError(f"exact must name tables of {names}, got {sorted(wanted - set(names))}")
        if not wanted or wanted == set(names):
            raise ValueError(f"exact must name some but not all tables of {names}, got {sorted(wanted)}")
        features: dict[bool, set[str]] = {True: set(), False: set()}
        for config in _configs(collection):
            features[config.name in wanted].update(config.feature_names)
        shared = sorted(features[True] & features[False])
        if shared:
            raise ValueError(
                f"exact parts tables that read the same feature ({shared}): their outputs would be renamed; "
                "keep such tables together"
            )
        self._part_of = {name: "exact" if name in wanted else "stale" for name in names}
        self.stale = _part(collection, [name for name in names if name not in wanted])
        self.exact = _part(collection, [name for name in names if name in wanted])
        self.register_state_dict_post_hook(_name_as_one)
        self.register_load_state_dict_pre_hook(_name_as_two)

    def forward(self, features: KeyedJaggedTensor) -> Any:
        """What the collection gives: a KeyedTensor of bags, or a dict of JaggedTensors; keys of `stale` come first."""
        stale, exact = self.stale(features), self.exact(features)
        return _bags_of(stale, exact) if self._pooled else _sequences_of(stale, exact)

    @property
    def fused_optimizer(self) -> KeyedOptimizer:
        """Of both parts, once they are sharded."""
        parts = [cast(FusedOptimizerModule, getattr(self, part)).fused_optimizer for part in _PARTS]
        return CombinedOptimizer([("", part) for part in parts])


def _configs(collection: Collection) -> list[Any]:
    if isinstance(collection, EmbeddingBagCollection):
        return list(collection.embedding_bag_configs())
    return list(collection.embedding_configs())


def _part(collection: Collection, names: list[str]) -> Collection:
    """A collection of the same kind with some of the tables, whose modules it shares."""
    configs = [config for config in _configs(collection) if config.name in names]
    # Made without memory: the modules, and so the parameters, are those of the collection.
    meta = torch.device("meta")
    part: Collection
    if isinstance(collection, EmbeddingBagCollection):
        part = EmbeddingBagCollection(tables=configs, is_weighted=collection.is_weighted(), device=meta)
        for name in names:
            part.embedding_bags[name] = collection.embedding_bags[name]
    else:
        part = EmbeddingCollection(
            tables=configs,
            device=meta,
            need_indices=collection.need_indices(),
            use_gather_select=collection.use_gather_select(),
            use_gather_select_per_sharding=collection.use_gather_select_per_sharding(),
        )
        for name in names:
            part.embeddings[name] = collection.embeddings[name]
    part._device = collection.device  # sharding copies the values of a collection that is not on "meta"
    return part


def _name_as_one(module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    """After state_dict: NAME.stale.embeddings.TABLE becomes NAME.embeddings.TABLE, in the order of the tables."""
    assert isinstance(module, SplitTables)
    for name, part in module._part_of.items():
        own = f"{prefix}{part}.{module._tables}.{name}."
        for key in [key for key in state if key.startswith(own)]:
            state[f"{prefix}{module._tables}.{name}.{key[len(own) :]}"] = state.pop(key)


def _name_as_two(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before load_state_dict: the way back."""
    assert isinstance(module, SplitTables)
    for name, part in module._part_of.items():
        own = f"{prefix}{module._tables}.{name}."
        for key in [key for key in state if key.startswith(own)]:
            state[f"{prefix}{part}.{module._tables}.{name}.{key[len(own) :]}"] = state.pop(key)
