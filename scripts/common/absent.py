"""Files and folders that a command line names and that are not there: told before torch is loaded,
in the words in which they would be told later."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from outrider.conf.paths import no_file
from outrider.heads.names import HUB
from outrider.scripts.common.files import here
from outrider.scripts.common.names import wrong_drafter
from outrider.scripts.common.prompts import DEMO


def no_prompts(path: str, key: str = "prompts") -> list[str]:
    """A line where there is no file of prompts."""
    fix = f"give a JSONL file, such as {DEMO}"
    return [] if here(Path(path)).exists() else no_file(key, path, fix)


def no_drafters(specs: Iterable[str], key: str = "drafter") -> list[str]:
    """Return a line for each drafter that this disk does not have; the hub is not asked for
    heads."""
    wrong = [wrong_drafter(spec) for spec in specs if HUB not in spec]
    return [f"{key}: {line}" for line in wrong if line]
