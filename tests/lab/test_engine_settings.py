"""An engine's own settings: the cost file, the plan that follows from it, what each engine is
told, and the load that a running server is timed with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from conf.errors import UserError
from decode.models.load import TargetConfig, load_target
from scripts.extra import engine_settings as engine
from scripts.extra import load
from scripts.lab import engines
from scripts.lab.serving import shared
from scripts.serving import contract, costs, settings
from scripts.serving.asking import Address, Door
from scripts.serving.costs import Costs, Point
from tests.helpers.commands import code_of
from tests.helpers.speculating_server import serving

RATES = (0.6, 0.3, 0.1)
SHAPE = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "vocab": 260}


def curve(*rows: tuple[int, int, float]) -> Costs:
    return Costs("x", tuple(Point(batch, drafts, (ms,)) for batch, drafts, ms in rows))


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
    assert any("3 to 4 at a time: no drafts" in line for line in settings.told(found, "eagle3"))


def test_a_drafter_that_never_pays_is_not_served() -> None:
    found = settings.plan(RATES, curve((1, 0, 10), (1, 3, 90)))
    assert (found.draft_tokens, found.off_above) == (0, 0)
    assert settings.vllm(found) == {} and settings.llamacpp(found) == []
    assert settings.sglang(found, "eagle3") == ([], None)
    assert "serve without a drafter" in settings.told(found, "eagle3")[-1]


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
    with pytest.raises(UserError, match="costs: no batch was measured both"):
        settings.plan(RATES, curve(*rows))


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "is not JSON"),
        ("[]", "holds no points"),
        ('{"points": []}', "holds no points"),
        ('{"format": 9, "points": [{}]}', "holds no points"),
        ('{"points": [{"batch": 0, "draft_tokens": 0, "ms": 1}]}', "point 1"),
        ('{"points": [{"batch": true, "draft_tokens": 0, "ms": 1}]}', "point 1"),
        ('{"points": [{"batch": 1, "draft_tokens": -1, "ms": 1}]}', "point 1"),
        ('{"points": [{"batch": 1, "draft_tokens": 0, "ms": NaN}]}', "costs"),
        ('{"points": [{"batch": 1, "draft_tokens": 0, "ms": []}]}', "point 1"),
        ('{"points": [{"batch": 1, "draft_tokens": 0, "ms": 1%s}]}' % ("0" * 400), "point 1"),
        ('{"points": [{"batch": 1, "draft_tokens": 0, "ms": "1"}]}', "point 1"),
        ('{"points": [{"batch": 1, "draft_tokens": 0, "ms": 1}, 3]}', "point 2"),
        ('{"points": [{"batch": 1, "draft_tokens": 1, "ms": 1, "kept": -1}]}', "kept from 0 on"),
        ('{"points": [{"batch": 1, "draft_tokens": 1, "ms": 1, "kept": "1"}]}', "point 1"),
        ('{"points": [{"batch": 1, "draft_tokens": 1, "ms": 1, "kept": true}]}', "point 1"),
        ('{"points": [{"batch": 1, "draft_tokens": 1, "ms": 1, "kept": false}]}', "point 1"),
        ('{"points": [{"batch": 1, "draft_tokens": 0, "ms": 1e-320}]}', "point 1"),
        ('{"points": [{"batch": 1, "draft_tokens": 0, "ms": 1.7e308}]}', "point 1"),
        ('{"points": [{"batch": 99999, "draft_tokens": 0, "ms": 1}]}', "point 1"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_holds_no_costs(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "costs.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=said) as told:
        costs.load(path)
    assert "\n" not in str(told.value)


def test_points_go_to_a_file_and_come_back(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    costs.save(path, CHEAP_THEN_DEAR)
    assert costs.load(path) == CHEAP_THEN_DEAR and "kept" not in path.read_text()
    anew = costs.load(path).joined([Point(1, 3, (99.0,)), Point(1, 1, (11.0,))])
    assert [(p.draft_tokens, p.ms) for p in anew.points if p.batch == 1] == [
        (0, (10.0,)),
        (1, (11.0,)),
        (3, (99.0,)),
    ]
    counted = Costs("x", (Point(1, 0, (1.0,)), Point(1, 2, (2.0,), 0.0), Point(8, 2, (3.0,), 0.5)))
    costs.save(path, counted)
    assert costs.load(path) == counted


@pytest.mark.parametrize("rows", [None, [], [{"mean": 2.0}], [{"mean": None}], [{}], [3], "x"])
def test_a_contract_without_rates(rows) -> None:
    with pytest.raises(UserError, match="acceptance_by_position is none"):
        settings.rates_of({"acceptance_by_position": rows})


# -- the load


@pytest.fixture(scope="module")
def target():
    return load_target(TargetConfig(kind="tiny", **SHAPE), "float32", "cpu")


@pytest.fixture(scope="module")
def draft():
    return load_target(TargetConfig(kind="tiny", **{**SHAPE, "layers": 1}), "float32", "cpu")


@pytest.fixture(scope="module")
def near(target):
    """A draft that the target accepts now and then."""
    found = load_target(TargetConfig(kind="tiny", **SHAPE), "float32", "cpu")
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in found.model.parameters():
            weight.add_(0.04 * torch.randn(weight.shape, generator=noise))
    return found


def test_a_load_counts_cycles_and_times_decoding(target, draft, monkeypatch) -> None:
    ask = load._asked

    async def timed(door: Any, prompts: Any, limit: int) -> Any:
        return limit * len(prompts) / 100, (await ask(door, prompts, limit))[1]

    monkeypatch.setattr(load, "_asked", timed)  # six tiny tokens are no time on a busy machine
    prompts = [[5, 77, 200], [9, 8, 7, 6], [31] * 5]
    asked = load.Load(prompts, [1, 2], 1, 6)
    with serving(target, draft) as url, serving(target, target) as other:
        servers = [load.Served(0, Address(url)), load.Served(2, Address(other))]
        laps = load.laps(servers, asked, lambda *_: None)
    assert [(one.batch, one.draft_tokens) for one in laps] == [(1, 0), (1, 2), (2, 0), (2, 2)]
    for one in laps:
        assert one.seconds > 0 and one.tokens == 5 * one.batch
        assert one.cycles == one.tokens if not one.draft_tokens else one.cycles < one.tokens
    assert [(p.batch, p.draft_tokens) for p in load.points(laps)] == [
        (1, 0),
        (1, 2),
        (2, 0),
        (2, 2),
    ]
    assert set(load.ratios(laps)) == {(1, 2), (2, 2)}


@pytest.mark.parametrize("limit, drafts", [(12, 2), (12, 1), (7, 2), (2, 2)])
def test_a_sound_engine_keeps_its_acceptance_in_company(target, near, limit, drafts) -> None:
    """What a prompt accepts one at a time is counted by the contract, to the token."""
    from decode.drafters import DraftModel

    prompts = [[5, 77, 200], [9, 8, 7, 6], [31] * 5]
    wanted = contract.expected(target, DraftModel(near, drafts), prompts, drafts, 12)
    asked = engine.asked_of(wanted, [1, 2], 3, limit)
    numbers = [n for turn in range(3) for n in asked.numbers(turn, 2)]
    alone = contract.expected(target, DraftModel(near, drafts), prompts, drafts, limit)
    each = [sum(row["accepted"]) for row in alone["prompts"]]
    assert [asked.due([i], drafts) for i in range(3)] == each
    assert 0 < sum(each) < 3 * (limit - 1) or limit == 2
    assert asked.due(numbers, drafts) == 2 * sum(each)
    assert asked.due(numbers, drafts + 1) == asked.due(numbers, 0) == 0  # other cycles: unknown


def lap(batch: int, drafts: int, accepted: int, due: int) -> load.Lap:
    return load.Lap(batch, drafts, 1.0, 100, 100 - accepted, due)


def test_what_an_engine_loses_in_company_counts_in_the_plan() -> None:
    laps = [lap(1, 0, 0, 0), lap(4, 0, 0, 0)]
    laps += [lap(1, 2, 30, 40), lap(1, 2, 50, 40), lap(4, 2, 10, 50), lap(4, 2, 15, 50)]
    points = {(p.batch, p.draft_tokens): p for p in load.points(laps)}
    assert points[1, 0].kept is None and points[4, 0].kept is None
    assert points[1, 2].kept == 1.0 and points[4, 2].kept == 0.25
    even = [Point(b, k, (10.0 + k,), points[b, k].kept) for b in (1, 4) for k in (0, 2)]
    found = Costs("x", tuple(even))
    assert [found.kept(batch) for batch in (1, 2, 4, 9)] == [1.0, 0.75, 0.25, 0.25]
    one, two, _, four = settings.plan((0.8, 0.4), found).choices
    assert one.speedup == pytest.approx(2.2 * 10 / 12) and one.kept == 1.0
    assert two.speedup == pytest.approx(1.9 * 10 / 12) and two.kept == 0.75
    assert four.speedup == pytest.approx(1.2 * 10 / 11) and four.kept == 0.25
    assert [c.draft_tokens for c in (one, two, four)] == [2, 2, 1]  # less pays where less is kept
    whole = Costs("x", tuple(Point(p.batch, p.draft_tokens, p.ms) for p in even))
    assert settings.plan((0.8, 0.4), whole).choices[3].speedup == one.speedup
    lines = settings.told(settings.plan((0.8, 0.4), found), "eagle3")
    (said,) = (line for line in lines if "accepts" in line)
    assert said.startswith("with 4 at a time this engine accepts 25% of") and "alone" not in said
    assert not any("accepts" in line for line in settings.told(settings.plan((0.8,), whole), ""))


def test_a_draft_that_was_read_otherwise_is_no_fault_of_company() -> None:
    rows = [(b, k, 0.5 if k else None) for b in (1, 4) for k in (0, 2)]
    found = Costs("x", tuple(Point(b, k, (10.0 + k,), kept) for b, k, kept in rows))
    said = [line for line in settings.told(settings.plan((0.8,), found), "") if "accepts" in line]
    assert len(said) == 1 and said[0].startswith("one at a time this engine accepts 50% of what")


@pytest.mark.parametrize("drafts", [0, 2])
def test_what_was_counted_in_company_alone_says_nothing_of_one(drafts: int) -> None:
    """A plain row cannot lose anything, and between one request and eight lies a line."""
    found = Costs("x", (Point(1, 0, (1.0,)), Point(1, 2, (1.0,)), Point(8, drafts, (1.0,), 0.3)))
    assert found.kept(1) == 1.0 and found.kept(8) == (0.3 if drafts else 1.0)


def test_acceptance_beyond_the_contracts_is_no_gain() -> None:
    """A few tokens more than were due, as behind a rounding tie, make no draft longer."""
    points = load.points([lap(1, 0, 0, 0), lap(1, 5, 60, 40)])
    assert points[1].kept == 1.5 and Costs("x", tuple(points)).kept(1) == 1.0


def test_answers_longer_than_the_contracts_are_not_held_against_it() -> None:
    rows = [{"ids": [5], "tokens": [1, 2, 3], "proposed": [2], "accepted": [1]}]
    told = {"prompts": rows, "draft_tokens": 2}
    assert engine.asked_of(told, [1], 1, 3).due([0], 2) == 1
    assert not engine.asked_of(told, [1], 1, 4).cycles


@pytest.mark.parametrize(
    "wrong",
    [
        {"accepted": [1]},
        {"accepted": None},
        {"accepted": "ab"},
        {"accepted": [1, "1"]},
        {"accepted": [1, -9]},
        {"accepted": [1, 1.0]},
        {"accepted": [1, True]},
        {"accepted": [3, 0]},
        {"tokens": None},
        {"proposed": [2, None]},
    ],
)
def test_a_contract_whose_counts_are_none(tmp_path: Path, wrong: dict[str, Any]) -> None:
    sound = {"ids": [5], "tokens": [1, 2], "text": "", "proposed": [2, 1], "accepted": [1, 0]}
    for row, taken in ((sound, True), (sound | wrong, False)):
        told = {"format": contract.FORMAT, "prompts": [sound, row]}
        (tmp_path / contract.NAME).write_text(json.dumps(told))
        if taken:
            assert contract.load(tmp_path) == told
            continue
        with pytest.raises(UserError, match="^expected: .*: prompt 2 holds .*; export the head"):
            contract.load(tmp_path)


@pytest.mark.parametrize("busy", [1, 3, 4])
def test_a_busy_moment_is_timed_again(target, monkeypatch, busy: int) -> None:
    """The long answers of the first laps seem to be quicker than the short ones."""
    ask, long = load._asked, 0

    async def timed(door: Any, prompts: Any, limit: int) -> Any:
        nonlocal long
        long += limit > 1
        seconds = 1.0 if limit == 1 else 0.5 if long <= busy else 1.5
        return seconds, (await ask(door, prompts, limit))[1]

    monkeypatch.setattr(load, "_asked", timed)
    asked = load.Load([[5, 6]], [1], 1, 4)
    with serving(target, target) as url:
        servers = [load.Served(0, Address(url))]
        if busy < load.TRIES:
            (one,) = load.laps(servers, asked, lambda *_: None)
            assert one.seconds == 0.5 and long == busy + 1
        else:
            with pytest.raises(UserError, match="too short to be timed"):
                load.laps(servers, asked, lambda *_: None)


def test_a_plain_server_in_the_drafters_place_is_named(target, draft, monkeypatch) -> None:
    async def silent(self):
        return None

    monkeypatch.setattr(Door, "metrics", silent)
    asked = load.Load([[5, 6]], [1], 1, 4)
    with serving(target, draft) as url:
        with pytest.raises(UserError, match="does not tell what it accepted"):
            load.laps([load.Served(2, Address(url))], asked, lambda *_: None)


def test_tune_engine_from_a_running_server_to_the_files(
    target, near, tmp_path: Path, capsys
) -> None:
    from decode.drafters import DraftModel

    wanted = contract.expected(target, DraftModel(near, 2), [[5, 77, 200], [9, 8]], 2, 12)
    (tmp_path / "expected.json").write_text(json.dumps(wanted))
    keys = [f"expected={tmp_path / 'expected.json'}", f"out={tmp_path / 'out'}", "quiet=true"]
    with serving(target, near) as url:
        more = [f"url={url}", f"plain={url}", "batches=[1,2]", "rounds=1", "max_new_tokens=8"]
        with pytest.raises(SystemExit) as stop:
            engine.main([*keys, *more])
    assert not stop.value.code and "written:" in capsys.readouterr().out
    known = costs.load(tmp_path / "out/costs.json")
    assert {(p.batch, p.draft_tokens) for p in known.points} == {(1, 0), (1, 2), (2, 0), (2, 2)}
    assert {p.kept for p in known.points} == {None, 1.0}  # as many as one at a time, to the token
    said = json.loads((tmp_path / "out/serving.json").read_text())
    assert set(said["serve"]) == {"vllm", "sglang", "llama.cpp"} and len(said["choices"]) == 2
    costs.save(tmp_path / "c.json", CHEAP_THEN_DEAR)
    with pytest.raises(SystemExit) as stop:
        engine.main([*keys, f"costs={tmp_path / 'c.json'}"])
    assert not stop.value.code
    assert costs.load(tmp_path / "out/costs.json") == CHEAP_THEN_DEAR


@pytest.mark.parametrize(
    "keys, said",
    [
        (["url=http://127.0.0.1:9"], "a load needs both"),
        ([], "give url= and plain= to measure"),
        (["costs=x", "batches=[]"], "batches: is empty"),
        (["costs=x", "batches=[1,1]"], "names one twice"),
        (["costs=x", "rounds=0"], "rounds: 0"),
        (["costs=x", "max_new_tokens=1"], "max_new_tokens: 1"),
    ],
)
def test_keys_that_make_no_sense(tmp_path: Path, keys, said, capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        engine.main(["expected=x", f"out={tmp_path / 'out'}", *keys])
    assert stop.value.code == 2 and said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_export_carries_what_pays_on_the_engine(tmp_path: Path, monkeypatch, capsys) -> None:
    from heads import save_head
    from heads.checkpoint import read_card
    from scripts.export import main as export
    from tests.helpers.interop import DEEP, deep_target, random_head

    target = deep_target()
    save_head(random_head(target, "eagle3"), tmp_path / "run/head", target.identity, {})
    assert read_card(tmp_path / "run/head")["kind"] == "eagle3"
    monkeypatch.setattr(settings, "rates_of", lambda wanted: (0.5, 0.3))  # it is untrained
    known = curve((1, 0, 10), (1, 2, 11), (4, 0, 10), (4, 2, 90))
    costs.save(tmp_path / "costs.json", known)
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


# What is served where nobody names a drafter
# -------------------------------------------------------------------------------------------

USUAL = [
    (engines.llamacpp.main, [], ["runs/demo/eagle3"]),
    (engines.vllm.main, ["speculators=README.md"], ["runs/demo/medusa", "runs/demo/eagle3"]),
    (engines.sampled.main, [], ["none", "runs/demo/eagle3"]),
    (engines.settings.main, [], ["runs/demo/eagle3"]),
    (engines.race.main, [], ["none", "runs/demo/eagle3"]),
]


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which `make demo` has just run, and what an engine's run goes on to load."""
    monkeypatch.chdir(tmp_path)
    for name in ("medusa", "eagle3"):
        (tmp_path / "runs/demo" / name / "head").mkdir(parents=True)
        (tmp_path / "runs/demo" / name / "head/head.json").write_text("{}")
    monkeypatch.setattr(shared, "environment", lambda *_: Path("python"))
    monkeypatch.setattr(shared, "load_target", lambda *_: pytest.fail("loads"))
    return tmp_path


