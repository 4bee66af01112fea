from __future__ import annotations

import pytest

from turbogr_plugin.backend.adaptation import Adaptation, fingerprint, lookup
from turbogr_plugin.pipeline.adaptations import ADAPTATIONS


@pytest.mark.parametrize("adaptation", ADAPTATIONS, ids=lambda adaptation: adaptation.target.rpartition(":")[2])
def test_each_record_says_why_where_and_until_when(adaptation: Adaptation) -> None:
    assert adaptation.why and adaptation.delete_when
    assert adaptation.upstream.startswith("torchrec 1.8.0, ")
    assert adaptation.target in adaptation.written_for
    for source, expected in adaptation.written_for.items():
        assert fingerprint(lookup(source)[2]) == expected  # wrappers, ours among them, are looked through


def test_no_place_is_adapted_twice() -> None:
    targets = [adaptation.target for adaptation in ADAPTATIONS]
    assert len(targets) == len(set(targets))
