"""README and docs: every command composes, every link leads to a file and a heading that exist."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.conf.schema import CONF, check
from outrider.scripts import cli
from tests.conf.test_config import ENTRIES

ROOT = CONF.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SCRIPT = re.compile(r"(?:^|.* )(train|scripts)/(\w+)\.py(?: |$)")


def commands(page: Path) -> Iterator[tuple[str, bool]]:
    """(command of ours, whether it is in a block and so whole) of a page."""
    blocks = re.findall(r"^```\n(.*?)^```", page.read_text(), re.M | re.S)
    inline = re.findall(r"`((?:outrider|accelerate launch|torchrun) [^`]+)`", page.read_text())
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    for line, whole in [*((line, True) for line in lines), *((line, False) for line in inline)]:
        line = line.partition("  #")[0].strip()
        if line.startswith("outrider ") or SCRIPT.match(line):
            yield line, whole


def composed(line: str) -> tuple[str, list[str]] | None:
    """(entry, its words) of a command; None where it is cut short or composes nothing."""
    words = shlex.split(line)
    if {"--help", "ls", "VERB", "NAME"} & {*words} or "..." in line or len(words) == 2:
        return None
    if "--launch" in words:
        at = words.index("--launch")
        del words[at : at + 2]
    if words[:2] == ["outrider", "train"]:
        found = cli.trainer(words[2])
        assert found is not None, line
        return Path(found[0]).stem, [*found[1], *words[3:]]
    if words[0] == "outrider":
        module = sys.modules[cli.schema_of(words[1]).__module__]
        return Path(cli.FILES[words[1]][0]).stem, getattr(module, "keyed", list)(words[2:])
    file = next(word for word in words if word.endswith(".py"))
    return Path(file).stem, words[words.index(file) + 1 :]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page(page: Path) -> None:
    problems = []
    for line, whole in commands(page):
        if (found := composed(line)) is not None:
            said = check(found[0], ENTRIES[found[0]], found[1])[1]
            problems += [(line, p) for p in said if whole or "is required" not in p]
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text()):
        file, _, heading = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        if not target.exists():
            problems.append((link, "no such file"))
        elif heading:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.M)
            slugs = {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}
            problems += [] if heading in slugs else [(link, "no such heading")]
    assert not problems, problems
