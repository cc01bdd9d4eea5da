"""Running servers that do what no server should, as rows of the scoreboard: each costs its own row
at most, and nothing is claimed of what it did not tell."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest

from outrider.conf.errors import UserError
from outrider.decode.engine import Request
from outrider.decode.models.load import TargetConfig, load_target
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.scripts import evaluate
from outrider.scripts.scoring import candidates
from outrider.scripts.scoring.addresses import wrong_address
from outrider.scripts.scoring.served import ServedSystem, risen
from outrider.scripts.serving.asking import (
    LLAMACPP,
    OTHER,
    VLLM,
    Endpoint,
    ServerRequest,
    _read_llamacpp,
    read_counters,
)
from outrider.scripts.synthesis.server import Again
from tests.helpers.odd_server import llamacpp, odd, vllm

SHAPE = {"layers": 2, "hidden": 32, "vocab": 260}
KEYS = ["target=tiny", *(f"target.{key}={value}" for key, value in SHAPE.items())]
COUNTS = "vllm:spec_decode_num_drafts_total 9\nvllm:spec_decode_num_accepted_tokens_total {}\n"


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target(TargetConfig(kind="tiny", **SHAPE), "float32", "cpu")


def run(
    served: ServedSystem, limit: int = 8, sampling: Sampling | None = None, seed: int = 0
) -> Any:
    return served([Request([1, 2], limit, id=7)], sampling or Sampling(), seed)


def test_a_server_that_stops_at_once(target: Target) -> None:
    (eos,) = target.eos_ids
    with odd(lambda body: llamacpp(body, [], "eos"), "llamacpp") as server:
        found = run(ServedSystem(target, "x", server.url))
    (one,) = found.generations
    assert one.token_ids == [eos] and one.finish == "eos" and one.cycles == []
    assert found.timing.decode_s == 0 and found.timing.cycles == 0
    with (
        odd(lambda body: llamacpp(body, []), "llamacpp") as server,
        pytest.raises(UserError, match="without token ids"),
    ):
        run(ServedSystem(target, "x", server.url))


def test_one_token_is_no_decoding(target: Target) -> None:
    with odd(lambda body: vllm([5])) as server:
        found = run(ServedSystem(target, "x", server.url), limit=1)
        assert found.timing.decode_s == 0 and len(server.requested) == 2
        assert run(ServedSystem(target, "x", server.url), limit=8).timing.decode_s == 0


WRONG = {
    "text alone": (lambda body: vllm(None), "vllm", "without token ids"),
    "another model": (lambda body: vllm([5, 260]), "vllm", "token 260, and the target has 260"),
    "too many": (lambda body: vllm([5] * 9), "vllm", "tokens; 9 came back"),
    "own settings": (
        lambda body: llamacpp(body, [5, 6], temperature=0.8),
        "llamacpp",
        "otherwise than asked: temperature=0.8",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_answer_that_cannot_stand_beside_ours_is_message(target: Target, name: str) -> None:
    answer, owner, said = WRONG[name]
    with odd(answer, owner) as server, pytest.raises(UserError, match=said) as message:
        run(ServedSystem(target, "x", server.url))
    assert "drafters: x:" in str(message.value) and "\n" not in str(message.value)


@pytest.mark.parametrize("count", [-5, math.nan, "3", None, True])
def test_counts_that_are_none_are_no_answer(count: Any) -> None:
    """Fewer accepted than none would make cycles of no token."""
    body = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0}
    read, reply = _read_llamacpp(ServerRequest(4)), llamacpp(body, [5, 6])
    assert read(reply).accepted == 0
    for timings in ({"draft_n": 9, "draft_n_accepted": count}, [count], None):
        with pytest.raises(Again):
            read({**reply, "timings": timings})
    with pytest.raises(Again):
        read({**reply, "generation_settings": None})


def test_counters_that_are_no_numbers_count_nothing() -> None:
    for word in ("NaN", "+Inf", "many"):
        assert read_counters(COUNTS.format(word))["accepted_tokens"] == 0


def test_of_several_stop_tokens_the_target_says_which(target: Target, monkeypatch) -> None:
    ids = [1, 2, 5, 6]
    served = ServedSystem(target, "x", "http://127.0.0.1:9")
    own = [served._stop(ids) for _ in [0]]
    assert own == list(target.eos_ids)
    monkeypatch.setattr(Target, "eos_ids", (3, 40, 41), raising=False)
    best = served._stop(ids)
    monkeypatch.setattr(Target, "eos_ids", (41, best, 40, 3), raising=False)
    assert served._stop(ids) == best


def test_every_question_is_read_anew_and_seeds_fit(target: Target) -> None:
    def answer(body: dict[str, Any]) -> Any:
        time.sleep(0.002 * body["max_tokens"])
        return vllm([5] * body["max_tokens"])

    with odd(answer) as server:
        run(ServedSystem(target, "x", server.url), sampling=Sampling(1.0), seed=1 << 60)
    salts = [body["cache_salt"] for body in server.requested]
    assert len(salts) == 2 and len(set(salts)) == 2
    assert all(0 <= body["seed"] < 1 << 31 for body in server.requested)


def test_chance_in_a_time_is_not_the_end(target: Target) -> None:
    """Four tries in which the first tokens took longer than the whole answers: of both the least
    time counts, and only where that is the wrong way round too nothing can be said."""
    times = [(0.3, 0.2), (0.1, 0.09), (0.2, 0.15), (0.4, 0.11)]
    served = ServedSystem(target, "x", "http://127.0.0.1:9")
    door = Endpoint(served.address)
    with pytest.raises(
        UserError, match="took 0.09 s, their first tokens 0.1 s: nothing can be timed"
    ):
        served._least(times, door)
    assert served._least([(0.3, 0.2), (0.1, 0.1), (0.08, 0.2)], door) == (0.08, 0.1)
    with pytest.raises(UserError, match="asked again"):
        served._least([], door)


def test_counters_that_tell_nothing_are_not_zero() -> None:
    up, down = COUNTS.format(90), COUNTS.format(5)
    assert risen(VLLM, down, up) == 85
    assert risen(VLLM, up, down) is None  # started anew
    assert risen(VLLM, "", up) == 90  # they appear with the first draft
    assert risen(VLLM, "", "") == 0 and risen(OTHER, "", "") is None  # vLLM counts what it drafts
    assert risen(OTHER, None, up) is None and risen(LLAMACPP, None, None) is None


def test_counters_of_several_engines_are_summed() -> None:
    line = 'vllm:spec_decode_num_{}_total{{engine="{}"}} {}\n'
    page = "".join(
        line.format(what, engine, count)
        for engine in (0, 1)
        for what, count in (("drafts", 3), ("accepted_tokens", 4))
    )
    place = 'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="{}",position="0"}} 2\n'
    found = read_counters(page + place.format(0) + place.format(1))
    assert found == {"drafts": 6, "accepted_tokens": 8, "accepted_by_position": [4]}


def scored(tmp_path: Path, *keys: str) -> tuple[int, dict[str, Any]]:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(f'{{"prompt": "{word}"}}\n' for word in ("go", "hay", "sun")))
    args = [*KEYS, f"prompts={prompts}", f"out={tmp_path / 'out'}", "parity=0", "quiet=true"]
    with pytest.raises(SystemExit) as stop:
        evaluate.main([*args, "max_new_tokens=6", "dtype=float32", "device=cpu", *keys])
    report = tmp_path / "out/report.json"
    return int(stop.value.code or 0), json.loads(report.read_text()) if report.exists() else {}


def steady(body: dict[str, Any]) -> Any:
    time.sleep(0.003 * body["max_tokens"])
    return vllm([5] * body["max_tokens"])


def test_a_server_that_is_down_costs_its_row_alone(tmp_path: Path) -> None:
    code, report = scored(tmp_path, "drafters=[none]", "candidates=[gone@http://127.0.0.1:9]")
    assert code == evaluate.SKIPPED
    assert [row["name"] for row in report["drafters"]] == ["none"]
    (skipped,) = report["skipped"]
    assert skipped["name"] == "gone@http://127.0.0.1:9" and "no connection" in skipped["reason"]


def test_a_server_that_fails_on_the_way_costs_its_row_alone(tmp_path: Path, capsys) -> None:
    left = 7

    def answer(body: dict[str, Any]) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise ValueError("no memory")
        return steady(body)

    with odd(answer) as server:
        code, report = scored(tmp_path, f"drafters=[none,x@{server.url},ngram]")
    assert code == evaluate.SKIPPED
    assert [row["name"] for row in report["drafters"]] == ["none", "ngram"]
    assert len(report["drafters"][0]["per_prompt"]) == 3
    (skipped,) = report["skipped"]
    assert skipped["name"].startswith("x@") and "status 400, no memory" in skipped["reason"]
    said = " ".join(capsys.readouterr().out.split())
    assert "skipped x@" in said and "no memory" in (tmp_path / "out/report.html").read_text()
    lines = (tmp_path / "out/outputs.jsonl").read_text().splitlines()
    assert {json.loads(line)["drafter"] for line in lines} == {"none", "ngram"}


def test_what_a_server_does_not_tell_is_not_claimed(tmp_path: Path) -> None:
    keys = ("temperatures=[0,1]", "batch_sizes=[1,2]")
    with odd(steady, "somebody") as server:
        code, report = scored(tmp_path, f"drafters=[none,x@{server.url}/v1]", *keys)
    assert code == 0 and len(report["others"]) == 3
    row = report["drafters"][1]
    assert row["label"] == "x" and row["tokens"] == 18 and row["tokens_per_second"] > 0
    assert row["accepted_length"]["mean"] is None and row["cycles"] == 0
    assert row["accepted_length_all_cycles"]["mean"] is None
    unseen = ("peak_bytes", "draft_ms", "verify_ms", "target_ms", "verify_ms_interval", "breakdown")
    assert [row[key] for key in unseen] == [None] * len(unseen)
    assert report["ranking"] == [] or row["name"] not in {r["name"] for r in report["ranking"]}
    assert "x" in (tmp_path / "out/report.html").read_text()


def test_names_of_servers_are_no_folders() -> None:
    assert wrong_address("x@http://h:1/v1") == wrong_address("runs/a@chain") == ""
    assert wrong_address("x@http://h:port") and wrong_address("x@http://:80/v1")
    name = "vllm+eagle@http://127.0.0.1:8000/v1"
    assert candidates.expand([name], "runs", True) == ([name], [])
