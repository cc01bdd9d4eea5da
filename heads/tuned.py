"""How a head drafts best on some machine: decode.json beside the head, written by
scripts/tune.py.

It changes only the shape of the draft, never a weight, so the head's own hashes stay valid; it
names the card it was measured for, and a head that was replaced since is not decoded with old
settings. The file is foreign until `read` has checked every field.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from outrider.conf.errors import UserError
from outrider.conf.typed import from_json
from outrider.decode.models.identity import sha256_weights
from outrider.heads.config import Levels, Nodes, Width
from outrider.heads.names import CARD, DraftSpec

DECODE = "decode.json"


@dataclass(frozen=True)
class DraftSettings:
    """The shape of a draft. shape: "chain" or "tree". depth: levels (a chain's K). nodes: of a
    tree. width: nodes that a dynamic tree expands per level. None: as the head itself has it."""

    shape: Literal["chain", "tree"]
    depth: Levels | None = None
    nodes: Nodes | None = None
    width: Width | None = None

    def draft(self, requested: DraftSpec | None = None) -> DraftSpec:
        """Return `requested` (None: anything) in this shape."""
        return replace(requested or DraftSpec(), **self.__dict__)

    def to_json(self) -> dict[str, Any]:
        """Return the fields that say something."""
        return {k: v for k, v in asdict(self).items() if v is not None}

    def __str__(self) -> str:
        if self.shape == "chain":
            return f"chain K={self.depth}" if self.depth else "chain"
        sizes = (("nodes", self.nodes), ("depth", self.depth), ("width", self.width))
        parts = [f"{n} nodes" if k == "nodes" else f"{k} {n}" for k, n in sizes if n]
        return " ".join(["tree", ", ".join(parts)]).strip()


@dataclass(frozen=True)
class Tuned:
    """What tuning chose for one head. best: the fastest of all shapes, faster than plain
    decoding when measured. evidence: where and how it was measured, for people."""

    card_sha256: str
    best: DraftSettings
    chain: DraftSettings | None = None
    tree: DraftSettings | None = None
    evidence: dict[str, Any] = field(default_factory=dict)
    format: Literal[1] = 1

    def validate(self) -> list[str]:
        of_shape = (("chain", self.chain), ("tree", self.tree))
        return [f"{k}: holds settings of a {s.shape}" for k, s in of_shape if s and s.shape != k]

    def to_json(self) -> dict[str, Any]:
        """Return the contents of decode.json."""
        shapes = {"best": self.best, "chain": self.chain, "tree": self.tree}
        given = {name: shape.to_json() if shape else None for name, shape in shapes.items()}
        return {k: v for k, v in {**self.__dict__, **given}.items() if v is not None}

    def draft(self, requested: DraftSpec) -> DraftSpec:
        """Return `requested` with the tuned size of its shape ("" = the best one), where it
        names no size itself and there is one."""
        if requested.depth is not None or requested.nodes is not None:
            return requested
        found = {"": self.best, "chain": self.chain, "tree": self.tree}[requested.shape]
        return requested if found is None else found.draft(requested)


def card_sha256(folder: Path) -> str:
    """Return what identifies the head in `folder`: the hash that its card states;
    of an ordinary model the hash of its weights. "" for folders that hold neither."""
    try:
        if not (folder / CARD).is_file():
            return sha256_weights(folder)
        return str(json.loads((folder / CARD).read_text())["sha256"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError, UserError):
        return ""


def read(folder: Path) -> Tuned | None:
    """Read decode.json of a head folder, checked; None when there is none.

    Raises UserError naming the file when it is damaged, of another format, or tuned for
    another head."""
    path = folder / DECODE
    fix = "run scripts/tune.py again, or delete the file to use the head's own settings"
    try:
        found = json.loads(path.read_text())
        known, problems = from_json(found, Tuned)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read ({type(error).__name__}); {fix}") from None
    if problems:
        raise UserError(f"{path}: {problems[0].partition('; ')[0]}; {fix}")
    if known.card_sha256 != card_sha256(folder):
        raise UserError(f"{path}: was tuned for another head; {fix}")
    return known
