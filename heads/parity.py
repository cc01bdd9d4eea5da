"""The parity gate: does the drafter that decodes compute what the training pass computed, also
after save and reload?

"98 % in training, 10 % when served" comes of a rotary offset, a feature of the row before,
a cache that keeps what it should forget. So both are run on the target's own greedy answers
to some prompts:

- *free-running*: the real engine with a chain drafter, which goes on from its own outputs;
- *teacher-forced*: the training pass over the finished answers (Head.teacher_forced: it reads
  the true tokens in place of its own). What a chain accepts at T = 0 is a function of the text
  before it, so stepping through the answer by what the training pass accepts must give the
  engine's cycles;
- *reloaded*: the engine with the head as it was saved and read back.

Compared are the distributions that drafts are drawn from, at some cycles of a short run at
T = 1, and what the greedy cycles accepted, one by one, beyond rounding. In float32 one
difference fails the gate; in 16 bits see the bounds below.

Shape letters: B rows, T positions, S levels of a draft, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from outrider.decode import stats
from outrider.decode.adaptive import Wrapped
from outrider.decode.checks import unfit
from outrider.decode.drafters import Drafter
from outrider.decode.engine import Cycle, Generation, Request, generate
from outrider.decode.rng import Rng
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.decode.tree import DraftTree
from outrider.heads import vocab
from outrider.heads.base import Head
from outrider.heads.batch import Batch
from outrider.heads.names import DraftSpec

SLACK = 0.05  # of accepted length, below which a difference is forgiven in 16 bits
SHARE = 0.02  # of cycles that may differ in 16 bits beyond rounding; none in float32
# Total variation between two distributions. 16 bits: the mean allowed, and in times of the
# first level's what a later one may have on top of a hundredth (a sound EAGLE-3 head has 0.01
# at every level, one with late rotary positions first 0.01, then 0.05); float32: the most
# allowed.
DISTRIBUTION, RISE, EXACT = 0.1, 3.0, 1e-3
FEWEST = 3  # whole drafts that an answer has room for
PROBES = 3  # cycles per prompt whose distributions are compared
# Share of the largest logit by which two orders of evaluation may differ: the drafter's cached
# passes of few rows and the training pass over whole texts. 16-bit: measured on
# SmolLM2.
ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}


@dataclass(frozen=True)
class PassLimits:
    """What a training pass may take: rows, and padded tokens (0 = no limit); one row in any
    case."""

    rows: int = 8
    tokens: int = 0


@dataclass(frozen=True)
class TeacherForced:
    """hit, sure: [B, T, S] bool at (row, place of the first token to draft, level): the
    training pass drafts the text's token there; and by more than rounding, either way. seen:
    [B, T, S] bool, the place was looked at."""

    hit: Tensor
    sure: Tensor
    seen: Tensor


@torch.no_grad()
def judge(head: Head, batch: Batch, target: Target, levels: int) -> TeacherForced:
    """Return where the supervised text of `batch` is what a chain of `levels` would draft.
    A tie goes to the token that argmax takes, and is not sure."""
    tokens, ids, size = batch.ids.reshape(-1), head.ids(), batch.ids.numel()
    hit, sure, seen = torch.zeros(3, size, levels, dtype=torch.bool, device=tokens.device)
    for flat, level, z in head.teacher_forced(batch, target, levels):
        place = vocab.places(ids, tokens[flat])
        best = z.topk(min(2, z.shape[1]), -1)
        own = z.gather(1, place.clamp(min=0)[:, None])[:, 0].masked_fill(place < 0, -torch.inf)
        right = z.argmax(-1) == place
        lead = torch.where(right, best.values[:, 0] - best.values[:, -1], best.values[:, 0] - own)
        spot = flat - level
        hit[spot, level], seen[spot, level] = right, True
        sure[spot, level] = lead > ROUNDING[target.dtype] * z.abs().amax(-1)
    return TeacherForced(*(t.view(*batch.ids.shape, levels) for t in (hit, sure, seen)))


@dataclass
class Parity:
    """What the gate found. lengths: name -> accepted length (bonus token counted, loops apart)
    of teacher_forced, free_running and, where it was measured, reloaded. problems: why it
    failed, for the user; [] when it passed."""

    depth: int
    prompts: int
    cycles: int = 0
    lengths: dict[str, stats.Interval] = field(default_factory=dict)
    # Per level: total variation, mean and largest.
    distance: list[list[float]] = field(default_factory=list)
    identical: bool | None = None  # the reloaded head wrote the very same drafts
    problems: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Say whether nothing speaks against the head."""
        return not self.problems

    def json(self) -> dict[str, Any]:
        """Return plain values for metrics.jsonl and reports."""
        lengths = {k: v.json() for k, v in self.lengths.items()} if self.cycles else {}
        return {
            "passed": self.passed,
            "depth": self.depth,
            "prompts": self.prompts,
            "cycles": self.cycles,
            "accepted_length": lengths,
            "law_distance": self.distance,
            "reload_identical": self.identical,
            "problems": self.problems,
        }

    def lines(self) -> list[str]:
        """Return the table for people."""
        what = f"parity, chain of {self.depth}, T = 0, {self.prompts} prompts"
        if not (self.cycles or self.problems):
            why = "every answer ended before a whole draft fitted in; nothing was compared"
            return [f"{what}: {why}"]
        out = [f"{what}, {self.cycles} cycles; accepted length:"]
        for name, found in self.lengths.items():
            spread = f" [{found.low:.3f}, {found.high:.3f}]" if found.low is not None else ""
            out.append(f"  {_shown(name):<15} {found.mean:.3f}{spread}")
        if self.distance:
            out.append(
                "  drafted distributions against the training pass's, total variation: "
                f"{_by_level(self.distance)}"
            )
        return out + ([f"  FAILED: {p}" for p in self.problems] or ["  passed"])


