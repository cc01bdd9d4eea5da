"""How a head is written and read again."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, Self

from safetensors.torch import save_file
from torch import nn

from outrider.decode.target import Target
from outrider.heads.saved import differing


class Stored(nn.Module):
    """What of a head stands in its folder: its weights, and in head.json what rebuilds it.
    Saved: what head.json says, as types. kind, cfg, coverage, calibration: see
    heads.base.Head."""

    Saved: ClassVar[type[Any]]
    kind: ClassVar[str]
    cfg: Any
    coverage: float
    calibration: dict[str, Any]

    @classmethod
    def from_json(cls, saved: dict[str, Any], target: Target) -> Self:
        """An empty head of the saved shape, ready for load_state_dict.

        saved: what config_json wrote, or what a stranger wrote in its place. The head is made
        on torch's default device, whichever that is now: load_head moves it.

        Raises UserError, KeyError or TypeError for values that are no head of this kind.
        """
        known = cls.Saved.read(saved, target, cls.kind)
        head = cls.restored(known, target)
        head.coverage, head.calibration = known.coverage, known.calibration
        return head

    @classmethod
    def restored(cls, known: Any, target: Target) -> Self:
        """The empty head that `known`, of the class's own `Saved`, describes.

        Raises UserError where none can be made of it."""
        raise TypeError(f"{cls.__name__} must define restored")

    @classmethod
    def misfits(
        cls, saved: dict[str, Any], target: Target, stored: dict[str, tuple[int, ...]]
    ) -> list[str]:
        """What of a weights file (`stored`: name -> shape) is not as a head saved so has it.
        Called under torch.device("meta"), before anything of those sizes is made."""
        empty = cls.from_json(saved, target)
        return differing({k: tuple(v.shape) for k, v in empty.state_dict().items()}, stored)

    def config_json(self) -> dict[str, Any]:
        """All that from_json needs to rebuild the module, without the weights, and what was
        measured.
        """
        return {
            "config": asdict(self.cfg),
            "coverage": self.coverage,
            "calibration": self.calibration,
        }

    def restore_json(self, saved: dict[str, Any]) -> None:
        """Take over from config_json what is measured rather than configured: when a head is
        loaded, and on resume.

        Raises KeyError for a file that no head wrote.
        """
        self.coverage, self.calibration = saved["coverage"], saved["calibration"]

    def write(self, folder: Path, finished: bool) -> tuple[str, dict[str, Any]]:
        """Write the weights into an existing folder: (name of the file, what from_json needs
        to read it again).

        finished: the head as it is used, not a checkpoint to resume from. Raises OSError or
            SafetensorError.
        """
        state = {k: v.detach().to("cpu").contiguous() for k, v in self.state_dict().items()}
        save_file(state, folder / "head.safetensors")
        return "head.safetensors", self.config_json()
