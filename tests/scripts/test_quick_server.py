"""certify url=... quick=true over HTTP: engines' forms, the test server's defects and the
rules that engines shipped, and a sound server that passes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.decode.draft_model import DraftModel
from outrider.decode.engine import Request, generate
from outrider.decode.models.load import TargetConfig, load_target
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.scripts.certify import quickly
from outrider.scripts.proofs.controls import field
from outrider.scripts.serve_http.worker import WorkerLimits
from outrider.scripts.serving import quick
from outrider.scripts.serving.asking import Address, Endpoint, ServerRequest
from tests.helpers import odd_server, own_server, table_server
from tests.helpers.speculating_server import CACHE, COOL, DEFECTS, SHIPPED, SOFTLY, serving

SHAPE: Any = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "vocab": 260}
WORDS = ("go", "hay", "oats", "barley", "a", "the river", "song", "night")
SHARPER, NOISE = 3.0, 0.2  # entropy 1.4 nats; 76 % of drawn draft tokens are accepted


@pytest.fixture(scope="module")
def target() -> Target:
    return _sharp(0.0)


@pytest.fixture(scope="module")
def draft() -> Target:
    return _sharp(NOISE)


def _sharp(noise: float) -> Target:
    """A tiny target whose distributions are about as sharp as a language model's."""
    made = load_target(TargetConfig(kind="tiny", **SHAPE), "float32", "cpu")
    weight = made.model.lm_head.weight
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        weight.add_(torch.randn(weight.shape, generator=generator) * weight.std() * noise)
        weight.mul_(SHARPER)
    return made


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    path.write_text("".join(f'{{"prompt": "{word}"}}\n' for word in WORDS))
    return path


def certify(url: str, out: Path, prompts: Path, *args: str) -> tuple[int, dict[str, Any]]:
    keys = [f"url={url}", "quick=true", f"out={out}", f"prompts={prompts}", "quiet=true", *args]
    with pytest.raises(SystemExit) as stop:
        quickly(keys)
    paper = out / "quick.json"
    return int(stop.value.code or 0), json.loads(paper.read_text()) if paper.exists() else {}


@pytest.mark.parametrize("kind", table_server.OWNERS)
def test_every_engine_is_asked_in_its_own_words(kind: str, prompts, tmp_path, capsys) -> None:
    with table_server.spoken(kind) as url:
        code, paper = certify(url, tmp_path, prompts, "retries=0")
    said = capsys.readouterr().out.strip()
    assert code == 0 and said == paper["line"] and "\n" not in said
    assert said.startswith("as asked: 1,200 tokens at temperature 1 and 0.6, 1, 8 at a time")
    assert paper["server"]["kind"] == kind and paper["tokens"] == 1200
    assert paper["format"] == 1 and paper["untested"] and paper["temperature_honoured"]


@pytest.mark.parametrize("kind", table_server.OWNERS)
def test_every_engine_that_ignores_the_temperature_is_named(kind, prompts, tmp_path) -> None:
    draw = lambda rng, logs, heat, *rest: int(logs.argmax())
    with table_server.spoken(kind, draw) as url:
        code, paper = certify(url, tmp_path, prompts, "retries=0", "tokens=400")
    assert (
        code == 1
        and "the temperature is not honoured: asked 1, answers are like those of 0"
        in (paper["line"])
    )


def test_a_server_that_names_tokens_by_text_alone(prompts, tmp_path, capsys) -> None:
    with table_server.spoken("other", by_text=True) as url:
        code, paper = certify(url, tmp_path, prompts, "retries=0")
    error = capsys.readouterr().err.strip()
    assert code == 2 and not paper and "name tokens by text" in error and "\n" not in error


@pytest.mark.parametrize("lie", [0.0, -0.7])
def test_log_probabilities_that_come_with_an_answer_are_checked(lie, prompts, tmp_path) -> None:
    """A part of them is scored again; where that differs, all are."""
    with table_server.spoken("other", lie=lie) as url:
        code, paper = certify(url, tmp_path, prompts, "retries=0", "tokens=450")
    assert code == 0, paper["line"]
    assert any("are not the model's" in note for note in paper["notes"]) == (lie < 0)


def test_a_slow_server_is_judged_by_what_came_in_time(prompts, tmp_path) -> None:
    """An answer takes 1.6 s of the 6 for asking: three waves at most, 250 tokens,
    and on a crowded machine one at least."""
    with table_server.spoken("vllm", wait=1.6) as url:
        code, paper = certify(url, tmp_path, prompts, "seconds=10")
    assert code == 3 and paper["verdict"] == "undecided"
    assert 0 < paper["tokens"] <= 250 and any("were over" in note for note in paper["notes"])


def test_a_server_that_never_answers(prompts, tmp_path, capsys) -> None:
    with table_server.spoken("vllm", wait=9.0) as url:
        code, paper = certify(url, tmp_path, prompts, "seconds=5", "retries=0")
    assert code == 2 and not paper and "without one whole answer" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["tokens=1201", "seconds=121", "temperature=0"])
