"""What scripts/validate.py finds out before a run is paid for. Each check returns lines to
read and whether it passed.

Shape letters: B rows, T positions, F taps, D width, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.decode.drafters import NoDraft
from outrider.decode.engine import Request, generate
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.heads.base import Batch, Head
from outrider.heads.losses import LossWeights
from outrider.heads.names import DraftSpec
from outrider.train import memory
from outrider.train.checkpoint import needed
from outrider.train.data.batches import BatchPlan, JoinedRows
from outrider.train.flops import Counter

# (counts [V], **changed head keys) -> a target and a fresh head on it
Fresh = Callable[..., tuple[Target, Head]]
TOKENS = 24  # different tokens of the oracle's random texts: chance is 1 in 24
NEAR = 0.85  # near-maximal accepted length, as a share of the longest possible


@dataclass
class Check:
    """Result of one check."""

    name: str
    passed: bool = True
    lines: list[str] = field(default_factory=list)

    def say(self, text: str, good: bool = True) -> None:
        """Add a line; a bad one fails the check."""
        self.passed &= good
        self.lines.append(text if good else f"FAILED: {text}")


def mask(rows: JoinedRows, plan: BatchPlan, tokenizer: Any, shown: int = 2) -> Check:
    """The text of some rows, what is supervised in double brackets, for a human eye; and what
    a machine can see.
    """
    check = Check("loss mask")
    share = rows.totals.supervised / max(rows.loss.numel(), 1)
    check.say(
        f"{rows.totals.supervised:,} of {rows.ids.numel():,} tokens supervised ({share:.0%})",
        0 < share < 1,
    )
    if message := rows.supervision():
        check.say(message)
    for row in plan.train[:shown].tolist():
        part = slice(int(rows.offsets[row]), int(rows.offsets[row + 1]))
        ids, on = rows.ids[part].tolist(), rows.loss[part].tolist()
        edges = [0, *(t for t in range(1, len(ids)) if on[t] != on[t - 1]), len(ids)]
        texts = [tokenizer.decode(ids[a:b]) for a, b in zip(edges, edges[1:], strict=False)]
        cut = [t if len(t) <= 160 else f"{t[:90]} ... {t[-60:]}" for t in texts]
        marked = "".join(f"[[{t}]]" if on[a] else t for t, a in zip(cut, edges, strict=False))
        check.say(f"{rows.where(row)}: {marked!r}")
    return check


class Oracle:
    """A target whose feature at position t is a code of token t + `ahead`; in all else the
    target itself.
    """

    def __init__(self, target: Target, ahead: int) -> None:
        self._target, self._ahead = target, ahead
        table = target.lm_head_weight.detach().float()
        self._table = table / table.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-6)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def features(
        self, ids: Tensor, mask: Tensor, taps: Any, grad: bool = False, position: Any = None
    ) -> Tensor:
        """[B, T, F, D]."""
        message = torch.cat([ids[:, self._ahead :], ids[:, : self._ahead]], 1)
        code = self._table[message].to(self._target.dtype)
        return code[:, :, None].expand(-1, -1, len(taps), -1)


def alignment(fresh: Fresh, levels: int, updates: int = 300) -> Check:
    """A head that is told the true answer by its features must be right everywhere, on random
    texts never seen before: head (or step) i predicts x_{t+2+i}. Told the token before it
    instead, it must not do better than guess, or it reads what it will not have when it
    drafts. Reading or predicting one position too early or too late fails one of them."""
    check = Check("shift alignment")
    for level in sorted({0, levels - 1}):
        found, used = _summary(fresh, level, 2 + level, updates)
        check.say(
            f"head {level} told x[t+{2 + level}]: {found:.0%} right after {used} updates",
            found > 0.95,
        )
        leak, _ = _summary(fresh, level, 1 + level, min(used + 20, updates))
        check.say(
            f"head {level} told x[t+{1 + level}] only: {leak:.0%} right, chance {1 / TOKENS:.0%}",
            leak < 0.4,
        )
    return check


def leak(target: Target, head: Head, batch: Batch) -> Check:
    """For a head that reads tokens alone, and so cannot be told the answer by a feature: the
    logits for a token must not depend on that token or on any behind it, and must depend on
    the one before it."""
    check = Check("shift alignment")
    width, place = batch.ids.shape[1], batch.ids.shape[1] // 2
    on = torch.zeros_like(batch.mask)
    on[:, place] = True

    def logits(changed: slice) -> Tensor:
        ids = batch.ids.clone()
        ids[:, changed] = (ids[:, changed] + 1) % target.vocab_size
        found = head.forced(Batch(ids, torch.ones_like(on), on, batch.sample_ids), target, 1)
        return torch.cat([z for _, _, z in found])

    plain = logits(slice(0, 0))
    ahead, before = (
        float((logits(part) - plain).abs().max())
        for part in (slice(place, width), slice(place - 1, place))
    )
    scale = float(plain.abs().max())
    check.say(
        f"x[t] and all behind it changed: its logits move by {ahead / scale:.2g} of their size",
        ahead == 0,
    )
    check.say(f"x[t-1] changed: they move by {before / scale:.2g}", before > 1e-3 * scale)
    return check


def _summary(fresh: Fresh, level: int, ahead: int, updates: int) -> tuple[float, int]:
    """(share of right guesses of head `level` on a new text, updates used) under an oracle of
    x[t + ahead].
    """
    generator = torch.Generator().manual_seed(level)
    target, _ = fresh(None)
    some = torch.randperm(target.vocab_size, generator=generator)[:TOKENS]
    counts = torch.zeros(target.vocab_size, dtype=torch.int64)
    counts[some] = 1
    target, head = fresh(
        counts,
        draft_vocab=TOKENS,
        loss=LossWeights(hard=1.0),
        feature_loss=0.0,
        confidence=0.0,  # or its gradient holds a small DSpark head at 84 % right
        noise=0.0,
    )
    oracle: Any = Oracle(target, ahead)
    optimizer = torch.optim.AdamW(head.parameters(), lr=2e-3, weight_decay=0.0)
    head.train()
    used, recent = 0, [0.0] * 3
    while used < updates and min(recent) <= 0.97:
        used += 1
        head.begin_step(updates - 1)
        ids = some[torch.randint(TOKENS, (8, 24), generator=generator)].to(target.device)
        real = torch.ones_like(ids, dtype=torch.bool)
        on = (torch.arange(24, device=ids.device) >= 2 + level).expand_as(real)
        optimizer.zero_grad()
        out = head(Batch(ids, real, on, torch.arange(8, device=ids.device)), oracle)
        (out.sum / out.count).backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        recent = [*recent[1:], _top1(out.stats)[level]]  # before the update: a text it has not seen
    return sum(recent) / 3, used


def gradients(target: Target, head: Head, batch: Batch) -> Check:
    """Only the head's own parameters get gradient, and all of them do, after one update at the
    latest.
    """
    check = Check("gradients")
    head.train()
    before = {
        n: p.detach().clone() for n, p in target.model.named_parameters() if not p.requires_grad
    }
    optimizer = torch.optim.SGD(head.parameters(), lr=1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        out = head(batch, target)  # type: ignore[arg-type]
        (out.sum / out.count.clamp(min=1)).backward()
        norms = {
            n: p.grad.norm() if p.grad is not None else None for n, p in head.named_parameters()
        }
        optimizer.step()
    groups: dict[str, list[tuple[str, Any]]] = {}
    for name, p in head.named_parameters():
        groups.setdefault(".".join(name.replace("/", ".").split(".")[:2]), []).append((name, p))
    for name, members in groups.items():
        on = [(n, p) for n, p in members if p.requires_grad]
        idle = [n for n, _ in on if not float(norms[n] or 0.0) > 0]
        total = sum(float(norm) ** 2 for n, _ in on if (norm := norms[n]) is not None) ** 0.5
        size = sum(p.numel() for _, p in members)
        text = f"{name:<28} {size:>13,}  {'trainable' if on else 'frozen':<10} gradient {total:.3g}"
        check.say(text + (f"; none at {', '.join(idle[:3])}" if idle else ""), not idle)
    mine = {id(p) for p in head.parameters()}
    others = [(n, p) for n, p in target.model.named_parameters() if id(p) not in mine]
    wrong = [
        n
        for n, p in others
        if p.requires_grad or p.grad is not None or not torch.equal(p, before[n])
    ]
    text = f"{'target':<28} {sum(p.numel() for _, p in others):>13,}  frozen"
    check.say(text + (f"; but {', '.join(wrong[:3])} would move" if wrong else ""), not wrong)
    return check


def overfit(fresh: Fresh, prompt: list[int], updates: int = 300, lr: float = 2e-3) -> Check:
    """Trained on one answer of the target, the head drafts it nearly whole through the real
    engine.
    """
    check = Check("one-sample overfit")
    target, probe = fresh(None)
    drafter = probe.drafter(target, DraftSpec(shape="chain"))
    ask = Request(prompt[-64:], 8 * (drafter.max_depth + 1))
    text = generate(target, NoDraft(), [ask], Sampling(), eos_ids=()).generations[0].token_ids
    ids = torch.tensor([[*ask.prompt, *text]], device=target.device)
    on = torch.arange(ids.shape[1], device=target.device)[None] >= len(ask.prompt)
    batch = Batch(
        ids, torch.ones_like(on), on, torch.zeros(1, dtype=torch.int64, device=target.device)
    )
    counts = torch.ones(target.vocab_size, dtype=torch.int64)
    counts[torch.tensor(text)] += 1000  # the draft vocabulary shall hold this answer
    target, head = fresh(counts, noise=0.0)
    params = [p for p in head.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=lr, weight_decay=0.0)
    levels, used = 1, 0
    head.train()
    for used in range(1, updates + 1):
        head.begin_step(used)
        head.zero_grad()
        out = head(batch, target)
        (out.sum / out.count).backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        right = _top1(out.stats)
        levels = len(right)
        if min(right) > 0.995:
            break
    head.eval()
    drafter = head.drafter(target, DraftSpec(shape="chain"))
    run = generate(target, drafter, [ask], Sampling(), eos_ids=()).generations[0]
    clean = [c.accepted for c in run.cycles if not c.cut] or [0]
    # Levels that no training step has seen are not asked for.
    least = NEAR * (1 + min(levels, drafter.max_depth))
    got = 1 + sum(clean) / len(clean)
    check.say(f"teacher-forced top-1 {' '.join(f'{r:.0%}' for r in right)} after {used} updates")
    check.say(
        f"accepted length {got:.2f} over {len(clean)} cycles of the engine; "
        f"{1 + drafter.max_depth} is the most, "
        f"{least:.2f} enough for {levels} trained level{'s' * (levels > 1)}",
        got >= least,
    )
    return check


def _top1(stats: dict[str, Tensor]) -> list[float]:
    """Teacher-forced accuracy by head or step."""
    names = sorted((k for k in stats if k.startswith("top1_")), key=lambda k: int(k[5:]))
    return [float(stats[k][0] / stats[k][1].clamp(min=1)) for k in names]


def levels_of(target: Target, head: Head, batch: Batch) -> int:
    """How many heads or steps the training loss has."""
    with torch.no_grad():
        return len(_top1(head(batch, target).stats))


def cost(cfg: Any, target: Target, head: Head, rows: JoinedRows, plan: BatchPlan) -> Check:
    """Memory, time, bytes and FLOPs of the run, from one measured micro-batch of at most four
    rows.
    """
    check = Check("cost of the run")
    head.train()
    peak, part = memory.predict(cfg, target, head, rows, plan), memory.widest(cfg, rows, plan)
    chosen = plan.batch(0)[:: max(1, cfg.batch_size // 4)][:4]
    batch = rows.batch(chosen).to(target.device)
    per_step = float(rows.lengths[plan.train].double().mean()) * cfg.batch_size
    with Counter() as counter:
        head(batch, target).sum.backward()
    flops, seconds = counter.total, float("inf")
    for _ in range(2):
        start = time.perf_counter()
        head(batch, target).sum.backward()
        if target.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = min(seconds, time.perf_counter() - start)
    for p in head.parameters():
        p.grad = None
    tokens = int(batch.mask.sum())
    n = sum(p.numel() for p in head.parameters() if p.requires_grad)
    held = sum(p.numel() * p.element_size() for p in target.model.parameters())
    step = seconds * per_step / tokens
    longest = max(int(rows.lengths[row]) for row in part)
    check.say(
        f"memory: {n:,} trainable parameters, {_size(16 * n)} with gradients and moments in "
        f"float32; target {_size(held)}; peak of one process about {_size(peak.bytes)} with its "
        f"widest pass, {len(part)} rows of {longest} tokens (held "
        f"{_size(peak.held + peak.moments)}, pass {_size(peak.step)}), evaluation not counted"
    )
    check.say(
        f"time: {tokens / seconds:,.0f} tokens/s with {len(chosen)} rows at a time, {step:.2g} s "
        f"per step of {cfg.batch_size} rows in one process, {step * cfg.steps / 60:.3g} minutes "
        f"for {cfg.steps:,} steps, not counting optimizer and evaluation"
    )
    whole = flops / tokens * per_step * cfg.steps
    check.say(
        f"arithmetic: {_si(flops / tokens, 'FLOP')} per token, {_si(whole, 'FLOP')} for the run; "
        f"here {_si(flops / seconds, 'FLOP/s')}"
    )
    room = needed(Path(cfg.out_dir), cfg.save_every, cfg.keep, cfg.steps, head)
    check.say(
        f"disk: head {_size(4 * n)}, checkpoint {_size(12 * n)}, {cfg.out_dir} up to "
        f"{_size(room)}; features are made on the fly: 0 B"
    )
    return check


def _size(count: float) -> str:
    return _si(count, "B", 1024)


def _si(value: float, unit: str, base: int = 1000) -> str:
    """A number with the prefix that fits it."""
    size = 0
    while value >= base and size < 5:
        value, size = value / base, size + 1
    prefix = ("", "K", "M", "G", "T", "P")[size]
    return f"{value:.3g} {prefix}{'i' if prefix and base == 1024 else ''}{unit}"
