"""Files and folders that a command line names and that are not there: told before torch is loaded,
in the words in which they would be told later."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from outrider.conf.paths import no_file
from outrider.decode.models.config import TargetConfig
from outrider.heads.folders import for_another
from outrider.heads.names import HUB
from outrider.scripts.common.files import here
from outrider.scripts.common.names import heads_of, wrong_drafter
from outrider.scripts.common.prompts import DEMO


def no_prompts(path: str, key: str = "prompts") -> list[str]:
    """A line where there is no file of prompts."""
    fix = f"give a JSONL file, such as {DEMO}"
    return [] if here(Path(path)).exists() else no_file(key, path, fix)


def no_drafters(
    specs: Iterable[str], key: str = "drafter", target: TargetConfig | None = None
) -> list[str]:
    """A line for each drafter that this disk does not have, or has for another target than the
    one that would be fetched for it; the hub is not asked for heads."""
    lines = []
    for spec in specs:
        line = "" if HUB in spec else wrong_drafter(spec)
        if not line and target is not None:
            line = next(filter(None, (for_another(p, target) for p in heads_of(spec))), "")
        lines += [f"{key}: {line}"] if line else []
    return lines
