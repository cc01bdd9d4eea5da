"""scripts/evaluate.py on the tiny target: the files it promises, fair turns, token equality,
and bad input.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.conf.errors import UserError
from outrider.conf.jsonl import records
from outrider.decode.drafters import NoDraft
from outrider.decode.engine import DecodedRun, Generation, Request, Timing, generate
from outrider.decode.models.load import TargetConfig, load_target
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.scripts import evaluate
from outrider.scripts.common.prompts import Prompt, load_prompts
from outrider.scripts.reports import plots
from outrider.scripts.scoring import breakdown, contest
from outrider.scripts.scoring import systems as systems_module
from outrider.scripts.scoring.contest import Contest, ContestSettings, ScoredAnswer, System
from outrider.scripts.scoring.plain import Plain
from outrider.scripts.scoring.reference import hf_generate
from outrider.scripts.scoring.same_tokens import lossless
from outrider.scripts.scoring.score import Scores
from outrider.scripts.scoring.systems import systems_of
from tests.helpers import pictures
from tests.helpers.commands import code_of


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target(TargetConfig(kind="tiny", context=256), "float32", "cpu")


def prompts_file(folder: Path) -> Path:
    rows = [
        {"question_id": 1, "category": "chat", "turns": ["one two three one two", "and then?"]},
        {"question_id": 2, "category": "chat", "turns": ["abcabcabc"]},
        {"question_id": 3, "category": "code", "turns": ["x = x + 1"]},
    ]
    path = folder / "p.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def run(*overrides: str) -> int:
    small = ("target=tiny", "dtype=float32", "max_new_tokens=20", "quiet=true", "device=cpu")
    return code_of(evaluate.main, *small, *overrides)


def test_report_and_outputs(tmp_path: Path, capsys: Any) -> None:
    path, out = prompts_file(tmp_path), tmp_path / "out"
    keys = [f"prompts={path}", f"out={out}", "drafters=[ngram,hf_generate]", "temperature=0"]
    assert run(*keys) == 0
    report = json.loads((out / "report.json").read_text())
    identity = {"name", "path", "weights_sha256", "tokenizer_sha256", "template_sha256"}
    assert set(report["target"]) > identity
    assert {"temperature", "batch_size", "seed"} < set(report["settings"])
    assert len(report["settings"]["prompts"]["sha256"]) == 64
    assert {"versions", "processor", "threads"} <= set(report["environment"])
    assert [d["name"] for d in report["drafters"]] == ["none", "ngram", "hf_generate"], (
        "none is always there, first"
    )
    for row in report["drafters"]:
        assert set(row["accepted_length"]) == set(row["speedup"]) == {"mean", "low", "high"}
        assert set(row["by_category"]) == {"chat", "code"}
        assert row["lossless"]["equal"] == row["lossless"]["checked"] == 4
        parts, wall = row["breakdown"]["seconds"], row["breakdown"]["wall_seconds"]
        assert sum(parts.values()) == pytest.approx(wall)
        steady = [unit["seconds"] for unit in row["units"] if not unit["stalled"]]
        assert wall == pytest.approx(sum(steady))
        assert 0 < parts["target"] < wall and parts["python"] > 0
    first = report["drafters"][1]["acceptance_by_position"][0]
    assert first.keys() >= {"position", "conditional", "unconditional", "trials"}
    lines = records(out / "outputs.jsonl")
    assert len(lines) == 3 * 4
    for line in lines:
        assert {"drafter", "prompt_id", "category", "prompt_ids", "token_ids", "cycles"} <= set(
            line
        )
        assert sum(line["cycles"]) == len(line["token_ids"]) - 1, (
            "the prefill's token is in no cycle"
        )
    second = {line["drafter"]: line["prompt_ids"] for line in lines if line["turn"] == 1}
    assert second["none"] == second["ngram"] == second["hf_generate"], "history comes from none"
    assert (out / "report.html").read_text().startswith("<!doctype html>")
    assert {p.stem for p in (out / "figures").glob("*.png")} == set(plots.PANELS)
    assert "ngram" in capsys.readouterr().out
    assert not list(out.rglob(".tmp-*"))


def test_parts_of_a_second_pass_replace_those_of_the_run(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: a few prompts with a clock that waits; the speeds stay those of the
    measured run.
    """
    waited: list[Target] = []

    def clock(t: Target) -> Any:
        waited.append(t)
        return time.perf_counter

    monkeypatch.setattr(systems_module, "clock", clock)
    systems, _ = systems_of(["none", "ngram", "hf_generate"], target)
    prompts = [Prompt(str(i), "chat", ["ab ab ab"]) for i in range(3)]
    measured = contest.run_contest(target, prompts, systems, SETTINGS, quiet=True)
    rows = [Scores(measured, systems).row(system) for system in systems]
    before = copy.deepcopy(rows)
    assert not waited and before[0]["breakdown"]["source"] == breakdown.MEASURED
    breakdown.again(rows, target, prompts[:2], systems, SETTINGS)
    assert waited
    for row, old in zip(rows[:2], before, strict=False):
        message = row.pop("breakdown")
        assert message["source"].startswith("2 prompts")
        assert row.pop("ms_per_token") == message["ms_per_token"]
        assert sum(message["seconds"].values()) == pytest.approx(message["wall_seconds"])
        assert message["without"]["all_but_target"] >= old["speedup"]["mean"] > 0
        assert row == {k: v for k, v in old.items() if k in row}
    assert rows[2]["breakdown"] is None and before[2]["breakdown"] is not None
    breakdown.again(rows, target, [], systems, SETTINGS)
    assert not any(row.get("breakdown") for row in rows)


