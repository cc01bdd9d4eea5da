"""The one grammar of drafters' names: every form with what it means, every wrong one with its
line, paths with "@".
"""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.conf.errors import UserError
from outrider.heads.names import DraftSpec, members, parse, split

LEGAL = {
    "none": DraftSpec("none"),
    "ngram": DraftSpec("ngram"),
    "ngram@4": DraftSpec("ngram", depth=4),
    "ngram@4@adaptive": DraftSpec("ngram", depth=4, adaptive=True),
    "ngram@tree": DraftSpec("ngram", "tree"),
    "ngram@tree:16@adaptive": DraftSpec("ngram", "tree", nodes=16, adaptive=True),
    "runs/m+ngram": DraftSpec("runs/m+ngram", parts=(DraftSpec("runs/m"), DraftSpec("ngram"))),
    "runs/m@tree:16@fixed+ngram@tree@adaptive": DraftSpec(
        "runs/m@tree:16@fixed+ngram@tree",
        adaptive=True,
        parts=(DraftSpec("runs/m", "tree", nodes=16, draw="fixed"), DraftSpec("ngram", "tree")),
    ),
    "ngram@4+runs/m+Qwen/Qwen3-0.6B@chain:2": DraftSpec(
        "ngram@4+runs/m+Qwen/Qwen3-0.6B@chain:2",
        parts=(
            DraftSpec("ngram", depth=4),
            DraftSpec("runs/m"),
            DraftSpec("Qwen/Qwen3-0.6B", "chain", depth=2),
        ),
    ),
    "runs/m": DraftSpec("runs/m"),
    "runs/m@chain": DraftSpec("runs/m", "chain"),
    "runs/m@tree": DraftSpec("runs/m", "tree"),
    "runs/m@chain:4": DraftSpec("runs/m", "chain", depth=4),
    "runs/m@tree:16": DraftSpec("runs/m", "tree", nodes=16),
    "runs/m@tree@sampled": DraftSpec("runs/m", "tree", draw="sampled"),
    "runs/m@adaptive": DraftSpec("runs/m", adaptive=True),
    "runs/m@tree:16@fixed@adaptive": DraftSpec(
        "runs/m", "tree", nodes=16, draw="fixed", adaptive=True
    ),
}

ILLEGAL = {
    "": "names no drafter",
    "@tree": "names no drafter",
    "none@tree": "none has no shape to choose; write none",
    "none@adaptive": "there is no draft length to adapt; write none",
    "none@fixed": "none has no distribution to draw from; write none",
    "ngram@chain": "ngram is a chain where no tree is asked for; write ngram, or ngram@K",
    "ngram@0": "ngram has no shape '0'; write ngram, ngram@tree, or ngram@K with K from 1 to 99",
    "ngram@fixed": "ngram has no distribution to draw from; write ngram",
    "ngram@tree@4": "@tree and @4 exclude each other",
    "ngram@tree@tree": "@tree stands there twice; write ngram@tree",
    "runs/m+": "names no drafter on one side of a +; write A+B",
    "+ngram": "names no drafter on one side of a +",
    "none+ngram": "none drafts nothing to join; write ngram",
    "runs/m@star+ngram": "unknown shape 'star'; write runs/m@chain",
    "runs/m+ngram@chain": "ngram is a chain where no tree is asked for",
    "ngram@adaptive@adaptive": "@adaptive stands there twice; write ngram@adaptive",
    "runs/m@star": "unknown shape 'star'; write runs/m@chain",
    "runs/m@chian:4": "unknown shape 'chian:4'; did you mean runs/m@chain:4?",
    "ngram@adaptve": "ngram has no shape 'adaptve'; did you mean ngram@adaptive?",
    "runs/m@tre+ngram": "unknown shape 'tre'; did you mean runs/m@tree?",
    "runs/m@chain:0": "unknown shape 'chain:0'",
    "runs/m@tree:": "unknown shape 'tree:'",
    "runs/m@": "unknown shape ''",
    "runs/m@chain@tree": "@chain and @tree exclude each other",
    "runs/m@sampled@fixed": "@sampled and @fixed exclude each other",
    "runs/m@chain@fixed": "a chain is drawn where T > 0 anyway; write runs/m@chain",
    "runs/m@adaptive@tree": "the order is shape, draw, @adaptive; write runs/m@tree@adaptive",
}


