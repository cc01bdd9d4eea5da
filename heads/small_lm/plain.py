"""Any transformers folder or Hugging Face repository as a separate draft model, checked
against the target first.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outrider.decode.draft_model import DraftModel
from outrider.decode.drafters import Drafter
from outrider.decode.models.load import TargetConfig, source_folder
from outrider.decode.target import Target
from outrider.decode.tree import TreeShape
from outrider.heads import shapes
from outrider.heads.base import Head
from outrider.heads.names import DraftSpec
from outrider.heads.small_lm.config import SmallLMConfig
from outrider.heads.small_lm.net import load_draft


class PlainModel(Head):
    """A causal language model that was not trained here, behind the calls that decoding and
    tuning ask of a head.

    Where T > 0 its tree is drawn from its own distribution on a static shape, as a trained
    head's is; the shape assumes that every level is accepted alike (heads.shapes.assumed),
    since nobody has measured the model."""

    kind = "small_lm"
    Config = SmallLMConfig

    def __init__(self, draft: Target, path: str) -> None:
        super().__init__(SmallLMConfig(path=path, shape="tree"))
        self.cfg: SmallLMConfig = self.cfg
        self.draft = draft
        self.calibration: dict[str, Any] = shapes.assumed(self.cfg.depth, alike=True)

    def drafter(self, target: Target, draft: DraftSpec | None = None) -> Drafter:
        """Draft with the model itself, not a copy."""
        form = self.form(target, draft)
        self.draft.packs_weights, self.draft.captures = target.packs_weights, target.captures
        return DraftModel(self.draft, form, self.cfg.path, vocab_size=target.vocab_size)

    def tree(self, nodes: int, depth: int) -> TreeShape:
        """Return a static tree of any size, for every level counts alike."""
        return shapes.tree(shapes.assumed(depth, nodes, alike=True), nodes, depth)


def plain_model(path: str, target: Target) -> PlainModel:
    """Load the causal language model in a folder or repository, in the target's dtype on its
    device. Raises UserError as load_draft does."""
    draft = load_draft(_source(path), target, target.dtype, target.device, f"drafters: {path}")
    return PlainModel(draft, path)


def plain_folder(path: str) -> Path:
    """Return the folder with the files of an ordinary model: itself, or where the
    repository is here.

    Raises UserError when it cannot be fetched."""
    return source_folder(_source(path))


def _source(path: str) -> TargetConfig:
    local = Path(path).expanduser().is_dir()
    return TargetConfig(
        kind="local" if local else "hub", path=path if local else "", name="" if local else path
    )
