"""A test of the tests: every known wrong rule is caught by the layer it names, and the correct
code passes there.
"""

from __future__ import annotations

import pytest

from outrider.scripts.proofs.controls.catalogue import Control, controls

ALL = controls()
LAYERS = {"enumeration", "engine enumeration", "scripted uniforms", "acceptance floor"}


@pytest.mark.parametrize("control", ALL, ids=lambda c: c.name)
def test_wrong_code_is_caught_where_the_correct_code_passes(control: Control) -> None:
    assert control.layer in LAYERS
    assert control.wrong() > control.limit
    assert control.right() <= min(control.limit, 1e-12)


def test_the_list_is_complete() -> None:
    names = [c.name for c in ALL]
    assert len(set(names)) == len(names) >= 16
    assert {c.layer for c in ALL} == LAYERS
