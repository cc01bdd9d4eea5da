"""What a mistake in a command line is answered with: tests/conf/mistakes.yaml."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml

from conf.errors import UserError
from conf.schema import compose
from tests.conf.test_config import ENTRIES

TABLE = yaml.safe_load(Path(__file__).with_name("mistakes.yaml").read_text())
CASES = [
    pytest.param(name, shlex.split(f"{verb['given']} {line}"), said, id=f"{name} {line}")
    for name, verb in TABLE.items()
    for line, said in verb["mistakes"].items()
]


@pytest.mark.parametrize(("name", "words", "said"), CASES)
def test_a_mistake_is_one_line(name: str, words: list[str], said: str) -> None:
    with pytest.raises(UserError) as caught:
        compose(name, ENTRIES[name], words)
    line = str(caught.value)
    assert "\n" not in line and len(line) < 300
    assert line.startswith(said[1:]) if said.startswith("^") else said in line, line
