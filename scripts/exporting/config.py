"""The keys of scripts/export.py, scripts/check.py, scripts/import_head.py and scripts/push.py."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from outrider.conf.paths import REPOSITORY, missing
from outrider.conf.rules import AboveZero, NotEmpty, OneOrMore, ZeroOrMore, one_of
from outrider.decode.models.config import DTYPES
from outrider.heads.names import HUB
from outrider.heads.registry import FORMATS
from outrider.scripts.common.keys import TargetKeys
from outrider.scripts.common.names import no_drafters, no_prompts

AS_WRITTEN = "as_written"
PUBLISHED = "give the folder of a published head (config.json and its weights)"


@dataclass(frozen=True)
class ExportConfig(TargetKeys):
    """Keys of scripts/export.py."""

    # run folder, head folder or hub:OWNER/NAME[@REVISION] to export
    drafter: str
    # vllm, speculators, sglang, deepspec, transformers or gguf
    format: Annotated[str, one_of(FORMATS)]
    # folder to write
    out: str
    # replace an earlier export in `out`, as a whole
    overwrite: bool = False
    # float32, bfloat16 or float16, with format=gguf also q8_0; bfloat16 holds a bfloat16 target's
    # weights as they are, which float16 rounds; null = as the head was imported, else float32
    dtype: Annotated[str, one_of((*DTYPES, "q8_0"))] | None = None
    # name or folder by which the engine loads the target; empty = its repository, else its
    # folder
    verifier: str = ""
    # with format=gguf: the target's own GGUF file, whose tokenizer the head's file takes
    tokenizer_from: str = ""
    # prompts of the self-check and of expected.json, JSONL as outrider evaluate reads it
    prompts: str = "scripts/prompts/demo.jsonl"
    # how many of them
    num_prompts: OneOrMore = 8
    # most tokens of an answer in expected.json
    max_new_tokens: OneOrMore = 32

    def absent(self) -> list[str]:
        """Return what is named and not there, as "key: value; fix"."""
        return no_drafters([self.drafter]) + no_prompts(self.prompts)

    def validate(self) -> list[str]:
        """Return problems as "key: value; rule; fix"."""
        if self.dtype == "q8_0" and self.format != "gguf":
            return ["dtype: q8_0 is for format=gguf; leave it out"]
        if self.format == "gguf" and not self.tokenizer_from:
            return ["tokenizer_from: is required with format=gguf; give the target's GGUF file"]
        if self.format != "gguf" and self.tokenizer_from:
            return ["tokenizer_from: is for format=gguf; leave it out"]
        return []


@dataclass(frozen=True)
class CheckConfig:
    """Keys of scripts/check.py."""

    # address of the running server, such as http://127.0.0.1:8080
    url: str
    # the exported folder, or its expected.json
    expected: str
    # seconds for one answer
    timeout: AboveZero = 120.0
    # tries after the first
    retries: ZeroOrMore = 4
    # environment variable that holds the server's key; empty = none
    key_env: str = ""
    # JSON to write; empty = none
    out: str = ""

    def absent(self) -> list[str]:
        """Return what is named and not there, as "key: value; fix"."""
        return missing("expected", self.expected, "give an exported folder", "file or folder")


@dataclass(frozen=True)
class ImportConfig(TargetKeys):
    """Keys of scripts/import_head.py."""

    # folder of the published head (config.json and its weights), or hub:OWNER/NAME[@REVISION]
    from_: str
    # head folder to write
    out: str
    # how to read what files cannot show; the probe names the one that fits
    convention: str = AS_WRITTEN
    # try the known conventions on a few prompts
    probe: bool = True
    # prompts of the probe, JSONL as outrider evaluate reads it; some of them are asked
    prompts: str = "scripts/prompts/demo.jsonl"
    # dtype that the target runs in: float32, bfloat16 or float16
    dtype: Annotated[str, one_of(DTYPES)] = "float32"
    # replace a head in `out`, as a whole
    overwrite: bool = False

    def absent(self) -> list[str]:
        """Return what is named and not there, as "key: value; fix"."""
        found = [] if self.from_.startswith(HUB) else [self.from_]
        wrong = [line for one in found for line in missing("from", one, PUBLISHED, "folder")]
        return wrong + no_prompts(self.prompts)


@dataclass(frozen=True)
class PushConfig:
    """Keys of scripts/push.py."""

    # run folder or head folder; the first word of the command
    run: NotEmpty
    # OWNER/NAME on the hub, made where it is not there; the second word
    repository: NotEmpty
    # its licence, by the hub's name for it (apache-2.0, mit, ..)
    license: NotEmpty
    # repository of the target; empty = its name, where that is a repository
    base_model: str = ""
    # data sets that it was trained on, by their repositories; empty = the card has the run's
    # own words about its data
    datasets: list[str] = field(default_factory=list)
    # folder of an export of this head (outrider export), whose files go to the top; empty =
    # none, the head in our own form alone
    export: str = ""
    # make the repository private
    private: bool = False
    # branch to push to, made where it is not there
    revision: NotEmpty = "main"
    # push over files that no push wrote
    overwrite: bool = False

    def absent(self) -> list[str]:
        """Return what is named and not there, as "key: value; fix"."""
        fix = "give the folder of an export"
        return no_drafters([self.run], "run") + (
            missing("export", self.export, fix, "folder") if self.export else []
        )

    def validate(self) -> list[str]:
        """Return problems as "key: value; rule; fix"."""
        found = []
        for key, value in (("repository", self.repository), ("base_model", self.base_model)):
            if value and not REPOSITORY.fullmatch(value):
                fix = f"write OWNER/{value}" if re.fullmatch(r"[\w.-]+", value) else "OWNER/NAME"
                found.append(f"{key}: {value}: is no name of a repository; {fix}")
        return found


def keyed(words: Sequence[str]) -> list[str]:
    """Return the words of a command line, the first two without a key as those of `run` and
    `repository`."""
    found = list(words)
    bare = [word for word in words if "=" not in word and not word.startswith("-")][:2]
    for key, word in zip(("run", "repository"), bare, strict=False):
        quoted = word.replace("\\", "\\\\").replace("'", "\\'")
        found[found.index(word)] = f"{key}='{quoted}'"
    return found
