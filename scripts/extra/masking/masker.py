"""What the rules find in a log, and stand-ins in its place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.scripts.extra.masking.needed import folded, may_match
from outrider.scripts.extra.masking.rules import HEAD, Rule, places

FEW = 500  # beginnings of values that are looked for faster one by one than letter by letter
UNMASKED_KEYS = ("role", "type")
Hit = tuple[int, int, int]  # start, end, index of the rule


def hits(rules: Sequence[Rule], text: str) -> list[Hit]:
    """What the rules find in a text, in order."""
    plain = folded(text)
    wanted = ((i, rule) for i, rule in enumerate(rules) if may_match(rule.needs, plain))
    return sorted((a, b, i) for i, rule in wanted for a, b in rule.find(text) if a < b)


@dataclass
class Known:
    """Values that were found: value -> word of its stand-in."""

    found: dict[str, str] = field(default_factory=dict)
    _sizes: dict[str, list[int]] = field(default_factory=dict)  # by a value's first characters

    def remember(self, value: str, stand_in: str) -> None:
        """The first stand-in of a value holds."""
        if len(value) >= HEAD and value not in self.found:
            self.found[value] = stand_in
            sizes = self._sizes.setdefault(value[:HEAD], [])
            if len(value) not in sizes:
                sizes.append(len(value))
                sizes.sort(reverse=True)

    def places(self, text: str) -> Iterator[tuple[int, int, str]]:
        """Where such values stand in a text: start, end, stand-in."""
        behind = 0
        for at in self._spots(text):
            if at < behind:
                continue
            for size in self._sizes.get(text[at : at + HEAD], ()):
                value = text[at : at + size]
                if value in self.found and _stands(text, value, at):
                    yield at, at + size, self.found[value]
                    behind = at + size
                    break

    def _spots(self, text: str) -> Iterable[int]:
        """Where a value may begin, in order."""
        if len(self._sizes) > FEW:
            return range(len(text) - HEAD + 1)
        return sorted(at for begin in self._sizes for at, _ in places(text, begin))


@dataclass
class Masker:
    """Finds first (`look` at every text of the log), masks then (`chat`), so that what was
    found once is masked everywhere.

    counts: how many places each rule masked in the texts that were looked at."""

    rules: Sequence[Rule]
    known: Known = field(default_factory=Known)
    counts: Counter[str] = field(default_factory=Counter)

    def look(self, value: Any) -> None:
        """Remember what is found in every text of a message, a list or an object."""
        for text in texts(value):
            self.take(text, hits(self.rules, text))

    def take(self, text: str, found: Sequence[Hit]) -> None:
        """Remember what `hits` gave for a text."""
        merged: list[Hit] = []
        for start, end, i in found:
            self._remember(text, start, end, i)
            if merged and start < merged[-1][1]:  # finds that overlap are one as well
                a, b, j = merged[-1]
                merged[-1] = (a, max(b, end), min(i, j))
            else:
                merged.append((start, end, i))
        for start, end, i in merged:
            self.counts[self.rules[i].name] += 1
            self._remember(text, start, end, i)

    def _remember(self, text: str, start: int, end: int, i: int) -> None:
        self.known.remember(text[start:end].strip("\"'`"), self.rules[i].stand_in)

    def chat(self) -> Chat:
        """Stand-ins for one chat: the same value gets the same one."""
        return Chat(self.known)


@dataclass
class Chat:
    """One chat's stand-ins."""

    known: Known
    names: dict[str, str] = field(default_factory=dict)
    numbers: Counter[str] = field(default_factory=Counter)

    def mask(self, value: Any) -> Any:
        """The value with every text in it masked."""
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, list):
            return [self.mask(v) for v in value]
        if isinstance(value, dict):
            return {
                self._text(str(k)): v if k in UNMASKED_KEYS else self.mask(v)
                for k, v in value.items()
            }
        return value

    def _text(self, text: str) -> str:
        # Long values first found whole; what a rule found beyond them lies in `found` as well.
        out, at = [], 0
        for start, end, word in self.known.places(text):
            out += [text[at:start], self._stand_in(text[start:end], word)]
            at = end
        return "".join([*out, text[at:]])

    def _stand_in(self, value: str, word: str) -> str:
        if value not in self.names:
            self.numbers[word] += 1
            self.names[value] = f"[{word}_{self.numbers[word]}]"
        return self.names[value]


def texts(value: Any) -> Iterator[str]:
    """Every text in a message, a list or an object."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for one in value:
            yield from texts(one)
    elif isinstance(value, dict):
        for key, one in value.items():
            yield str(key)
            if key not in UNMASKED_KEYS:
                yield from texts(one)


def _stands(text: str, value: str, at: int) -> bool:
    """Whether a value stands at a place: not inside a longer word, unless it is long itself."""
    end = at + len(value)
    if len(value) >= 12:
        return True
    before = at and text[at - 1].isalnum() and value[0].isalnum()
    after = end < len(text) and text[end].isalnum() and value[-1].isalnum()
    return not before and not after
