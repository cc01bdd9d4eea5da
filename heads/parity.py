"""The parity gate: does the drafter that decodes compute what the training pass computed, also
after save and reload?

"98 % in training, 10 % when served" has many causes: a rotary offset, a feature of the row
before, a cache that keeps what it should forget, a wrong draft vocabulary, a head that was
saved without a part. Each makes two computations differ that must agree, so both are run on
the same text, the target's own greedy answers to some prompts:

- *free-running*: the real engine with a chain drafter; in each cycle the drafter goes on from
its own outputs;
- *teacher-forced*: the training pass over the finished answers (heads/forced.py), for drafts
  of the same depth. What a chain accepts at T = 0 is a function of the text before it, so
  stepping through the answer by what the training pass accepts must give the cycles of the
  engine, one by one. The mean over *all* places is another figure: a cycle starts behind a
  mistake of the drafter, where the text is harder;
- *reloaded*: the engine with the head as it was saved and read back.

Compared are the distributions that drafts are drawn from: at some cycles of a short run at
T = 1 the training pass is given the drafted chain and must have the same distribution at
every level, whether the target accepts the tokens or not. And what the greedy cycles
accepted, one by one, except where the training pass prefers one token over another by no
more than rounding. In float32 one difference fails the gate; in 16 bits the distributions
may be DISTRIBUTION apart on average, a later level not much more than the first, and a
small share of the cycles may differ. The accepted lengths may differ by no more than the
paired interval over prompts, or SLACK.

Shape letters: S levels of a draft, P prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from outrider.decode import stats
from outrider.decode.drafters import Drafter
from outrider.decode.engine import Cycle, Generation, Request, generate
from outrider.decode.fits import unfit
from outrider.decode.rng import Rng
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.decode.tree import DraftTree
from outrider.decode.wrapped import Wrapped
from outrider.heads.base import Head
from outrider.heads.batch import Batch
from outrider.heads.forced import Forced, judge
from outrider.heads.names import DraftSpec

SLACK = 0.05  # of accepted length, below which a difference is not held against a head in 16 bits
SHARE = 0.02  # of cycles that may differ in 16 bits beyond what counts as rounding; none in float32
# Total variation between two distributions. 16 bits: the mean allowed, and in times of the first
# level's what a later one may have on top of a hundredth (a sound EAGLE-3 head has 0.01 at
# every level, one with late rotary positions first 0.01, then 0.05); float32: the most
# allowed.
DISTRIBUTION, RISE, EXACT = 0.1, 3.0, 1e-3
FEWEST = 3  # whole drafts that an answer has room for
PROBES = 3  # cycles per prompt whose distributions are compared


@dataclass(frozen=True)
class PassLimits:
    """What a training pass may take: rows, and padded tokens (0 = no limit); one row in any
    case."""

    rows: int = 8
    tokens: int = 0


@dataclass
class Parity:
    """What the gate found. lengths: name -> accepted length (bonus token counted, loops apart)
    of teacher_forced, free_running and, where it was measured, reloaded. problems: why it
    failed, for the user; [] when it passed."""

    depth: int
    prompts: int
    cycles: int = 0
    lengths: dict[str, stats.Interval] = field(default_factory=dict)
    every_place: float | None = None
    # Per level: total variation, mean and largest.
    distance: list[list[float]] = field(default_factory=list)
    identical: bool | None = None  # the reloaded head wrote the very same drafts
    problems: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether nothing speaks against the head."""
        return not self.problems

    def json(self) -> dict[str, Any]:
        """Plain values for metrics.jsonl and reports."""
        lengths = {k: v.json() for k, v in self.lengths.items()} if self.cycles else {}
        return {
            "passed": self.passed,
            "depth": self.depth,
            "prompts": self.prompts,
            "cycles": self.cycles,
            "accepted_length": lengths,
            "every_place": self.every_place,
            "law_distance": self.distance,
            "reload_identical": self.identical,
            "problems": self.problems,
        }

    def line(self) -> str:
        """A gate that passed, for people who read of many."""
        lengths = ", ".join(
            f"{found.mean:.3f} {name.replace('_', '-')}" for name, found in self.lengths.items()
        )
        return (
            f"parity passed: accepted length {lengths} (chain of {self.depth}, T = 0, "
            f"{self.prompts} prompts, {self.cycles} cycles)"
        )

    def lines(self) -> list[str]:
        """The table for people."""
        if not (self.cycles or self.problems):
            return [
                f"parity, chain of {self.depth}, T = 0, {self.prompts} prompts: every answer "
                "ended before a whole draft fitted in; nothing was compared"
            ]
        out = [
            f"parity, chain of {self.depth}, T = 0, {self.prompts} prompts, "
            f"{self.cycles} cycles; accepted length:"
        ]
        about = {
            "teacher_forced": "the training pass over the same answers",
            "free_running": "decoded by the engine",
            "reloaded": "the same after save and reload",
        }
        for name, found in self.lengths.items():
            spread = f" [{found.low:.3f}, {found.high:.3f}]" if found.low is not None else ""
            out.append(f"  {name.replace('_', '-'):<15} {found.mean:.3f}{spread}  {about[name]}")
        if self.distance:
            out.append(
                "  drafted distributions against the training pass's, total variation: "
                f"{_by_level(self.distance)}"
            )
        return [
            *out,
            *(f"  FAILED: {p}" for p in self.problems),
            *([] if self.problems else ["  passed"]),
        ]


