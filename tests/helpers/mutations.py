"""Wrong values for every key of a JSON file, one at a time: what the tests of foreign files
share.

A mutation is named as it reads in a failure: "head.config.depth = -1". Outcomes that are
allowed: it works, or one UserError of one line, within a few seconds.
"""

from __future__ import annotations

import contextlib
import copy
import re
import signal
from collections.abc import Callable, Iterator
from typing import Any

from outrider.conf.errors import UserError

LIMIT = 20  # seconds a mutation may take before it counts as a hang; the machine may be busy
DELETED = object()
WRONG: dict[str, Any] = {
    "null": None,
    "true": True,
    "-1": -1,
    "0": 0,
    "3": 3,
    "10**9": 10**9,
    "2**63": 2**63,
    "0.5": 0.5,
    "-1e300": -1e300,
    "NaN": float("nan"),
    "Infinity": float("inf"),
    "empty text": "",
    "text": "x",
    "an interpolation": "${oc.env:HOME}",
    "half a surrogate": "\ud83d",
    "[]": [],
    "[[]]": [[]],
    "[null]": [None],
    "[-1]": [-1],
    "[10**9]": [10**9],
    "{}": {},
    "{x: 1}": {"x": 1},
    "missing": DELETED,
}
Mutation = tuple[str, Any]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of everything inside a JSON value; of a list its first and last entries."""
    if path:
        yield path
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*path, key))
    elif isinstance(value, list) and value:
        for i in sorted({0, len(value) - 1}):
            yield from places(value[i], (*path, i))


def mutations(value: Any) -> Iterator[Mutation]:
    """(name, whole value with one thing changed) for every place: each wrong value, missing,
    and an unknown key."""
    for path in places(value):
        name = ".".join(map(str, path))
        old = value
        for step in path:
            old = old[step]
        for label, wrong in WRONG.items():
            if type(wrong) is type(old) and wrong == old:
                continue
            yield f"{name} = {label}", changed(value, path, wrong)
        if isinstance(old, dict):
            yield f"{name} + unknown key", changed(value, (*path, "zzz"), 1)
        if isinstance(old, list) and old:
            yield f"{name} twice as long", changed(value, path, [*old, *old])


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy of a JSON value with `new` at `path`."""
    out = copy.deepcopy(value)
    holder = out
    for step in path[:-1]:
        holder = holder[step]
    if new is DELETED:
        del holder[path[-1]]
    else:
        holder[path[-1]] = copy.deepcopy(new)
    return out


def outcome(action: Callable[[], Any]) -> str:
    """ "" where the action works or ends in a UserError of one readable line (or one that says
    how many problems it lists below, as for the tensors of a foreign file); else what was
    wrong with it."""
    try:
        with deadline(LIMIT):
            action()
    except UserError as error:
        line, *listed = str(error).split("\n")
        sound = len(line) < 600 and (not listed or re.search(r": \d+ problems:$", line))
        return "" if sound else f"not one line: {str(error)[:700]}"
    except TimeoutError:
        return f"hangs: more than {LIMIT} s"
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]
    return ""


@contextlib.contextmanager
def deadline(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in the main thread when the block takes longer."""

    def late(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
