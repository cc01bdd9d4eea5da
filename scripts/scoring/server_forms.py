"""What is sent to a server and read from its answers, in the form of each engine: llama.cpp's own
API, SGLang's /generate, vLLM's completions with token ids, and the bare ones of `outrider serve`.

A reader takes what it needs and lets KeyError, TypeError and the like tell that an answer has
another form: scripts/scoring/servers.py turns these into words.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.scripts.data.server import AnswerRefused

LLAMACPP, VLLM, SGLANG, OTHER = "llama.cpp", "vllm", "sglang", "other"
OWNERS = {"llamacpp": LLAMACPP, "vllm": VLLM, "sglang": SGLANG}  # by what /v1/models tells
MOST_IDS = 1 << 31  # an id beyond is no token's
CLOSE = 1e-4  # by which a setting may differ that went through float32
# said, since a model's own defaults would stand in for them
PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
MARK = "token_id:"  # a token by its id, where return_tokens_as_token_ids is taken
COUNTS = ("drafts", "drafted", "accepted")  # of Reply, and of what `outrider serve` tells
SGLANG_COUNTS = ("spec_verify_ct", "spec_draft_token_num", "spec_accept_token_num")
Scores = dict[int, float]  # token -> log-probability, of one place


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

    @property
    def sampling(self) -> dict[str, float]:
        names = ("temperature", "top_k", "top_p", "min_p", "seed")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Reply:
    """tokens: generated ids, the stop token included where the server sends it; None where
    it sends none. drafted, accepted: draft tokens of this answer, where the server tells
    them, drafts: in how many passes they were verified, where that is reported too (SGLang,
    `outrider serve`). ignored: settings that it says it took otherwise than asked."""

    tokens: list[int] | None
    text: str
    stopped: bool
    drafted: int | None = None
    accepted: int | None = None
    ignored: tuple[str, ...] = ()
    drafts: int | None = None


@dataclass(frozen=True)
class Question:
    """What goes to `path`, how the answer is read, and what is asked for, in words."""

    path: str
    body: dict[str, Any]
    read: Callable[[Any], Any]
    about: str


def ids_of(value: Any) -> list[int]:
    """Return a list of token ids, or of counts. Raises ValueError for anything else."""
    if not isinstance(value, list) or not all(type(i) is int and 0 <= i < MOST_IDS for i in value):
        raise ValueError("no list of ids")
    return value


def _text_of(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("no text")
    return value


# --- answers


def answer(kind: str, model: str, ids: list[int], ask: ServerRequest) -> Question:
    """Return what asks for one answer behind a prompt, read as a Reply."""
    about = f"{len(ids)} token ids, {ask.limit} more"
    if kind == LLAMACPP:  # the samplers are named, so that nothing else is applied
        body: dict[str, Any] = {"prompt": ids, "n_predict": ask.limit, **ask.sampling}
        body |= {"samplers": ["temperature", "top_k", "top_p", "min_p"], "repeat_penalty": 1.0}
        body |= {"return_tokens": True, "cache_prompt": False, "stream": False}
        return Question("/completion", body, lambda reply: _of_llamacpp(reply, ask), about)
    if kind == SGLANG:
        how = ask.sampling | PENALTIES | {"max_new_tokens": ask.limit, "top_k": ask.top_k or -1}
        how["sampling_seed"] = how.pop("seed")
        body = {"input_ids": ids, "sampling_params": how, "stream": False}
        return Question("/generate", body, _of_sglang, about)
    body = {"model": model, "prompt": ids, "max_tokens": ask.limit, **ask.sampling}
    body |= {"return_token_ids": True, "stream": False}
    if kind == VLLM:
        body |= PENALTIES
        body |= {"cache_salt": ask.salt} if ask.salt else {}
        body |= {"stop_token_ids": list(ask.stop)} if ask.stop else {}
    return Question("/v1/completions", body, _of_completion, about)


def _of_llamacpp(reply: Any, ask: ServerRequest) -> Reply:
    said, timings = reply["generation_settings"], reply["timings"]
    ignored = tuple(
        f"{key}={said.get(key)!r} instead of {value}"
        for key, value in ask.sampling.items()
        if not math.isclose(said.get(key, math.nan), value, rel_tol=CLOSE, abs_tol=CLOSE)
    )
    counts = ids_of([timings.get(key, 0) for key in ("draft_n", "draft_n_accepted")])
    tokens, text = ids_of(reply["tokens"]), _text_of(reply["content"])
    return Reply(tokens, text, reply["stop_type"] == "eos", counts[0], counts[1], ignored)


def _of_sglang(reply: Any) -> Reply:
    about, tokens = reply["meta_info"], ids_of(reply["output_ids"])
    stopped = about["finish_reason"]["type"] == "stop"
    return Reply(tokens, _text_of(reply["text"]), stopped, **_counts(about, SGLANG_COUNTS))


def _of_completion(reply: Any) -> Reply:
    choice = reply["choices"][0]
    tokens, stopped = choice.get("token_ids"), choice["finish_reason"] == "stop"
    known = None if tokens is None else ids_of(tokens)
    return Reply(
        known, _text_of(choice["text"]), stopped, **_counts(reply.get("speculation"), COUNTS)
    )


def _counts(said: Any, names: Sequence[str]) -> dict[str, Any]:
    """Return the numbers of COUNTS that stand under `names`; {} where one is none."""
    try:
        return dict(zip(COUNTS, ids_of([said[name] for name in names]), strict=True))
    except (KeyError, TypeError, ValueError):
        return {}


# --- log-probabilities of the `top` best tokens of a place


def scores(kind: str, model: str, ids: list[int], start: int, top: int) -> Question | None:
    """Return what asks for the scores of the `top` best tokens, and of the text's own, at every
    place from `start` on; None of a server that tells one place at a time (`next_scores`)."""
    body: dict[str, Any]
    if kind == SGLANG:
        body = {"input_ids": ids, "stream": False, "return_logprob": True}
        body["sampling_params"] = {"max_new_tokens": 1, "temperature": 0.0}
        # the first place that it tells has no score
        body |= {"logprob_start_len": max(start - 1, 0), "top_logprobs_num": top}
        read = lambda reply: _sglang_scores(reply, ids[start:])
        return Question("/generate", body, read, f"top_logprobs_num={top}")
    if kind != VLLM:
        return None
    body = {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 0}
    body["prompt_logprobs"] = top
    read = lambda reply: _prompt_logprobs(reply, start, len(ids))
    return Question("/v1/completions", body, read, f"prompt_logprobs={top}")


def next_scores(kind: str, model: str, ids: list[int], top: int) -> Question:
    """Return what asks for the scores of the place behind a text, by an answer of one token,
    which no draft touches."""
    body: dict[str, Any]
    if kind == LLAMACPP:  # greedy, with the raw distribution
        body = {"prompt": ids, "n_predict": 1, "temperature": -1.0, "n_probs": top}
        body |= {"cache_prompt": True, "samplers": []}
        about = f"n_probs={top}, which a server that drafts does not give"
        return Question("/completion", body, _n_probs, about)
    body = {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 1.0, "logprobs": top}
    body["return_tokens_as_token_ids"] = True
    return Question("/v1/completions", body, _logprobs, f"logprobs={top}")


def _sglang_scores(reply: Any, text: list[int]) -> list[Scores]:
    about = reply["meta_info"]
    best, own = (about[f"input_{name}_logprobs"][-len(text) :] for name in ("top", "token"))
    rows = [{int(r[1]): float(r[0]) for r in row} for row in best]
    for row, mine, token in zip(rows, own, text, strict=True):
        if int(mine[1]) != token:
            raise ValueError("scores of another text")
        row[token] = float(mine[0])
    return [sound(row) for row in rows]


def _prompt_logprobs(reply: Any, start: int, end: int) -> list[Scores]:
    rows = reply["choices"][0]["prompt_logprobs"]
    places = (rows[at].items() for at in range(start, end))
    return [sound({int(t): float(entry["logprob"]) for t, entry in row}) for row in places]


def _n_probs(reply: Any) -> Scores:
    rows = reply["completion_probabilities"][0]["top_logprobs"]
    return sound({int(row["id"]): float(row["logprob"]) for row in rows})


def _logprobs(reply: Any) -> Scores:
    row = reply["choices"][0]["logprobs"]["top_logprobs"][0]
    if not all(key.startswith(MARK) for key in row):
        raise AnswerRefused("log-probabilities that name tokens by text, which several may have")
    return sound({int(key.removeprefix(MARK)): float(value) for key, value in row.items()})


def sound(distribution: Scores) -> Scores:
    """Return log-probabilities that are some: finite or -inf, with a sum of at most one and more
    than nothing, of ids that a token may have. Raises AnswerRefused for others."""
    values, ids = list(distribution.values()), [*distribution]
    total = sum(math.exp(min(v, 1.0)) for v in values)
    if not all(0 <= i < MOST_IDS for i in ids):
        raise AnswerRefused("log-probabilities of token ids that are none")
    if not all(v <= CLOSE for v in values) or not 0 < total <= 1 + 1e-3:
        raise AnswerRefused(f"log-probabilities that are none (they sum to {total:.4g})")
    return distribution


# --- the ids of a text


def tokenize(kind: str, model: str, text: str) -> Question:
    """Return what asks for the ids that a text becomes as a prompt."""
    path, body = "/tokenize", dict[str, Any](model=model, prompt=text)
    if kind == LLAMACPP:
        body = {"content": text, "add_special": True}
    elif kind != SGLANG:
        path = "/v1/completions"
        body |= {"max_tokens": 1, **ServerRequest(1).sampling, "return_token_ids": True}
    return Question(path, body, _prompt_ids, f"the ids of {len(text)} characters")


def _prompt_ids(reply: Any) -> list[int]:
    found = reply["tokens"] if "tokens" in reply else reply["choices"][0]["prompt_token_ids"]
    if not ids_of(found):
        raise ValueError("no ids")
    return list(found)
