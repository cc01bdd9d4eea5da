"""The forecast: the arithmetic of its curves, what it refuses, and the whole way on the tiny
target."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.conf.errors import UserError
from outrider.conf.schema import compose
from outrider.conf.typed import faults
from outrider.decode.drafters import NGram
from outrider.decode.engine import Request, generate
from outrider.decode.models.load import TargetConfig
from outrider.decode.sampling import Sampling
from outrider.heads.checkpoint import save_head
from outrider.heads.tuned import DraftSettings
from outrider.scripts.common.files import ROOT
from outrider.scripts.common.progress import Steps
from outrider.scripts.extra import forecast as command
from outrider.scripts.extra.forecast import main
from outrider.scripts.extra.forecasting import curves, run, text
from outrider.scripts.extra.forecasting.config import ForecastConfig
from outrider.scripts.extra.forecasting.curves import CurveFamily, Length, PilotRun
from tests.helpers.commands import code_of
from tests.helpers.interop import random_head

# -- arithmetic


@pytest.mark.parametrize("depth", [1, 4, 5])
@pytest.mark.parametrize("length", [1.0, 1.2, 1.9])
def test_lengths_come_back(length: float, depth: int) -> None:
    assert curves.length_of(curves.rejection(length, depth), depth) == pytest.approx(length)


@pytest.mark.parametrize("length", [0.0, 0.5, 1.0, 5.9, 6.0, 7.0, 1e9])
def test_lengths_at_the_ends(length: float) -> None:
    y = curves.rejection(length, 5)
    assert math.isfinite(y) and 1 <= curves.length_of(y, 5) <= 6


def pilot(tokens: float = 2e5, length: float = 1.5, kind: str = "a") -> PilotRun:
    spread = Length(length, 1 + (length - 1) * 0.9, 1 + (length - 1) * 1.1)
    return PilotRun("p", kind, 5, tokens, 1000.0, spread)


def family(name: str = "a", slope: float = 0.15) -> CurveFamily:
    return CurveFamily(name, 5, -0.6, slope, 0.02, 0.02, 0.1)


def test_a_measured_line_is_found_again(tmp_path: Path) -> None:
    points = [
        {
            "tokens_seen": t,
            "accepted_length": (at := curves.length_of(-0.5 - 0.2 * math.log(t / 1e6), 5)),
            "low": at - 0.1,
            "high": at + 0.1,
        }
        for t in (5e5, 1e6, 2e6, 4e6)
    ]
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"runs": {"a": {"points": points}, "few": {"points": points[:2]}}}))
    found = curves.families(path, {"a": 5, "few": 5, "none": 5})
    assert set(found) == {"a"}
    assert found["a"].slope == pytest.approx(0.2) and found["a"].level == pytest.approx(-0.5)
    assert found["a"].residual == curves.LEAST_RESIDUAL
    for key, value in (("accepted_length", math.nan), ("tokens_seen", 0), ("tokens_seen", 1e999)):
        wrong = [*points[:3], {**points[3], key: value}]
        path.write_text(json.dumps({"runs": {"a": {"points": wrong}}}))
        with pytest.raises(UserError, match="curves: .* is of another form"):
            curves.families(path, {"a": 5})


def test_a_pilot_scales_the_line_of_its_family() -> None:
    """A head that follows its family's curve, with half of its y, is foretold."""
    lines = [family(), family("b", 0.05), family("c", 0.25)]

    def truth(tokens: float) -> float:
        return curves.length_of(0.5 * (-0.6 - 0.15 * math.log(tokens / 1e6)), 5)

    for tokens in (2e5, 1e6, 5e6):
        found = curves.forecast(pilot(length=truth(2e5)), lines[0], lines, tokens)
        assert found.mean == pytest.approx(truth(tokens), rel=0.08)
        assert found.low < truth(tokens) < found.high
    widths = [
        (f.high - f.low) / f.mean
        for f in (curves.forecast(pilot(), lines[0], lines, t) for t in (2e5, 5e6, 1e8))
    ]
    assert widths == sorted(widths)


def test_an_untrained_pilot_says_nothing_of_the_learning() -> None:
    lines = [family(), family("b", 0.05)]
    found = curves.forecast(pilot(tokens=4e3, length=1.0), lines[0], lines, 1e6)
    assert found.mean == pytest.approx(curves.length_of(-0.6, 5), rel=0.2)
    assert found.high - found.low > 0.4


def test_a_pilot_of_which_nothing_was_accepted_is_no_certainty() -> None:
    """Its interval has no width, and the head may still begin to learn a little later."""
    nothing = PilotRun("p", "a", 5, 2e5, 1000.0, Length(1.0, 1.0, 1.0))
    found = curves.forecast(nothing, family(), [family(), family("b", 0.05)], 1e6)
    assert found.high - found.low > 0.1


