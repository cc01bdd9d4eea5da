"""What head.json says of EAGLE heads."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.decode.target import Target
from outrider.heads.eagle.config import EagleConfig
from outrider.heads.layers.saved import LayeredSaved


@dataclass(kw_only=True)
class EagleSaved(LayeredSaved):
    """See LayeredSaved."""

    config: EagleConfig

    def fits(self, target: Target) -> list[str]:
        """See Saved."""
        found, deep = super().fits(target), target.num_layers
        # EAGLE-3 reads three by default; a shallow target's stand there more than once.
        most = 1 if self.config.kind == "eagle1" else max(3, deep + 1)
        if not 0 < len(self.taps) <= most or not all(0 <= tap <= deep for tap in self.taps):
            found.append(
                f"taps: {self.taps[:9]}; 1 to {most} of the hidden states 0..{deep} are read"
            )
        return found
