"""The race picture and the coloured answer of report.html, from the report's `race`
(scripts/scoring/race.py): HTML with a strip of SVG per row, so that names stay legible on a phone.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.heads.names import NONE
from outrider.scripts.reports import plots
from outrider.scripts.scoring import names as scored

OWN, SEVERAL = "var(--faint)", "var(--ink)"  # colours of tokens that no one drafter proposed
FAR = 10_000  # units of a strip from the start to the end of the slowest row
CELL = 10  # units of a token's height
FILLED = 0.88  # of a pass's width; the rest is the gap to the next one
MOST = 8  # lanes of a picture
QUESTION = 400  # characters of a question that are shown

Found = dict[str, Any]  # an entry of `lanes`


@dataclass(frozen=True)
class Lane:
    """A row of the picture. result: its speed in words; height: of its strip, in tokens; paths:
    (colour, SVG path) of its tokens; words: the strip as text."""

    label: str
    color: str
    result: str
    height: int
    paths: Sequence[tuple[str, str]]
    words: str


@dataclass(frozen=True)
class Race:
    """What the page shows. legend: (colour, words); label: the row whose answer it is; answer:
    (text, colour, "" for the target's own); counts: (colour, words) of its tokens; notes: what a
    reader must know, a sentence each."""

    prompt: str
    question: str
    lanes: Sequence[Lane]
    legend: Sequence[tuple[str, str]]
    label: str
    answer: Sequence[tuple[str, str]]
    counts: Sequence[tuple[str, str]]
    notes: Sequence[str]


@dataclass(frozen=True)
class Names:
    """Drafter -> label, and -> colour."""

    labels: Mapping[str, str]
    colors: Mapping[str, str]

    @classmethod
    def of(cls, report: dict[str, Any]) -> Names:
        """Colours are those of the rows in every figure; members of a union without a row of
        their own take further ones."""
        colors = plots.color_of(report)
        for lane in report["race"]["lanes"]:
            for name in lane["drafters"]:
                colors.setdefault(name, plots.COLORS[len(colors) % len(plots.COLORS)])
        return cls({row["name"]: row["label"] for row in report["drafters"]}, colors)

    def color(self, who: int, lane: Found, own: str) -> str:
        """Of a token by who wrote it (a number of scripts/scoring/race.py); own: the target's."""
        if not who:
            return own
        name = _single(who, lane)
        return SEVERAL if name is None else self.colors[name]

    def label(self, who: int, lane: Found) -> str:
        """Who proposed a token."""
        name = _single(who, lane)
        return "several drafters" if name is None else self.labels.get(name) or scored.label(name)


def _single(who: int, lane: Found) -> str | None:
    """The one drafter that proposed a token; None where several did."""
    place = who.bit_length() - 1
    return str(lane["drafters"][place]) if who == 1 << place else None


def drawn(report: dict[str, Any]) -> Race | None:
    """The race of a report; None where it has none, as those of version 0.1."""
    found = report.get("race")
    if not found:
        return None
    names, lanes = Names.of(report), found["lanes"]
    by_name = {lane["name"]: lane for lane in lanes}
    shown, best = _shown(lanes), by_name[found["drafter"]]
    slowest = max(lane["seconds"] for lane in shown)
    return Race(
        prompt=f"{found['prompt_id']} ({found['category']})",
        question=textwrap.shorten(found["question"], QUESTION, placeholder=" …"),
        lanes=[
            Lane(
                label="plain decoding" if lane["name"] == NONE else names.labels[lane["name"]],
                color=names.colors[lane["name"]],
                result=_result(lane, by_name.get(NONE)),
                height=_height(lane),
                paths=_paths(lane, FAR * lane["seconds"] / slowest, names),
                words=f"{names.labels[lane['name']]}: {_words(lane)}",
            )
            for lane in shown
        ],
        legend=_legend(shown, names),
        label=names.labels[best["name"]],
        answer=[(text, names.color(who, best, "")) for text, who in found["answer"]],
        counts=_counts(best, names),
        notes=_notes(report["settings"], len(lanes) - len(shown)),
    )


def _notes(settings: dict[str, Any], left_out: int) -> list[str]:
    """What else must be said of the picture. left_out: rows without a lane."""
    notes = ["One prompt has no interval: what a drafter is worth, the table says."]
    if settings["temperature"] > 0:
        notes.append("Above T = 0 every row draws an answer of its own, long or short.")
    if settings["batch_size"] > 1:
        notes.append("Prompts of a batch share the time of their passes.")
    if left_out:
        notes.append(f"{left_out} slower rows stand in the table alone.")
    return notes


def _rate(lane: Found) -> float:
    """Tokens per second of decoding: the prefill's token is not its work."""
    return float((lane["tokens"] - 1) / lane["seconds"])


def _shown(lanes: Sequence[Found]) -> list[Found]:
    """Plain decoding and the fastest of the others, the fastest first."""
    order = sorted(lanes, key=_rate, reverse=True)
    kept = [lane for lane in order if lane["name"] != NONE][: MOST - 1]
    return [lane for lane in order if lane["name"] == NONE or lane in kept]


def _result(lane: Found, plain: Found | None) -> str:
    """1.28× · 81.3 tokens/s; without the factor for plain decoding itself."""
    speed = f"{_rate(lane):.1f} tokens/s"
    return speed if plain in (None, lane) else f"{_rate(lane) / _rate(plain):.2f}× · {speed}"


def _height(lane: Found) -> int:
    """Tokens of the fullest pass; 1 where passes are not known."""
    return max((len(tokens) for tokens in lane["passes"] or []), default=1)


def _paths(lane: Found, wide: float, names: Names) -> list[tuple[str, str]]:
    """(colour, SVG path) of a strip of `wide` units. A pass is a column as wide as the mean pass:
    its own token below, the accepted ones above. A server's answer is one bar."""
    high, cells = _height(lane), dict[str, list[str]]()
    columns = lane["passes"] or [[1]]
    step = wide / len(columns)
    for number, tokens in enumerate(columns):
        for level, who in enumerate(sorted(tokens, key=bool)):
            top = CELL * (high - 1 - level) + 1
            across = step if lane["passes"] is None else FILLED * step
            cell = f"M{number * step:.0f} {top}h{across:.0f}v{CELL - 2}h-{across:.0f}z"
            cells.setdefault(names.color(who, lane, OWN), []).append(cell)
    return [(color, "".join(paths)) for color, paths in cells.items()]


def _words(lane: Found) -> str:
    """A strip in words."""
    what = f"{lane['tokens'] - 1} tokens in {lane['seconds']:.2f} s"
    if lane["passes"] is None:
        return what
    accepted = sum(bool(who) for tokens in lane["passes"] for who in tokens)
    return f"{what} and {len(lane['passes'])} target passes; {accepted} tokens from the draft"


def _counted(lane: Found) -> list[tuple[int, int]]:
    """(who, tokens) of what was accepted."""
    return sorted(Counter(who for tokens in lane["passes"] or [] for who in tokens if who).items())


def _legend(lanes: Sequence[Found], names: Names) -> list[tuple[str, str]]:
    """(colour, words): the target's own tokens, and whatever has no lane of its own."""
    found = {OWN: "the target's own token", "": "accepted tokens have their drafter's colour"}
    known = {names.colors[lane["name"]] for lane in lanes}
    for lane in lanes:
        for who, _ in _counted(lane):
            color = names.color(who, lane, OWN)
            if color not in known:
                found[color] = f"accepted from {names.label(who, lane)}"
    return list(found.items())


def _counts(lane: Found, names: Names) -> list[tuple[str, str]]:
    """Of an answer: accepted tokens by drafter, then the target's own, without a colour."""
    accepted = [
        (names.color(who, lane, ""), f"{count} accepted from {names.label(who, lane)}")
        for who, count in _counted(lane)
    ]
    own = lane["tokens"] - sum(count for _, count in _counted(lane))
    return [*accepted, ("", f"{own} of the target's own")]
