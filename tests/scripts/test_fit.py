"""scripts/fit.py: a head fitted to traffic, the old one kept where the new one is not better."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.conf.errors import UserError
from outrider.conf.schema import CONF, compose
from outrider.heads import HEADS, find_head, load_head, tuned
from outrider.heads.checkpoint import write_card
from outrider.scripts import fit as command
from outrider.scripts.fitting import ranks, train, verdict
from outrider.scripts.fitting.config import FitConfig, FitKeys
from outrider.scripts.reports import fit_table
from outrider.scripts.reports.table import change
from outrider.train.config import EagleRun
from outrider.train.signals import Interrupted
from tests.heads.test_warm import weights
from tests.helpers.traffic import Log
from tests.helpers.training import TINY, chats, run, tiny_target

KEYS = [
    "target=tiny",
    *(f"target.{k}={v}" for k, v in TINY.items()),
    "minutes=0.02",
    "dtype=float32",
    "batch_size=4",
    "data.max_length=64",
    "data.held_out=0.2",
    "evaluations=2",
    "eval.prompts=2",
    "eval.max_new_tokens=8",
    "max_new_tokens=8",
    "prompts=4",
    "general_prompts=2",
    "eval.parity=0",
    "certify_tokens=0",
    "device=cpu",
    "quiet=true",
]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder of Medusa heads."""
    folder = tmp_path_factory.mktemp("start")
    return run(chats(folder / "data.jsonl"), folder / "run")


def later(path: Path, rows: int = 8) -> Path:
    """Later chats of two categories."""
    lines = [json.loads(line) for line in chats(path, rows).read_text().splitlines()]
    for i, row in enumerate(lines):
        row["category"] = ("a", "b")[i % 2]
        row["messages"][0]["content"] = f"later question {i}"
    path.write_text("".join(json.dumps(row) + "\n" for row in lines))
    return path


