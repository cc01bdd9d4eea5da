"""A window of steps under torch.profiler: `profile=[from,to]`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from outrider.conf.errors import first_line


class Window:
    """Records the steps `first` to `last`, counted from 1 as in metrics.jsonl, and leaves
    one trace in OUT/profile. A run that starts behind `first` records what is left of the
    window, and its file is named after that; one that starts behind `last`, or is no rank
    0, records nothing.

    say: takes the line about the trace. Trouble with a trace costs the trace, not the run.
    """

    def __init__(
        self, window: list[int], out: Path, main: bool, say: Callable[[str], None]
    ) -> None:
        self.first, self.last = window if window and main else (0, -1)
        self.folder, self.say = out / "profile", say
        self._trace: Any = None

    def before(self, step: int) -> None:
        """Step `step` is about to begin."""
        if self._trace is None and self.first <= step <= self.last:
            self._trace, self.first = torch.profiler.profile(), step
            self._trace.start()

    def after(self, step: int) -> None:
        """Step `step` is done."""
        if self._trace is not None and step == self.last:
            self.close(step)

    def close(self, step: int) -> None:
        """Write what was recorded up to `step`, if anything."""
        trace, self._trace = self._trace, None
        if trace is None:
            return
        path = self.folder / f"steps-{self.first}-{step}.json.gz"
        try:
            trace.stop()
            self.folder.mkdir(parents=True, exist_ok=True)
            trace.export_chrome_trace(str(path))
            self.say(f"profile: {path}")
        except (OSError, RuntimeError) as error:
            self.say(f"profile: {path}: no trace ({first_line(error)})")
