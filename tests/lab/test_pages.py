"""Every part of a page that a script writes is what the script makes of the committed JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest

from outrider.scripts.common.files import ROOT
from outrider.scripts.lab.pages import cluster, lossless_page, readme, reliability, sampled_versions
from outrider.scripts.lab.rl import gate_page
from outrider.scripts.reports.block import Block

WRITTEN: dict[Block, Callable[[], str]] = {
    **readme.PAGES,
    reliability.BLOCK: lambda: reliability.table(reliability.read(reliability.RESULTS)).markdown(),
    lossless_page.BLOCK: lambda: lossless_page.render(lossless_page.figures()),
    lossless_page.PLACE_BLOCK: lambda: lossless_page.places(
        json.loads(lossless_page.PLACES.read_text())
    ),
    sampled_versions.BLOCK: lambda: sampled_versions.render(sampled_versions.read()),
    cluster.BLOCK: lambda: cluster.page(json.loads(cluster.RESULT.read_text())),
    gate_page.BLOCK: lambda: gate_page.render(json.loads(gate_page.RESULTS.read_text())),
}


@pytest.mark.parametrize("block", WRITTEN, ids=lambda block: block.first.strip("<!-> "))
def test_a_page_shows_what_the_json_holds(block: Block) -> None:
    text = block.page.read_text()
    assert block.put(text, WRITTEN[block]()) == text, "run the command that the page names"


def test_every_part_that_is_written_is_known() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    marked = {
        (page, line)
        for page in pages
        for line in re.findall(r"^<!-- (?!end of ).* -->$", page.read_text(), re.M)
    }
    assert marked == {(block.page, block.first) for block in WRITTEN}


def test_no_result_names_a_folder_of_somebodys_machine() -> None:
    """slim() and the writers of results leave them out."""
    for path in sorted((ROOT / "docs" / "results").rglob("*.json")):
        found = re.search(r'"[^"]*(?:/root|/home)/[^"]*"', path.read_text())
        assert found is None, f"{path.name}: {found[0]}"
