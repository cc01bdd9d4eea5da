"""From tokens to text that is safe to hand out: whole characters, and nothing that may turn
out to be the beginning of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from outrider.decode.live import Fresh, TokenDistribution
from outrider.decode.text import Stream


@dataclass(frozen=True)
class Said:
    """A token and the text that it added; "" where a character is not whole yet."""

    token: int
    text: str
    drafted: bool
    distribution: TokenDistribution | None


class Transcript:
    """One answer. text: what has been released. stopped: a stop string came; it and all behind
    it are left out, and nothing more is taken."""

    def __init__(self, tokenizer: Any, stops: Sequence[str]):
        self._stream, self._stops = Stream(tokenizer), tuple(stops)
        self._held: list[Said] = []
        self.text, self.stopped, self.tokens = "", False, 0

    def push(self, fresh: Fresh) -> list[Said]:
        """What may be shown now."""
        distributions: Sequence[TokenDistribution | None] = fresh.distributions or [None] * len(
            fresh.tokens
        )
        out: list[Said] = []
        for token, drafted, distribution in zip(
            fresh.tokens, fresh.drafted, distributions, strict=True
        ):
            if self.stopped:
                break
            self.tokens += 1
            self._held.append(Said(token, self._stream.push(token), drafted, distribution))
            out += self._release()
        return out

    def end(self) -> list[Said]:
        """All that was held back, when the answer is over."""
        rest = "" if self.stopped else self._stream.rest()
        if rest:  # its tokens have no text yet, so the last of them is still held
            self._held[-1] = replace(self._held[-1], text=self._held[-1].text + rest)
        out = [] if self.stopped else self._release()
        left, self._held = self._held, []
        self.text += "".join(said.text for said in left)
        return [*out, *left]

    def _release(self) -> list[Said]:
        held = "".join(said.text for said in self._held)
        places = [at for stop in self._stops if (at := held.find(stop)) >= 0]
        if places:
            self.stopped = True
            out = _cut(self._held, min(places))
            self._held = []
        else:
            out = self._safe(len(held) - self._begun(held))
        self.text += "".join(said.text for said in out)
        return out

    def _begun(self, held: str) -> int:
        """Characters at the end that a stop string may begin with."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for size in range(min(longest, len(held)), 0, -1):
            if any(stop.startswith(held[-size:]) for stop in self._stops):
                return size
        return 0

    def _safe(self, end: int) -> list[Said]:
        """The tokens whose text ends at `end` or before it; they leave. Those without text
        wait for the character that they may belong to."""
        at = count = 0
        for number, said in enumerate(self._held, 1):
            at += len(said.text)
            if at > end:
                break
            if said.text:
                count = number
        out, self._held = self._held[:count], self._held[count:]
        return out


def _cut(held: list[Said], end: int) -> list[Said]:
    """Tokens up to the character `end`; the text of the last one may be shortened."""
    out, at = [], 0
    for said in held:
        if at >= end and said.text:
            break
        out.append(replace(said, text=said.text[: end - at]))
        at += len(said.text)
    return out
