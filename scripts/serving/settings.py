"""An engine's own settings from measured acceptance and the engine's own cost curve: how many
tokens to draft with how many requests at a time, and from where on not to draft at all.

With unconditional rates r_1 .. r_K (the share of cycles that accept d tokens or more) a cycle
of K drafts brings 1 + r_1 + .. + r_K tokens; it costs c(B, K) where a plain step costs c(B, 0).
So drafting runs at (1 + r_1 + .. + r_K) c(B, 0) / c(B, K) times plain decoding. Where the
measurements show that B concurrent requests keep the share s(B) alone of what few accept, every
r_d counts s(B) times.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.conf.errors import UserError
from outrider.scripts.common import files
from outrider.scripts.serving.costs import Costs
from outrider.scripts.tuning.cost import Curve, length_of_chain

FILE = "serving.json"
SGLANG_FILE = "sglang-adaptive.json"
SOUND = 0.9  # share of its acceptance that a sound engine keeps under load, noise apart
SGLANG_ALGORITHMS = ("eagle1", "eagle3")  # those whose steps may change while it runs


@dataclass(frozen=True)
class BatchChoice:
    """With `batch` requests at a time: the best number of draft tokens, 0 for none, and the
    speed to be expected against plain decoding. kept: the share of its acceptance that it reckons
    with (scripts/serving/costs.py)."""

    batch: int
    draft_tokens: int
    speedup: float
    kept: float = 1.0


@dataclass(frozen=True)
class DraftSchedule:
    """What to serve with. rates: acceptance by position, unconditional. choices: for every
    batch from one to the largest that was measured. measured: the batches that were. drafts:
    the numbers of draft tokens that were, with any of them."""

    engine: str
    rates: tuple[float, ...]
    choices: tuple[BatchChoice, ...]
    measured: tuple[int, ...]
    drafts: tuple[int, ...]

    @property
    def draft_tokens(self) -> int:
        """The most that is faster anywhere; 0 when drafting never does."""
        return max(choice.draft_tokens for choice in self.choices)

    @property
    def off_above(self) -> int | None:
        """The largest batch that still drafts; None when every measured one does, 0 when
        none."""
        drafting = [c.batch for c in self.choices if c.draft_tokens]
        last = max(drafting, default=0)
        return None if last == self.choices[-1].batch else last

    @property
    def ranges(self) -> list[tuple[int, int, int]]:
        """(first batch, last batch, draft tokens), ascending and without gaps."""
        out: list[tuple[int, int, int]] = []
        for c in self.choices:
            if out and out[-1][2] == c.draft_tokens:
                out[-1] = (out[-1][0], c.batch, c.draft_tokens)
            else:
                out.append((c.batch, c.batch, c.draft_tokens))
        return out

    def to_json(self) -> dict[str, Any]:
        """The plan as serving.json holds it."""
        return {
            "engine": self.engine,
            "acceptance_by_position": list(self.rates),
            "draft_tokens": self.draft_tokens,
            "off_above": self.off_above,
            "measured_batches": list(self.measured),
            "measured_draft_tokens": list(self.drafts),
            "choices": [
                {
                    "batch": c.batch,
                    "draft_tokens": c.draft_tokens,
                    "speedup": round(c.speedup, 4),
                    "kept": round(c.kept, 4),
                }
                for c in self.choices
            ],
        }


def rates_of(contract: dict[str, Any]) -> tuple[float, ...]:
    """Unconditional acceptance by position out of expected.json. Raises UserError for a
    contract without a draft."""
    rows = contract.get("acceptance_by_position") or []
    try:
        rates = tuple(float(row["mean"]) for row in rows)
    except (TypeError, KeyError, ValueError):
        rates = ()
    if not rates or not all(0 <= rate <= 1 for rate in rates):
        raise UserError(
            "expected: its acceptance_by_position is none (shares from 0 to 1); export again"
        )
    return rates


def speedup(curve: Curve, batch: int, rates: Sequence[float], depth: int) -> float:
    """Speed of `depth` draft tokens against plain decoding."""
    return length_of_chain(rates, depth) * curve(batch, 0) / curve(batch, depth)


def plan(rates: Sequence[float], costs: Costs, at_most: int | None = None) -> DraftSchedule:
    """The best number of draft tokens of every batch from one to the largest measured. Between
    measured points the curve is a straight line; beyond the deepest one nothing is claimed, and
    batches below the smallest are taken as that one.
    Once drafting has stopped paying, larger batches do not draft.

    at_most: a further limit of the drafter. Raises UserError when nothing can be derived.
    """
    curve = costs.curve()
    deepest = min(len(rates), costs.deepest, *([] if at_most is None else [at_most]))
    choices: list[BatchChoice] = []
    off = False
    for batch in range(1, max(curve.knots) + 1):
        share = costs.kept(batch)
        left = [rate * share for rate in rates]
        known = [(speedup(curve, batch, left, k), k) for k in range(1, deepest + 1)]
        best, depth = max(known, key=lambda pair: (pair[0], -pair[1]))
        off = off or best <= 1
        choices.append(
            BatchChoice(batch, 0, 1.0, share) if off else BatchChoice(batch, depth, best, share)
        )
    batches = tuple(sorted(curve.knots))
    return DraftSchedule(costs.engine, tuple(rates), tuple(choices), batches, costs.drafts)


def vllm(found: DraftSchedule) -> dict[str, Any]:
    """Keys of --speculative-config beside model and method; {} when drafting is never faster. The
    last range goes on beyond the largest measured batch."""
    if not found.draft_tokens:
        return {}
    out: dict[str, Any] = {"num_speculative_tokens": found.draft_tokens}
    if len(found.ranges) > 1:
        out["num_speculative_tokens_per_batch_size"] = [list(r) for r in found.ranges]
    return out


def sglang(
    found: DraftSchedule, kind: str, place: str = SGLANG_FILE
) -> tuple[list[str], dict[str, Any] | None]:
    """(flags, the file of --speculative-adaptive-config or None). Its entries name the batch
    from which they hold; 0 steps draft nothing. place: the file as the server finds it."""
    steps = found.draft_tokens
    if not steps:
        return [], None
    flags = sglang_flags(steps, kind)
    if len(found.ranges) == 1 or kind not in SGLANG_ALGORITHMS:
        return flags, None
    table = {str(first): {"candidate_steps": [k]} for first, _, k in found.ranges}
    return [*flags, f"--speculative-adaptive --speculative-adaptive-config {place}"], table


def sglang_flags(draft_tokens: int, kind: str) -> list[str]:
    """How SGLang is told to draft so many tokens. A block head is one step, whose window holds
    the last token too."""
    window = f"--speculative-num-draft-tokens {draft_tokens + 1}"
    if kind in ("dflash", "dspark"):
        return [window]
    return [f"--speculative-num-steps {draft_tokens}", "--speculative-eagle-topk 1", window]


def llamacpp(found: DraftSchedule) -> list[str]:
    """Flags of llama-server. It has no schedule: the number of slots is the limit."""
    if not found.draft_tokens:
        return []
    flags = [
        f"--spec-draft-n-max {found.draft_tokens}",
        "--spec-draft-n-min 0",
        "--spec-draft-p-min 0",
    ]
    return flags if found.off_above is None else [*flags, f"-np {found.off_above}"]


def write(folder: Path, found: DraftSchedule, kind: str) -> None:
    """serving.json, and SGLang's file where there is a schedule."""
    flags, table = sglang(found, kind)
    summary = {
        "vllm": vllm(found),
        "sglang": flags,
        "llama.cpp": llamacpp(found),
    }
    files.write_json(folder / FILE, {"format": 1, **found.to_json(), "serve": summary})
    if table is not None:
        files.write_json(folder / SGLANG_FILE, table)


