"""How a head drafts best on some machine: decode.json beside the head, written by
scripts/tune.py.

It changes only the shape of the draft, never a weight, so the head's own hashes stay valid; it
names the card it was measured for, and a head that was replaced since is not decoded with old
settings. The file is foreign until `read` has checked every field.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conf.errors import UserError
from decode.models.identity import sha256_weights
from decode.price import FREE, Price
from decode.tree import TreeShape
from heads.checkpoint import CARD
from heads.limits import MOST_DEPTH, MOST_NODES, MOST_WIDTH
from heads.names import Draft

DECODE = "decode.json"
FORMAT = 1
SHAPES = ("best", "chain", "tree", "adaptive")


@dataclass(frozen=True)
class Settings:
    """The shape of a draft. shape: "chain" or "tree". depth: levels (a chain's K). nodes: of a
    tree. width: nodes that a dynamic tree expands per level. paths: ranks of a static tree's
    nodes. price: what a node and a level must bring (decode.price). None: as the head itself
    has it, and no price.
    """

    shape: str
    depth: int | None = None
    nodes: int | None = None
    width: int | None = None
    paths: tuple[tuple[int, ...], ...] | None = None
    price: Price | None = None

    def draft(self, asked: Draft | None = None) -> Draft:
        """`asked` (None: anything) in this shape."""
        return dataclasses.replace(
            asked or Draft(),
            shape=self.shape,
            depth=self.depth,
            nodes=self.nodes,
            width=self.width,
            paths=self.paths,
            price=self.price or FREE,
        )

    def to_json(self) -> dict[str, Any]:
        """The fields that say something."""
        return {k: v for k, v in dataclasses.asdict(self).items() if v is not None}

    @classmethod
    def from_json(cls, data: Any) -> Settings:
        """The inverse, everything checked. Raises ValueError that names the field."""
        if not isinstance(data, dict) or data.get("shape") not in ("chain", "tree"):
            raise ValueError("shape must be chain or tree")
        for key, most in (("depth", MOST_DEPTH), ("nodes", MOST_NODES), ("width", MOST_WIDTH)):
            value = data.get(key)
            if value is not None and (type(value) is not int or not 1 <= value <= most):
                raise ValueError(f"{key} must be a whole number from 1 to {most}")
        paths = data.get("paths")
        if paths is not None:
            ok = isinstance(paths, list) and 0 < len(paths) <= MOST_NODES
            ok = ok and all(isinstance(p, list) and len(p) <= MOST_DEPTH for p in paths)
            if not ok or any(
                type(r) is not int or not 0 <= r < MOST_WIDTH for p in paths for r in p
            ):
                raise ValueError("paths must be lists of ranks")
            try:
                paths = TreeShape.of(paths).paths
            except UserError as error:
                raise ValueError(str(error)) from None
        price = data.get("price")
        if price is not None:
            ok = isinstance(price, dict) and price.keys() <= {"node", "level"}
            if not ok or not all(_tokens(value) for value in price.values()):
                raise ValueError("price must be numbers of tokens, node and level, from 0 on")
            price = Price(**price)
        depth, nodes, width = (data.get(key) for key in ("depth", "nodes", "width"))
        return cls(data["shape"], depth, nodes, width, paths, price)

    def __str__(self) -> str:
        price = f"at {self.price}" if self.price else ""
        if self.shape == "chain":
            words = ["chain", f"K={self.depth}" if self.depth else "", price]
            return " ".join(word for word in words if word)
        parts = [
            f"{self.nodes} nodes" if self.nodes else "",
            f"depth {self.depth}" if self.depth else "",
            f"width {self.width}" if self.width else "",
            price,
        ]
        return " ".join(["tree", ", ".join(p for p in parts if p)]).strip()


def _tokens(value: Any) -> bool:
    """Whether it can be a price."""
    return not isinstance(value, bool) and isinstance(value, int | float) and 0 <= value < 1e6


@dataclass(frozen=True)
class Tuned:
    """What tuning chose for one head. best: the fastest of all shapes. adaptive: the best one
    that has a price. break_even: accepted length (tokens per cycle) below which drafting with
    `best` is slower than plain decoding. pays: whether it was faster when measured.
    evidence: where and how it was measured, for people.
    """

    card_sha256: str
    best: Settings
    chain: Settings | None = None
    tree: Settings | None = None
    break_even: float | None = None
    pays: bool = True
    evidence: dict[str, Any] = field(default_factory=dict)
    adaptive: Settings | None = None

    def to_json(self) -> dict[str, Any]:
        """What stands in decode.json."""
        shapes = {k: getattr(self, k).to_json() for k in SHAPES if getattr(self, k)}
        return {
            "format": FORMAT,
            "card_sha256": self.card_sha256,
            **shapes,
            "break_even": self.break_even,
            "pays": self.pays,
            "evidence": self.evidence,
        }

    def draft(self, asked: Draft) -> Draft:
        """`asked` with the tuned size of its shape ("" = the best one), where it names no size
        itself and there is one, and with the break-even. Where @adaptive is asked for: in the
        best shape with a price, or at that price where a size of that shape is named."""
        known = dataclasses.replace(asked, break_even=self.break_even)
        own, sized = self.adaptive, asked.depth is not None or asked.nodes is not None
        if asked.adaptive and own is not None and asked.shape in ("", own.shape):
            asked = known if own == self.best else asked
            return (
                dataclasses.replace(asked, price=own.price or FREE) if sized else own.draft(asked)
            )
        if sized:
            return known
        found = {"": self.best, "chain": self.chain, "tree": self.tree}[asked.shape]
        return known if found is None else found.draft(known)


def card_sha256(folder: Path) -> str:
    """What tells one head in `folder` from another: the hash that its card states; of an
    ordinary model the hash of its weights. "" for folders that hold neither."""
    try:
        if not (folder / CARD).is_file():
            return sha256_weights(folder)
        return str(json.loads((folder / CARD).read_text())["sha256"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError, UserError):
        return ""


def read(folder: Path) -> Tuned | None:
    """decode.json of a head folder, checked; None when there is none.

    Raises UserError naming the file when it is damaged, of another format, or tuned for
    another head.
    """
    path = folder / DECODE
    fix = "run scripts/tune.py again, or delete the file to use the head's own settings"
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read ({type(error).__name__}); {fix}") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise UserError(f"{path}: not in format {FORMAT}; {fix}")
    if data.get("card_sha256") != card_sha256(folder):
        raise UserError(f"{path}: was tuned for another head than the one in this folder; {fix}")
    limit, evidence = data.get("break_even"), data.get("evidence", {})
    if limit is not None and (
        isinstance(limit, bool) or not isinstance(limit, int | float) or not 1 <= limit < 1e6
    ):
        raise UserError(f"{path}: break_even must be a number from 1 on; {fix}")
    try:
        shapes = {
            k: Settings.from_json(data[k]) if k == "best" or data.get(k) is not None else None
            for k in SHAPES
        }
    except (ValueError, KeyError) as error:
        raise UserError(f"{path}: {error}; {fix}") from None
    known = shapes["adaptive"]
    if known is not None and known.price is None:
        raise UserError(f"{path}: adaptive holds settings without a price; {fix}")
    for name in ("chain", "tree"):
        found = shapes[name]
        if found is not None and found.shape != name:
            raise UserError(f"{path}: {name} holds settings of a {found.shape}; {fix}")
    return Tuned(
        str(data["card_sha256"]),
        shapes["best"],  # type: ignore[arg-type]
        shapes["chain"],
        shapes["tree"],
        limit,
        data.get("pays") is not False,
        evidence if isinstance(evidence, dict) else {},
        known,
    )
