"""The keys of scripts/push.py."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from outrider.conf.rules import NotEmpty, OneOrMore, one_of
from outrider.decode.models.config import TargetConfig
from outrider.heads.formats import FORMATS
from outrider.scripts.common.absent import no_drafters

AUTO, NONE = "auto", "none"
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


def keyed(words: Sequence[str]) -> list[str]:
    """The words of a command line, the first two without a key as those of `run` and
    `repository`."""
    found = list(words)
    bare = [word for word in words if "=" not in word and not word.startswith("-")][:2]
    for key, word in zip(("run", "repository"), bare, strict=False):
        quoted = word.replace("\\", "\\\\").replace("'", "\\'")
        found[found.index(word)] = f"{key}='{quoted}'"
    return found


@dataclass(frozen=True)
class PushConfig:
    """Keys of scripts/push.py."""

    # run folder, head folder or exported folder; the first word of the command
    run: NotEmpty
    # OWNER/NAME on the hub, made where it is not there; the second word
    repository: NotEmpty
    # the target that the head was trained for
    target: TargetConfig = field(default_factory=TargetConfig)
    # the licence that the head is published under, by the hub's name for it (apache-2.0, mit,
    # ..); empty = that of the base model, where the hub knows it
    license: str = ""
    # repository of the target; empty = its name, where that is a repository
    base_model: str = ""
    # data sets that it was trained on, by their repositories; empty = the card has the run's
    # own words about its data
    datasets: list[str] = field(default_factory=list)
    # OUT of an evaluation of this head, or its report.json, for the accepted length in the
    # card; empty = it says "not measured"
    report: str = ""
    # engine's format of the files at the top: auto = what the newest vLLM reads of such a
    # head, none = the head in our own form alone
    format: Annotated[str, one_of([AUTO, NONE, *FORMATS])] = AUTO
    # folder of that export; where it is not there, or of another head, it is made. Empty =
    # RUN/export-FORMAT
    export: str = ""
    # float32, bfloat16 or float16 of the export; null = as scripts/export.py has it
    dtype: str | None = None
    # prompts of the export's self-check, which stand in expected.json for everybody to read
    prompts: str = "scripts/prompts/demo.jsonl"
    # how many of them
    num_prompts: OneOrMore = 8
    # make the repository private
    private: bool = False
    # branch to push to, made where it is not there
    revision: NotEmpty = "main"
    # push over files that no push wrote
    overwrite: bool = False
    # write what would be uploaded into this folder and upload nothing; empty = upload
    out: str = ""
    # cpu, cuda, cuda:1; null = the GPU when there is one
    device: str | None = None

    def absent(self) -> list[str]:
        """What is named and not there, as "key: value; fix"."""
        there = Path(self.run).expanduser().is_dir()  # an exported folder holds no head of ours
        return [] if there else no_drafters([self.run], "run")

    def validate(self) -> list[str]:
        """Problems as "key: value; rule; fix"."""
        found = []
        for key, value in (("repository", self.repository), ("base_model", self.base_model)):
            if value and not REPOSITORY.fullmatch(value):
                fix = f"write OWNER/{value}" if re.fullmatch(r"[\w.-]+", value) else "OWNER/NAME"
                found.append(f"{key}: {value}: is no name of a repository; {fix}")
        if self.export and self.format == NONE:
            found.append("export: is for an engine's format; leave it out, or give format=")
        return found