def summary(found: DraftSchedule, kind: str) -> list[str]:
    """The plan for people, with what each engine wants."""
    lines = [
        f"{first if first == last else f'{first} to {last}'} at a time: "
        + (f"draft {k}, {_span(found, first, last)} times plain" if k else "no drafts")
        for first, last, k in found.ranges
    ]
    lines += _lost(found) + _between(found)
    if not found.draft_tokens:
        return [*lines, "drafting is not faster on this engine: serve without a drafter"]
    flags, table = sglang(found, kind)
    lines += [
        f"vLLM: {json.dumps(vllm(found))}",
        f"SGLang: {' '.join(flags)}",
        *([f"SGLang, {SGLANG_FILE}: {json.dumps(table)}"] if table else []),
        f"llama.cpp: {' '.join(llamacpp(found))}",
    ]
    return lines


def _lost(found: DraftSchedule) -> list[str]:
    """What the engine loses of its acceptance under load, where that is more than noise."""
    least = min(found.choices, key=lambda choice: choice.kept)
    if least.kept >= SOUND:
        return []
    return [
        f"with {least.batch} concurrent requests this engine accepts {least.kept:.0%} of the draft "
        "tokens that it accepts with few: its drafting mixes requests up, see docs/serving.md"
    ]


def _between(found: DraftSchedule) -> list[str]:
    """Which of the chosen numbers of draft tokens nobody measured."""
    chosen = {c.draft_tokens for c in found.choices if c.draft_tokens}
    if not (unseen := sorted(chosen - set(found.drafts))):
        return []
    which = ", ".join(map(str, unseen))
    return [
        f"{which} draft tokens were not measured but lie on a line between measured ones, and an "
        "engine's costs have steps: add rows of every number from 1 on, see docs/serving.md"
    ]


def _span(found: DraftSchedule, first: int, last: int) -> str:
    some = [c.speedup for c in found.choices if first <= c.batch <= last]
    low, high = f"{min(some):.2f}", f"{max(some):.2f}"
    return low if low == high else f"{low} to {high}"
