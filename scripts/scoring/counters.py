"""What a running server counts of its speculation, from two looks at its Prometheus page.

The page is another program's: it may be cut, hold no numbers, or count from 0 again because the
server was started anew. What it does not tell is None, and what is wrong with it is said.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

PER_POSITION = re.compile(
    r'accepted_tokens_per_pos(?:_total)?\{[^}]*position="(\d{1,4})"[^}]*\} (\S+)'
)
TOTALS = re.compile(
    r"spec_decode_num_(drafts|draft_tokens|accepted_tokens)(?:_total)?(?:\{.*\})? (\S+)$"
)
NAMES = ("drafts", "draft_tokens", "accepted_tokens")
LINE = 2000  # characters of a page's line: a longer one is no counter


@dataclass(frozen=True)
class Rise:
    """rose: what the counters rose by, as in `read_counters`; None where that is not told. why:
    what is wrong with them, "" where there are none or nothing is."""

    rose: dict[str, Any] | None
    why: str = ""


def read_counters(text: str) -> dict[str, Any] | None:
    """Of a Prometheus page with speculation's counters, summed over a server's engines: those of
    NAMES that it has, and accepted_by_position; None without them."""
    out: dict[str, Any] = {}
    places: dict[int, int] = {}
    for line in text.splitlines():
        if line.startswith("#") or len(line) > LINE:
            continue
        found = PER_POSITION.search(line)
        if found:
            place = int(found[1])
            places[place] = places.get(place, 0) + _counted(found[2])
            continue
        total = TOTALS.search(line)
        if total:
            out[total[1]] = out.get(total[1], 0) + _counted(total[2])
    if "drafts" not in out:
        return None
    return {**out, "accepted_by_position": [places[k] for k in sorted(places)]}


def _counted(text: str) -> int:
    """A counter of a Prometheus page; 0 for NaN, infinity, less than 0 and what is no number."""
    try:
        return max(0, int(float(text)))
    except (ValueError, OverflowError):
        return 0


def rise(before: str | None, after: str | None, names: Collection[str] = NAMES) -> Rise:
    """What the counters rose by between two looks at the page (None: it could not be read).
    names: the ones that are needed."""
    old, new = (None if page is None else read_counters(page) for page in (before, after))
    if new is None:
        return Rise(None, "the server's counters are gone" if old else "")
    if before is None:
        return Rise(None)  # since when they count is not known
    if lacking := [name for name in names if name not in new]:
        return Rise(None, f"the server's counters lack {' and '.join(lacking)}")
    old = old or {}  # they may appear with the first draft
    rose = {name: new[name] - old.get(name, 0) for name in NAMES if name in new}
    # a position that nothing had reached before may have had no counter
    pages = (new["accepted_by_position"], old.get("accepted_by_position", []))
    places = [a - b for a, b in zip_longest(*pages, fillvalue=0)]
    if fell := [name for name, count in rose.items() if count < 0]:
        counts = f"{fell[0]} fell from {old[fell[0]]} to {new[fell[0]]}"
        return Rise(None, f"the server's counter {counts}, as if it had been started anew")
    if min(places, default=0) < 0:
        return Rise(None, "the server's counters of accepted tokens by position fell")
    return Rise(rose | {"accepted_by_position": places})
