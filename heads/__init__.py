"""Draft heads: HEADS is the only place where their names meet their classes; resolve_drafter reads a drafter's name."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from conf.errors import UserError
from decode.adaptive import Adaptive
from decode.drafters import Drafter, NGram, NoDraft
from decode.monitor import Alert, Monitor
from decode.target import Target
from heads import tuned
from heads.base import Batch, Head, HeadConfig, LossOut
from heads.checkpoint import CARD, load_head, save_head
from heads.eagle import Eagle1Head, Eagle3Head
from heads.hydra_heads import HydraHeads
from heads.medusa import MedusaHead
from heads.medusa2 import Medusa2Head
from heads.plain import is_plain, plain_drafter
from heads.small_lm import SmallLM

__all__ = ["HEADS", "Batch", "Head", "HeadConfig", "LossOut", "find_head", "load_head", "resolve_drafter", "save_head"]

HEADS: dict[str, type[Head]] = {
    "medusa": MedusaHead,
    "medusa2": Medusa2Head,
    "hydra_heads": HydraHeads,
    "eagle1": Eagle1Head,
    "eagle3": Eagle3Head,
    "small_lm": SmallLM,
}
SHAPES = ("chain", "tree")
ADAPTIVE, DRAWS = "@adaptive", ("@sampled", "@fixed")
WATCHED = {"@monitor": False, "@fallback": True}


def resolve_drafter(spec: str, target: Target) -> Drafter:
    """A drafter by name: "none", "ngram", a run folder, a head folder, or any smaller model with the target's tokenizer
    (a transformers folder or a Hugging Face repository); all but the first two with "@chain" or "@tree".

    Where scripts/tune.py has left its choice in the head's folder, that is how the head drafts; "@chain:4" or
    "@tree:16" (levels, nodes; "ngram@4" too) ask for something else. "@monitor" behind a tuned drafter warns when a
    request stays below break-even, "@fallback" decodes it plainly then (decode.monitor).
    Where T > 0 a head draws the candidates of its tree without replacement ("@sampled" behind a head, or its tree, asks
    for it where head.tree_draw was fixed); "@fixed" takes the most probable ones instead.
    "@adaptive" behind any of them but "none" lets every row draft as deep as its own acceptance so far pays for
    (decode.adaptive). The drafter's name is `spec`. Raises UserError for anything else, for a tree on a target that
    takes chains only, for a head of another target, and for a model with another tokenizer.
    """
    plain, at, last = spec.rpartition("@")
    if at + last in WATCHED:
        return watched(resolve_drafter(plain, target), spec, WATCHED[at + last])
    if spec.endswith(ADAPTIVE):
        plain = spec.removesuffix(ADAPTIVE)
        if plain == "none" or plain.endswith(ADAPTIVE):
            raise UserError(f"drafters: {spec}: there is no draft length to adapt; write {plain}")
        adaptive = Adaptive(resolve_drafter(plain, target))
        adaptive.name = spec
        return adaptive
    drawn = next((how for how in DRAWS if spec.endswith(how)), "")
    path, _, shape = spec.removesuffix(drawn).partition("@")
    if path in ("none", "ngram"):
        if drawn:
            raise UserError(f"drafters: {spec}: {path} has no tree to draw; write {path}")
        drafter: Drafter = NoDraft() if path == "none" else NGram()
        if path == "ngram" and re.fullmatch(r"[1-9]\d?", shape):
            drafter = NGram(depth=int(shape))
        elif shape:
            raise UserError(f"drafters: {spec}: {path} has no shape to choose; write {path}")
    else:
        asked = tuned.asked(shape)
        shape = asked.shape if asked else shape
        if shape not in ("", *SHAPES):
            raise UserError(f"drafters: {spec}: unknown shape {shape!r}; write {path}@chain or {path}@tree, "
                            "each with @adaptive behind it for an adaptive draft length")  # fmt: skip
        model = is_plain(path) and not (Path(path).expanduser() / CARD).is_file()
        head = None if model else load_head(find_head(path), target)
        if shape == "tree" and target.support != "tree":
            raise UserError(f"drafters: {spec}: this target takes chains only; write {path}@chain")
        if drawn:
            if shape == "chain":
                raise UserError(f"drafters: {spec}: a chain is drawn where T > 0 anyway; write {path}@chain")
            if head is None:
                raise UserError(f"drafters: {spec}: {drawn} is for trained heads; leave it out")
            head.draw_trees(drawn[1:])
            shape = shape or "tree"
        left = tuned.read(find_head(path)) if head else None
        settings = asked or (left.choose(shape) if left else None)
        if head:
            drafter = tuned.drafter(head, target, settings) if settings else head.drafter(target, shape or None)
        else:
            drafter = plain_drafter(path, target, shape or None)
            if settings and settings.shape == "chain" and settings.depth:
                drafter = tuned.shortened(drafter, settings.depth)
        drafter.break_even = left.break_even if left else None  # type: ignore[attr-defined]
    drafter.name = spec
    return drafter


def watched(drafter: Drafter, spec: str, fallback: bool) -> Monitor:
    """`drafter` under a monitor of its acceptance that warns on stderr, once per run, or falls back.

    Raises UserError where nobody has measured its break-even.
    """
    limit = getattr(drafter, "break_even", None)
    if limit is None:
        raise UserError(f"drafters: {spec}: its break-even is not known on this machine; run scripts/tune.py first")
    monitor = Monitor(drafter, limit, fallback=fallback)
    monitor.name = spec

    def told(alert: Alert) -> None:
        if len(monitor.alerts) == 1:
            what = "it is decoded plainly for a while" if fallback else "@fallback in place of @monitor would stop that"
            print(f"warning: {spec}: {alert}; {what}", file=sys.stderr)

    monitor.on_alert = told
    return monitor


def find_head(path: str) -> Path:
    """The head folder that `path` means: itself, or of a run folder head/ (final), else best/, else the newest
    checkpoint. Raises UserError when there is none."""
    folder = Path(path).expanduser()
    steps = [p for p in folder.glob("checkpoints/step-*") if re.fullmatch(r"step-\d+", p.name)]
    newest = sorted(steps, key=lambda p: int(p.name[5:]), reverse=True)
    for place in (folder, folder / "head", folder / "best", *newest):
        if (place / CARD).is_file():
            return place
    if folder.is_dir():
        raise UserError(f"drafters: {path}: the folder holds no head (no {CARD}, head/, best/ or checkpoints/); "
                        "finish the training run, or give another folder")
    raise UserError(f"drafters: {path}: neither none, ngram nor an existing folder; give a run folder, a head folder, "
                    "or a model with the target's tokenizer")  # fmt: skip
