"""The schedule of TrainPipelineFineGrained as a table: which stage of which batch runs where, and what it waits for.

The pipeline is built from this table: each call of progress goes through the rows in order and hands every stage to its
lane, for all batches that are due. A lane works its stages off in the order in which it got them, so the order of the
rows is the order of the collectives, the same on all ranks. With batch i in the dense part and staleness s:

    stage               batch      lane    waits for
    load                i + s + 2  load    -
    lookup              i + s      sparse  wait_features; embedding_backward, dense_optimizer of batch i - 1
    feature_dist        i + s + 1  sparse  load
    wait_features       i + s + 1  sparse  feature_dist
    dense_forward       i          dense   lookup
    dense_backward      i          dense   dense_forward
    embedding_backward  i          sparse  dense_backward
    sync_embeddings     i          sparse  embedding_backward
    dense_optimizer     i          dense   dense_backward

A stage of a batch is handed out after those of the same batch that it waits for, whatever the order of the rows; that
fills the pipeline, too. With s = 1 five batches are in flight: the update of batch i - 1, the dense part of batch i,
and three that are ahead; six while the update of batch i - 2 is late, too.

Left out: stages for a part of the batches, and lanes beyond the three.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

LaneName = Literal["load", "sparse", "dense"]

LOAD = "load"
LOOKUP = "lookup"
LOOKUP_EXACT = "lookup_exact"
FEATURE_DIST = "feature_dist"
WAIT_FEATURES = "wait_features"
DENSE_FORWARD = "dense_forward"
DENSE_BACKWARD = "dense_backward"
EMBEDDING_BACKWARD = "embedding_backward"
SYNC_EMBEDDINGS = "sync_embeddings"
DENSE_OPTIMIZER = "dense_optimizer"


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A row of the table.

    Attributes:
        name: unique; also that of its ranges in a profile, `## <name> <batch> ##`.
        lane: "load" (a thread and the stream of copies), "sparse" (a thread and a stream; all collectives of the tables
            and all that touches them), "dense" (the thread and current stream of whoever calls progress).
        ahead: how many batches before the dense part it runs; 0 for the batch of the dense part.
        stale: whether it runs further ahead by the staleness.
        waits_for: stages of the same batch.
        waits_for_previous: stages of the batch that was in the dense part before.
        training_only: whether evaluation leaves it out.
        work: what an added stage does, called with the batch's context in its lane; None for the stages that the
            pipeline knows.
    """

    name: str
    lane: LaneName
    ahead: int = 0
    stale: bool = False
    waits_for: tuple[str, ...] = ()
    waits_for_previous: tuple[str, ...] = ()
    training_only: bool = False
    work: Callable[[Any], None] | None = None

    def __post_init__(self) -> None:
        if self.lane not in get_args(LaneName):
            raise ValueError(f"lane of stage {self.name!r} must be one of {get_args(LaneName)}, got {self.lane!r}")
        if isinstance(self.ahead, bool) or not isinstance(self.ahead, int) or self.ahead < 0:
            raise ValueError(f"ahead of stage {self.name!r} must be a whole number >= 0, got {self.ahead!r}")
        if self.work is not None and not callable(self.work):
            raise TypeError(f"work of stage {self.name!r} must be callable, got {type(self.work).__name__}")

    def batch(self) -> str:
        """The batch in terms of i, for people."""
        return "i" + " + s" * self.stale + (f" + {self.ahead}" if self.ahead else "")


_STAGES = (
    Stage(name=LOAD, lane="load", ahead=2, stale=True),
    Stage(
        name=LOOKUP,
        lane="sparse",
        stale=True,
        waits_for=(WAIT_FEATURES,),
        waits_for_previous=(EMBEDDING_BACKWARD, DENSE_OPTIMIZER),
    ),
    Stage(name=FEATURE_DIST, lane="sparse", ahead=1, stale=True, waits_for=(LOAD,)),
    Stage(name=WAIT_FEATURES, lane="sparse", ahead=1, stale=True, waits_for=(FEATURE_DIST,)),
    Stage(name=DENSE_FORWARD, lane="dense", waits_for=(LOOKUP,)),
    Stage(name=DENSE_BACKWARD, lane="dense", waits_for=(DENSE_FORWARD,), training_only=True),
    Stage(name=EMBEDDING_BACKWARD, lane="sparse", waits_for=(DENSE_BACKWARD,), training_only=True),
    Stage(name=SYNC_EMBEDDINGS, lane="sparse", waits_for=(EMBEDDING_BACKWARD,), training_only=True),
    Stage(name=DENSE_OPTIMIZER, lane="dense", waits_for=(DENSE_BACKWARD,), training_only=True),
)
#: Added where some modules are to stay exact: their lookup, once the update of the batch before is there.
_EXACT = Stage(
    name=LOOKUP_EXACT,
    lane="sparse",
    waits_for=(WAIT_FEATURES,),
    waits_for_previous=(EMBEDDING_BACKWARD, DENSE_OPTIMIZER),
)