class _Witness(Wrapped):
    """A chain drafter that keeps PROBES whole drafts of every request, the first and the
    last ones: (cycle, tokens [S], distributions [S, Vd]). vocab: what the distributions'
    places mean, see Proposal."""

    vocab: Tensor | None = None

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(drafter)
        self._live = list[int]()
        self.cycles, self.kept = list[int](), list[list[tuple[int, list[int], Tensor]]]()

    def begin(self, prompts: list[Any], sampling: Sampling) -> None:
        self._live += range(len(self.kept), len(self.kept) + len(prompts))
        self.kept += [[] for _ in prompts]
        self.cycles += [0 for _ in prompts]
        super().begin(prompts, sampling)

    def select(self, rows: list[int]) -> None:
        self._live = [self._live[r] for r in rows]
        super().select(rows)

    def propose(self, budget: Tensor, sampling: Sampling, rng: Rng) -> DraftTree:
        tree = super().propose(budget, sampling, rng)
        for row, (index, size) in enumerate(zip(self._live, tree.size.tolist(), strict=True)):
            if tree.proposal is not None and size == self.max_depth:
                if len(self.kept[index]) == PROBES:
                    del self.kept[index][1]
                self.vocab = tree.proposal.vocab
                distributions = tree.proposal.probs[row, tree.proposal.row[row, :size]].cpu()
                tokens = tree.tokens[row, :size].tolist()
                self.kept[index].append((self.cycles[index], tokens, distributions))
            self.cycles[index] += 1
        return tree


