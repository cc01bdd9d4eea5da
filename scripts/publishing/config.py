"""The keys of scripts/push.py."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.conf.paths import REPOSITORY, no_folder
from outrider.conf.rules import NotEmpty
from outrider.scripts.common.absent import no_drafters


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
    # OUT of an evaluation of this head, or its report.json, for the accepted length in the
    # card; empty = it says "not measured"
    report: str = ""
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
        """What is named and not there, as "key: value; fix"."""
        fix = "give the folder of an export"
        return no_drafters([self.run], "run") + (
            no_folder("export", self.export, fix) if self.export else []
        )

    def validate(self) -> list[str]:
        """Problems as "key: value; rule; fix"."""
        found = []
        for key, value in (("repository", self.repository), ("base_model", self.base_model)):
            if value and not REPOSITORY.fullmatch(value):
                fix = f"write OWNER/{value}" if re.fullmatch(r"[\w.-]+", value) else "OWNER/NAME"
                found.append(f"{key}: {value}: is no name of a repository; {fix}")
        return found