def test_adaptive_is_said_of_all_of_a_union_behind_any_of_it() -> None:
    whole = parse("runs/m+ngram@adaptive")
    assert whole.adaptive and not any(part.adaptive for part in whole.parts)
    assert parse("runs/m@adaptive+ngram") == whole
    assert parse("runs/m@adaptive+ngram@adaptive") == whole


@pytest.mark.parametrize("spec", LEGAL)
def test_a_legal_name(spec: str) -> None:
    assert parse(spec) == LEGAL[spec] and str(LEGAL[spec]) == spec


def test_a_draw_alone_asks_for_a_tree() -> None:
    assert parse("runs/m@fixed") == DraftSpec("runs/m", "tree", draw="fixed")
    assert parse("runs/m@sampled@adaptive") == DraftSpec(
        "runs/m", "tree", draw="sampled", adaptive=True
    )


@pytest.mark.parametrize("spec", ILLEGAL)
def test_an_illegal_name_costs_one_line(spec: str) -> None:
    with pytest.raises(UserError) as message:
        parse(spec)
    line = str(message.value)
    assert (
        ILLEGAL[spec] in line
        and "\n" not in line
        and line.startswith("drafters: ")
        and "; " in line
    )


def test_the_longest_path_that_exists_is_the_source(tmp_path: Path) -> None:
    home = tmp_path / "me@work"
    (home / "runs/m@tree").mkdir(parents=True)
    (home / "runs/chain").mkdir()
    (home / "runs/m").mkdir()
    assert parse(f"{home}/runs/m@tree") == DraftSpec(f"{home}/runs/m@tree")
    assert parse(f"{home}/runs/m@tree@chain:2") == DraftSpec(
        f"{home}/runs/m@tree", "chain", depth=2
    )
    assert parse(f"{home}/runs/chain@tree@fixed") == DraftSpec(
        f"{home}/runs/chain", "tree", draw="fixed"
    )
    with pytest.raises(UserError, match="unknown shape 'star'"):
        parse(f"{home}/runs/chain@star")
    with pytest.raises(UserError, match="did you mean .*/me@work/runs/chain@tree@adaptive"):
        parse(f"{home}/runs/chain@tree@adaptve")


def test_a_plus_in_a_path_that_exists_belongs_to_the_path(tmp_path: Path) -> None:
    one, other = tmp_path / "c++/runs/m", tmp_path / "a+b@tree"
    one.mkdir(parents=True)
    other.mkdir()
    assert members(f"{one}@tree+ngram") == [f"{one}@tree", "ngram"]
    assert members(f"{one}+{other}@chain+ngram") == [str(one), f"{other}@chain", "ngram"]
    assert members(f"{one}") == [str(one)] and members(f"{other}@tree") == [f"{other}@tree"]
    assert parse(f"ngram+{other}").parts == (DraftSpec("ngram"), DraftSpec(str(other)))
    assert parse(f"ngram+{other}@chain:2@adaptive").parts[1] == DraftSpec(
        str(other), "chain", depth=2
    )


def test_split_never_raises() -> None:
    for spec in (
        "",
        "@",
        "a@b@c",
        "none (x) #2",
        "ngram@wide@",
        "\0@tree",
        "~nobody-here@tree",
        "a" * 5000 + "@tree",
        "+a@+tree+",
    ):
        assert "+".join(members(spec)) == spec
        source, options = split(spec)
        assert "@".join([source, *options]) == spec