def config(start: Path, out: Path, *more: str) -> FitConfig:
    source = start.parent
    later(source / "later.jsonl")
    given = [f"train={source / 'data.jsonl'}", f"later={source / 'later.jsonl'}"]
    if any(key.startswith(("logs=", "train=")) for key in more):
        given = []
    return compose("fit", FitConfig, [*KEYS, f"start={start}", f"out={out}", *given, *more])


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pilot that finds the same on any machine."""
    real = train.budgeted
    monkeypatch.setattr(train, "budgeted", lambda cfg, step, seconds: real(cfg, 0.1, 0.1))


def fitted(cfg: FitConfig) -> dict[str, Any]:
    assert command.fitted(cfg, Path(cfg.out)) == 0
    return json.loads((Path(cfg.out) / "fit.json").read_text())


@pytest.mark.slow
@pytest.mark.usefixtures("steady")
def test_from_traffic_to_a_kept_head_and_stopped_between(start: Path, tmp_path: Path) -> None:
    before = {p: p.read_bytes() for p in start.rglob("*") if p.is_file()}
    whole = fitted(config(start, tmp_path / "whole"))
    assert whole["budget"]["steps"] == 10 and whole["budget"]["every"] == 5
    assert {p: p.read_bytes() for p in start.rglob("*") if p.is_file()} == before
    assert [r["name"] for r in whole["later"]["drafters"]][0] == str(start)
    assert set(whole["later"]["drafters"][1]["by_category"]) == {"a", "b"}

    cfg, real = config(start, tmp_path / "part"), command.Pipeline.once
    kept: list[str] = []

    def stopped(job: Any, name: str, *more: Any) -> Any:
        found = real(job, name, *more)
        if name not in kept:
            kept.append(name)
            raise KeyboardInterrupt  # as if killed right behind every stage
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command.Pipeline, "once", stopped)
        for _ in range(7):
            with pytest.raises(KeyboardInterrupt):
                command.fitted(cfg, Path(cfg.out))
    part = fitted(cfg)
    assert len(kept) == 7 and part["kept"] == whole["kept"] and part["gain"] == whole["gain"]
    for place in ("run/best", "run/head", "head"):
        assert weights(tmp_path / "whole" / place) == weights(tmp_path / "part" / place)
    load_head(find_head(cfg.out), tiny_target())


@pytest.mark.usefixtures("steady")
def test_the_old_head_stays_where_the_new_one_is_not_better(
    start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = fitted(config(start, tmp_path / "fit", "optim.lr=1e-12", "general_prompts=0"))
    assert found["kept"] == "old" and "the OLD head" in capsys.readouterr().out
    assert weights(tmp_path / "fit/head") == weights(find_head(str(start)))
    assert found["training"]["best_step"] == 5


def report(lengths: list[tuple[float, float]]) -> list[dict[str, Any]]:
    """Rows before and after of prompts with these accepted lengths."""
    return [
        {
            "per_prompt": [
                {"prompt_id": str(i), "category": "a", "accepted_length": pair[side], "cycles": 10}
                for i, pair in enumerate(lengths)
            ]
        }
        for side in (0, 1)
    ]


def test_only_a_paired_interval_above_one_counts() -> None:
    old, new = report([(1.5 + i % 3, 1.6 + i % 3) for i in range(30)])
    gain = verdict.ratio(new, old)
    assert gain["mean"] == pytest.approx(2.6 / 2.5) and verdict.better(gain)
    assert not verdict.better(verdict.ratio(old, new))
    old, new = report([(2.0, 2.0 + (0.5 if i % 2 else -0.4)) for i in range(10)])
    assert not verdict.better(verdict.ratio(new, old))
    old, new = report([(2.0, 3.0)])
    assert not verdict.better(verdict.ratio(new, old))  # one prompt allows no interval
    assert verdict.ratio(new, old, "nothing")["mean"] is None
    assert change(verdict.ratio(new, old, "nothing")) == "–"


def test_the_matrix_pairs_every_head_with_the_first_one_by_traffic(tmp_path: Path) -> None:
    lengths = {"general": (2.0, 3.0), "fit_sql": (4.0, 2.7)}
    rows: list[dict[str, Any]] = [{"name": "none", "shape": "none"}]
    for name, both in lengths.items():
        per_prompt = [
            {"prompt_id": f"{c}{i}", "category": c, "accepted_length": at + i / 10, "cycles": 10}
            for c, at in zip(("sql", "letters"), both, strict=True)
            for i in range(4)
        ]
        cells = {
            c: {"prompts": 4, "accepted_length": {"mean": at + 0.15, "low": at, "high": at + 0.3}}
            for c, at in zip(("sql", "letters"), both, strict=True)
        }
        rows.append(
            {
                "name": f"runs/{name}@tree",
                "shape": "tree",
                "bytes": 1,
                "speedup": None,
                "accepted_length": None,
                "by_category": cells,
                "per_prompt": per_prompt,
            }
        )
    report = {"created": "", "command": "", "environment": {}, "skipped": [], "drafters": rows}
    (tmp_path / "report.json").write_text(json.dumps(report))
    found = fit_table.forgotten(tmp_path / "report.json")
    sql = found["drafters"][1]["by_category"]["sql"]["against_before"]
    assert sql["mean"] == pytest.approx(4.15 / 2.15) and sql["low"] > 1
    head, _, first, second = fit_table.matrix(found).markdown().splitlines()
    assert head == "| drafter | sql (4) | letters (4) |"
    assert first == "| general@tree | 2.15 | 3.15 |"
    assert "| 4.15, +93.0% [+" in second and "| 2.85, -9.5% [-" in second


@pytest.mark.parametrize("cycles", [(0, 0), (5, 0), (0, 5)])
def test_a_prompt_without_cycles_on_both_sides_is_no_pair(cycles: tuple[int, int]) -> None:
    """All cycles of a short answer may be cut by its stop token: the other prompt is alone then."""
    old, new = report([(2.0, 3.0), (1.2, 1.2)])
    for row, count in zip((old, new), cycles, strict=True):
        row["per_prompt"][1] |= {"cycles": count, "accepted_length": 1.2 if count else None}
    gain = verdict.ratio(new, old)
    assert gain == {"mean": 1.5, "low": None, "high": None} and not verdict.better(gain)


def test_a_fitted_head_drafts_as_the_old_one_was_tuned_to(start: Path, tmp_path: Path) -> None:
    """Else a deep draft of the new head would be compared with a shallow one of the old."""
    old, new = tmp_path / "old", tmp_path / "new"
    for place in (old, new):
        shutil.copytree(find_head(str(start)), place)
    command.as_tuned(old, new)
    assert not (new / tuned.DECODE).exists()
    one = tuned.DraftSettings("chain", depth=1)
    choice = tuned.Tuned(tuned.card_sha256(old), one, chain=one, break_even=1.2)
    (old / tuned.DECODE).write_text(json.dumps(choice.to_json()))
    card = json.loads((new / "head.json").read_text())
    saved = {**card["head"], "coverage": 0.5}  # another head
    write_card(new, card["weights"]["file"], card["kind"], saved, None, None)
    command.as_tuned(old, new)
    found = tuned.read(new)
    assert found is not None and found.best == one and found.break_even == 1.2


def test_a_budget_becomes_steps(start: Path, tmp_path: Path) -> None:
    cfg = config(start, tmp_path, "minutes=2", "evaluations=4")
    budget = train.budgeted(cfg, 0.5, 5.0)
    assert (budget.steps, budget.every) == (200, 50)
    assert train.budgeted(cfg, 0.5, 25.0).steps == 2 * 70  # evaluations take half at most
    with pytest.raises(UserError, match="^minutes: 2 is too short for one evaluation here"):
        train.budgeted(cfg, 0.5, 100.0)
    with pytest.raises(UserError, match="^minutes: "):
        train.budgeted(cfg, 500.0, 1.0)
    cfg = replace(cfg, minutes=1e9)
    assert train.budgeted(cfg, 0.0, 0.0).steps < 2**53  # more than a schedule takes
    with pytest.raises(UserError, match="^minutes: .* is above 1000000000"):
        config(start, tmp_path, "minutes=1e308")


@pytest.mark.parametrize(("step", "evaluation"), [(1.0, 100.0), (1.0, 725.0), (500.0, 72.0)])
def test_the_minutes_that_are_requested_for_are_enough(
    start: Path, tmp_path: Path, step: float, evaluation: float
) -> None:
    cfg = config(start, tmp_path, "minutes=0.5")
    with pytest.raises(UserError) as message:
        train.budgeted(cfg, step, evaluation)
    cfg = replace(cfg, minutes=float(str(message.value).rpartition("give ")[2].split()[0]))
    assert train.budgeted(cfg, step, evaluation).steps >= 1
    cfg = replace(cfg, minutes=2 * evaluation / 60)  # exactly one evaluation
    assert step > evaluation or train.budgeted(cfg, step, evaluation).every >= 1


def refused(*args: Any) -> str:
    with pytest.raises(UserError) as message:
        cfg = config(*args)
        command.fitted(cfg, Path(cfg.out))
    assert "\n" not in str(message.value)
    return str(message.value)


def test_what_is_refused(start: Path, tmp_path: Path) -> None:
    out = tmp_path / "fit"
    data = start.parent / "data.jsonl"
    assert refused(start, out, f"train={data}", "later=").startswith("later: is empty")
    assert refused(start, out, f"train={data}", "logs=x", "later=y").startswith("logs: logs and")
    assert refused(start, out, "minutes=0").startswith("minutes: ")
    assert refused(start, out, "head.lora.dropout=0.5").startswith("head.lora.rank: 0 is no LoRA")
    train_alone = f"train={data}"
    assert refused(start, out, train_alone, "later=gone.jsonl").startswith("later: cannot read")
    assert refused(start, out, "general=gone.jsonl").startswith("general: cannot read")
    assert refused(start, out, "against=[gone/head/at]").startswith("against: gone/head")
    more = ("certify_tokens=9", "controls=gone")
    assert refused(start, out, *more).startswith("controls: gone")
    assert refused(tmp_path / "nothing", out).startswith("start: ")
    assert refused(start, start / "fit").startswith("out: ")
    assert refused(start, out, "target.hidden=64").startswith("start: ")
    shutil.rmtree(out)
    assert refused(start, out, "format=eagle").startswith("format=eagle: ")
    assert refused(start, out, "head.lora.rank=2").startswith(
        "head.lora.rank: "
    )  # Medusa's is stacked
    shutil.rmtree(out)
    assert refused(start, out, "format=gguf").startswith("format=gguf: ")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "train", lambda *args: (_ for _ in ()).throw(UserError("pilot: here")))
        assert refused(start, out) == "pilot: here"  # nothing was learned: other keys may come
    (out / "budget.json").write_text("{}")
    assert refused(start, out, "minutes=3").startswith("out: ")
    (tmp_path / "others").mkdir()
    (tmp_path / "others/mine").touch()
    assert refused(start, tmp_path / "others").startswith("out: ")


@pytest.mark.usefixtures("steady")
def test_what_was_found_holds_for_the_same_files(start: Path, tmp_path: Path) -> None:
    learned, requested = chats(tmp_path / "train.jsonl"), later(tmp_path / "later.jsonl")
    keys = (start, tmp_path / "fit", f"train={learned}", f"later={requested}", "general_prompts=0")
    fitted(config(*keys))
    for path in (learned, requested):
        whole = path.read_text()
        path.write_text("".join(whole.splitlines(keepends=True)[:-2]))
        message = refused(*keys)
        assert message.startswith("out: ") and f"content.{path.stem}" in message
        path.write_text(whole)
    same = requested.with_name("same.jsonl")
    same.write_text(requested.read_text())
    message = refused(start, tmp_path / "other", f"train={same}", f"later={requested}")
    assert message.startswith("later: ") and "what is learned from" in message
    gone = refused(start, tmp_path / "gone", "train=gone.jsonl", f"later={requested}")
    assert gone.startswith("train: cannot read")

    budget = tmp_path / "fit/budget.json"
    whole = json.loads(budget.read_text())
    shutil.rmtree(tmp_path / "fit/steps/pilot")
    for kept in ({}, {**whole, "steps": "5"}, {**whole, "every": 0}):
        budget.write_text(json.dumps(kept))
        assert "budget.json is damaged; delete it" in refused(*keys)


def test_too_little_to_ask_is_message_before_the_training(start: Path, tmp_path: Path) -> None:
    out, data = tmp_path / "fit", start.parent / "data.jsonl"
    requested = tmp_path / "later.jsonl"
    keys = (start, out, f"train={data}", f"later={requested}")
    later(requested, 1)
    assert refused(*keys).startswith("later: of 1 prompts")
    long = "".join(json.dumps({"prompt": f"{i} " + "x" * 3000}) + "\n" for i in range(3))
    requested.write_text(long)
    assert refused(*keys).startswith("later: of 3 prompts")
    later(requested).write_text(requested.read_text() + long)
    general = tmp_path / "general.jsonl"
    general.write_text(long)
    assert refused(*keys, f"general={general}").startswith("general: of 2 prompts")
    log = log_file(tmp_path / "log.jsonl", 4)  # a fifth of them is one chat
    assert refused(start, tmp_path / "logs", f"logs={log}").startswith("later: of 1 prompts")


def test_later_chats_that_are_learned_from_are_message(
    start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, requested = start.parent / "data.jsonl", later(tmp_path / "later.jsonl")
    rows = [json.loads(line) | {"category": "x"} for line in data.read_text().splitlines()[:3]]
    same = "".join(json.dumps(row) + "\n" for row in rows)
    cfg = config(start, tmp_path / "fit", f"train={data}", f"later={requested}")
    command.readable(cfg)
    assert not capsys.readouterr().err
    requested.write_text(requested.read_text() + same)
    command.readable(cfg)
    assert "3 of 11 later chats stand in" in capsys.readouterr().err
    requested.write_text(same)
    with pytest.raises(UserError, match="^later: every chat of .* is what is learned from"):
        command.readable(cfg)


def test_what_is_read_behind_the_training_is_read_before_it(start: Path, tmp_path: Path) -> None:
    command.readable(config(start, tmp_path, f"against=['{start}+ngram']"))  # a union
    place = find_head(str(start)) / tuned.DECODE
    place.write_text("{}")
    try:
        assert "decode.json" in refused(start, tmp_path / "fit")
    finally:
        place.unlink()


def test_a_fit_that_was_moved_goes_on_from_its_own_chats(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, requested = log_file(tmp_path / "log.jsonl"), []

    def stopped(cfg: FitConfig, known: train.Chats, out: Path) -> None:
        requested.append(known)
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "pilot", stopped)
    for name in ("before", "after"):
        cfg = config(start, tmp_path / name, f"logs={log}")
        with pytest.raises(KeyboardInterrupt):
            command.fitted(cfg, Path(cfg.out))
        if name == "before":
            (tmp_path / name).rename(tmp_path / "after")
    assert all(Path(place).is_file() for place in (requested[1].train, requested[1].later))


def test_a_log_without_answers_is_refused(start: Path, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    row = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
    log.write_text(json.dumps(row) + "\n")
    assert refused(start, tmp_path / "fit", f"logs={log}").startswith("logs: ")
    log.write_text("")
    assert refused(start, tmp_path / "empty", f"logs={log}").startswith("logs: ")
    gone = tmp_path / "gone.jsonl"
    assert refused(start, tmp_path / "gone", f"logs={gone}").startswith("logs: ")


def log_file(path: Path, rows: int = 60) -> Path:
    """A log of requests and answers, as an OpenAI-style server writes them."""
    lines = []
    for i, line in enumerate(chats(path, rows).read_text().splitlines()):
        user, answer = json.loads(line)["messages"]
        choice = {"index": 0, "message": answer, "finish_reason": "stop"}
        lines.append(
            {
                "request": {
                    "model": "tiny",
                    "messages": [user],
                    "metadata": {"category": ("a", "b")[i % 2]},
                },
                "response": {"model": "tiny", "created": 1700000000 + i, "choices": [choice]},
            }
        )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.slow
@pytest.mark.usefixtures("steady")
def test_logs_to_a_certified_and_exported_lora(start: Path, tmp_path: Path) -> None:
    from outrider.train.config import EagleRun
    from outrider.train.loop import fit
    from tests.heads.test_lora import EAGLE

    data, old = start.parent / "data.jsonl", tmp_path / "old"
    taps = ("target.layers=4", "head.taps=[1,2,3]")
    keys = [*EAGLE, f"data.path={data}", f"out_dir={old}", *taps]
    fit(compose("eagle", EagleRun, keys), HEADS["eagle3"])
    log = log_file(tmp_path / "log.jsonl")
    more = (
        "head.lora.rank=2",
        "scratch=true",
        "certify_tokens=300",
        "controls=none",
        "format=vllm",
    )
    more = (*more, "target.layers=4")
    found = fitted(config(old, tmp_path / "fit", f"logs={log}", *more))
    assert found["traffic"]["rows"] == {"train": 48, "later": 12}
    assert found["bytes"]["after"] < 0.5 * found["bytes"]["before"]
    assert len(found["later"]["drafters"]) == 3
    assert found["certificate"]["verdict"] in ("lossless", "undecided")
    assert (tmp_path / "fit/export/outrider.json").is_file()
    table = fit_table.several([{**found, "name": "a log"}]).markdown()
    assert table.count("\n") == 4 and "LoRA 2" in table


@pytest.mark.slow
@pytest.mark.usefixtures("steady")
def test_a_log_of_five_thousand_exchanges(
    start: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """With 2 % long prompts, tool calls, reasoning, three models and broken lines: what is left
    out is said, with its number and why."""
    log = Log(5000, letters=160)
    path = log.write(tmp_path / "log.jsonl")
    more = ("data.max_length=512", "general_prompts=0", "data.held_out=0.01", "quiet=true")
    found = fitted(config(start, tmp_path / "fit", f"logs={path}", *more))
    traffic, said = found["traffic"], capfd.readouterr()
    assert {k: n for k, n in traffic["counts"].items() if k != "usable"} == log.reasons
    assert traffic["counts"]["usable"] == log.usable > 3500
    assert all(f"{n} {why}" in said.out for why, n in log.reasons.items())
    rows = (tmp_path / "fit/traffic/train.jsonl").read_text().splitlines()
    long = [row for row in rows if len(json.loads(row)["messages"][0]["content"]) > 512]
    assert 50 < len(long) <= log.counts["long prompt"]
    listed = (tmp_path / "fit/run/left_out.txt").read_text()
    assert listed.count("no supervised token within data.max_length=512") == len(long)
    # This target's template shows neither tools nor reasoning.
    assert listed.count("does not show the reasoning_content") > 100 < listed.count("show tools")
    assert f"{len(listed.splitlines())} rows left out (" in said.err
    assert f"{len(long)} x no supervised token within data.max_length" in said.err


# -- the keys that messages name


# What a message of a training run may name and a fit has not, and why no user of a fit needs it.
NOT_HERE = {
    "data.features": "a fit reads no stored features",
    "data.kind": "of a file alone",
    "data.name": "of data=hub",
    "data.path": "becomes `logs` or `train` (ranks.in_words)",
    "data.revision": "of data=hub",
    "data.split": "of data=hub",
    "data.streaming": "of data=hub",
    "data.weights": "of several files",
    "epochs": "minutes in their place",
    "eval.every": "stands behind three keys that a fit has; `evaluations` says it",
    "out_dir": "becomes `out` (ranks.in_words)",
    "profile": "of bench",
    "shard_target": "a fit needs a target that one device holds",
    "shard_group": "a fit needs a target that one device holds",
    "steps": "minutes in their place",
    "trackers": "none are given",
    "wandb": "none is given",
}


def named_keys() -> set[str]:
    """The keys of training runs that the texts under train/ name."""
    import ast
    import re

    from outrider.conf.typed import keys
    from outrider.train.config import ENTRIES

    known = {key for _, schema in ENTRIES.values() for key in keys(schema)}
    texts = []
    for path in (Path(train.__file__).parents[2] / "train").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr | ast.Constant):
                texts.append(ast.unparse(node))
    whole = "\n".join(texts)
    # Keys of a head are the start's; those of its vocabulary, LoRA and memory are a fit's.
    ours = ("head.lora.", "head.draft_vocab", "head.chunk")
    wanted = (k for k in known if not k.startswith(("head.", "target.")) or k.startswith(ours))
    plain = re.compile(r"(?<![\w.])[a-z_]+(?:\.[a-z_]+)+|(?<![\w.])[a-z_]+(?=[=:])")
    return set(wanted) & set(plain.findall(whole))


def test_every_key_that_a_message_names_can_be_given() -> None:
    from outrider.conf.typed import keys

    here, named = set(keys(FitConfig)), named_keys()
    assert {"data.max_bad_fraction", "micro_batch", "micro_tokens", "optim.lr"} <= named & here
    assert named - here <= set(NOT_HERE)
    assert not here & set(NOT_HERE)


def test_long_prompts_are_left_out_and_the_message_of_too_many_names_a_key(
    start: Path, tmp_path: Path
) -> None:
    rows = chats(tmp_path / "train.jsonl", 40).read_text().splitlines()
    for i in range(0, 40, 20):
        row = json.loads(rows[i])
        row["messages"][0]["content"] = f"question {i} " + "word " * 200
        rows[i] = json.dumps(row)
    (tmp_path / "train.jsonl").write_text("\n".join(rows))
    later(tmp_path / "later.jsonl")
    given = (f"train={tmp_path}/train.jsonl", f"later={tmp_path}/later.jsonl")
    message = refused(start, tmp_path / "fit", *given, "data.max_bad_fraction=0.01")
    assert "2 of 40 rows are unusable" in message and "data.max_bad_fraction=0.01" in message
    # The same command with the key that it names goes on.
    cfg = config(start, tmp_path / "fit", *given)
    assert cfg.data.max_bad_fraction == 0.2
    known = train.Chats(cfg.train, cfg.later)
    assert train.pilot(replace(cfg, minutes=5), known, tmp_path / "fit").steps >= 1


def test_keys_that_change_no_result_may_change_between_two_calls(
    start: Path, tmp_path: Path
) -> None:
    """What a message of too little memory names goes on in the same folder."""
    out = tmp_path / "fit"
    command.begin(config(start, out), out, "0" * 64)
    (out / "budget.json").write_text("{}")
    fewer = ("micro_batch=1", "micro_tokens=64", "eval.batch_size=2", "head.chunk=64")
    more = ("data.max_bad_fraction=0.5", "data.workers=1", "accelerate=conf/launch/ddp.yaml")
    command.begin(config(start, out, *fewer, *more), out, "0" * 64)
    with pytest.raises(UserError, match="^out: .* of other settings .*max_length"):
        command.begin(config(start, out, "data.max_length=128"), out, "0" * 64)


def test_names_of_a_run_become_those_of_the_fit(start: Path, tmp_path: Path) -> None:
    cfg = config(start, tmp_path / "fit")
    said = ranks.in_words("out_dir: cannot save to data.path.old or data.path; set out_dir", cfg)
    assert said == "out: cannot save to data.path.old or train; set out"


# -- without a head, and in several processes


@pytest.mark.usefixtures("steady")
def test_without_a_start_a_fresh_head_is_trained(
    start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("kind=medusa", "head.draft_vocab=0", "general_prompts=0")
    cfg = replace(config(start, tmp_path / "fit", *more), start="")
    found = fitted(cfg)
    said = capsys.readouterr().out
    assert "no start= is given, so a fresh medusa head is trained" in said
    assert found["kept"] == "new" and found["gain"] is None and found["start"]["path"] == ""
    assert [Path(row["name"]).name for row in found["later"]["drafters"]] == ["best"]
    assert load_head(find_head(cfg.out), tiny_target()).kind == "medusa"
    assert "no start= was given" in said
    assert compose("fit", FitConfig, ["out=x", "logs=y", "target=tiny"]).kind == "eagle3"


def test_what_is_refused_without_a_start(start: Path, tmp_path: Path) -> None:
    out = tmp_path / "fit"
    for key, name in (("scratch=true", "scratch"), ("head.lora.rank=2", "head.lora.rank")):
        keys = [*KEYS, f"out={out}", "logs=x", key]
        with pytest.raises(UserError, match=f"^{name}: "):
            compose("fit", FitConfig, keys)
    cfg = replace(config(start, out), start="", kind="nothing")
    with pytest.raises(UserError, match="^kind"):
        command.fitted(cfg, out)
    assert "or no start= for a fresh head" in refused(tmp_path / "nothing", out)


def of_recipe(name: str, *more: str) -> FitConfig:
    given = [f"experiment={name}", "logs=x", "out=y", *more]
    return compose("fit", FitKeys, given)


def test_a_recipe_gives_model_head_rows_and_optimizer() -> None:
    cfg = of_recipe("qwen3_8b_eagle3", "data.max_length=2048", "head.depth=5")
    assert (cfg.target.kind, cfg.target.name) == ("hub", "Qwen/Qwen3-8B")
    assert (cfg.data.turns, cfg.data.max_length, cfg.optim.lr) == ("rows", 2048, 1e-4)
    assert (cfg.batch_size, cfg.micro_tokens, cfg.kind) == (64, 16384, "eagle3")
    made = train.config(cfg, train.Chats("train.jsonl", "later.jsonl"), Path("run"))
    usual: Any = compose(
        "eagle", EagleRun, ["experiment=qwen3_8b_eagle3", "data.path=x", "out_dir=y"]
    )
    assert made.head == replace(usual.head, depth=5)
    assert made.optim == usual.optim and made.epochs == 0
    assert cfg.settings()["head"]["steps"] == 7, "another recipe is another fit"


def test_of_a_recipe_the_head_at_start_keeps_its_own_keys(start: Path, tmp_path: Path) -> None:
    cfg = of_recipe("smollm2_medusa_smoke", f"start={start}", "head.heads=1")
    made: Any = train.config(cfg, train.Chats("train.jsonl", "later.jsonl"), tmp_path / "run")
    assert made.head.heads == train.start_of(cfg)[2].heads == 2
    assert made.batch_size == 16 and made.start == str(start)


@pytest.mark.parametrize("name", sorted(path.stem for path in (CONF / "experiment").glob("*.yaml")))
def test_every_recipe_is_one_for_a_fit_or_refused_in_a_line(name: str) -> None:
    if name != "llama31_70b_eagle3":
        assert of_recipe(name).head_kind == of_recipe(name).kind
        return
    with pytest.raises(UserError, match=r"^experiment: .*shard_target.*outrider train"):
        of_recipe(name)


def test_what_is_refused_beside_a_recipe() -> None:
    for key, said in (
        ("steps=5", "^steps: no such key"),
        ("epochs=1", "^epochs: no such key"),
        ("head.dept=5", "^head.dept: no such key; did you mean head.depth"),
        ("kind=medusa", "^kind: medusa, and the chosen head is of kind eagle3; leave kind out"),
    ):
        with pytest.raises(UserError, match=said):
            of_recipe("qwen3_8b_eagle3", key)


def test_launches_that_are_refused(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert refused(start, tmp_path, "accelerate=gone.yaml").startswith(
        "accelerate: cannot read gone.yaml"
    )
    nodes = refused(start, tmp_path, "accelerate=conf/launch/multi_node.yaml")
    assert nodes.startswith("accelerate: ") and "of 2 machines" in nodes
    assert refused(start, tmp_path, "processes=2").startswith("processes: only with accelerate")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "in place of `accelerate launch`" in refused(start, tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("steady")
def test_two_processes_of_a_launch_train_the_same_head(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    one = fitted(config(start, tmp_path / "one", "general_prompts=0"))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    launch = ("accelerate=conf/launch/ddp.yaml", "processes=2", "general_prompts=0")
    two = fitted(config(start, tmp_path / "two", *launch))
    assert "over 2 rank(s)" in capfd.readouterr().err
    lengths = [
        [row["accepted_length"] for row in found["training"]["evaluations"]] for found in (one, two)
    ]
    assert lengths[0] == pytest.approx(lengths[1], abs=0.05)
    assert sorted(p.name for p in (tmp_path / "two").glob("*.json")) == [
        "budget.json",
        "fit.json",
        "settings.json",
    ]
    # A mistake that the processes find comes back as one line with a key of the fit.
    more = ("data.max_length=8", "general_prompts=0")
    assert "data.max_length=8" in refused(start, tmp_path / "bad", *launch[:2], *more)


@pytest.mark.slow
@pytest.mark.usefixtures("steady")
def test_a_run_that_is_stopped_midway_ends_with_the_same_bits(start: Path, tmp_path: Path) -> None:
    from tests.helpers.training import sigterm_at_update

    fitted(config(start, tmp_path / "whole", "general_prompts=0"))
    cfg = config(start, tmp_path / "part", "general_prompts=0")
    with pytest.MonkeyPatch.context() as patch:
        sigterm_at_update(patch, 11)  # four of them are the pilot's
        with pytest.raises(Interrupted):
            command.fitted(cfg, Path(cfg.out))
    fitted(cfg)
    assert weights(tmp_path / "whole/run/head") == weights(tmp_path / "part/run/head")


def test_a_folder_of_an_earlier_version_goes_on_unless_it_learned_from_rounds(
    start: Path, tmp_path: Path
) -> None:
    cfg = config(start, tmp_path / "fit")
    command.begin(cfg, tmp_path / "fit", "0" * 64)
    path = tmp_path / "fit" / command.SETTINGS
    kept = json.loads(path.read_text())
    (tmp_path / "fit/budget.json").write_text("{}")
    path.write_text(json.dumps({**kept, "rounds": ""}))
    command.begin(cfg, tmp_path / "fit", "0" * 64)
    path.write_text(json.dumps({**kept, "rounds": "runs/rounds"}))
    with pytest.raises(UserError, match=r"other settings \(rounds runs/rounds, now None\)"):
        command.begin(cfg, tmp_path / "fit", "0" * 64)
