"""What `scripts/chat.py` shows of an answer beside its text: the footer's figures."""

from __future__ import annotations

import math
import time

from outrider.decode.engine import Cycle, Generation
from outrider.decode.stats import accepted_length, split


class AnswerTally:
    """Counts one answer while it streams, so that a stopped answer has a footer too."""

    def __init__(self, prompt: list[int]):
        self.generation = Generation(list(prompt))
        self.began = time.perf_counter()
        self.first = 0.0  # seconds until the first token
        self.last = 0.0

    def add(self, tokens: list[int], drafted: list[bool]) -> None:
        """One call of the engine's `on_tokens`: the first is the prefill's token, each later
        one a cycle.
        """
        out = self.generation
        self.last = time.perf_counter() - self.began
        if not out.token_ids:
            self.first = self.last
        else:
            accepted = sum(drafted)
            out.cycles.append(Cycle(accepted, accepted, (), False, len(out.token_ids)))
        out.token_ids += tokens
        out.from_draft += drafted

    def footer(self, finished: Generation | None = None, note: str = "") -> str:
        """Accepted length (over complete cycles, bonus token counted), decoding speed, tokens
        from drafts.
        """
        out = finished or self.generation
        cycles = split(out)
        mean = accepted_length([cycles.clean + cycles.loop]).mean
        seconds = self.last - self.first
        speed = f"{(len(out.token_ids) - 1) / seconds:.1f}" if seconds > 0 else "-"
        length = "-" if math.isnan(mean) else f"{mean:.2f}"
        parts = [
            f"accepted length {length}",
            f"{speed} tokens/s",
            f"{len(out.token_ids)} tokens",
            f"{sum(out.from_draft)} from accepted drafts",
        ]
        return " · ".join([*parts, note] if note else parts)