def test_batches_and_sampling_write_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures.left_out(monkeypatch)
    path = prompts_file(tmp_path)
    for size in (1, 2):
        keys = [f"prompts={path}", f"batch_size={size}", "decode=sample", "seed=3"]
        assert run(*keys, f"out={tmp_path}/b{size}") == 0
    texts = []
    for size in (1, 2):
        lines = records(tmp_path / f"b{size}" / "outputs.jsonl")
        texts.append({(x["drafter"], x["prompt_id"], x["turn"]): x["token_ids"] for x in lines})
    assert texts[0] == texts[1]
    report = json.loads((tmp_path / "b2" / "report.json").read_text())
    assert report["drafters"][0]["lossless"] is None


def test_several_settings_are_kept_as_they_come(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures.left_out(monkeypatch)
    out, measured = tmp_path / "out", evaluate.measure
    args = [f"prompts={prompts_file(tmp_path)}", f"out={out}", "num_prompts=2"]
    args += ["drafters=[ngram]", "batch_sizes=[1,2]"]

    def stopped(cfg: Any, *rest: Any) -> Any:
        if cfg.batch_size == 2:
            raise KeyboardInterrupt
        return measured(cfg, *rest)

    monkeypatch.setattr(evaluate, "measure", stopped)
    assert run(*args) == 130
    assert json.loads((out / "report.json").read_text())["settings"]["batch_size"] == 1
    monkeypatch.setattr(evaluate, "measure", measured)
    assert run(*args) == 0
    report = json.loads((out / "report.json").read_text())
    assert [p["batch_size"] for p in report["batches"]["ngram"]] == [1, 2]
    assert set(report["batch_limits"]["ngram"]) == {"pays_up_to", "stops_at"}
    assert [o["folder"] for o in report["others"]] == ["t0-b2"]
    assert (out / "t0-b2" / "report.json").exists()
    assert "Speedup against batch size" in (out / "report.html").read_text()


@pytest.mark.parametrize(
    "spec, words",
    [
        ("RUNS/medusa@tre", "unknown shape 'tre'; did you mean @tree?"),
        ("RUNS/medsua", "neither none, ngram nor an existing folder; did you mean RUNS/medusa?"),
        ("ngarm", "did you mean ngram?"),
        ("hf_assisted", "transformers needs an assistant; write hf_assisted@DIR"),
        ("RUNS/empty", "the folder holds no head"),
    ],
)
def test_a_misspelt_drafter_is_refused_before_anything_is_loaded(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, spec: str, words: str
) -> None:
    runs = tmp_path / "runs"
    for name in ("medusa/head/head.json", "empty/x"):
        (runs / name).parent.mkdir(parents=True)
        (runs / name).write_text("{}")
    monkeypatch.setattr(evaluate, "load_target", lambda *_: pytest.fail("the target was loaded"))
    named = f"drafters=[none,'{spec.replace('RUNS', str(runs))}']"
    assert run(f"prompts={prompts_file(tmp_path)}", f"out={tmp_path}/out", named) == 2
    shown = capsys.readouterr().err
    assert words.replace("RUNS", str(runs)) in shown and shown.count("\n") == 1
    assert shown.startswith("error: drafters: ") and not (tmp_path / "out").exists()


def test_a_drafter_that_cannot_be_loaded_is_refused_before_the_first_token(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad/head").mkdir(parents=True)
    (tmp_path / "bad/head/head.json").write_text("{}")
    monkeypatch.setattr(contest, "run_contest", lambda *_: pytest.fail("tokens were scored"))
    out = tmp_path / "out"
    keys = [f"prompts={prompts_file(tmp_path)}", f"out={out}", "parity=0"]
    assert run(*keys, f"drafters=[none,{tmp_path}/bad@tree]") == 2
    assert "bad/head/head.json: " in capsys.readouterr().err
    assert not (out / "report.json").exists()


def test_a_prompt_beyond_the_context_is_named(target: Target) -> None:
    systems, _ = systems_of(["none"], target)
    long = [Prompt("too-long", "chat", ["word " * 300])]
    with pytest.raises(UserError, match="too-long has .* tokens"):
        contest.run_contest(target, long, systems, SETTINGS, quiet=True)


def test_a_later_turn_that_outgrows_the_context_is_left_out_for_all(target: Target) -> None:
    systems, _ = systems_of(["none", "ngram"], target)
    talk = [
        Prompt("grows", "chat", ["hello", "word " * 60, "and?"]),
        Prompt("short", "chat", ["hi"]),
    ]
    found = contest.run_contest(target, talk, systems, SETTINGS, quiet=True)
    assert [(s["prompt_id"], s["turn"]) for s in found.skipped_turns] == [("grows", 1)]
    assert sorted((a.drafter, a.prompt_id, a.turn) for a in found.answers) == [
        (name, prompt, 0) for name in ("ngram", "none") for prompt in ("grows", "short")
    ]


SETTINGS = ContestSettings(Sampling(), 12, 1, 0)


def telling(name: str, token: int, message: Callable[[Any], object]) -> System:
    """A system that answers `token` to everything; message: hears its requests."""

    def ran(requests: Any, settings: ContestSettings) -> DecodedRun:
        message(requests)
        found = [Generation(list(r.prompt), [token], [], [False]) for r in requests]
        return DecodedRun(found, Timing(), 0)

    return System(name, name, name, "none", 0, 0, ran)


def test_drafters_take_turns_at_going_first(target: Target) -> None:
    order: list[str] = []
    systems = [telling(n, 5, lambda _, n=n: order.append(n)) for n in ("none", "b", "c")]
    prompts = [Prompt(str(i), "chat", ["x"]) for i in range(3)]
    contest.run_contest(target, prompts, systems, SETTINGS, quiet=True)
    assert order[:3] == ["none", "b", "c"], "warm-up"
    assert order[3:] == ["none", "b", "c", "b", "c", "none", "c", "none", "b"]


def test_hf_generate_samples_without_touching_the_global_generator(target: Target) -> None:
    requests = [Request([5, 9, 33, 12], 12)]
    before = torch.random.get_rng_state()
    warm = Sampling(1.0, top_k=20, top_p=0.9, min_p=0.01)
    first, again, other = (
        hf_generate(target, requests, warm, seed=s).generations[0].token_ids for s in (1, 1, 2)
    )
    assert first == again != other and torch.equal(before, torch.random.get_rng_state())


def test_a_wrong_token_is_no_rounding(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check must be able to fail: a token far below the best one is called an error, an
    equal answer is not. What is far is measured: a model whose own plain passes differ by as
    much is not blamed on the engine."""
    run_ = generate(target, NoDraft(), [Request([5, 9, 33, 12], 8)], Sampling())
    right = run_.generations[0]
    wrong = [*right.token_ids[:3], (right.token_ids[3] + 1) % 256, *right.token_ids[4:]]
    short = right.token_ids[:5]
    found = Contest([ScoredAnswer("none", "a", 0, "chat", right)])
    for name, tokens in (("same", right.token_ids), ("wrong", wrong), ("short", short)):
        found.answers.append(
            ScoredAnswer(name, "a", 0, "chat", Generation(right.prompt_ids, tokens, [], []))
        )
    systems = [System(n, n, n, "none", 0, 0, None) for n in ("none", "same", "wrong", "short")]  # type: ignore[arg-type]
    result = lossless(found, systems, target)
    assert result["same"]["equal"] == 1 and result["none"]["equal"] == 1
    assert result["wrong"]["beyond_rounding"] == 1
    assert result["wrong"]["differences"][0]["position"] == 3
    gap = result["wrong"]["differences"][0]["gap"]
    assert gap > 0.01 and result["short"]["beyond_rounding"] == 1
    assert result["wrong"]["measured_rounding"] < gap / 100
    assert result["same"]["measured_rounding"] is None
    for noise, beyond in ((gap * 0.49, 1), (gap * 0.51, 0)):
        monkeypatch.setattr(Plain, "rounding", lambda *_, n=noise: {"logit": n, "gap": n})
        again = lossless(found, systems, target)
        assert again["wrong"]["beyond_rounding"] == beyond
        assert again["short"]["beyond_rounding"] == 1


def test_prompts_are_thinned_evenly_over_categories() -> None:
    prompts = load_prompts("scripts/prompts/demo.jsonl")
    few = evaluate.chosen(prompts, evaluate.EvaluateConfig("x", num_prompts=16))
    counts = {c: sum(p.category == c for p in few) for c in {p.category for p in prompts}}
    assert len(few) == 16 and set(counts.values()) == {2}
    only = evaluate.chosen(prompts, evaluate.EvaluateConfig("x", categories=["code"]))
    assert {p.category for p in only} == {"code"}
