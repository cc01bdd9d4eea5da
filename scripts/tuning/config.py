"""The keys of scripts/tune.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from outrider.conf.rules import OneOrMore
from outrider.scripts.common.keys import DecodingKeys, LongKeys, PenaltyKeys
from outrider.scripts.common.names import no_drafters, no_prompts


@dataclass(frozen=True)
class TuneConfig(PenaltyKeys, DecodingKeys, LongKeys):
    """Keys of scripts/tune.py."""

    # ngram, a run folder, a head folder, hub:OWNER/NAME[@REVISION] or a smaller model;
    # FOLDER@chain and FOLDER@tree search that shape alone
    drafter: str
    # folder for tune.json
    out: str
    # prompts like those that will be asked: acceptance depends on them
    prompts: str = "scripts/prompts/demo.jsonl"
    # how many of them, from its categories one after the other
    num_prompts: Annotated[int, Ge(2)] = 16
    # longest answer, tokens
    max_new_tokens: Annotated[int, Ge(8)] = 64
    # prompts that are decoded together: what the choice is made for
    batch_size: OneOrMore = 1
    # deepest chain or dynamic tree
    max_depth: OneOrMore = 8
    # largest tree
    max_nodes: OneOrMore = 64
    # settings that are confirmed by measurement
    confirm: OneOrMore = 4
    # write the choice into the head's folder, where it is faster than plain decoding
    write: bool = True

    def absent(self) -> list[str]:
        """Return what is named and not there, as "key: value; fix"."""
        return no_drafters([self.drafter]) + no_prompts(self.prompts)
