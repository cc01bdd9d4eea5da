"""A running server as a row of the table: the same answers as plain decoding here, its accepted
length from its own counters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.decode.models.load import TargetConfig, load_target
from outrider.decode.target import Target
from outrider.scripts import evaluate
from outrider.scripts.scoring.served import accepted, cycles_of
from outrider.scripts.scoring.server_forms import Reply
from tests.helpers.commands import code_of
from tests.helpers.speculating_server import serving

SHAPE = {"layers": 2, "hidden": 32, "vocab": 260}
KEYS = [f"target.{key}={value}" for key, value in SHAPE.items()]


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target(TargetConfig(kind="tiny", **SHAPE), "float32", "cpu")


def test_a_server_stands_in_the_table(target: Target, tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(f'{{"prompt": "{word}"}}\n' for word in ("go", "hay", "sun")))
    with serving(target, target) as right, serving(target, None) as plain:
        keys = ["target=tiny", *KEYS, f"prompts={prompts}", f"out={tmp_path / 'out'}", "parity=0"]
        keys += [f"drafters=[none,spec@{right},plain@{plain}/v1]", "max_new_tokens=16"]
        keys += ["dtype=float32", "batch_size=2", "quiet=true"]
        assert code_of(evaluate.main, *keys) == 0
    report = json.loads((tmp_path / "out/report.json").read_text())
    rows = {row["label"]: row for row in report["drafters"]}
    assert list(rows) == ["none", "spec", "plain"]
    assert rows["spec"]["accepted_length"]["mean"] > 2  # it drafts with the target itself
    assert rows["plain"]["accepted_length"]["mean"] == 1
    for row in (rows["spec"], rows["plain"]):
        assert row["tokens"] == rows["none"]["tokens"] and row["tokens_per_second"] > 0
        assert row["acceptance_by_position"] == []  # where its cycles end is not seen
        assert row["lossless"]["equal"] == row["lossless"]["checked"] == 3
        assert row["verify_ms"] is None


def test_cycles_are_as_many_as_the_totals_say() -> None:
    (cycles,) = cycles_of([[5] * 11], [6])
    assert [c.accepted for c in cycles] == [1, 2, 1, 2] and cycles[0].start == 1
    assert cycles_of([[5]], [0]) == [[]] and len(cycles_of([[5] * 4], [9])[0]) == 1
    message = [Reply([1, 2], "", False, 3, 1), Reply([1, 2, 3], "", True, 3, 2)]
    assert accepted(message, None, [[1, 2], [1, 2, 3]]) == [1, 2]
    silent = [Reply([1] * 10, "", False), Reply([1] * 30, "", False)]
    assert accepted(silent, 20, [[1] * 10, [1] * 30]) == [5, 15]
    assert accepted(silent, None, [[1] * 10, [1] * 30]) is None