@pytest.mark.parametrize("main, keys, served", USUAL)
def test_the_demo_is_served_where_nothing_else_is(
    main: Any,
    keys: list[str],
    served: list[str],
    demo: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    seen: list[str] = []

    def load(*_: Any) -> Any:
        raise UserError("; ".join(seen))

    real = shared.served

    def noted(cfg: Any) -> list[str]:
        seen[:] = real(cfg)
        return seen

    monkeypatch.setattr(shared, "served", noted)
    monkeypatch.setattr(shared, "load_target", load)
    assert code_of(main, *keys) == 2 and seen == served
    said = capsys.readouterr().err
    assert "is not there; runs/demo/eagle3 takes its place" in said


def test_own_heads_come_first_and_named_ones_alone(
    demo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def chosen(*names: str) -> list[str]:
        return shared.served(engines.llamacpp.LlamaCppConfig(drafters=[*names]))

    assert chosen() == ["runs/demo/eagle3"]
    assert capsys.readouterr().err.splitlines() == [
        "note: runs/eagle3_portable is not there; runs/demo/eagle3 takes its place",
        "note: runs/draft is not there and left out",
    ]
    for name in ("eagle3_portable", "draft"):
        (demo / "runs" / name / "head").mkdir(parents=True)
        (demo / "runs" / name / "head/head.json").write_text("{}")
    assert chosen() == ["runs/eagle3_portable", "runs/draft"]
    assert chosen("runs/gone") == ["runs/gone"], "what is named is named as missing"
    assert capsys.readouterr().err == ""
    shutil.rmtree(demo / "runs")
    with pytest.raises(UserError, match="run `make demo`, or name a run folder"):
        chosen()