COSTS = [(1, 0, 10.0), (1, 3, 13.0), (4, 0, 20.0), (4, 3, 60.0)]


def costs_file(path: Path) -> Path:
    """The points of an engine."""
    points = [
        {"concurrent_requests": b, "draft_tokens": d, "step_seconds": ms / 1000}
        for b, d, ms in COSTS
    ]
    path.write_text(json.dumps({"engine": "theirs", "points": points}))
    return path


@pytest.mark.parametrize("low", [1.0, 1.0001])
def test_a_length_of_one_is_not_taken_for_the_longest(low: float, tmp_path: Path) -> None:
    """Its acceptance rate is 0, which is a rate like any other."""
    engine = run.engine_costs.load(costs_file(tmp_path / "c.json"))
    drafts = SimpleNamespace(default=lambda: DraftSettings("chain", depth=5))
    one = PilotRun("p", "a", 5, 2e5, 1000.0, Length(1.0, 1.0, 1.0))
    speed = lambda length: run._speed(1, length, one, drafts, None, engine)
    found = speed(Length(low, low, low))
    assert found["speedup"]["mean"] < 1 and found["pays"] == "do not"
    assert speed(Length(1.5, low, 2.0))["speedup"]["low"] == pytest.approx(0.89, abs=1e-3)


def test_more_tokens_never_forecast_less() -> None:
    lines = [family(), family("b", 0.05)]
    for known in (lines[0], None):
        means = [curves.forecast(pilot(), known, lines, t).mean for t in (1e5, 1e6, 1e7, 1e12)]
        assert means == sorted(means) and means[-1] <= 6


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("length", [1.0, 3.0, 6.0])
@pytest.mark.parametrize("tokens", [1.0, 1e6, 1e14])
def test_intervals_hold_their_mean(known: bool, length: float, tokens: float) -> None:
    lines = [family(), family("b", 0.05)]
    found = curves.forecast(pilot(length=length), lines[0] if known else None, lines, tokens)
    assert 1 <= found.low <= found.mean <= found.high <= 6


def test_a_family_without_a_curve_is_less_certain() -> None:
    lines = [family(), family("b", 0.05)]
    known = curves.forecast(pilot(), lines[0], lines, 5e6)
    other = curves.forecast(pilot(kind="z"), None, lines, 5e6)
    alone = curves.forecast(pilot(kind="z"), None, [], 5e6)
    assert other.high - other.low > known.high - known.low
    assert alone.low < alone.mean < alone.high


