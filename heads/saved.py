"""What a head's folder holds: its weights, and in head.json what rebuilds it,
every value checked before anything of its size is made."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self, get_type_hints

from safetensors.torch import save_file
from torch import nn

from outrider.conf.errors import UserError
from outrider.conf.typed import from_json
from outrider.conf.words import LAST
from outrider.decode.target import Target

WEIGHTS = "head.safetensors"
# Keys of a head that left, each with the value that changes nothing (...: any).
LEFT: dict[str, Any] = {
    "tune": ...,
    "lora": ...,
    "init": ...,
    "init_layer": ...,
    "layer": "llama",
    "causal": False,
    "activation_checkpointing": False,
    "draft_vocab_from": "",
    "weights": "decay",
    "least": 0.0,
    "hidden_act": ...,
    "spacing": "even",
}


def is_left(key: str, value: Any) -> bool:
    """Say whether a saved key of a head, or of a group of its keys, may be passed over."""
    name = key.partition(".")[0]
    return name in LEFT and (LEFT[name] is ... or LEFT[name] == value)


@dataclass(kw_only=True)
class Saved:
    """What a kind of head writes under "head" in head.json (config_json), as types.

    coverage: share of the supervised tokens in the draft vocabulary. calibration: what
    heads.shapes.measure found, {} for a head that was never calibrated."""

    config: Any
    coverage: float = 1.0
    calibration: dict[str, Any] = field(default_factory=dict)

    def fits(self, target: Target) -> list[str]:
        """Say why no head of `target` was saved so, as "key: what is wrong"; []."""
        return []

    @classmethod
    def read(cls, saved: Any, target: Target, kind: str) -> Self:
        """Read parsed JSON of a head of `kind`, every value checked.

        Raises UserError of one line that names the wrong keys."""
        problems: list[str] = []
        if isinstance(saved, dict) and isinstance(saved.get("config"), dict):
            known = getattr(get_type_hints(cls)["config"], "__dataclass_fields__", {})
            config = {k: v for k, v in saved["config"].items() if k in known or not is_left(k, v)}
            problems = [
                f"config.{key}: {value!r:.40}; {LAST} is the last that reads it"
                for key, value in config.items()
                if key in LEFT and key not in known
            ]
            saved = {**saved, "config": config}
        if not problems:
            value, problems = from_json(saved, cls)
        if not problems and value.config.kind != kind:
            problems = [f"config.kind: {value.config.kind!r} in the card of a {kind} head"]
        if problems := problems or value.fits(target):
            lines = [f"head.{line.partition('; set ')[0]}" for line in problems[:3]]
            raise UserError("; ".join(lines))
        return value


class Stored(nn.Module):
    """What a head's folder holds: its weights, and in head.json what rebuilds it.
    Saved: what head.json says, as types. kind, cfg, coverage, calibration: see
    heads.base.Head."""

    Saved: ClassVar[type[Any]]
    kind: ClassVar[str]
    cfg: Any
    coverage: float
    calibration: dict[str, Any]

    @classmethod
    def from_json(cls, saved: dict[str, Any], target: Target) -> Self:
        """Make an empty head of the saved shape, ready for load_state_dict, on torch's default
        device. saved: what config_json wrote, or what a stranger wrote in its place.

        Raises UserError, KeyError or TypeError for values that are no head of this kind."""
        known = cls.Saved.read(saved, target, cls.kind)
        head = cls.restored(known, target)
        head.coverage, head.calibration = known.coverage, known.calibration
        return head

    @classmethod
    def restored(cls, known: Any, target: Target) -> Self:
        """Make the empty head that `known`, of the class's own `Saved`, describes.

        Raises UserError where none can be made of it."""
        raise TypeError(f"{cls.__name__} must define restored")

    @classmethod
    def misfits(
        cls, saved: dict[str, Any], target: Target, stored: dict[str, tuple[int, ...]]
    ) -> list[str]:
        """Say what of a weights file (`stored`: name -> shape) is not as a head saved so has
        it. Called under torch.device("meta"), before anything of those sizes is made."""
        empty = cls.from_json(saved, target)
        return differing({k: tuple(v.shape) for k, v in empty.state_dict().items()}, stored)

    def config_json(self) -> dict[str, Any]:
        """Return all that from_json needs to rebuild the module, without the weights, and
        what was measured."""
        return {
            "config": asdict(self.cfg),
            "coverage": self.coverage,
            "calibration": self.calibration,
        }

    def restore_json(self, saved: dict[str, Any]) -> None:
        """Take over from config_json what is measured rather than configured, on resume.

        Raises KeyError for a file that no head wrote."""
        self.coverage, self.calibration = saved["coverage"], saved["calibration"]

    def write(self, folder: Path, finished: bool) -> tuple[str, dict[str, Any]]:
        """Write the weights into an existing folder: (name of the file, what from_json needs
        to read it again). finished: the head as it is used, not a checkpoint to resume from.

        Raises OSError or SafetensorError."""
        state = {k: v.detach().to("cpu").contiguous() for k, v in self.state_dict().items()}
        save_file(state, folder / WEIGHTS)
        return WEIGHTS, self.config_json()


def differing(wanted: dict[str, tuple[int, ...]], stored: dict[str, tuple[int, ...]]) -> list[str]:
    """Name what differs in two sets of shapes, each with both shapes."""

    def shown(shape: tuple[int, ...] | None) -> str:
        return "absent" if shape is None else str(list(shape))

    return [
        f"{n} is {shown(stored.get(n))} in the weights and {shown(wanted.get(n))} by the card"
        for n in {**wanted, **stored}
        if wanted.get(n) != stored.get(n)
    ]
