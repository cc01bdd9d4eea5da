"""scripts/evaluate.py on the tiny target: the files it promises, fair turns, token equality,
and bad input.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from outrider.conf.jsonl import records
from outrider.decode.drafters import NoDraft
from outrider.decode.engine import Generation, Request, generate
from outrider.decode.models.load import TargetConfig, load_target
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.scripts import evaluate
from outrider.scripts.common.prompts import Prompt, load_prompts, thinned
from outrider.scripts.reports import plots
from outrider.scripts.reports.wandb_log import to_wandb
from outrider.scripts.scoring import interleaved
from outrider.scripts.scoring.interleaved import Contest, ContestSettings, ScoredAnswer, System
from outrider.scripts.scoring.plain import Plain
from outrider.scripts.scoring.reference import hf_generate
from outrider.scripts.scoring.same_tokens import lossless
from outrider.scripts.scoring.systems import systems_of
from tests.helpers.commands import code_of

SETTINGS = ContestSettings(Sampling(), 12, 1, 0)


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


def test_report_and_outputs(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path, out, wandb = prompts_file(tmp_path), tmp_path / "out", MagicMock()
    logged = wandb.init.return_value.__enter__.return_value
    logged.summary = {}
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    keys = [f"prompts={path}", f"out={out}", "drafters=[ngram,hf_generate]", "temperatures=[0,1]"]
    assert run(*keys, "wandb=offline") == 0
    report = json.loads((out / "report.json").read_text())
    (other,) = report["others"]
    for one, temperature in ((report, 0), (other, 1)):
        assert one["settings"]["temperature"] == temperature
        assert len(one["settings"]["prompts"]["sha256"]) == 64
        assert set(one["target"]) > {"name", "path", "weights_sha256", "tokenizer_sha256"}
        assert {"versions", "processor", "threads"} <= set(one["environment"])
        assert [d["name"] for d in one["drafters"]] == ["none", "ngram", "hf_generate"], (
            "none is always there, first"
        )
        for row in one["drafters"]:
            assert set(row["accepted_length"]) == set(row["speedup"]) == {"mean", "low", "high"}
            assert set(row["by_category"]) == {"chat", "code"}
            assert row["verify_ms"] > 0
    assert all(r["lossless"]["equal"] == r["lossless"]["checked"] == 4 for r in report["drafters"])
    assert other["drafters"][0]["lossless"] is None
    first = report["drafters"][1]["acceptance_by_position"][0]
    assert first.keys() >= {"position", "conditional", "unconditional", "trials"}
    lines = records(out / "outputs.jsonl")
    assert [line["temperature"] for line in lines] == [0] * 12 + [1] * 12
    for line in lines:
        assert sum(line["cycles"]) == len(line["token_ids"]) - 1, (
            "the prefill's token is in no cycle"
        )
    second = {line["drafter"]: line["prompt_ids"] for line in lines[:12] if line["turn"] == 1}
    assert second["none"] == second["ngram"] == second["hf_generate"], "history comes from none"
    page = (out / "report.html").read_text()
    assert page.startswith("<!doctype html>") and "T = 1 ·" in page
    assert {p.stem for p in (out / "figures").glob("*.png")} == set(plots.PANELS)
    assert "ngram" in capsys.readouterr().out
    assert not list(out.rglob(".tmp-*"))
    (line,) = logged.log.call_args.args
    assert line["eval/drafters"] is wandb.Table.return_value and len(line) == 1 + len(plots.PANELS)
    drafters = [label for _, label, *_ in wandb.Table.call_args.kwargs["data"]]
    assert drafters == ["none", "ngram", "hf_generate"] * 2
    assert {"speed/none/T=1/speedup", "eval/ngram/T=0/accepted_length"} <= {*logged.summary}


def test_trouble_with_wandb_costs_a_report_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not its exit code, and not what was measured for hours."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    to_wandb({"settings": {}}, tmp_path, "online", "p")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("wandb") and line.endswith(f"the report is in {tmp_path}")


@pytest.mark.parametrize(
    "spec",
    ["RUNS/medusa@tre", "RUNS/medsua", "hf_assisted", "RUNS/empty", "gone@http://127.0.0.1:9"],
)
def test_a_drafter_that_is_not_there_is_refused_before_anything_is_loaded(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, spec: str
) -> None:
    runs = tmp_path / "runs"
    for name in ("medusa/head/head.json", "empty/x"):
        (runs / name).parent.mkdir(parents=True)
        (runs / name).write_text("{}")
    monkeypatch.setattr(evaluate, "load_target", lambda *_: pytest.fail("the target was loaded"))
    named = f"drafters=[none,'{spec.replace('RUNS', str(runs))}']"
    assert run(f"prompts={prompts_file(tmp_path)}", f"out={tmp_path}/out", named) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: drafters: ") and shown.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_later_turn_that_outgrows_the_context_is_left_out_for_all(target: Target) -> None:
    systems = systems_of(["none", "ngram"], target)
    talk = [
        Prompt("grows", "chat", ["hello", "word " * 60, "and?"]),
        Prompt("short", "chat", ["hi"]),
    ]
    found = interleaved.run_contest(target, talk, systems, SETTINGS, quiet=True)
    assert [(s["prompt_id"], s["turn"]) for s in found.skipped_turns] == [("grows", 1)]
    assert sorted((a.drafter, a.prompt_id, a.turn) for a in found.answers) == [
        (name, prompt, 0) for name in ("ngram", "none") for prompt in ("grows", "short")
    ]


def test_ids_of_turns_never_meet(target: Target) -> None:
    """A prompt of more than 64 turns shared its random numbers with the next one."""
    ids = [interleaved.request_id(prompt, turn) for prompt in range(30) for turn in range(200)]
    assert len(set(ids)) == len(ids)
    assert all(interleaved.request_id(p, t) == 64 * p + t for p in range(5) for t in range(64))


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
        monkeypatch.setattr(Plain, "rounding", lambda *_, n=noise: n)
        again = lossless(found, systems, target)
        assert again["wrong"]["beyond_rounding"] == beyond
        assert again["short"]["beyond_rounding"] == 1


def test_prompts_are_thinned_evenly_over_categories() -> None:
    prompts = load_prompts("scripts/prompts/demo.jsonl")
    few = thinned(prompts, 16)
    counts = {c: sum(p.category == c for p in few) for c in {p.category for p in prompts}}
    assert len(few) == 16 and set(counts.values()) == {2} and thinned(prompts, None) == prompts
