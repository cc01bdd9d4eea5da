"""Check a training run before spending on it.

    outrider validate experiment=NAME data.path=FILE

Takes the keys of the training scripts, for every kind of head. Exit code 0: all checks passed;
1: one failed, and says why; 2: a mistake to mend in the configuration or the data.

    outrider validate dry_run=true experiment=NAME gpus=8 gpu=h100-80gb

With dry_run=true nothing is loaded or read: memory by part and hours on GPUs that are not
here, by formula (train/dry_run). Exit code 0: it fits, 1: it does not, and what to change is
said.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

# train/ is first on sys.path and would shadow libraries
sys.path[0] = str(Path(__file__).resolve().parents[1])

from outrider.train import launch
from outrider.train.config import ValidateConfig as ValidateConfig

if __name__ == "__main__":
    launch.refuse("validate", ValidateConfig)

import torch
from omegaconf import OmegaConf
from torch import Tensor

from outrider.conf.schema import entry
from outrider.conf.typed import convert, raise_all
from outrider.decode.drafters import NoDraft
from outrider.decode.engine import Request, generate
from outrider.decode.models.load import load_target
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.heads.base import Batch, Head
from outrider.heads.batch import hash_u63
from outrider.heads.names import DraftSpec
from outrider.heads.registry import head_class
from outrider.train.accelerator import device_of
from outrider.train.config import TrainConfig
from outrider.train.data.batches import BatchPlan, JoinedRows
from outrider.train.dry_run import report
from outrider.train.setup import first_head, resolve, rows_of

# (counts [V], **changed head keys) -> a target and a fresh head on it
Fresh = Callable[..., tuple[Target, Head]]
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
    """Return the text of some rows, what is supervised in double brackets, for a human eye;
    and what a machine can see."""
    check = Check("loss mask")
    share = rows.totals.supervised / max(rows.loss.numel(), 1)
    check.say(f"{rows.totals.supervised:,} of {rows.ids.numel():,} tokens supervised ({share:.0%})")
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
        count = sum(p.numel() for _, p in members)
        text = (
            f"{name:<28} {count:>13,}  {'trainable' if on else 'frozen':<10} gradient {total:.3g}"
        )
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


def head_config(given: dict[str, Any]) -> Any:
    """Return the typed head keys. Raises UserError with every problem."""
    kind = head_class(str(given.get("kind")))
    value, problems = convert(OmegaConf.create(given), kind.Config)
    raise_all([f"head.{line}" for line in problems])
    return value


@entry("validate", ValidateConfig)
def main(cfg: ValidateConfig) -> int:
    """Run every check; a failed one does not stop the others."""
    run: TrainConfig = replace(cfg, head=head_config(cfg.head))
    if cfg.dry_run:
        fits, said = report.report(report.planned(cfg, run))
        print(said, flush=True)
        return 0 if fits else 1
    kind = head_class(run.head.kind)
    device_of(cfg.device)  # a GPU that is not there is said before anything is loaded
    print(f"[ok] configuration: {kind.kind}, every key known and in range", flush=True)
    target = load_target(run.target, run.dtype, run.device or None)
    rows = rows_of(run.data, target)
    plan = BatchPlan(rows, run.batch_size, run.data.window, run.seed, run.data.skip)

    facts = kind, target, rows.counts(target.vocab_size), plan.per_epoch
    checked = resolve(replace(run, start=""), *facts)  # the checks look at a fresh head
    settled = checked.cfg
    if run.start:  # refused here where its weights have no place
        first_head(resolve(run, *facts), kind, target)
    for note in checked.notes:
        print(f"     {note}", flush=True)

    def fresh(counts: Tensor | None = None, **changes: Any) -> tuple[Target, Head]:
        """Return the target and a fresh head."""
        torch.manual_seed(hash_u63(cfg.seed, "head"))
        keys = settled.head
        known = {f.name for f in dataclasses.fields(keys)}
        keys = replace(keys, **{k: v for k, v in changes.items() if k in known})
        return target, kind.for_target(target, keys, checked.ranked if counts is None else counts)

    failed = []

    def tell(check: Check) -> None:
        print(f"[{'ok' if check.passed else 'FAILED'}] {check.name}", flush=True)
        for line in check.lines:
            print(f"     {line}", flush=True)
        failed.extend([] if check.passed else [check.name])

    tell(mask(rows, plan, target.tokenizer))
    _, head = fresh()
    batch = rows.batch(plan.batch(0)[:4]).to(target.device)
    tell(gradients(target, head, batch))
    tell(overfit(fresh, rows.prompt(int(plan.train[0]))))
    print(
        f"{len(failed)} of 3 checks failed: {', '.join(failed)}"
        if failed
        else "all 3 checks passed",
        flush=True,
    )
    return 1 if failed else 0


if __name__ == "__main__":
    main()
