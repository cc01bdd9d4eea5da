"""What head.json says of a head, every value checked before anything of its size is made."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Self, get_type_hints

from outrider.conf.errors import UserError
from outrider.conf.typed import from_json
from outrider.decode.target import Target
from outrider.heads import earlier


@dataclass(kw_only=True)
class Saved:
    """What a kind of head writes under "head" in head.json (config_json), as types.

    coverage: share of the supervised tokens in the draft vocabulary. calibration: what
    heads.shapes.measure found, {} for a head that was never calibrated.
    """

    config: Any
    coverage: float = 1.0
    calibration: dict[str, Any] = field(default_factory=dict)

    def fits(self, target: Target) -> list[str]:
        """Why no head of `target` was saved so, as "key: what is wrong"; []."""
        return []

    @classmethod
    def read(cls, saved: Any, target: Target, kind: str) -> Self:
        """Parsed JSON of a head of `kind`, every value checked.

        Raises UserError of one line that names the wrong keys.
        """
        if isinstance(saved, dict) and isinstance(saved.get("config"), dict):
            keys: Any = get_type_hints(cls)["config"]
            known = asdict(keys()) if hasattr(keys, "__dataclass_fields__") else {}
            if problems := earlier.left(saved["config"], known):
                raise UserError(f"head.{problems[0]}")
            saved = {**saved, "config": earlier.without_gone(saved["config"], known)}
        value, problems = from_json(saved, cls)
        if not problems and value.config.kind != kind:
            problems = [f"config.kind: {value.config.kind!r} in the card of a {kind} head"]
        problems = problems or value.fits(target)
        if problems:
            lines = [f"head.{line.partition('; set ')[0]}" for line in problems[:3]]
            raise UserError("; ".join(lines))
        return value


def differing(wanted: dict[str, tuple[int, ...]], stored: dict[str, tuple[int, ...]]) -> list[str]:
    """Names in which two sets of shapes differ, each with both shapes."""
    names = [name for name in {**wanted, **stored} if wanted.get(name) != stored.get(name)]
    return [
        f"{n} is {_size(stored.get(n))} in the weights and {_size(wanted.get(n))} by the card"
        for n in names
    ]


def _size(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else str(list(shape))
