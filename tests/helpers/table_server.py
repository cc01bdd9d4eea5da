"""A server whose next token hangs on the last one alone, in the words of any engine: what
`certify url=...` asks of llama.cpp, vLLM, SGLang and of a bare server of the completions
API.

    with spoken("sglang") as url: ...
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.helpers.servers import answering, models

VOCAB, LIMIT, BEST, PROMPTS = 120, 25, 20, 8
OWNERS = {"llama.cpp": "llamacpp", "vllm": "vllm", "sglang": "sglang", "other": "somebody"}
# (random numbers, log-probabilities [V], temperature, top_k, or top_p where below 1, place,
# requests at a time) -> token
Draw = Callable[[np.random.Generator, np.ndarray, float, float, int, int], int]
Ranked = list[tuple[int, float]]
# (path, what was asked or None for a GET, the answer) -> the answer
Twist = Callable[[str, dict[str, Any] | None, Any], Any]


def table() -> np.ndarray:
    """[V, V] log-probabilities of the next token by the last one, some sharp, some flat."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(VOCAB, VOCAB)) * (rng.random((VOCAB, 1)) * 2.5 + 0.5)
    return logits - np.logaddexp.reduce(logits, 1, keepdims=True)


TABLE = table()
LIKELIEST = np.argsort(-TABLE, 1)[:, :BEST]


def sound(
    rng: np.random.Generator, log_probs: np.ndarray, heat: float, cut: float, place: int, level: int
) -> int:
    """A token at a temperature, among the `cut` likeliest, or in their nucleus where it is below
    1; 0: all."""
    scores = log_probs / heat
    if 0 < cut < 1:
        mass = np.sort(np.exp(scores - np.logaddexp.reduce(scores)))[::-1]
        last = int((mass.cumsum() - mass < cut).sum())
        scores = np.where(log_probs >= np.sort(log_probs)[-last], scores, -np.inf)
    elif cut:
        cut = int(cut)
        scores = np.where(log_probs >= np.sort(log_probs)[-cut], scores, -np.inf)
    return int(np.argmax(scores + rng.gumbel(size=VOCAB)))


@contextlib.contextmanager
def spoken(
    kind: str,
    by_text: bool = False,
    twist: Twist = lambda path, body, value: value,
) -> Iterator[str]:
    """Its address while the block runs. kind: a key of OWNERS. by_text: tokens of
    log-probabilities are named by text. twist: what becomes of every answer."""
    table = _Table(kind, by_text)

    def answer(path: str, body: Any) -> Any:
        if body is not None:
            return twist(path, body, table.answered(path, body))
        there = models(OWNERS[kind]) if path == "/v1/models" else None
        return twist(path, body, there)

    with answering(answer) as url:
        yield url


def _best(last: int) -> Ranked:
    return [(int(i), float(TABLE[last, i])) for i in LIKELIEST[last]]


@dataclass
class _Table:
    kind: str
    by_text: bool

    def answered(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/tokenize":
            key = "content" if self.kind == "llama.cpp" else "prompt"
            return {"tokens": self._ids(body[key])}
        if path == "/generate":
            return self._sglang(body)
        ids = body["prompt"] if isinstance(body["prompt"], list) else self._ids(body["prompt"])
        if path == "/completion":
            return self._llamacpp(body, ids)
        return self._openai(body, ids)

    def _ids(self, text: str) -> list[int]:
        return [b % VOCAB for b in text.encode()]

    def _answer(self, ids: list[int], limit: int, heat: float, cut: float, seed: int) -> list[int]:
        rng, last, found = np.random.default_rng(seed), ids[-1], list[int]()
        for place in range(limit):
            last = sound(rng, TABLE[last], heat, cut, place, 0)
            found.append(last)
        return found

    def _sglang(self, body: dict[str, Any]) -> dict[str, Any]:
        ids, how = body["input_ids"], body["sampling_params"]
        about: dict[str, Any] = {"finish_reason": {"type": "length"}}
        if body.get("return_logprob"):  # from logprob_start_len on, whose own score is none
            places = range(body["logprob_start_len"] + 1, len(ids))
            own = [[float(TABLE[ids[i - 1], ids[i]]), ids[i], None] for i in places]
            best = [[[v, t, None] for t, v in _best(ids[i - 1])] for i in places]
            about["input_token_logprobs"] = [[None, ids[places.start - 1], None], *own]
            about["input_top_logprobs"] = [None, *best]
            return {"text": "", "output_ids": [0], "meta_info": about}
        cut = max(how["top_k"], 0) or how["top_p"] % 1
        heat, limit = how["temperature"], how["max_new_tokens"]
        found = self._answer(ids, limit, heat, cut, how["sampling_seed"])
        return {"text": "", "output_ids": found, "meta_info": about}

    def _llamacpp(self, body: dict[str, Any], ids: list[int]) -> dict[str, Any]:
        if "n_probs" in body:
            rows = [{"id": t, "logprob": v} for t, v in _best(ids[-1])]
            return {"completion_probabilities": [{"top_logprobs": rows}]}
        keys = ("temperature", "top_k", "top_p", "min_p", "seed")
        limit, heat = body["n_predict"], body["temperature"]
        found = self._answer(ids, limit, heat, body["top_k"] or body["top_p"] % 1, body["seed"])
        said = {key: body[key] for key in keys}
        out = {"tokens": found, "content": "", "timings": {}, "stop_type": "limit"}
        return out | {"generation_settings": said}

    def _openai(self, body: dict[str, Any], ids: list[int]) -> dict[str, Any]:
        choice: dict[str, Any] = {"text": "", "finish_reason": "length", "prompt_token_ids": ids}
        name = "{}" if self.by_text else "token_id:{}"
        if body["max_tokens"] == 1 and "logprobs" in body:
            row = {name.format(t): v for t, v in _best(ids[-1])}
            choice["logprobs"] = {"top_logprobs": [row]}
        elif "prompt_logprobs" in body:
            rows = [
                {str(t): {"logprob": v} for t, v in [(own, TABLE[last, own]), *_best(last)]}
                for last, own in zip(ids, ids[1:], strict=False)
            ]
            choice["prompt_logprobs"] = [None, *rows]
        else:
            limit, heat = body["max_tokens"], body["temperature"]
            cut = body.get("top_k", 0) or body["top_p"] % 1
            found = self._answer(ids, limit, max(heat, 1e-3), cut, body["seed"])
            stop = set(body.get("stop_token_ids", ()))
            end = next((i for i, token in enumerate(found) if token in stop), limit)
            choice["token_ids"] = found = found[: end + 1]
        return {"choices": [choice]}
