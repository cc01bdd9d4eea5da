"""What is known of every target that packages carry, read from the JSON files beside this
one."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.decode.models.identity import cache_root

FORMAT = 1  # raise when the conversion changes: older folders are then converted again


@dataclass(frozen=True)
class Wheels:
    """A GGUF file as wheels carry it, cut in order. {n} in the names: number of the part,
    from 1. bytes: of every part but the last, which may be shorter. sha256: of the
    wheels."""

    package: str
    file: str
    member: str
    bytes: int
    sha256: list[str]

    def named(self, pattern: str, number: int) -> str:
        """`package`, `file` or `member` of part `number`."""
        return pattern.format(n=number)


@dataclass(frozen=True)
class PackagedTarget:
    """kind: its name in conf/target. name: of its folder and in tables. weights: what they
    are, in words. repository: where the model was published, under `license`. gguf: {sha256,
    bytes} of the joined file, of which the hash is what is trusted. parameters: numbers that
    are stored. converted: identity.sha256_weights of its folder. config, generation: as
    published. tokenizer: {special: bos, eos, pad and unk
    by their text, more special ones under extra_special_tokens; plain: ids that the GGUF
    calls special and the published tokenizer does not; steps: the parts of a tokenizer.json
    other than vocabulary and added tokens}. ids: of the special tokens. system: what the
    chat template says where a chat has no system turn. vectors: texts with their ids."""

    kind: str
    name: str
    weights: str
    repository: str
    license: str
    wheels: Wheels
    gguf: dict[str, Any]
    parameters: int
    converted: str
    config: dict[str, Any]
    generation: dict[str, Any]
    tokenizer: dict[str, Any]
    ids: dict[str, int]
    system: str
    vectors: list[tuple[str, list[int]]]

    @property
    def folder(self) -> Path:
        """Where the converted model lies: config, safetensors, tokenizer with chat template,
        outrider.json."""
        return cache_root() / self.name

    @property
    def file(self) -> Path:
        """Where the joined GGUF lies."""
        return cache_root() / f"{self.name}.gguf"

    @property
    def ready(self) -> bool:
        """True when this version's conversion is complete in the cache folder."""
        try:
            found = json.loads((self.folder / "outrider.json").read_text())["format"]
        except (OSError, ValueError, KeyError, TypeError):
            return False
        return bool(found == FORMAT)


def read(path: Path) -> PackagedTarget:
    """Return the target of a JSON file."""
    said = json.loads(path.read_text(encoding="utf-8"))
    vectors = [(str(text), list(ids)) for text, ids in said.pop("vectors")]
    return PackagedTarget(
        kind=path.stem, wheels=Wheels(**said.pop("wheels")), vectors=vectors, **said
    )


TARGETS = {path.stem: read(path) for path in sorted(Path(__file__).parent.glob("*.json"))}