@dataclass(frozen=True)
class Schedule:
    """The rows; immutable. `Schedule()` is the table of the module.

        schedule = Schedule().with_stage(Stage(name="count", lane="dense", waits_for=("lookup",), work=count))

    Raises:
        ValueError: two stages of one name, an unknown stage to wait for, stages that wait for each other, a stage of
            the pipeline that is missing, a stage that is not the pipeline's and has no work.
    """

    stages: tuple[Stage, ...] = _STAGES

    def __post_init__(self) -> None:
        names = [stage.name for stage in self.stages]
        if len(set(names)) < len(names):
            raise ValueError(f"stages must have different names, got {', '.join(names)}")
        known = {stage.name: stage for stage in (*_STAGES, _EXACT)}
        missing = [stage.name for stage in _STAGES if stage.name not in names]
        if missing:
            raise ValueError(f"the schedule lacks {', '.join(missing)}")
        for stage in self.stages:
            if (stage.work is None) != (stage.name in known):
                raise ValueError(
                    f"stage {stage.name!r} must have work, as it is not one of the pipeline's: {', '.join(known)}"
                    if stage.work is None
                    else f"stage {stage.name!r} is the pipeline's own and takes no work; choose another name"
                )
            for other in (*stage.waits_for, *stage.waits_for_previous):
                if other not in names:
                    raise ValueError(f"stage {stage.name!r} waits for {other!r}; known are {', '.join(names)}")
        for name in names:
            before = self._all_before(name)
            lost = set(known[name].waits_for) - set(before) if name in known else ()
            if lost:
                raise ValueError(f"stage {name!r} must wait for {', '.join(sorted(lost))}")

    def __getitem__(self, name: str) -> Stage:
        return next(stage for stage in self.stages if stage.name == name)

    def _all_before(self, name: str, path: tuple[str, ...] = ()) -> list[str]:
        if name in path:
            raise ValueError(f"stages wait for each other: {' -> '.join((*path, name))}")
        found = []
        for other in self[name].waits_for:
            found += [other, *self._all_before(other, (*path, name))]
        return found

    def with_stage(self, stage: Stage, *, before: str | None = None, after: str | None = None) -> Schedule:
        """The schedule with a stage in it: one of the same name is replaced, a new one goes to the end.

        Args:
            stage: the row.
            before: the stage in front of which it goes.
            after: the stage behind which it goes.

        Raises:
            ValueError: both places, or an unknown one; see also the class.
        """
        if before is not None and after is not None:
            raise ValueError(f"give before or after, got before={before!r} and after={after!r}")
        names = [each.name for each in self.stages]
        beside = before if before is not None else after
        if beside is not None and (beside not in names or beside == stage.name):
            raise ValueError(f"{'after' if before is None else 'before'} must be another of {names}, got {beside!r}")
        if beside is None and stage.name in names:
            return Schedule(tuple(stage if each.name == stage.name else each for each in self.stages))
        rows = [each for each in self.stages if each.name != stage.name]
        names = [each.name for each in rows]
        rows.insert(len(rows) if beside is None else names.index(beside) + (before is None), stage)
        return Schedule(tuple(rows))

    def with_wait(self, name: str, waits_for: str) -> Schedule:
        """The schedule in which a stage also waits for another one of the same batch."""
        stage = self[name]
        if waits_for in stage.waits_for:
            return self
        return self.with_stage(replace(stage, waits_for=(*stage.waits_for, waits_for)))

    def with_exact_lookup(self) -> Schedule:
        """The schedule with a stage lookup_exact, which looks up the modules that the stage lookup leaves out."""
        if any(stage.name == LOOKUP_EXACT for stage in self.stages):
            return self
        return self.with_stage(_EXACT, before=LOOKUP).with_wait(DENSE_FORWARD, LOOKUP_EXACT)

    def __str__(self) -> str:
        rows = [("stage", "batch", "lane", "waits for")]
        for stage in self.stages:
            waits = [", ".join(stage.waits_for)] if stage.waits_for else []
            if stage.waits_for_previous:
                waits.append(", ".join(stage.waits_for_previous) + " of batch i - 1")
            rows.append((stage.name, stage.batch(), stage.lane, "; ".join(waits) or "-"))
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        cells = ["  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[3]]) for row in rows]  # noqa: B905
        return "\n".join(cells)
