"""Commands as a user calls them, in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def code_of(main: Callable[[list[str]], Any], *words: str) -> int:
    """The exit code of a command with these words behind its name."""
    with pytest.raises(SystemExit) as stop:
        main([*words])
    return int(stop.value.code or 0)
