"""What an evaluation says of a head: its rows in a report.json of scripts/evaluate.py, and the
protocol that they were measured by."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from outrider.conf.errors import UserError

REPORT = "report.json"


@dataclass(frozen=True)
class Row:
    """How a head drafted, and what came of it. shape: "chain of 3", "tree of 16 nodes". mean,
    low, high: accepted length, bonus token counted, with its 95 % interval."""

    shape: str
    mean: float
    low: float
    high: float

    @property
    def is_chain(self) -> bool:
        """Whether it drafted as engines do."""
        return self.shape.startswith("chain")


@dataclass(frozen=True)
class Measured:
    """rows: of one head. prompts: their name. protocol: how they were asked, in a line."""

    rows: tuple[Row, ...]
    prompts: str
    protocol: str

    @property
    def first(self) -> Row:
        """The row that stands for the head: a chain where there is one."""
        return next((row for row in self.rows if row.is_chain), self.rows[0])


def read(path: Path, weights_sha256: str, target_sha256: str) -> Measured:
    """What the report at `path` (or in that folder) says of the head with these weights.

    Raises UserError where it is no report, of another target, or tells nothing of that head.
    """
    path = path / REPORT if path.is_dir() else path
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        theirs, rows = str(report["target"].get("weights_sha256", "")), report["drafters"]
        mine = [row for row in rows if row.get("weights_sha256") == [weights_sha256]]
        found = tuple(row for row in map(_row, mine) if row is not None)
        prompts, protocol = _protocol(report)
    except OSError as error:
        raise UserError(f"report: {path}: {error.strerror}; give OUT of evaluate") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"report: {path} is no report of evaluate ({type(error).__name__}); give its OUT"
        ) from None
    if target_sha256 and theirs != target_sha256:
        raise UserError(f"report: {path} was measured with another target; evaluate with this one")
    if not found:
        raise UserError(
            f"report: {path} measured no head with these weights ({weights_sha256[:12]}); evaluate "
            "this one with this version, or leave report out"
        )
    return Measured(found, prompts, protocol)


def _row(row: dict[str, Any]) -> Row | None:
    """A drafter of the report; None where nothing was measured."""
    length = row["accepted_length"]
    values = [
        float("nan") if length[k] is None else float(length[k]) for k in ("mean", "low", "high")
    ]
    if not all(map(math.isfinite, values)):
        return None
    shape = f"chain of {int(row['max_depth'])}"
    if row["shape"] != "chain":
        shape = f"tree of {int(row['max_nodes'])} nodes"
    return Row(shape, *values)


def _protocol(report: dict[str, Any]) -> tuple[str, str]:
    """(name of the prompts, how they were asked)."""
    how = report["settings"]
    name = PurePath(str(how["prompts"]["path"])).name.removeprefix("suite=")
    heat, sha256 = float(how["temperature"]), str(how["prompts"]["sha256"])[:12]
    words = [
        f"{int(how['num_prompts'])} prompts of {name} (sha256 {sha256})",
        f"temperature {heat:g}" if heat else "greedy",
        f"at most {int(how['max_new_tokens'])} new tokens",
        f"{str(how['dtype'])[:10]}, {int(how['batch_size'])} at a time",
        "the bonus token counted, cycles cut by an end of answer left out",
        "95 % bootstrap intervals over prompts",
    ]
    return name, "; ".join(words)
