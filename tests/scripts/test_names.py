"""Short labels: one name each, no more of the path than it takes to tell drafters apart."""

from __future__ import annotations

import pytest

from outrider.scripts.common.names import clipped, labels


@pytest.mark.parametrize(
    "names, found",
    [
        (["none", "runs/a@tree", "ngram@adaptive"], ["none", "a@tree", "ngram@adaptive"]),
        (["/srv/runs/m/head@tree", "/srv/runs/m/head@chain"], ["m@tree", "m@chain"]),
        (["runs/a/head@tree", "runs/b/best@tree:16"], ["a@tree", "b@tree:16"]),
        (["runs/a/checkpoints/step-40@tree"], ["step-40@tree"]),
        (["old/m@tree", "new/m@tree", "new/n@tree"], ["old/m@tree", "new/m@tree", "n@tree"]),
        (["hf_assisted@runs/d/head"], ["hf_assisted@d"]),
        (["runs/a@chain+ngram", "vllm@http://h:1"], ["a@chain+ngram", "vllm"]),
        (["/m", "m", "a/../m", ""], ["/m", "m", "a/../m", ""]),
    ],
)
def test_labels(names: list[str], found: list[str]) -> None:
    assert labels(names) == found


def test_clipped() -> None:
    assert clipped("short") == "short" and clipped("a" * 20 + "@tree", 11) == "aaaaa…@tree"
    assert len(clipped("b" * 99)) == 30