def check(
    head: Head,
    target: Target,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    batch_size: int = 8,
    room: PassLimits | None = None,
    reload: Callable[[], Head] | None = None,
) -> Parity:
    """Run the gate for `head` on token `prompts`. max_new_tokens: of an answer; a head that
    drafts deep writes more. batch_size: prompts decoded at a time. room: of a training pass.
    reload: gives the head as it was saved and read back.

    Raises UserError when the saved head cannot be read.
    """
    head.eval()
    room = room or PassLimits()
    depth = int(head.drafter(target, DraftSpec(shape="chain")).max_depth)
    # Cycles at the end of an answer are cut: of shorter ones none would be left to compare.
    limit = max(max_new_tokens, FEWEST * (depth + 1))
    fitting = [(i, p) for i, p in enumerate(prompts) if p and not unfit(target, len(p), limit)]
    requests = [Request(p, limit, id=i) for i, p in fitting]
    found = Parity(depth, len(requests))
    if not requests:
        return found
    runs = {"free_running": _decode(head, target, requests, batch_size)}
    again = reload() if reload else None
    if again is not None:
        found.problems += _lost(head, again)
        runs["reloaded"] = _decode(again, target, requests, batch_size)
        found.identical = runs["reloaded"] == runs["free_running"]
    for name, generations in runs.items():
        texts = [(g.prompt_ids, g.token_ids) for g in generations]
        if name == "reloaded" and found.identical:
            found.lengths[name] = found.lengths["free_running"]
            continue
        tables = _judged(head, target, texts, room, depth)
        if tables is None:  # a head without a teacher-forced pass: only the reload can be compared
            found.cycles = found.cycles or sum(len(g.cycles) for g in generations)
            found.lengths[name] = stats.accepted_length([stats.split(g).clean for g in generations])
            found.problems += ["the reloaded head drafts other tokens"] * (name == "reloaded")
            continue
        replayed = _replayed(tables, generations, depth)
        clean = [[stats.split(g).clean for g in side] for side in (replayed, generations)]
        if name == "free_running":
            found.cycles = sum(map(len, clean[1]))
            found.lengths["teacher_forced"] = stats.accepted_length(clean[0])
            found.every_place = _every_place(tables, generations, depth)
        found.lengths[name] = stats.accepted_length(clean[1])
        decoding = head if name == "free_running" or again is None else again
        distance, lost = _distribution_distance(head, decoding, target, requests, room, batch_size)
        found.distance = distance if name == "free_running" else found.distance
        found.problems += _verdict(
            name, clean, distance, _contradictions(tables, generations), target
        )
        found.problems += _uncompared(name, _blind(tables, generations), lost)
    return found


def _every_place(
    tables: Sequence[Forced], generations: Sequence[Generation], depth: int
) -> float | None:
    """Accepted length of drafts that begin at every token of the answers; None without any."""
    places = torch.cat(
        [t.hit[1 : len(g.token_ids) - depth] for t, g in zip(tables, generations, strict=True)]
    )
    return 1 + float(places.cumprod(1).sum(1).double().mean()) if len(places) else None


def _decode(
    head: Head, target: Target, requests: list[Request], batch_size: int
) -> list[Generation]:
    return generate(
        target,
        head.drafter(target, DraftSpec(shape="chain")),
        requests,
        Sampling(),
        batch_size=batch_size,
    ).generations


def _lost(head: Head, again: Head) -> list[str]:
    """What the saved head does not share with the trained one."""
    if type(head).write is not Head.write:  # saved in a form of its own: its drafts alone can tell
        return []
    mine, other = head.state_dict(), again.state_dict()
    names = [
        n
        for n in {**mine, **other}
        if n not in mine or n not in other or not torch.equal(mine[n].cpu(), other[n].cpu())
    ]
    return (
        [f"the saved head differs from the trained one in {', '.join(names[:4])}"] if names else []
    )


def _batches(
    rows: list[tuple[list[int], int]], target: Target, room: PassLimits
) -> Iterator[tuple[range, Batch]]:
    """Rows (tokens, number of tokens before the supervised ones) as batches that find room,
    in order: which rows, and their batch."""
    start = 0
    while start < len(rows):
        end, width = start, 0
        while end < len(rows) and end - start < room.rows:
            width = max(width, len(rows[end][0]))
            if end > start and room.tokens and width * (end + 1 - start) > room.tokens:
                break
            end += 1
        part = rows[start:end]
        size = torch.tensor([len(r) for r, _ in part])[:, None]
        ids = torch.zeros(len(part), int(size.max()), dtype=torch.int64)
        for b, (tokens, _) in enumerate(part):
            ids[b, : len(tokens)] = torch.tensor(tokens)
        at = torch.arange(ids.shape[1])
        on = (at >= torch.tensor([n for _, n in part])[:, None]) & (at < size)
        yield (
            range(start, end),
            Batch(ids, at < size, on, torch.arange(start, end)).to(target.device),
        )
        start = end


