"""What is sent to a server and read from its answers, in the form of each engine:
llama.cpp's own API, SGLang's /generate, vLLM's completions with token ids, and the bare
ones of anything else.

A reader takes what it needs and lets KeyError, TypeError and the like tell that an answer has
another form: scripts/scoring/servers.py turns these into words.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from outrider.scripts.data.server import AnswerRefused

LLAMACPP, VLLM, SGLANG, OTHER = "llama.cpp", "vllm", "sglang", "other"
OWNERS = {"llamacpp": LLAMACPP, "vllm": VLLM, "sglang": SGLANG}  # by what /v1/models tells
MOST_IDS = 1 << 31  # an id beyond is no token's
MARK = "token_id:"  # a token by its id, where return_tokens_as_token_ids is taken
CLOSE = 1e-4  # by which a setting may differ that went through float32
# said, since a model's own defaults would stand in for them
PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
NEUTRAL = {"top_k": 0, "min_p": 0.0, **PENALTIES}
COUNTS = ("drafts", "drafted", "accepted")  # of Reply, and of what scripts/serve.py tells
SGLANG_COUNTS = ("spec_verify_ct", "spec_draft_token_num", "spec_accept_token_num")


@dataclass(frozen=True)
class ServerRequest:
    """One answer. limit: most tokens. temperature 0 = greedy; top_k 0 and top_p 1 = off.
    salt: the prompt shares nothing with what vLLM has kept of prompts with another salt.
    stop: tokens that end the answer, of vLLM, which tells them."""

    limit: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    salt: str = ""
    stop: tuple[int, ...] = ()


@dataclass(frozen=True)
class Reply:
    """tokens: generated ids, the stop token included where the server sends it; None where
    it sends none. drafted, accepted: draft tokens of this answer, where the server tells
    them, drafts: in how many passes they were verified, where that is told too (SGLang,
    scripts/serve.py). ignored: settings that it says it took otherwise than asked."""

    tokens: list[int] | None
    text: str
    stopped: bool
    drafted: int | None = None
    accepted: int | None = None
    ignored: tuple[str, ...] = ()
    drafts: int | None = None


@dataclass(frozen=True)
class Question:
    """What goes to `path`, and how the answer is read. lacking: what an answer of another form
    does not have; "" where it may be tried again."""

    path: str
    body: dict[str, Any]
    read: Callable[[Any], Any]
    about: str
    lacking: str = ""


def ids_of(value: Any) -> list[int]:
    """Return a list of token ids, or of counts. Raises ValueError for anything else."""
    if not isinstance(value, list) or not all(type(i) is int and 0 <= i < MOST_IDS for i in value):
        raise ValueError("no list of ids")
    return value


def _text_of(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("no text")
    return value


def _counts_of(values: list[Any]) -> dict[str, Any]:
    """Return the numbers of COUNTS; {} where one is none."""
    try:
        return dict(zip(COUNTS, ids_of(values), strict=True))
    except ValueError:
        return {}


# --- answers


def answer(kind: str, model: str, ids: list[int], ask: ServerRequest) -> Question:
    """Return one answer behind a prompt, as a Reply."""
    about = f"{len(ids)} token ids, {ask.limit} more"
    if kind == LLAMACPP:
        return Question("/completion", _llamacpp(ids, ask), _read_llamacpp(ask), about)
    if kind == SGLANG:
        return Question("/generate", _sglang(ids, ask), _read_sglang, about)
    body = {
        "model": model,
        "prompt": ids,
        "max_tokens": ask.limit,
        "temperature": ask.temperature,
        "top_p": ask.top_p,
        "seed": ask.seed,
        "return_token_ids": True,
        "stream": False,
    }
    body |= {k: v for k, v in (("top_k", ask.top_k), ("min_p", ask.min_p)) if v}
    if kind == VLLM:
        body = NEUTRAL | body
        body |= {"cache_salt": ask.salt} if ask.salt else {}
        body |= {"stop_token_ids": list(ask.stop)} if ask.stop else {}
    return Question("/v1/completions", body, _read_completion, about)


def _llamacpp(ids: list[int], ask: ServerRequest) -> dict[str, Any]:
    """Return the samplers are named, so that nothing else is applied."""
    return {
        "prompt": ids,
        "n_predict": ask.limit,
        **_asked(ask),
        "repeat_penalty": 1.0,
        "samplers": ["temperature", "top_k", "top_p", "min_p"],
        "return_tokens": True,
        "cache_prompt": False,
        "stream": False,
    }


def _asked(ask: ServerRequest) -> dict[str, float]:
    return {key: getattr(ask, key) for key in ("temperature", "top_k", "top_p", "min_p", "seed")}


def _read_llamacpp(ask: ServerRequest) -> Callable[[Any], Reply]:
    def read(reply: Any) -> Reply:
        said, timings = reply["generation_settings"], reply["timings"]
        ignored = tuple(
            f"{key}={said.get(key)!r} instead of {value}"
            for key, value in _asked(ask).items()
            if not math.isclose(said.get(key, math.nan), value, rel_tol=CLOSE, abs_tol=CLOSE)
        )
        counts = ids_of([timings.get(key, 0) for key in ("draft_n", "draft_n_accepted")])
        tokens, text = ids_of(reply["tokens"]), _text_of(reply["content"])
        return Reply(tokens, text, reply["stop_type"] == "eos", counts[0], counts[1], ignored)

    return read


def _sglang(ids: list[int], ask: ServerRequest) -> dict[str, Any]:
    settings = {
        "max_new_tokens": ask.limit,
        "temperature": ask.temperature,
        "top_k": ask.top_k or -1,
        "top_p": ask.top_p,
        "min_p": ask.min_p,
        **PENALTIES,
        "sampling_seed": ask.seed,
    }
    return {"input_ids": ids, "sampling_params": settings, "stream": False}


def _read_sglang(reply: Any) -> Reply:
    about = reply["meta_info"]
    stopped = about["finish_reason"]["type"] == "stop"
    counts = _counts_of([about.get(key) for key in SGLANG_COUNTS])
    return Reply(ids_of(reply["output_ids"]), _text_of(reply["text"]), stopped, **counts)


def _read_completion(reply: Any) -> Reply:
    choice = reply["choices"][0]
    tokens, told = choice.get("token_ids"), reply.get("speculation")
    counts = _counts_of([told.get(key) for key in COUNTS]) if isinstance(told, dict) else {}
    known = None if tokens is None else ids_of(tokens)
    return Reply(known, _text_of(choice["text"]), choice["finish_reason"] == "stop", **counts)


# --- log-probabilities, {token: log-probability} of a place


def scores(kind: str, model: str, ids: list[int], start: int, top: int) -> Question | None:
    """Return the scores of the `top` best tokens, and of the text's own, at every place from
    `start` on; None of a server that tells one place at a time alone."""
    if kind == SGLANG:
        body = {
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": max(start - 1, 0),  # the first place that it tells has no score
            "top_logprobs_num": top,
            "stream": False,
        }
        lacking = "no input_top_logprobs of the text in the answer"
        read = _read_sglang_scores(ids, start)
        return Question("/generate", body, read, f"top_logprobs_num={top}", lacking)
    if kind != VLLM:
        return None
    body = {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 0}
    body["prompt_logprobs"] = top
    lacking, read = "no prompt_logprobs in the answer", _read_prompt_logprobs(ids, start)
    return Question("/v1/completions", body, read, f"prompt_logprobs={top}", lacking)


def next_scores(kind: str, model: str, ids: list[int], top: int) -> Question:
    """Return the scores of the place behind a text, by an answer of one token, which no draft
    touches."""
    if kind == LLAMACPP:
        body: dict[str, Any] = {
            "prompt": ids,
            "n_predict": 1,
            "temperature": -1.0,  # greedy, with the raw distribution beside it
            "n_probs": top,
            "cache_prompt": True,
            "samplers": [],
        }
        lacking = "no n_probs in the answer (a server that drafts gives none)"
        return Question("/completion", body, _read_n_probs, f"n_probs={top}", lacking)
    body = {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 1.0, "logprobs": top}
    body["return_tokens_as_token_ids"] = True
    lacking = "no logprobs in the answer"
    return Question("/v1/completions", body, _read_logprobs, f"logprobs={top}", lacking)


def _read_sglang_scores(ids: list[int], start: int) -> Callable[[Any], list[dict[int, float]]]:
    def read(reply: Any) -> list[dict[int, float]]:
        count, about = len(ids) - start, reply["meta_info"]
        best, own = (about[f"input_{name}_logprobs"][-count:] for name in ("top", "token"))
        rows = [{int(r[1]): float(r[0]) for r in row} for row in best]
        for row, mine, token in zip(rows, own, ids[start:], strict=True):
            if int(mine[1]) != token:
                raise ValueError("scores of another text")
            row[token] = float(mine[0])
        return [sound(row) for row in rows]

    return read


def _read_prompt_logprobs(ids: list[int], start: int) -> Callable[[Any], list[dict[int, float]]]:
    def read(reply: Any) -> list[dict[int, float]]:
        rows = reply["choices"][0]["prompt_logprobs"]
        places = (rows[at].items() for at in range(start, len(ids)))
        return [sound({int(t): float(entry["logprob"]) for t, entry in row}) for row in places]

    return read


def _read_n_probs(reply: Any) -> dict[int, float]:
    rows = reply["completion_probabilities"][0]["top_logprobs"]
    return sound({int(row["id"]): float(row["logprob"]) for row in rows})


def _read_logprobs(reply: Any) -> dict[int, float]:
    row = reply["choices"][0]["logprobs"]["top_logprobs"][0]
    if not all(key.startswith(MARK) and key[len(MARK) :].isdecimal() for key in row):
        raise AnswerRefused(
            "its log-probabilities name tokens by text, which more than one token may have "
            "(asked return_tokens_as_token_ids)"
        )
    return sound({int(key[len(MARK) :]): float(value) for key, value in row.items()})


def sound(distribution: dict[int, float]) -> dict[int, float]:
    """Log-probabilities that are some: finite or -inf, with a sum of at most one and more than
    nothing, of ids that a token may have."""
    try:
        ids_of([*distribution])
    except ValueError:
        raise AnswerRefused("log-probabilities of token ids that are none") from None
    values = list(distribution.values())
    total = sum(math.exp(min(v, 1.0)) for v in values)
    if not all(v <= CLOSE for v in values) or not 0 < total <= 1 + 1e-3:
        raise AnswerRefused(f"log-probabilities that are none (they sum to {total:.4g})")
    return distribution


# --- the ids of a text


def tokenize(kind: str, model: str, text: str) -> Question:
    """Return the ids that a text becomes as a prompt."""
    about, lacking = (
        f"the ids of {len(text)} characters",
        "the ids of the prompt are not in the answer",
    )
    if kind == LLAMACPP:
        body: dict[str, Any] = {"content": text, "add_special": True}
        return Question("/tokenize", body, _read_prompt, about, lacking)
    body = {"model": model, "prompt": text}
    if kind == SGLANG:
        return Question("/tokenize", body, _read_prompt, about, lacking)
    body |= {"max_tokens": 1, "temperature": 0, "seed": 0, "top_p": 1.0, "return_token_ids": True}
    return Question("/v1/completions", body, _read_prompt, about, lacking)


def _read_prompt(reply: Any) -> list[int]:
    found = reply["tokens"] if "tokens" in reply else reply["choices"][0]["prompt_token_ids"]
    if not ids_of(found):
        raise ValueError("no ids")
    return list(found)
