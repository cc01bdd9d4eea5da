"""Made-up domains: the questions are templates filled with seeds (domains.yaml), the answers
are the target's own. What a user's traffic is to a head, in small and open to all."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from outrider.scripts.synthesis.write import BlockWriter

FILE = Path(__file__).with_name("domains.yaml")


def domains() -> dict[str, Any]:
    """Every domain with its templates and its seeds, by name."""
    return OmegaConf.to_container(OmegaConf.load(FILE))  # type: ignore[return-value]


def questions(name: str, seed: int) -> list[str]:
    """All questions of a domain, each once, in an order drawn by `seed`."""
    domain = domains()[name]
    seeds: dict[str, list[str]] = domain["seeds"]
    found = [
        template.format(**dict(zip(seeds, chosen, strict=True)))
        for template in domain["templates"]
        for chosen in itertools.product(*seeds.values())
    ]
    random.Random(f"{seed}:{name}").shuffle(found)
    return found


@dataclass
class DomainWriter(BlockWriter):
    """As BlockWriter, but the questions are a domain's, which is the "category" of its rows."""

    domain: str = ""
    requested: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.requested = questions(self.domain, self.seed)

    def block(self, number: int, want: int) -> list[dict[str, Any]]:
        """See BlockWriter."""
        return [{**row, "category": self.domain} for row in super().block(number, want)]

    def _questions(self, number: int, want: int) -> list[str]:
        first = number * self.batch
        return self.requested[first : first + want]
