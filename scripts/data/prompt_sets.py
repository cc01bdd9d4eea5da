"""Public sets of prompts by name: conf/prompt_set/NAME.yaml says where one lies, under which
licence, and which column holds what is asked. Packages may bring more of them, and
`prompts=FILE.yaml` takes a description of one's own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from outrider.conf import packages
from outrider.conf.errors import UserError
from outrider.conf.rules import NotEmpty, ZeroOrMore
from outrider.conf.schema import CONF
from outrider.conf.typed import from_json, nearest, raise_all
from outrider.scripts.common.published import Published

GROUP = "prompt_set"  # not `prompts`: Hydra takes a key with a folder's name for a choice of it
SHOWN = ("name", "dataset", "config", "files", "split", "revision", "licence", "tried")


@dataclass(frozen=True)
class PromptSet(Published):
    """A public set of prompts to have answered."""

    word, place = "prompts", "prompts_path"

    # rows of the whole set, about
    rows: ZeroOrMore = 0
    # column with a question, a list of them, or a list of messages (role and content, or from and
    # value), of which the answers are dropped
    column: NotEmpty = "messages"
    # column of more text below a question, where that is not empty
    more: str = ""
    # only rows that have these values: {column: value}
    keep: dict[str, Any] = field(default_factory=dict)
    # characters of a row's turns at most; 0 = any
    longest: ZeroOrMore = 12000
    # prompts that are asked unless num_conversations says otherwise; 0 = all
    take: ZeroOrMore = 0

    @property
    def described(self) -> dict[str, Any]:
        """What says which set it is, for records: not where it was had."""
        return {key: getattr(self, key) for key in SHOWN}


def known() -> dict[str, Path]:
    """The descriptions that are here, by name."""
    return dict(sorted(packages.options(CONF, GROUP).items()))


def is_file(prompts: str) -> bool:
    """Whether `prompts` is meant as a file of prompts rather than as a set's name."""
    path = Path(prompts).expanduser()
    return path.suffix != ".yaml" and (path.is_file() or path.name != prompts or "." in prompts)


def prompt_set(prompts: str) -> PromptSet:
    """The set of that name, or that a YAML file describes. Raises UserError: neither, or a
    description that is none."""
    path = known().get(prompts, Path(prompts).expanduser())
    if path.suffix != ".yaml":
        raise UserError(
            f"prompts: {prompts!r} is neither a file nor a set's name; {nearest(prompts, known())}"
        )
    try:
        content = OmegaConf.to_container(OmegaConf.load(path))
    except (OSError, ValueError) as error:
        raise UserError(f"prompts: {path}: {' '.join(str(error).split())[:200]}") from None
    found, problems = from_json(content, PromptSet)
    raise_all([f"prompts: {path}: {problem}" for problem in problems])
    return found
