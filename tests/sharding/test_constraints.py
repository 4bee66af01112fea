"""What the constraints say; that the planner keeps to them is tested in training/test_gradient_scale.py."""

from __future__ import annotations

from turbogr_plugin.sharding.constraints import sequence_table_constraints


def test_each_table_may_be_sharded_by_rows_or_whole() -> None:
    constraints = sequence_table_constraints(["a", "b"])
    assert list(constraints) == ["a", "b"]
    for constraint in constraints.values():
        assert sorted(constraint.sharding_types or []) == ["row_wise", "table_wise"]
    assert sequence_table_constraints([]) == {}