def _shown(name: str) -> str:
    return name.replace("_", "-")


def _by_level(distance: list[list[float]]) -> str:
    return ", ".join(f"level {i + 1} {mean:.3f}" for i, (mean, _) in enumerate(distance))


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
        self.inner.begin(prompts, sampling)

    def select(self, rows: list[int]) -> None:
        self._live = [self._live[r] for r in rows]
        self.inner.select(rows)

    def propose(self, budget: Tensor, sampling: Sampling, rng: Rng) -> DraftTree:
        tree = self.inner.propose(budget, sampling, rng)
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

    Raises UserError when the saved head cannot be read."""
    head.eval()
    depth = int(head.drafter(target, DraftSpec(shape="chain")).max_depth)
    # Cycles at the end of an answer are cut: of shorter ones none would be left to compare.
    limit = max(max_new_tokens, FEWEST * (depth + 1))
    fitting = [(i, p) for i, p in enumerate(prompts) if p and not unfit(target, len(p), limit)]
    requests = [Request(p, limit, id=i) for i, p in fitting]
    found = Parity(depth, len(requests))
    if not requests:
        return found
    run = _Run(head, target, requests, room or PassLimits(), batch_size, depth)
    generations = run.answers(head)
    run.compare(found, "free_running", head, generations)
    if reload:
        again = reload()
        found.problems += _lost(head, again)
        other = run.answers(again)
        found.identical = other == generations
        if found.identical:
            found.lengths["reloaded"] = found.lengths["free_running"]
        else:
            run.compare(found, "reloaded", again, other)
    return found


@dataclass(frozen=True)
class _Run:
    """What is asked of `head` and its target. depth: of its chain."""

    head: Head
    target: Target
    requests: list[Request]
    room: PassLimits
    batch_size: int
    depth: int

    def answers(self, head: Head) -> list[Generation]:
        drafter, size = head.drafter(self.target, DraftSpec(shape="chain")), self.batch_size
        return generate(
            self.target, drafter, self.requests, Sampling(), batch_size=size
        ).generations

    def compare(
        self, found: Parity, name: str, decoding: Head, generations: list[Generation]
    ) -> None:
        """Compare what `decoding` drafted, as the engine's run `name`, with the training
        pass."""
        clean = [stats.split(g).clean for g in generations]
        found.cycles = found.cycles or sum(map(len, clean))
        tables = self._tables(generations)
        if tables is None:  # no teacher-forced pass: only the reload can be compared
            found.lengths[name] = stats.accepted_length(clean)
            found.problems += ["the reloaded head drafts other tokens"] * (name == "reloaded")
            return
        judged = _Judged(self.depth)
        for table, generation in zip(tables, generations, strict=True):
            judged.add(table, generation)
        distance, lost = self._distance(decoding)
        if name == "free_running":
            found.lengths["teacher_forced"] = stats.accepted_length(judged.clean)
            found.distance = distance
        found.lengths[name] = stats.accepted_length(clean)
        who = "the drafter" if name == "free_running" else "the saved and reloaded head"
        found.problems += _verdict(who, clean, distance, judged, self.target)
        if judged.blind or lost:
            found.problems.append(
                f"the training pass gave nothing for {judged.blind} cycles and {lost} drafted "
                f"tokens of {who}, so they were not compared"
            )

    def _tables(self, generations: list[Generation]) -> list[TeacherForced] | None:
        """Return for each answer the tables [n, S], row k: the draft that follows after k
        generated tokens; None when the head has no teacher-forced pass."""
        if type(self.head).teacher_forced is Head.teacher_forced:
            return None
        out: list[TeacherForced] = []
        texts = [([*g.prompt_ids, *g.token_ids], len(g.prompt_ids)) for g in generations]
        for rows, batch in _batches(texts, self.target, self.room):
            found = judge(self.head, batch, self.target, self.depth)
            for b, i in enumerate(rows):
                part = slice(texts[i][1], len(texts[i][0]))
                out.append(
                    TeacherForced(*(t[b, part].cpu() for t in (found.hit, found.sure, found.seen)))
                )
        return out

    @torch.no_grad()
    def _distance(self, decoding: Head) -> tuple[list[list[float]], int]:
        """Return for each level [mean, largest] total variation between the distributions
        that the drafter of `decoding` draws from at T = 1 and those of the training pass
        over the drawn tokens, [] when the drafter states none; and how many of these the
        training pass did not give."""
        head, target, depth = self.head, self.target, self.depth
        witness = _Witness(decoding.drafter(target, DraftSpec(shape="chain")))
        # Some rows leave earlier, so that the state of the others is moved.
        short = [
            replace(r, max_new_tokens=min(r.max_new_tokens, (2 + i % 2) * (depth + 2)))
            for i, r in enumerate(self.requests)
        ]
        rows, distributions = [], []
        warm, size = Sampling(temperature=1.0), self.batch_size
        run = generate(target, witness, short, warm, batch_size=size)  # type: ignore[arg-type]
        for answer, kept in zip(run.generations, witness.kept, strict=True):
            for cycle, tokens, distribution in kept:
                before = [*answer.prompt_ids, *answer.token_ids[: answer.cycles[cycle].start]]
                rows.append(([*before, *tokens], len(before)))
                distributions.append(distribution)
        found: list[list[float]] = [[] for _ in range(depth)]

        def spread(distribution: Tensor, ids: Tensor | None) -> Tensor:
            """Spread a distribution over the draft vocabulary to all tokens."""
            if ids is None:
                return distribution
            return distribution.new_zeros(target.vocab_size).index_copy_(0, ids.cpu(), distribution)

        for part, batch in _batches(rows, target, self.room):
            first = [b * batch.ids.shape[1] + rows[i][1] for b, i in enumerate(part)]
            starts = torch.tensor(first, device=target.device)
            for flat, level, z in head.teacher_forced(batch, target, depth):
                for j, b in (flat[:, None] - level == starts).nonzero().tolist():
                    p = spread(z[j].double().softmax(-1).cpu(), head.ids())
                    q = spread(distributions[part[b]][level].double(), witness.vocab)
                    found[level].append(float((p - q).abs().sum()) / 2)
        lost = len(rows) * depth - sum(map(len, found))
        return [[sum(d) / len(d), max(d)] for d in found if d], lost


def _lost(head: Head, again: Head) -> list[str]:
    """Name what the saved head does not share with the trained one."""
    if type(head).write is not Head.write:  # in a form of its own: its drafts alone can tell
        return []
    mine, other = head.state_dict(), again.state_dict()
    both = mine.keys() & other.keys()
    differ = [n for n in both if not torch.equal(mine[n].cpu(), other[n].cpu())]
    names = sorted([*(mine.keys() ^ other.keys()), *differ])
    shown = ", ".join(names[:4])
    return [f"the saved head differs from the trained one in {shown}"] if names else []


def _batches(
    rows: list[tuple[list[int], int]], target: Target, room: PassLimits
) -> Iterator[tuple[range, Batch]]:
    """Yield rows (tokens, number of tokens before the supervised ones) as batches that find
    room, in order: which rows, and their batch."""
    width = max((len(tokens) for tokens, _ in rows), default=1)
    count = max(1, min(room.rows, room.tokens // width if room.tokens else room.rows))
    for start in range(0, len(rows), count):
        part = rows[start : start + count]
        ids = pad_sequence([torch.tensor(tokens) for tokens, _ in part], batch_first=True)
        at = torch.arange(ids.shape[1])
        mask = at < torch.tensor([len(tokens) for tokens, _ in part])[:, None]
        on = mask & (at >= torch.tensor([before for _, before in part])[:, None])
        index = range(start, start + len(part))
        yield index, Batch(ids, mask, on, torch.tensor(index)).to(target.device)


@dataclass
class _Judged:
    """What the training pass says of the engine's cycles. clean: the cycles that it makes
    of the answers itself, loops apart. cycles: whole ones of the engine. wrong: those whose
    accepted tokens it surely contradicts. blind: those of which it has not looked at every
    place that was decided, the accepted tokens and the one behind them."""

    depth: int
    clean: list[list[Cycle]] = field(default_factory=list)
    cycles: int = 0
    wrong: int = 0
    blind: int = 0

    def add(self, table: TeacherForced, generation: Generation) -> None:
        """Judge the cycles of one answer."""
        replayed = replace(generation, cycles=self._replay(table, generation))
        self.clean.append(stats.split(replayed).clean)
        for cycle in generation.cycles:
            if not cycle.cut:
                hit, sure, seen = (t[cycle.start] for t in (table.hit, table.sure, table.seen))
                j = cycle.accepted
                over = bool((sure & ~hit)[:j].any())
                under = j < cycle.proposed and bool(hit[j] & sure[j] & seen[j])
                self.cycles += 1
                self.wrong += over or under
                self.blind += not bool(seen[: min(j + 1, cycle.proposed)].all())

    def _replay(self, table: TeacherForced, generation: Generation) -> list[Cycle]:
        """Return the cycles that the training pass makes of an answer; the last, cut ones
        are left out."""
        accepted = table.hit.int().cumprod(1).sum(1).tolist()
        depth, size, k, out = self.depth, len(generation.token_ids), 1, list[Cycle]()
        room = size if generation.finish == "length" else size + depth
        while k < size and accepted[k] < size - k and room - k > depth:
            out.append(Cycle(depth, accepted[k], False, k))
            k += accepted[k] + 1
        return out


def _verdict(
    who: str,
    clean: list[list[Cycle]],
    distance: list[list[float]],
    judged: _Judged,
    target: Target,
) -> list[str]:
    """Say why the gate fails for the drafts of `who`. clean: the cycles that the engine
    made."""
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
    if judged.wrong > (0 if wide else max(1, SHARE * judged.cycles)):
        problems.append(
            f"{who} accepts other lengths than the training pass at {judged.wrong} of "
            f"{judged.cycles} cycles"
        )
    gap = stats.paired_difference(clean, judged.clean)
    certain = gap.low is not None and gap.high is not None and not gap.low <= 0 <= gap.high
    if certain and abs(gap.mean) > SLACK:
        side = "below" if gap.mean < 0 else "above"
        problems.append(
            f"{who} decodes with an accepted length {abs(gap.mean):.3f} {side} the training pass "
            f"on the same text [{gap.low:.3f}, {gap.high:.3f}]"
        )
    return problems
