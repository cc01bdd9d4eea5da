"""Running servers that do what no server should, as rows of the scoreboard: each costs its own row
at most, and nothing is claimed of what it did not tell."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest

from outrider.conf.errors import UserError
from outrider.decode.engine import Request
from outrider.decode.models.load import TargetConfig, load_target
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.scripts.scoring import server_forms
from outrider.scripts.scoring.served import ServedSystem, least, risen
from outrider.scripts.scoring.servers import (
    LLAMACPP,
    OTHER,
    VLLM,
    ServerRequest,
)
from tests.helpers.servers import llamacpp, odd, vllm

SHAPE = {"layers": 2, "hidden": 32, "vocab": 260}
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
    question = server_forms.answer(LLAMACPP, "m", [3], ServerRequest(4))
    read, reply = question.read, llamacpp(body, [5, 6])
    assert read(reply).accepted == 0
    with pytest.raises(ValueError, match="ids"):
        read({**reply, "timings": {"draft_n": 9, "draft_n_accepted": count}})


def test_every_question_is_read_anew_and_seeds_fit(target: Target) -> None:
    def answer(body: dict[str, Any]) -> Any:
        time.sleep(0.002 * body["max_tokens"])
        return vllm([5] * body["max_tokens"])

    with odd(answer) as server:
        run(ServedSystem(target, "x", server.url), sampling=Sampling(1.0), seed=1 << 60)
    salts = [body["cache_salt"] for body in server.requested]
    assert len(salts) == 2 and len(set(salts)) == 2
    assert all(0 <= body["seed"] < 1 << 31 for body in server.requested)


def test_chance_in_a_time_is_not_the_end() -> None:
    """Four tries in which the first tokens took longer than the whole answers: of both the least
    time counts, and only where that is the wrong way round too nothing can be said."""
    times = [(0.3, 0.2), (0.1, 0.09), (0.2, 0.15), (0.4, 0.11)]
    for wrong, said in ((times, "0.09 s, their first tokens 0.1 s"), ([], "asked again")):
        with pytest.raises(UserError, match=f"x: .*{said}"):
            least(wrong, "x", last=True)
        least(wrong, "x", last=False)
    assert least([(0.3, 0.2), (0.1, 0.1), (0.08, 0.2)], "x", last=True) == (0.08, 0.1)


def test_counters_that_tell_nothing_are_not_zero() -> None:
    up, down = COUNTS.format(90), COUNTS.format(5)
    assert risen(VLLM, down, up) == 85
    assert risen(VLLM, up, down) is None  # started anew
    assert risen(VLLM, "", up) == 90  # they appear with the first draft
    assert risen(VLLM, "", "") == 0 and risen(OTHER, "", "") is None  # vLLM counts what it drafts
    assert risen(OTHER, None, up) is None and risen(LLAMACPP, None, None) is None
