"""An engine's own settings: the file of measured rows, the plan that follows from it, and what each
engine is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.conf.errors import UserError
from outrider.scripts.extra import engine_settings as engine
from outrider.scripts.serving import contract, costs, settings
from outrider.scripts.serving.costs import Costs, Point
from tests.helpers.commands import code_of

RATES = (0.6, 0.3, 0.1)


def curve(*rows: tuple[int, int, float]) -> Costs:
    return Costs("x", tuple(Point(batch, k, ms / 1000) for batch, k, ms in rows))


CHEAP_THEN_DEAR = curve((1, 0, 10), (1, 3, 13), (4, 0, 12), (4, 3, 60))


def test_the_plan_takes_what_pays_and_stops_where_it_does_not() -> None:
    found = settings.plan(RATES, CHEAP_THEN_DEAR)
    assert [c.batch for c in found.choices] == [1, 2, 3, 4]
    assert found.choices[0].draft_tokens == 2  # 1.9 / 1.2; one draft 1.6 / 1.1, three 2.0 / 1.3
    assert found.choices[0].speedup == pytest.approx(1.9 / 1.2)
    assert found.choices[3].draft_tokens == 0 and found.off_above == 2
    assert settings.vllm(found) == {
        "num_speculative_tokens": 2,
        "num_speculative_tokens_per_batch_size": [[1, 1, 2], [2, 2, 1], [3, 4, 0]],
    }
    flags, table = settings.sglang(found, "eagle3")
    assert table == {
        "1": {"candidate_steps": [2]},
        "2": {"candidate_steps": [1]},
        "3": {"candidate_steps": [0]},
    }
    assert flags[0] == "--speculative-num-steps 2" and flags[-1].startswith("--speculative-adap")
    assert settings.sglang(found, "small_lm")[1] is None
    assert settings.llamacpp(found)[0] == "--spec-draft-n-max 2"
    assert settings.llamacpp(found)[-1] == "-np 2"
    assert any("3 to 4 at a time: no drafts" in line for line in settings.summary(found, "eagle3"))


def test_a_drafter_that_never_pays_is_not_served() -> None:
    found = settings.plan(RATES, curve((1, 0, 10), (1, 3, 90)))
    assert (found.draft_tokens, found.off_above) == (0, 0)
    assert settings.vllm(found) == {} and settings.llamacpp(found) == []
    assert settings.sglang(found, "eagle3") == ([], None)
    assert "serve without a drafter" in settings.summary(found, "eagle3")[-1]


def test_a_drafter_that_always_pays_needs_no_schedule() -> None:
    found = settings.plan((0.9, 0.8), curve((2, 0, 10), (2, 2, 10.5)))
    assert found.measured == (2,) and found.to_json()["measured_batches"] == [2]
    assert found.off_above is None and found.ranges == [(1, 2, 2)]
    assert settings.vllm(found) == {"num_speculative_tokens": 2}
    assert settings.llamacpp(found)[-1] == "--spec-draft-p-min 0"


def test_nothing_is_claimed_beyond_the_deepest_point_or_the_drafter() -> None:
    free = curve((1, 0, 10), (1, 2, 10))
    assert settings.plan((0.9,) * 8, free).draft_tokens == 2
    assert settings.plan((0.9,), free).draft_tokens == 1
    assert settings.plan((0.9,) * 8, free, at_most=1).draft_tokens == 1


def test_a_measured_row_is_read_as_it_stands() -> None:
    """Three tokens may be checked sooner than two: no line and no rising curve is drawn there."""
    tiled = curve((1, 0, 24), (1, 1, 30), (1, 2, 26), (1, 3, 45), (1, 4, 41))
    assert [tiled.curve()(1, k) for k in range(5)] == pytest.approx([24, 30, 26, 45, 41])
    found = settings.plan((0.1, 0.1, 0.05, 0.05), tiled)
    assert found.draft_tokens == 2
    assert found.choices[0].speedup == pytest.approx(1.2 * 24 / 26)
    assert found.to_json()["measured_draft_tokens"] == [0, 1, 2, 3, 4]
    assert not any("not measured" in line for line in settings.summary(found, "eagle3"))


def test_what_lies_between_measured_rows_is_said() -> None:
    found = settings.plan(RATES, CHEAP_THEN_DEAR)
    (said,) = (line for line in settings.summary(found, "eagle3") if "not measured" in line)
    assert said.startswith("1, 2 draft tokens were not measured") and "docs/serving.md" in said
    never = settings.plan(RATES, curve((1, 0, 10), (1, 3, 90)))
    assert not any("not measured" in line for line in settings.summary(never, "eagle3"))


def test_the_engine_never_comes_back_after_it_was_off() -> None:
    noisy = curve((1, 0, 10), (1, 1, 11), (2, 0, 10), (2, 1, 30), (3, 0, 10), (3, 1, 11))
    assert [c.draft_tokens for c in settings.plan((0.5,), noisy).choices] == [1, 0, 0]


@pytest.mark.parametrize(
    "rows",
    [
        (),
        ((1, 0, 10.0),),
        ((1, 3, 10.0),),
        ((1, 0, 10.0), (2, 3, 10.0)),
    ],
)
def test_a_curve_needs_a_batch_with_and_without_drafts(rows) -> None:
    with pytest.raises(
        UserError, match="costs: no number of concurrent requests was measured both"
    ):
        settings.plan(RATES, curve(*rows))


ROW = {"concurrent_requests": 1, "draft_tokens": 0, "step_seconds": 0.01}


def file_of(path: Path, *rows: Any) -> Path:
    path.write_text(json.dumps({"points": list(rows)}))
    return path


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "is not JSON"),
        ("[]", "holds no points"),
        ('{"points": []}', "holds no points"),
        ('{"points": {"a": 1}}', "holds no points"),
        ("[" * 100_000, "costs"),
        (b"\xff{}", "costs"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_holds_no_costs(tmp_path: Path, text: str | bytes | None, said: str) -> None:
    path = tmp_path / "costs.json"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=said) as message:
        costs.load(path)
    assert "\n" not in str(message.value)


@pytest.mark.parametrize(
    "row, said",
    [
        (3, "not a JSON object"),
        ({}, "concurrent_requests"),
        (ROW | {"concurrent_requests": 0}, "concurrent_requests: 0"),
        (ROW | {"concurrent_requests": True}, "concurrent_requests: "),
        (ROW | {"concurrent_requests": 99999}, "concurrent_requests: 99999"),
        (ROW | {"draft_tokens": -1}, "draft_tokens: -1"),
        (ROW | {"draft_tokens": 1.5}, "draft_tokens: "),
        (ROW | {"step_seconds": 0}, "step_seconds: 0"),
        (ROW | {"step_seconds": "1"}, "step_seconds: "),
        (ROW | {"step_seconds": [1]}, "step_seconds: "),
        (ROW | {"step_seconds": 1e-320}, "a step of 1e-320 s is none"),
        (ROW | {"step_seconds": int("1" + "0" * 400)}, "step_seconds: "),
        (ROW | {"step_seconds": None}, "give either step_seconds or tokens_per_second"),
        (ROW | {"tokens_per_second": 9.0}, "give either step_seconds or tokens_per_second"),
        (ROW | {"draft_tokens": 2, "accepted_length": 3.5}, "a step brings 3 at most"),
        (ROW | {"draft_tokens": 2, "accepted_length": 0.5}, "accepted_length: 0.5"),
        (ROW | {"kept": 1.0}, "kept"),
        (
            {"concurrent_requests": 1, "draft_tokens": 2, "tokens_per_second": 9.0},
            "needs accepted_length beside it",
        ),
        ({"batch": 1, "draft_tokens": 0, "ms": [1.0]}, "batch is concurrent_requests now, ms"),
    ],
)
def test_a_row_that_is_no_measurement(tmp_path: Path, row: Any, said: str) -> None:
    path = file_of(tmp_path / "costs.json", ROW, row)
    with pytest.raises(UserError, match=f"point 2.*{said}") as message:
        costs.load(path)
    assert "\n" not in str(message.value)


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_number_that_is_none(tmp_path: Path, literal: str) -> None:
    path = file_of(tmp_path / "costs.json", ROW)
    path.write_text(path.read_text().replace("0.01", literal))
    with pytest.raises(UserError, match="^costs: "):
        costs.load(path)


def test_a_throughput_says_how_long_a_step_takes(tmp_path: Path) -> None:
    """Eight requests with 2.4 tokens a step each, at 480 tokens a second: 40 ms."""
    drafted = {"tokens_per_second": 480.0, "accepted_length": 2.4}
    rows = [
        {"concurrent_requests": 8, "draft_tokens": 0, "tokens_per_second": 320.0},
        {"concurrent_requests": 8, "draft_tokens": 3, **drafted},
        {"concurrent_requests": 8, "draft_tokens": 3, "step_seconds": 0.05},
        {"concurrent_requests": 8, "draft_tokens": 3, "step_seconds": 0.041},
    ]
    found = costs.load(file_of(tmp_path / "costs.json", *rows))
    assert found.points[1].seconds == pytest.approx(0.04)
    line = found.curve()  # the median of a point's rows
    assert line(8, 0) == pytest.approx(25.0) and line(8, 3) == pytest.approx(41.0)


@pytest.mark.parametrize("rows", [None, [], [{"mean": 2.0}], [{"mean": None}], [{}], [3], "x"])
def test_a_contract_without_rates(rows) -> None:
    with pytest.raises(UserError, match="acceptance_by_position is none"):
        settings.rates_of({"acceptance_by_position": rows})


def test_what_an_engine_loses_under_load_counts_in_the_plan() -> None:
    lengths = {(1, 2): 1.8, (4, 2): 1.2}  # of 0.8 accepted draft tokens a quarter is left
    even = [Point(b, k, 0.01 + k / 1000, None, lengths.get((b, k))) for b in (1, 4) for k in (0, 2)]
    found = Costs("x", tuple(even))
    assert [found.kept(batch) for batch in (1, 2, 4, 9)] == pytest.approx([1.0, 0.75, 0.25, 0.25])
    one, two, _, four = settings.plan((0.8, 0.4), found).choices
    assert one.speedup == pytest.approx(2.2 * 10 / 12) and one.kept == 1.0
    assert two.speedup == pytest.approx(1.9 * 10 / 12) and two.kept == pytest.approx(0.75)
    assert four.speedup == pytest.approx(1.2 * 10 / 11) and four.kept == pytest.approx(0.25)
    assert [c.draft_tokens for c in (one, two, four)] == [2, 2, 1]  # less pays where less is kept
    whole = Costs("x", tuple(Point(p.concurrent_requests, p.draft_tokens, p.seconds) for p in even))
    assert settings.plan((0.8, 0.4), whole).choices[3].speedup == one.speedup
    lines = settings.summary(settings.plan((0.8, 0.4), found), "eagle3")
    (said,) = (line for line in lines if "accepts" in line)
    assert said.startswith("with 4 concurrent requests this engine accepts 25% of the draft tokens")
    assert not any("accepts" in line for line in settings.summary(settings.plan((0.8,), whole), ""))


def test_what_is_accepted_more_under_load_is_no_gain() -> None:
    rows = (Point(1, 0, 1.0), Point(1, 2, 1.0, None, 1.4), Point(8, 2, 1.0, None, 1.9))
    assert Costs("x", rows).kept(8) == 1.0
    nothing = (Point(1, 0, 1.0), Point(1, 2, 1.0, None, 1.0), Point(8, 2, 1.0, None, 1.9))
    assert Costs("x", nothing).kept(8) == 1.0, "nothing accepted alone is nothing to lose"


def test_tune_engine_from_rows_to_the_files(tmp_path: Path, capsys) -> None:
    rates = [{"mean": rate} for rate in RATES]
    row = {"ids": [5], "tokens": [1, 2], "text": "", "proposed": [2, 1], "accepted": [1, 0]}
    wanted = {"format": contract.FORMAT, "prompts": [row], "acceptance_by_position": rates}
    (tmp_path / "expected.json").write_text(json.dumps(wanted))
    rows = [
        {"concurrent_requests": b, "draft_tokens": k, "step_seconds": ms / 1000}
        for b, k, ms in ((1, 0, 10), (1, 3, 13), (4, 0, 12), (4, 3, 60))
    ]
    keys = [f"expected={tmp_path / 'expected.json'}", f"out={tmp_path / 'out'}"]
    known = file_of(tmp_path / "costs.json", *rows)
    assert code_of(engine.main, *keys, f"costs={known}") == 0
    assert "written:" in capsys.readouterr().out
    said = json.loads((tmp_path / "out/serving.json").read_text())
    assert set(said["serve"]) == {"vllm", "sglang", "llama.cpp"}
    assert said["off_above"] == 2 and [c["draft_tokens"] for c in said["choices"]] == [2, 1, 0, 0]
    assert code_of(engine.main, *keys) == 2 and "costs: " in capsys.readouterr().err


def test_an_export_carries_what_pays_on_the_engine(tmp_path: Path, monkeypatch, capsys) -> None:
    from outrider.heads import save_head
    from outrider.heads.checkpoint import read_card
    from outrider.scripts.export import main as export
    from tests.helpers.interop import DEEP, deep_target, random_head

    target = deep_target()
    save_head(random_head(target, "eagle3"), tmp_path / "run/head", target.identity, {})
    assert read_card(tmp_path / "run/head")["kind"] == "eagle3"
    monkeypatch.setattr(settings, "rates_of", lambda wanted: (0.5, 0.3))  # it is untrained
    rows = [
        {"concurrent_requests": b, "draft_tokens": k, "step_seconds": ms / 1000}
        for b, k, ms in ((1, 0, 10), (1, 2, 11), (4, 0, 10), (4, 2, 90))
    ]
    file_of(tmp_path / "costs.json", *rows)
    keys = [
        "target=tiny",
        *(f"target.{k}={v}" for k, v in DEEP.items()),
        f"drafter={tmp_path / 'run'}",
        "format=sglang",
        "num_prompts=1",
        "max_new_tokens=6",
        "device=cpu",
        f"costs={tmp_path / 'costs.json'}",
    ]
    with pytest.raises(SystemExit) as stop:
        export([*keys, f"out={tmp_path / 'out'}"])
    assert not stop.value.code, capsys.readouterr().err
    said = json.loads((tmp_path / "out/serving.json").read_text())
    depth = said["draft_tokens"]
    assert depth == 2 and said["off_above"] == 1
    assert contract.load(tmp_path / "out")["draft_tokens"] == depth
    page = (tmp_path / "out/README.md").read_text()
    assert f"--speculative-num-steps {depth} " in page and settings.SGLANG_FILE in page
    table = json.loads((tmp_path / "out" / settings.SGLANG_FILE).read_text())
    assert table["1"] == {"candidate_steps": [depth]}
    assert {"candidate_steps": [0]} in table.values()
    manifest = json.loads((tmp_path / "out/outrider.json").read_text())
    assert {settings.FILE, settings.SGLANG_FILE} <= set(manifest["files"])
    assert manifest["draft_tokens"] == depth
    with pytest.raises(SystemExit) as stop:
        export([*keys, f"out={tmp_path / 'b'}", "drafter=none", "format=gguf", "target=tiny"])
    assert stop.value.code == 2 and not (tmp_path / "b").exists()