def test_our_curves_are_read() -> None:
    found = curves.families(Path("docs/results/recipes.json"), run.DEPTHS)
    assert set(found) == set(run.DEPTHS)
    assert all(0 < f.slope < 0.5 and f.residual < 0.05 for f in found.values())


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"runs": {"eagle3": {"points": [1, 2, 3]}}}'])
def test_curves_of_another_form(content: str, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text(content)
    with pytest.raises(UserError, match="^curves: .* another form"):
        curves.families(path, run.DEPTHS)
    with pytest.raises(UserError, match="^curves: cannot read"):
        curves.families(tmp_path / "none.json", run.DEPTHS)


# -- the target's text


def test_lookup_is_what_the_engine_does(target: Any) -> None:
    """The cycles read off a finished answer are those of decoding with prompt lookup."""
    prompt = [3, 4, 5, 6, 3, 4, 5, 6, 3, 4]
    found = generate(target, NGram(), [Request(prompt, 40, id=0)], Sampling()).generations[0]
    assert found.finish == "length"
    cycles = text.lookup(prompt, found.token_ids)
    assert sum(cycles) >= len(found.token_ids)
    assert cycles[:-1] == [c.accepted + 1 for c in found.cycles][: len(cycles) - 1]


def test_statistics_of_a_text(target: Any) -> None:
    prompts = [[3, 4, 5, 6, 7], [8, 9, 8, 9, 8]]
    requested = [Request(p, 12, id=i) for i, p in enumerate(prompts)]
    answers = generate(target, NGram(), requested, Sampling()).generations
    found = text.statistics(target, prompts, answers)
    distribution = target.model(torch.tensor([prompts[0]])).logits[0, -1].float().log_softmax(-1)
    h, p = text._distribution(target, prompts[0], answers[0].token_ids)
    assert h[0] == pytest.approx(float(-(distribution.exp() * distribution).sum()), rel=1e-4)
    assert p[0] == pytest.approx(float(distribution.max().exp()), rel=1e-4)
    assert found["tokens"] == sum(len(a.token_ids) for a in answers)
    assert 0 < found["entropy"] <= math.log(target.vocab_size) and 0 < found["top1"] <= 1
    assert all(0 <= share <= 1 for share in found["grams"].values())


# -- the whole way


@pytest.fixture(scope="module")
def runs(target: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short runs that never were: untrained heads whose cards tell of a training."""
    folder = tmp_path_factory.mktemp("runs")
    made = {
        "short": ("eagle3", 1e5),
        "long": ("eagle3", 1e6),
        "med": ("medusa", 1e5),
    }
    for name, (kind, tokens) in made.items():
        head = random_head(target, kind)
        about = {"training": {"tokens_seen": tokens, "train_seconds": 100.0}}
        save_head(head, folder / name, target.identity, about)
    save_head(random_head(target, "eagle3"), folder / "silent", target.identity, {})
    strange = {"nan": math.nan, "endless": 10**400, "text": "many"}
    for name, tokens in strange.items():
        about = {"training": {"tokens_seen": tokens, "train_seconds": 100.0}}
        save_head(random_head(target, "eagle3"), folder / name, target.identity, about)
    return folder


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"Say {i} again: {i} {i}"}) + "\n" for i in range(4))
    )
    return path


def config(out: Path, prompts: Path, **keys: Any) -> ForecastConfig:
    small: dict[str, Any] = {
        "num_prompts": 3,
        "max_new_tokens": 10,
        "tokens": [1e6, 1e5],
        "batch_sizes": [1, 2],
        "curve_rounds": 1,
        "dtype": "float64",
    }
    keys = {"target": TargetConfig(kind="tiny"), **small, **keys}
    made = ForecastConfig(out=str(out), prompts=str(prompts), **keys)
    assert not faults(made)
    return made


def test_from_pilots_to_a_frozen_file_and_its_truth(
    target: Any, runs: Path, prompts: Path, tmp_path: Path
) -> None:
    cfg = config(tmp_path / "out", prompts, pilots=[str(runs / "short"), str(runs / "med")])
    value = run.run(cfg, target, Steps(quiet=True), cfg.pilots)
    assert [(r["head"], r["tokens"]) for r in value["forecasts"]] == [
        ("eagle3", 1e5),
        ("eagle3", 1e6),
        ("medusa", 1e5),
        ("medusa", 1e6),
    ]
    for row in value["forecasts"]:
        assert row["hours"] == pytest.approx(row["tokens"] / 1000 / 3600)
        assert [b["batch"] for b in row["by_batch"]] == [1, 2]
        for one in row["by_batch"]:
            found = one["speedup"]
            assert 0 <= found["low"] <= found["mean"] <= found["high"] and one["break_even"] >= 1
            assert one["pays"] == "do not" or found["high"] > 1
    path = tmp_path / "forecast.json"
    path.write_text(json.dumps(value))
    assert run.frozen(path) == value

    cfg = config(tmp_path / "out", prompts, check=str(path), truth=[str(runs / "long")])
    cfg = replace(cfg, num_prompts=2)  # the forecast's own count wins
    said = run.check(cfg, target, Steps(quiet=True))
    assert said["of"] == 1 and said["rows"][0]["tokens"] == 1e6
    row = said["rows"][0]
    inside = row["forecast"]["low"] <= row["measured"]["mean"] <= row["forecast"]["high"]
    assert row["inside"] is inside and said["inside"] == inside

    for change in ("forecasts", "created", "prompts"):
        changed = json.loads(path.read_text())
        changed[change] = []
        path.with_name("c.json").write_text(json.dumps(changed))
        with pytest.raises(UserError, match="^check: .* was changed since it was written"):
            run.frozen(path.with_name("c.json"))
    with pytest.raises(UserError, match=r"^truth: .*med .medusa, 100,000 tokens. was not|^truth"):
        cfg = replace(cfg, truth=[str(runs / "silent")])
        run.check(cfg, target, Steps(quiet=True))
    prompts.write_text(prompts.read_text() + '{"prompt": "one more"}\n')
    with pytest.raises(UserError, match="^prompts: .* is not the file that the forecast"):
        run.check(cfg, target, Steps(quiet=True))


def test_the_points_of_an_engine_take_the_place_of_this_machine(
    target: Any, runs: Path, prompts: Path, tmp_path: Path
) -> None:
    costs = costs_file(tmp_path / "costs.json")
    cfg = config(
        tmp_path / "o", prompts, pilots=[str(runs / "short")], costs=str(costs), batch_sizes=[1, 4]
    )
    value = run.run(cfg, target, Steps(quiet=True), cfg.pilots)
    one, four = value["forecasts"][0]["by_batch"]
    assert value["engine"] == "theirs"
    assert one["break_even"] <= 1.3 + 1e-9 and one["draft_tokens"] <= 3
    assert four["pays"] == "do not" and four["speedup"]["mean"] < one["speedup"]["mean"]


def test_a_pilot_drafts_as_the_engine_will(
    target: Any, runs: Path, prompts: Path, tmp_path: Path
) -> None:
    """Engines draft chains: what a tree has accepted is no rate of a chain's."""
    short = str(runs / "short")
    cfg = config(tmp_path / "o", prompts, pilots=[short])
    for engine, kinds in ((True, ["chain"]), (False, ["chain", "tree"])):
        made = run.Forecast(cfg, target, Steps(quiet=True), engine)
        family, _, _ = made.decoded(short)
        assert family.kinds == kinds


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Heads are not decoded with: the prompts that each would have been asked."""
    requested: list[list[str]] = []
    drafts = SimpleNamespace(
        parallel=False, deepest=5, default=lambda: DraftSettings("chain", depth=5)
    )

    def decoded(self: Any, folder: str) -> Any:
        requested.append([prompt.id for prompt in self.prompts])
        return drafts, [], Length(1.5, 1.4, 1.6)

    monkeypatch.setattr(run.Forecast, "decoded", decoded)
    monkeypatch.setattr(run.text, "statistics", lambda *args: {"tokens": 0})
    return requested


def frozen(target: Any, runs: Path, prompts: Path, folder: Path, **keys: Any) -> Path:
    """A forecast of one pilot, on disk."""
    costs = str(costs_file(folder / "costs.json"))
    cfg = config(folder / "o", prompts, pilots=[str(runs / "short")], costs=costs, **keys)
    path = folder / "forecast.json"
    path.write_text(json.dumps(run.run(cfg, target, Steps(quiet=True), cfg.pilots)))
    return path


def test_the_very_prompts_are_requested_again(
    target: Any, runs: Path, prompts: Path, tmp_path: Path, quick: list[list[str]]
) -> None:
    """Also where one of them was too long: a spread of fewer would be of other ones."""
    lines = [json.dumps({"prompt": "x" * (9000 if i == 0 else 9)}) + "\n" for i in range(8)]
    prompts.write_text("".join(lines))
    path = frozen(target, runs, prompts, tmp_path, num_prompts=4)
    assert json.loads(path.read_text())["prompts"]["count"] == 3
    cfg = config(tmp_path, prompts, check=str(path), truth=[str(runs / "long")])
    run.check(cfg, target, Steps(quiet=True))
    assert quick[0] == quick[1]


def test_a_forecast_is_held_against_its_own_target(
    target: Any, runs: Path, prompts: Path, tmp_path: Path, quick: list[list[str]]
) -> None:
    path = frozen(target, runs, prompts, tmp_path)
    said = json.loads(path.read_text()) | {"target": "another"}
    path.write_text(json.dumps(said | {"sha256": run.digest(said)}))
    cfg = config(tmp_path, prompts, check=str(path), truth=[str(runs / "long")])
    with pytest.raises(UserError, match="^target: .* the forecast is about another"):
        run.check(cfg, target, Steps(quiet=True))


def test_a_miss_stays_beside_another_head_of_the_same_budget(
    target: Any, runs: Path, prompts: Path, tmp_path: Path, quick: list[list[str]]
) -> None:
    """Runs of other seeds see as many tokens."""
    path, record = frozen(target, runs, prompts, tmp_path), tmp_path / "truth.json"
    again = tmp_path / "again"
    about = {"training": {"tokens_seen": 1e6, "train_seconds": 100.0}}
    save_head(random_head(target, "eagle3", seed=5), again, target.identity, about)
    for folder, count in ((runs / "long", 1), (again, 2), (runs / "long", 2)):
        cfg = config(tmp_path, prompts, check=str(path), truth=[str(folder)])
        value = run.check(cfg, target, Steps(quiet=True), record)
        record.write_text(json.dumps(value))
        assert value["of"] == count


def test_a_head_is_held_against_the_nearest_budget(
    target: Any, runs: Path, prompts: Path, tmp_path: Path, quick: list[list[str]]
) -> None:
    path = frozen(target, runs, prompts, tmp_path, tokens=[9.9e5, 1e6, 1.01e6])
    known = {r["tokens"]: r["accepted_length"] for r in json.loads(path.read_text())["forecasts"]}
    cfg = config(tmp_path, prompts, check=str(path), truth=[str(runs / "long")])
    (row,) = run.check(cfg, target, Steps(quiet=True))["rows"]
    assert row["forecast"] == known[1e6]


@pytest.mark.parametrize("name", ["plain", "a b", "données", "a,b=c(1)", "o'b\"r", "${x}"])
def test_a_pilot_is_trained_from_a_path_of_any_letters(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from outrider.train.config import ENTRIES

    commands: list[list[str]] = []

    def done(_: Any, step: Any) -> int:
        commands.append(step.argv)
        return 0

    monkeypatch.setattr("outrider.scripts.common.pipeline.Pipeline._call", done)
    chats = tmp_path / f"{name}.jsonl"
    chats.touch()
    cfg = config(tmp_path / name, tmp_path, heads=["eagle3"], chats=str(chats))
    here = TargetConfig(kind="local", path=str(tmp_path / name), allow_other=True)
    cfg = replace(cfg, target=here)
    command.pilot(cfg, "eagle3", tmp_path / name)
    assert (ROOT / commands[0][0]).is_file()
    wanted: Any = compose(*ENTRIES["eagle3"], commands[0][1:])
    assert wanted.data.path == str(chats)
    assert wanted.out_dir == str(tmp_path / name / "pilots/eagle3")
    assert wanted.target.path == cfg.target.path and wanted.target.allow_other


@pytest.mark.parametrize(
    ("pilots", "message"),
    [
        (["silent"], "pilots: .*silent does not say how many tokens"),
        *(([name], f"pilots: .*{name} does not say how") for name in ("nan", "endless", "text")),
        (["nowhere"], "nowhere"),
    ],
)
def test_pilots_that_are_none(
    pilots: list[str], message: str, target: Any, runs: Path, prompts: Path, tmp_path: Path
) -> None:
    cfg = config(tmp_path / "out", prompts, pilots=[str(runs / p) for p in pilots])
    with pytest.raises(UserError, match=message):
        run.run(cfg, target, Steps(quiet=True), cfg.pilots)


def test_prompts_without_room(target: Any, runs: Path, prompts: Path, tmp_path: Path) -> None:
    cfg = config(tmp_path / "o", prompts, pilots=[str(runs / "short")], max_new_tokens=1020)
    with pytest.raises(UserError, match="^prompts: fewer than two of .* leave room"):
        run.run(cfg, target, Steps(quiet=True), cfg.pilots)


def test_a_forecast_stays_as_it_was(
    tmp_path: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "forecast.json").write_text("{}")
    for keys, message in (
        (["pilots=[x]"], "a forecast stays as it was"),
        (["check=none.json", "truth=[x]"], "check: cannot read none.json"),
        ([f"check={tmp_path}/forecast.json", "truth=[x]"], "is no forecast"),
    ):
        assert code_of(main, f"out={tmp_path}", f"prompts={prompts}", "target=tiny", *keys) == 2
        assert message in capsys.readouterr().err


PUBLISHED = sorted(
    p.name.removesuffix("-truth.json") for p in (ROOT / "docs/results").glob("forecast*-truth.json")
)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_forecast_is_as_it_was_frozen(name: str) -> None:
    said = run.frozen(ROOT / f"docs/results/{name}.json")
    truth = json.loads((ROOT / f"docs/results/{name}-truth.json").read_text())
    assert truth["forecast"]["sha256"] == said["sha256"]
    known = [r["accepted_length"] for r in said["forecasts"]]
    for row in truth["rows"]:
        assert row["forecast"] in known
        low, high = row["forecast"]["low"], row["forecast"]["high"]
        assert row["inside"] is (low <= row["measured"]["mean"] <= high)
    assert truth["created"] > said["created"]
    assert truth["inside"] == sum(r["inside"] for r in truth["rows"])
    page = " ".join((ROOT / "docs/fit.md").read_text().split())
    assert f"{truth['inside']} of {truth['of']} lengths lay inside" in page


@pytest.mark.slow
def test_a_pilot_is_trained_by_the_command(tmp_path: Path, data: Path, prompts: Path) -> None:
    small = ["target=tiny", "target.layers=3", "dtype=float32", "pilot_steps=2", "num_prompts=2"]
    small += ["max_new_tokens=8", "curve_rounds=1", "batch_sizes=[1]", "heads=[eagle3]"]
    more = "more=['head.draft_vocab=0','batch_size=2']"
    places = [f"out={tmp_path / 'out'}", f"prompts={prompts}", f"chats={data}"]
    assert code_of(main, *small, *places, more) == 0
    said = run.frozen(tmp_path / "out" / "forecast.json")
    assert said["pilots"][0]["kind"] == "eagle3" and said["pilots"][0]["tokens"] > 0