def test_the_limits_are_limits(key: str, prompts, tmp_path, capsys) -> None:
    code, _ = certify("http://127.0.0.1:9", tmp_path, prompts, key)
    assert code == 2 and key.partition("=")[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    "tokens, verdict", [(64, 3), pytest.param(1200, 0, marks=pytest.mark.slow)]
)
def test_our_own_server_is_as_asked(target: Target, prompts, tmp_path, tokens, verdict) -> None:
    """It tells one place at a time; its answers' log-probabilities are the model's."""
    with own_server.serving(target, ["ngram"], WorkerLimits(8, 256, 3, 32)) as running:
        code, paper = certify(running.url, tmp_path, prompts, f"tokens={tokens}")
    assert code == verdict and paper["server"]["drafted"] > 0, paper["line"]
    assert paper["server"]["kind"] == "other" and paper["tokens"] == tokens
    assert paper["p"] > 1e-3 and paper["notes"] == []


def test_a_models_own_defaults_are_overruled() -> None:
    """vLLM takes what a request leaves out from the model's generation_config.json."""

    async def ask(url: str) -> None:
        async with Endpoint(Address(url)) as server:
            await server.answer([5, 6], ServerRequest(4, 0.7))

    with odd_server.odd(lambda body: odd_server.vllm([5, 6])) as server:
        asyncio.run(ask(server.url))
    body = server.requested[-1]
    assert body["repetition_penalty"] == 1 and body["presence_penalty"] == 0
    assert body["top_k"] == 0 and body["min_p"] == 0 and body["temperature"] == 0.7


# --- the test server: what 1,200 tokens name, and what they do not


def asked(url: str, seed: int = 0, tokens: int = 1200) -> dict[str, Any]:
    """The check as it is by default."""
    where = Address(url, 20.0, 0, 8)
    plan = quick.QuickPlan(where, WORDS, 1.0, tokens, 120.0, (1, 8), 1e-3, seed)
    return quick.judged(plan, lambda *_: None)


# What the line says of it. It names the kind of difference that 1,200 tokens show, which is not
# always the cause: drafts that are kept too often look hotter, likeliest ones colder.
NAMED = {
    "bonus from the draft's distribution": "another distribution",
    "residual not renormalised": "another distribution",
    "rows mixed up above two": "answers depend on the batch: 1 at a time",
    CACHE: "answers repeat earlier ones",
    "typical acceptance": "another distribution",
    "acceptance at a set rate": "NOT as asked",
    "greedy at T > 0": "asked 1, answers are like those of 0 and 0.6",
    "late rejection": "another distribution",
    SOFTLY: "NOT as asked",
}
# Tokens that would do, of the whole certificate: the first three by its test at 20,000
# (test_certify_server.py), the last by proofs/power.py: with 7 or 8 drafted tokens 1.1 % of the
# tokens are kept against the rule (below), and at 140,000 tokens a bias of 1.1 % that follows no
# key is found with power 0.99.
TOO_WEAK = {
    "acceptance by softmax": 20_000,
    "one random number used twice": 20_000,
    COOL: 20_000,
    "deferred acceptance": 140_000,
}


def test_of_every_defect_it_is_known_whether_it_is_named() -> None:
    assert {*NAMED, *TOO_WEAK} == {*DEFECTS, *SHIPPED} and not {*NAMED} & {*TOO_WEAK}


def rejects(target: Target, draft: Target, defect: str, seed: int) -> None:
    with serving(target, draft, defect) as url:
        found = asked(url, seed)
    assert found["verdict"] == "rejected" and NAMED[defect] in found["line"], found["line"]
    assert found["tokens"] <= 1200 and found["seconds"] < 120


@pytest.mark.parametrize("defect", ["greedy at T > 0", "rows mixed up above two"])
def test_what_users_reported_most_is_named(target, draft, defect: str) -> None:
    rejects(target, draft, defect, 0)


@pytest.mark.slow
@pytest.mark.parametrize("defect", NAMED)
def test_every_defect_that_1200_tokens_show_is_named(target, draft, defect: str) -> None:
    for seed in (1, 2):
        rejects(target, draft, defect, seed)


@pytest.mark.slow
def test_deferred_acceptance_moves_about_one_token_in_a_hundred(target, draft) -> None:
    """So many that the table of what is too weak needs no more than it says."""
    kept: list[int] = []
    rule = field.deferred_acceptance(6, on_deferred=lambda: kept.append(1))
    requests = [Request([5 + i, 7, 9], 100, id=i) for i in range(24)]
    drafter = DraftModel(draft, 7)
    run = generate(target, drafter, requests, Sampling(1.0), batch_size=24, verify=rule, eos_ids=())
    tokens = sum(len(g.token_ids) for g in run.generations)
    assert 0.005 < len(kept) / tokens < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 50, 10))
def test_a_sound_server_passes_fifty_times(target, draft, first: int) -> None:
    """The chance of one false alarm in fifty is at most 0.05, alpha being 1e-3."""
    for seed in range(first, first + 10):
        with serving(target, draft) as url:
            found = asked(url, seed)
        assert found["verdict"] == "passed", found["line"]