def _judged(
    head: Head,
    target: Target,
    texts: list[tuple[list[int], list[int]]],
    room: PassLimits,
    depth: int,
) -> list[Forced] | None:
    """Per text the tables [n, S], row k: the draft that follows after k generated tokens; None
    when the head has no teacher-forced pass."""
    if type(head).forced is Head.forced:
        return None
    out: list[Forced] = []
    for _, batch in _batches([([*p, *t], len(p)) for p, t in texts], target, room):
        tables = judge(head, batch, target, depth)
        for b in range(batch.ids.shape[0]):
            prompt, text = texts[len(out)]
            part = slice(len(prompt), len(prompt) + len(text))
            out.append(Forced(*(t[b, part].cpu() for t in (tables.hit, tables.sure, tables.seen))))
    return out


def _replayed(
    tables: Sequence[Forced], generations: Sequence[Generation], depth: int
) -> list[Generation]:
    """The answers with the cycles that the training pass makes of them."""
    both = zip(tables, generations, strict=True)
    return [replace(one, cycles=_replay(table, one, depth)) for table, one in both]


def _replay(table: Forced, generation: Generation, depth: int) -> list[Cycle]:
    """The cycles that the training pass makes of an answer; the last, cut ones are left
    out."""
    accepted, size = table.hit.int().cumprod(1).sum(1).tolist(), len(generation.token_ids)
    room, k, out = size if generation.finish == "length" else size + depth, 1, []
    while k < size and accepted[k] < size - k and room - k > depth:
        out.append(Cycle(depth, accepted[k], (0,) * accepted[k], False, k))
        k += accepted[k] + 1
    return out


def _contradictions(tables: list[Forced], generations: list[Generation]) -> tuple[int, int]:
    """(cycles compared, cycles whose accepted tokens the training pass surely contradicts)."""
    compared = wrong = 0
    for table, generation in zip(tables, generations, strict=True):
        for cycle in generation.cycles:
            if cycle.cut:
                continue
            hit, sure, j = table.hit[cycle.start], table.sure[cycle.start], cycle.accepted
            over = bool((sure & ~hit)[:j].any())
            under = j < cycle.proposed and bool(hit[j] & sure[j] & table.seen[cycle.start, j])
            compared, wrong = compared + 1, wrong + (over or under)
    return compared, wrong


def _blind(tables: list[Forced], generations: list[Generation]) -> int:
    """Whole cycles of which the training pass has not looked at every place that was decided:
    the accepted tokens and the one behind them."""
    return sum(
        not bool(table.seen[cycle.start, : min(cycle.accepted + 1, cycle.proposed)].all())
        for table, generation in zip(tables, generations, strict=True)
        for cycle in generation.cycles
        if not cycle.cut
    )


def _uncompared(name: str, blind: int, lost: int) -> list[str]:
    """What is wrong where the training pass said nothing of some cycles and drafted tokens."""
    if not blind + lost:
        return []
    return [
        f"the training pass gave nothing for {blind} cycles and {lost} drafted tokens of "
        f"{_who(name)}, so they were not compared"
    ]


