"""What an error must hold beside the key and what is wrong: what to do."""

from __future__ import annotations

import re

DO = (
    "set|start|serve|give|mend|look|ask|raise|choose|write|take|leave|export|run|check|free|fetch|"
    "train|did you mean|the nearest that is served"
)
FIX = re.compile(rf"[;,:(] ?((or|else|then) )?`?({DO})\b")
