"""What the tests of export and import share."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.decode.target import Target
from tests.helpers.interop import deep_target


@pytest.fixture(scope="module")
def target() -> Target:
    return deep_target()


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    path.write_text('{"prompt": "a slow horse"}\n{"prompt": "go"}\n')
    return path
