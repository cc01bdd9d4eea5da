"""What is asked of a server, and what is sent and read where token ids go over the wire in a
form of an engine's own: SGLang's /generate, and completions whose log-probabilities name
tokens by id."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from outrider.scripts.data.server import Again, AnswerRefused

# of an answer, in SGLang's words
SGLANG_COUNTS = {
    "drafted": "spec_draft_token_num",
    "accepted": "spec_accept_token_num",
    "drafts": "spec_verify_ct",
}
MOST_IDS = 1 << 31  # an id beyond is no token's
MARK = "token_id:"  # a token by its id, where return_tokens_as_token_ids is taken
# Said, since a model's own defaults would stand in for them.
PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
NEUTRAL = {"top_k": 0, "min_p": 0.0, **PENALTIES}


@dataclass(frozen=True)
class ServerRequest:
    """One answer. limit: most tokens. temperature 0 = greedy; top_k 0 and top_p 1 = off.
    top: log-probabilities that come with the answer, of a bare completions API alone. salt:
    the prompt shares nothing with what vLLM has kept of prompts with another salt. stop: tokens
    that end the answer, of vLLM, which tells them."""

    limit: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    salt: str = ""
    stop: tuple[int, ...] = ()
    top: int = 0


def is_ids(value: Any) -> bool:
    """Whether it is a list of token ids."""
    return isinstance(value, list) and all(
        isinstance(i, int) and not isinstance(i, bool) and 0 <= i < MOST_IDS for i in value
    )


def sglang(ids: list[int], ask: ServerRequest) -> dict[str, Any]:
    """/generate with every setting named."""
    return {
        "input_ids": ids,
        "sampling_params": {
            "max_new_tokens": ask.limit,
            "temperature": ask.temperature,
            "top_k": ask.top_k or -1,
            "top_p": ask.top_p,
            "min_p": ask.min_p,
            **PENALTIES,
            "sampling_seed": ask.seed,
        },
        "stream": False,
    }


def read_sglang(reply: Any) -> dict[str, Any]:
    """tokens, text, stopped: whether the model ended the answer; and where it speculates drafted,
    accepted and drafts (verifying passes)."""
    try:
        tokens, text, about = reply["output_ids"], reply["text"], reply["meta_info"]
        reason = about["finish_reason"]["type"]
    except (KeyError, TypeError):
        raise Again("an answer of another form") from None
    if not is_ids(tokens) or not isinstance(text, str):
        raise Again("an answer of another form")
    found = {"tokens": tokens, "text": text, "stopped": reason == "stop"}
    counts = {name: about.get(key) for name, key in SGLANG_COUNTS.items()}
    return found | counts if is_ids([*counts.values()]) else found


def sglang_scores(ids: list[int], start: int, top: int) -> dict[str, Any]:
    """/generate that scores a text. The first place that it tells has no score: one before."""
    return {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
        "return_logprob": True,
        "logprob_start_len": max(start - 1, 0),
        "top_logprobs_num": top,
        "stream": False,
    }


def read_sglang_scores(ids: list[int], start: int) -> Callable[[Any], list[dict[int, float]]]:
    """{token: log-probability} of every place from `start` on, the text's own token with
    them."""

    def read(reply: Any) -> list[dict[int, float]]:
        count = len(ids) - start
        try:
            about = reply["meta_info"]
            best = about["input_top_logprobs"][-count:]
            own = about["input_token_logprobs"][-count:]
            rows = [{int(r[1]): float(r[0]) for r in row} for row in best]
            for row, mine, token in zip(rows, own, ids[start:], strict=True):
                if int(mine[1]) != token:
                    raise ValueError("scores of another text")
                row[token] = float(mine[0])
        except (KeyError, IndexError, TypeError, ValueError):
            raise AnswerRefused("no input_top_logprobs of the text in the answer") from None
        return rows

    return read


def read_next(reply: Any) -> dict[int, float]:
    """{token: log-probability} of the first place of a completion."""
    try:
        row = _by_id(reply["choices"][0]["logprobs"]["top_logprobs"][0])
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        raise AnswerRefused("no logprobs in the answer") from None
    if row is None:
        raise AnswerRefused(
            "its log-probabilities name tokens by text, which more than one token may have "
            "(asked return_tokens_as_token_ids)"
        )
    return row


def read_rows(choice: Any, tokens: list[int]) -> list[dict[int, float]] | None:
    """{token: log-probability} at every token of a completion's answer; None where it tells
    none, or not by id."""
    try:
        given = choice["logprobs"]
        rows = [_by_id(row) for row in given["top_logprobs"]]
        own = [float(value) for value in given["token_logprobs"]]
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    if not len(rows) == len(own) == len(tokens):
        return None
    found = [row | {t: v} for row, t, v in zip(rows, tokens, own, strict=True) if row]
    return found if len(found) == len(tokens) else None


def _by_id(row: dict[str, Any]) -> dict[int, float] | None:
    """None where a token is named otherwise."""
    named = {key: float(value) for key, value in row.items()}
    if not all(key.startswith(MARK) and key[len(MARK) :].isdecimal() for key in named):
        return None
    return {int(key[len(MARK) :]): value for key, value in named.items()}


def read_prompt(reply: Any) -> list[int]:
    """The ids of a prompt that was sent as text: of /tokenize, or of a completion."""
    try:
        known = reply["tokens"] if "tokens" in reply else reply["choices"][0]["prompt_token_ids"]
    except (KeyError, IndexError, TypeError):
        known = None
    if not is_ids(known) or not known:
        raise AnswerRefused("the ids of the prompt are not in the answer")
    return list(known)
