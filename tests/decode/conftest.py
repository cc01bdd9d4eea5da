"""What the tests of decoding share."""

from __future__ import annotations

import pytest

from outrider.decode import devices


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked of a tensor to end a loop early, as on an accelerator."""
    monkeypatch.setattr(devices, "on_cpu", lambda tensor: False)


@pytest.fixture(params=["host", "accelerator"])
def anywhere(request: pytest.FixtureRequest) -> str:
    """The test runs as on a CPU, and as on an accelerator."""
    if request.param == "accelerator":
        request.getfixturevalue("accelerator")
    name: str = request.param
    return name
