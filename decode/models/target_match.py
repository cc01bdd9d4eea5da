"""Whether a target is the one that a head was trained for, before it is fetched."""

from __future__ import annotations

import re
from typing import Any

from outrider.decode.models.config import TargetConfig
from outrider.decode.models.identity import WHOLE, sha256_joined

PART = re.compile(r"model-\d+-of-\d+\.safetensors")  # of weights that are one file or many


def another(trained_for: dict[str, Any], cfg: TargetConfig) -> str:
    """The name of the target that `cfg` would have fetched, where its weights are not those of
    `trained_for`, the target of a head's card. "" where they are, where nothing would be
    fetched, and where only loading can tell."""
    from outrider.decode.models.packages.table import TARGETS

    packed = TARGETS.get(cfg.kind)
    name = packed.name if packed else cfg.name if cfg.kind == "hub" else ""
    if not name or cfg.allow_other or name == trained_for.get("name"):
        return ""
    known = packed.converted if packed else _published(cfg)
    return name if known and known != trained_for.get("weights_sha256") else ""


def _published(cfg: TargetConfig) -> str:
    """Identity.weights_sha256 of a repository by what the hub says of its files; "" where it
    does not answer, or they are laid out in another way."""
    from huggingface_hub import HfApi

    try:
        found = HfApi().model_info(cfg.name, revision=cfg.revision, files_metadata=True)
    except Exception:  # the client's errors and those of its network share no class
        return ""
    files = {one.rfilename: one.lfs for one in found.siblings or []}
    names = [WHOLE] if WHOLE in files else [name for name in files if PART.fullmatch(name)]
    digests = {name: lfs.sha256 for name in names if (lfs := files[name])}
    return sha256_joined(digests) if digests and len(digests) == len(names) else ""