@torch.no_grad()
def _distribution_distance(
    head: Head,
    decoding: Head,
    target: Target,
    requests: list[Request],
    room: PassLimits,
    batch_size: int,
) -> tuple[list[list[float]], int]:
    """Per level [mean, largest] total variation between the distributions that the drafter of
    `decoding` draws from at T = 1 and those of the training pass of `head` over the drawn
    tokens, [] when the drafter states none; and how many of these the training pass did not
    give."""
    witness = _Witness(decoding.drafter(target, DraftSpec(shape="chain")))
    depth = witness.max_depth
    # Some rows leave earlier, so that the state of the others is moved.
    short = [
        replace(r, max_new_tokens=min(r.max_new_tokens, (2 + i % 2) * (depth + 2)))
        for i, r in enumerate(requests)
    ]
    run = generate(target, witness, short, Sampling(temperature=1.0), batch_size=batch_size)  # type: ignore[arg-type]
    rows, distributions = [], []
    for generation, kept in zip(run.generations, witness.kept, strict=True):
        for cycle, tokens, distribution in kept:
            before = [
                *generation.prompt_ids,
                *generation.token_ids[: generation.cycles[cycle].start],
            ]
            rows.append(([*before, *tokens], len(before)))
            distributions.append(distribution)
    found: list[list[float]] = [[] for _ in range(depth)]
    for part, batch in _batches(rows, target, room):
        starts = torch.tensor(
            [b * batch.ids.shape[1] + rows[i][1] for b, i in enumerate(part)], device=target.device
        )
        for flat, level, z in head.forced(batch, target, depth):
            for j, b in (flat[:, None] - level == starts).nonzero().tolist():
                p = _spread(z[j].double().softmax(-1).cpu(), head.ids(), target.vocab_size)
                q = _spread(
                    distributions[part[b]][level].double(), witness.vocab, target.vocab_size
                )
                found[level].append(float((p - q).abs().sum()) / 2)
    lost = len(rows) * depth - sum(map(len, found))
    return [[sum(d) / len(d), max(d)] for d in found if d], lost


def _spread(distribution: Tensor, ids: Tensor | None, size: int) -> Tensor:
    """A distribution over the draft vocabulary as one over all target tokens."""
    return (
        distribution
        if ids is None
        else distribution.new_zeros(size).index_copy_(0, ids.cpu(), distribution)
    )


def _who(name: str) -> str:
    """Whose drafts the engine's run `name` has."""
    return "the drafter" if name == "free_running" else "the saved and reloaded head"


def _verdict(
    name: str,
    clean: list[list[list[Cycle]]],
    distance: list[list[float]],
    cycles: tuple[int, int],
    target: Target,
) -> list[str]:
    """Why the gate fails for the engine's run `name`."""
    who = _who(name)
    wide = target.dtype in (torch.float32, torch.float64)
    problems = []
    most = min(DISTRIBUTION, RISE * distance[0][0] + 0.01) if distance else DISTRIBUTION
    far = [
        largest > EXACT if wide else mean > (most if i else DISTRIBUTION)
        for i, (mean, largest) in enumerate(distance)
    ]
    if any(far):
        where = (
            "already at the first level: it reads another feature, embedding or position than "
            "training does, or another map of the draft vocabulary"
            if far[0]
            else "but not at the first level: its own cache or positions go wrong while "
            "it drafts on"
        )
        problems.append(
            f"{who} draws from other distributions than the training pass, {where}; total "
            "variation "
            f"{_by_level(distance)}"
        )
    if cycles[1] > (0 if wide else max(1, SHARE * cycles[0])):
        problems.append(
            f"{who} accepts other lengths than the training pass at {cycles[1]} of "
            f"{cycles[0]} cycles"
        )
    gap = stats.paired_difference(clean[1], clean[0])
    if (
        gap.low is not None
        and gap.high is not None
        and not gap.low <= 0 <= gap.high
        and abs(gap.mean) > SLACK
    ):
        side = "below" if gap.mean < 0 else "above"
        problems.append(
            f"{who} decodes with an accepted length {abs(gap.mean):.3f} {side} the training pass "
            f"on the same text [{gap.low:.3f}, {gap.high:.3f}]"
        )
    return problems


def _by_level(distance: list[list[float]]) -> str:
    return ", ".join(f"level {i + 1} {mean:.3f}" for i, (mean, _) in enumerate(distance))
