"""Draft heads: HEADS is the only place where their names meet their classes; resolve_drafter reads a drafter's name."""

from __future__ import annotations

import re
from pathlib import Path

from conf.errors import UserError
from decode.adaptive import Adaptive
from decode.drafters import Drafter, NGram, NoDraft
from decode.target import Target
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
ADAPTIVE = "@adaptive"


def resolve_drafter(spec: str, target: Target) -> Drafter:
    """A drafter by name: "none", "ngram", a run folder, a head folder, or any smaller model with the target's tokenizer
    (a transformers folder or a Hugging Face repository); all but the first two with "@chain" or "@tree".

    "@adaptive" behind any of them but "none" lets every row draft as deep as its own acceptance so far pays for
    (decode.adaptive). The drafter's name is `spec`. Raises UserError for anything else, for a tree on a target that
    takes chains only, for a head of another target, and for a model with another tokenizer.
    """
    if spec.endswith(ADAPTIVE):
        plain = spec.removesuffix(ADAPTIVE)
        if plain == "none" or plain.endswith(ADAPTIVE):
            raise UserError(f"drafters: {spec}: there is no draft length to adapt; write {plain}")
        adaptive = Adaptive(resolve_drafter(plain, target))
        adaptive.name = spec
        return adaptive
    path, _, shape = spec.partition("@")
    if path in ("none", "ngram"):
        if shape:
            raise UserError(f"drafters: {spec}: {path} has no shape to choose; write {path}")
        drafter: Drafter = NoDraft() if path == "none" else NGram()
    else:
        if shape not in ("", *SHAPES):
            raise UserError(f"drafters: {spec}: unknown shape {shape!r}; write {path}@chain or {path}@tree, "
                            "each with @adaptive behind it for an adaptive draft length")  # fmt: skip
        model = is_plain(path) and not (Path(path).expanduser() / CARD).is_file()
        head = None if model else load_head(find_head(path), target)
        if shape == "tree" and target.support != "tree":
            raise UserError(f"drafters: {spec}: this target takes chains only; write {path}@chain")
        drafter = head.drafter(target, shape or None) if head else plain_drafter(path, target, shape or None)
    drafter.name = spec
    return drafter


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
