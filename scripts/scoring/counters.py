"""What a running server counts of its speculation, from two looks at its Prometheus page.

The page is another program's: it may be cut, hold no numbers, or count from 0 again because
the server was started anew. What it does not tell is None, and what is wrong with it is
said.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

COUNTER = re.compile(
    r"spec_decode_num_(drafts|draft_tokens|accepted_tokens(?:_per_pos)?)(?:_total)?"
    r"(?:\{(.*)\})? (\S+)$"
)
POSITION = re.compile(r'position="(\d{1,4})"')
NAMES = ("drafts", "draft_tokens", "accepted_tokens")
LINE = 2000  # characters of a page's line: a longer one is no counter


@dataclass(frozen=True)
class Rise:
    """rose: what the counters rose by, as in `read_counters`; None where that is not reported.
    why: what is wrong with them, "" where there are none or nothing is."""

    rose: dict[str, Any] | None
    why: str = ""


def read_counters(text: str) -> dict[str, Any] | None:
    """Return the counters of speculation on a Prometheus page, summed over a server's
    engines: those of NAMES that it has, and accepted_by_position; None without them."""
    totals, places = Counter[str](), Counter[int]()
    for line in text.splitlines():
        found = None if line.startswith("#") or len(line) > LINE else COUNTER.search(line)
        if found is None:
            continue
        name, labels, count = found.groups()
        if name in NAMES:
            totals[name] += _counted(count)
        elif place := POSITION.search(labels or ""):
            places[int(place[1])] += _counted(count)
    if "drafts" not in totals:
        return None
    return {**totals, "accepted_by_position": [places[k] for k in sorted(places)]}


def _counted(text: str) -> int:
    """Return a counter of a Prometheus page; 0 for NaN, infinity, less than 0 and what is
    no number."""
    try:
        return max(0, int(float(text)))
    except (ValueError, OverflowError):
        return 0


def rise(before: str | None, after: str | None) -> Rise:
    """Return what the counters rose by between two looks at the page (None: it could not be
    read)."""
    old, new = (None if page is None else read_counters(page) for page in (before, after))
    if new is None:
        return Rise(None, "the server's counters are gone" if old else "")
    if before is None:
        return Rise(None)  # since when they count is not known
    if lacking := [name for name in NAMES if name not in new]:
        return Rise(None, f"the server's counters lack {' and '.join(lacking)}")
    old = old or {}  # they may appear with the first draft
    rose = {name: new[name] - old.get(name, 0) for name in NAMES}
    # a position that nothing had reached before may have had no counter
    pages = (new["accepted_by_position"], old.get("accepted_by_position", []))
    places = [a - b for a, b in zip_longest(*pages, fillvalue=0)]
    if min(*rose.values(), *places) < 0:
        return Rise(None, "the server's counters fell, as if it had been started anew")
    return Rise(rose | {"accepted_by_position": places})
