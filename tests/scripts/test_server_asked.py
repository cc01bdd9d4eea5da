"""certify url=... over HTTP: engines' forms, servers that answer badly, rules that engines shipped,
and a sound server that passes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.decode.models.load import TargetConfig, load_target
from outrider.decode.target import Target
from outrider.scripts.certificate import server_asked
from outrider.scripts.certificate.config import CertifyConfig
from outrider.scripts.certify import main
from tests.helpers import table_server
from tests.helpers.commands import code_of
from tests.helpers.speculating_server import RULES, serving
from tests.helpers.table_server import LIMIT, Twist

SHAPE: Any = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "vocab": 260}
WORDS = ("go", "hay", "oats", "barley", "a", "the river", "song", "night")
SHARPER, NOISE = 3.0, 0.2  # entropy 1.4 nats; 76 % of drawn draft tokens are accepted
KINDS = tuple(table_server.OWNERS)
SOON, LATE = [*RULES][:2], [*RULES][2:]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    path.write_text("".join(f'{{"prompt": "{word}"}}\n' for word in WORDS))
    return path


def certify(url: str, out: Path, prompts: Path, *args: str) -> tuple[int, dict[str, Any]]:
    keys = [f"url={url}", f"out={out}", f"prompts={prompts}", "quiet=true", *args]
    code, found = code_of(main, *keys), out / "certificate.json"
    return code, json.loads(found.read_text()) if found.exists() else {}


@pytest.mark.parametrize("kind", KINDS)
def test_every_engine_is_asked_in_its_own_words(kind: str, prompts, tmp_path, capsys) -> None:
    tokens = 1500 if kind == "vllm" else 600  # more than by default
    with table_server.spoken(kind) as url:
        code, found = certify(url, tmp_path, prompts, f"tokens={tokens}")
    said = capsys.readouterr().out.strip()
    assert code == 0 and said == found["line"] and "\n" not in said
    assert said.startswith(f"as asked: {tokens:,} tokens at temperature 1 and 0.6, 1, 8 at a time")
    assert found["server"]["kind"] == kind and found["tokens"] == tokens
    assert found["format"] == 2 and found["untested"] and found["temperature_honoured"]


def test_keys_that_a_server_does_not_take(prompts, tmp_path, capsys) -> None:
    """Also a run that could decide nothing is refused before it asks."""
    for word, said in (("drafter=ngram", "drafter: "), ("tokens=200", "set 400 or more")):
        code, _ = certify("http://127.0.0.1:9", tmp_path, prompts, word)
        assert code == 2 and said in capsys.readouterr().err


# --- servers that answer badly: one line and an exit code, and nothing passes that was not judged


def answers(change: Callable[[list[int]], list[int]]) -> Twist:
    """The tokens of every answer of vLLM, changed."""

    def twist(path: str, body: dict[str, Any] | None, value: Any) -> Any:
        for choice in value.get("choices", ()) if body else ():
            if "token_ids" in choice:
                choice["token_ids"] = change(choice["token_ids"])
        return value

    return twist


def nothing(path: str, body: dict[str, Any] | None, value: Any) -> Any:
    return b"" if body and "tokenize" not in path else value


def test_a_bad_answer_costs_one_line(prompts, tmp_path, capsys) -> None:
    for twist, said in (
        (nothing, "no JSON"),
        (answers(lambda ids: []), "all came back empty"),
        (answers(lambda ids: ids * 40), f"asked {LIMIT} tokens"),
    ):
        with table_server.spoken("vllm", twist=twist) as url:
            code, found = certify(url, tmp_path, prompts, "tokens=450")
        error = capsys.readouterr().err.strip()
        assert code == 2 and not found and said in error and "\n" not in error


def test_a_server_that_names_tokens_by_text_alone(prompts, tmp_path, capsys) -> None:
    with table_server.spoken("other", by_text=True) as url:
        code, found = certify(url, tmp_path, prompts)
    error = capsys.readouterr().err.strip()
    assert code == 2 and not found and "name tokens by text" in error and "\n" not in error


def test_a_server_that_hangs_is_left(prompts, tmp_path, capsys) -> None:
    """A byte now and then. Nothing of it is waited for longer than `seconds` say."""

    def twist(path: str, body: dict[str, Any] | None, value: Any) -> Any:
        if body is None or "max_tokens" not in body:
            return value
        return (time.sleep(0.5) or b" " for _ in range(60))

    with table_server.spoken("vllm", twist=twist) as url:
        code, found = certify(url, tmp_path, prompts, "seconds=5", "tokens=400")
    assert code == 2 and not found and "went by" in capsys.readouterr().err


# --- the test server with rules that engines shipped


@pytest.fixture(scope="module")
def pair() -> tuple[Target, Target]:
    """A tiny target whose distributions are about as sharp as a language model's, and a draft."""
    made = []
    for noise in (0.0, NOISE):
        one = load_target(TargetConfig(kind="tiny", **SHAPE), "float32", "cpu")
        weight = one.model.lm_head.weight
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            weight.add_(torch.randn(weight.shape, generator=generator) * weight.std() * noise)
            weight.mul_(SHARPER)
        made.append(one)
    return made[0], made[1]


def asked(url: str, seed: int = 0) -> dict[str, Any]:
    """The check as it is by default."""
    return server_asked.judged(CertifyConfig(url=url, seed=seed), WORDS, lambda *_: None)


@pytest.mark.slow
def test_a_sound_server_passes(pair) -> None:
    for seed in range(3):
        with serving(*pair) as url:
            assert asked(url, seed)["verdict"] == "passed"


@pytest.mark.parametrize(
    "defect", [*SOON, *(pytest.param(n, marks=pytest.mark.slow) for n in LATE)]
)
def test_what_engines_shipped_is_rejected(pair, defect: str) -> None:
    with serving(*pair, defect) as url:
        found = asked(url)
    assert found["verdict"] == "rejected", found["line"]
    batch = defect == "rows mixed up above two"
    assert (found["depends_on_the_batch"] == "yes") == batch, found["line"]
