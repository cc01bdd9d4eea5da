"""Asking a running server, whatever it is: llama.cpp's own API, SGLang's, vLLM's, or the bare
OpenAI one with token ids.

    async with Endpoint(address) as door:
        reply = await door.answer(ids, ServerRequest(64, temperature=1.0, seed=3))
        distributions = await door.distributions([*ids, *reply.tokens], len(ids), 64)

Prompts go out as token ids, so that no tokenizer stands between. What comes back is checked
before it is believed; what a server does not tell is None.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from dataclasses import dataclass, field, replace
from typing import Any

from outrider.conf.errors import UserError
from outrider.scripts.data.server import Again, AnswerRefused, GivenUp, OpenAIServer
from outrider.scripts.scoring import server_forms
from outrider.scripts.scoring.server_forms import ServerRequest

LLAMACPP, VLLM, SGLANG, OTHER = "llama.cpp", "vllm", "sglang", "other"
DRAFTED = ("draft_n", "draft_n_accepted")  # draft tokens of an answer, by llama.cpp
SERVE = "serve with llama.cpp, vLLM or SGLang"
CLOSE = 1e-4  # by which a setting may differ that went through float32


@dataclass(frozen=True)
class Address:
    """Where and how patiently. key_env: the environment variable that holds a key, "" for
    none. setting: the key of the command line that messages name. key_setting: that of key_env, ""
    where the command has none."""

    url: str
    timeout: float = 120.0
    retries: int = 4
    connections: int = 1
    key_env: str = ""
    setting: str = "url"
    key_setting: str = "key_env"


@dataclass(frozen=True)
class Reply:
    """tokens: generated ids, the stop token included where the server sends it; None where it
    sends none. drafted, accepted: draft tokens of this answer, where the server tells them, drafts:
    in how many passes they were verified, where that is told too (SGLang, scripts/serve.py).
    rows: {token: log-probability} at every token, where they were asked for and came.
    """

    tokens: list[int] | None
    text: str
    stopped: bool
    drafted: int | None = None
    accepted: int | None = None
    ignored: tuple[str, ...] = field(default=())
    rows: list[dict[int, float]] | None = None
    drafts: int | None = None


class Endpoint:
    """A server that was recognised. kind: llama.cpp, vllm, sglang or other. model: its name there.
    unread: why its metrics could not be read, "" where they could or it has none."""

    def __init__(self, address: Address) -> None:
        root = address.url.rstrip("/").removesuffix("/v1")
        key = ""
        if address.key_env:
            key = os.environ.get(address.key_env, "")
            if not key:
                raise UserError(
                    f"key_env: the environment variable {address.key_env} is empty; set it, or "
                    "leave key_env out"
                )
        self.address, self.root = address, root
        self.kind, self.model, self.unread = OTHER, "", ""
        self._server = OpenAIServer(
            root,
            key,
            address.timeout,
            address.retries,
            0.5,
            address.connections,
            setting=address.setting,
            key_setting=address.key_setting,
            mend=f"mend the address, or {SERVE}",
        )

    async def __aenter__(self) -> Endpoint:
        await self._server.__aenter__()
        try:
            await self._recognise()
        except BaseException:
            await self._server.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.__aexit__()

    async def _recognise(self) -> None:
        try:
            reply = await self._server.ask("GET", "/v1/models")
            self.model = str(reply["data"][0]["id"])
            owner = str(reply["data"][0].get("owned_by", ""))
        except (GivenUp, AnswerRefused, KeyError, IndexError, TypeError, AttributeError) as error:
            known = isinstance(error, GivenUp | AnswerRefused)
            refused = error if known else AnswerRefused("lists no models")
            raise self._wrong("GET /v1/models", refused) from None
        self.kind = {"llamacpp": LLAMACPP, "vllm": VLLM, "sglang": SGLANG}.get(owner, OTHER)

    def _wrong(self, requested: str, error: Exception) -> UserError:
        """What was asked, what came of it, and what to do."""
        if isinstance(error, AnswerRefused):
            fix = f"{SERVE}, with room for the prompts"
        elif self._server.heard:
            fix = "look into the server's log, then give the same command again"
        else:
            fix = "start the server there, or mend the address"
        return UserError(f"{self.address.setting}: {self.root}: asked {requested}; {error}; {fix}")

    async def _post(self, path: str, body: dict[str, Any], read: Any, about: str) -> Any:
        try:
            return await self._server.ask("POST", path, body, read)
        except (GivenUp, AnswerRefused) as error:
            raise self._wrong(f"POST {path} ({about})", error) from None

    async def answer(self, ids: list[int], ask: ServerRequest) -> Reply:
        """One answer behind a prompt. Raises UserError that names address, question, answer."""
        about = f"{len(ids)} token ids, {ask.limit} more"
        if self.kind == LLAMACPP:
            return await self._post("/completion", _llamacpp(ids, ask), _read_llamacpp(ask), about)
        if self.kind == SGLANG:
            body = server_forms.sglang(ids, ask)
            return Reply(**await self._post("/generate", body, server_forms.read_sglang, about))
        body = {"model": self.model, **_openai(ids, ask)}
        if self.kind == VLLM:
            body = server_forms.NEUTRAL | body
        if self.kind == OTHER and ask.top:
            body |= {"logprobs": ask.top, "return_tokens_as_token_ids": True}
        if self.kind == VLLM and ask.salt:
            body["cache_salt"] = ask.salt
        if self.kind == VLLM and ask.stop:
            body["stop_token_ids"] = list(ask.stop)
        return await self._post("/v1/completions", body, _read_openai, about)

    async def distributions(self, ids: list[int], start: int, top: int) -> list[dict[int, float]]:
        """Raw log-probabilities of the `top` best tokens (and of the text's own) at every place
        from `start` on, of the model alone: [{token: logprob}], len(ids) - start of them.

        Raises UserError where the server gives none.
        """
        if start >= len(ids):
            return []
        if self.kind == LLAMACPP:
            return [
                await self._distribution_llamacpp(ids[:at], top) for at in range(start, len(ids))
            ]
        if self.kind == SGLANG:
            body = server_forms.sglang_scores(ids, start, top)
            scores = server_forms.read_sglang_scores(ids, start)
            read = lambda reply: [_sound(row) for row in scores(reply)]
            return await self._post("/generate", body, read, f"top_logprobs_num={top}")
        if self.kind == OTHER:
            return [await self.next_distribution(ids[:at], top) for at in range(start, len(ids))]
        body = {
            "model": self.model,
            "prompt": ids,
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": top,
        }
        read = _read_prompt_logprobs(ids, start)
        return await self._post("/v1/completions", body, read, f"prompt_logprobs={top}")

    async def _distribution_llamacpp(self, ids: list[int], top: int) -> dict[int, float]:
        body = {
            "prompt": ids,
            "n_predict": 1,
            "temperature": -1.0,  # greedy, with the raw distribution beside it
            "n_probs": top,
            "cache_prompt": True,
            "samplers": [],
        }
        return await self._post("/completion", body, _read_n_probs, f"n_probs={top}")

    async def next_distribution(self, ids: list[int], top: int) -> dict[int, float]:
        """Behind a prompt, by an answer of one token, which no draft touches."""
        body = {
            "model": self.model,
            "prompt": ids,
            "max_tokens": 1,
            "temperature": 1.0,
            "logprobs": top,
            "return_tokens_as_token_ids": True,
        }
        read = lambda reply: _sound(server_forms.read_next(reply))
        return await self._post("/v1/completions", body, read, f"logprobs={top}")

    async def tokenized(self, text: str) -> list[int]:
        """The ids that a text becomes as a prompt. Raises UserError where it does not tell."""
        about = f"the ids of {len(text)} characters"
        if self.kind == LLAMACPP:
            body: dict[str, Any] = {"content": text, "add_special": True}
            return await self._post("/tokenize", body, server_forms.read_prompt, about)
        body = {"model": self.model, "prompt": text}
        if self.kind == SGLANG:
            return await self._post("/tokenize", body, server_forms.read_prompt, about)
        body |= {"max_tokens": 1, "temperature": 0, "seed": 0, "top_p": 1.0}
        body["return_token_ids"] = True
        return await self._post("/v1/completions", body, server_forms.read_prompt, about)

    async def metrics(self) -> str | None:
        """Its Prometheus page; None where it has none, or one that cannot be read (`unread`)."""
        try:
            return await self._server.page("/metrics")
        except Again as error:
            self.unread = f"GET /metrics: {error}"
            return None

    async def connect(self) -> None:
        """Open all connections, so that none is opened while somebody takes the time."""
        lists = (self._server.ask("GET", "/v1/models") for _ in range(self.address.connections))
        try:
            await asyncio.gather(*lists)
        except (GivenUp, AnswerRefused) as error:
            raise self._wrong("GET /v1/models", error) from None

    @property
    def troubles(self) -> int:
        """How many tries have failed so far: each costs a wait before the next one."""
        return self._server.troubles.total()


def reached(address: Address) -> None:
    """Raises UserError where no server answers, before anything slow is begun for its sake."""

    async def recognised() -> None:
        async with Endpoint(replace(address, retries=min(address.retries, 1))):
            pass

    asyncio.run(recognised())


def _llamacpp(ids: list[int], ask: ServerRequest) -> dict[str, Any]:
    """Its native form: the samplers are named, so that nothing else is applied."""
    return {
        "prompt": ids,
        "n_predict": ask.limit,
        "temperature": ask.temperature,
        "top_k": ask.top_k,
        "top_p": ask.top_p,
        "min_p": ask.min_p,
        "seed": ask.seed,
        "repeat_penalty": 1.0,
        "samplers": ["temperature", "top_k", "top_p", "min_p"],
        "return_tokens": True,
        "cache_prompt": False,
        "stream": False,
    }


def _read_llamacpp(ask: ServerRequest) -> Any:
    def read(reply: Any) -> Reply:
        try:
            tokens, text = reply["tokens"], reply["content"]
            timings, kind = reply["timings"], reply["stop_type"]
            settings = reply["generation_settings"]
        except (KeyError, TypeError):
            raise Again("an answer of another form") from None
        sound = server_forms.is_ids(tokens) and isinstance(text, str) and isinstance(settings, dict)
        counts = [timings.get(key, 0) if isinstance(timings, dict) else None for key in DRAFTED]
        if not sound or not server_forms.is_ids(counts):
            raise Again("an answer of another form")
        requested = {"temperature": ask.temperature, "top_k": ask.top_k, "top_p": ask.top_p}
        requested |= {"min_p": ask.min_p, "seed": ask.seed}
        ignored = tuple(
            f"{key}={settings.get(key)!r} instead of {value}"
            for key, value in requested.items()
            if not _near(settings.get(key), value)
        )
        return Reply(
            tokens,
            text,
            kind == "eos",
            counts[0],
            counts[1],
            ignored,
        )

    return read


def _near(said: Any, wanted: float) -> bool:
    return isinstance(said, int | float) and abs(said - wanted) <= CLOSE * max(1.0, abs(wanted))


def _openai(ids: list[int], ask: ServerRequest) -> dict[str, Any]:
    """vLLM's completions with token ids on both sides."""
    body = {
        "prompt": ids,
        "max_tokens": ask.limit,
        "temperature": ask.temperature,
        "top_p": ask.top_p,
        "seed": ask.seed,
        "return_token_ids": True,
        "stream": False,
    }
    extra = {"top_k": ask.top_k, "min_p": ask.min_p}
    return body | {key: value for key, value in extra.items() if value}


def _read_openai(reply: Any) -> Reply:
    try:
        choice = reply["choices"][0]
        text, reason = choice["text"], choice["finish_reason"]
    except (KeyError, IndexError, TypeError):
        raise Again("an answer of another form") from None
    tokens = choice.get("token_ids")
    if not isinstance(text, str) or not (tokens is None or server_forms.is_ids(tokens)):
        raise Again("an answer of another form")
    rows = None if tokens is None else server_forms.read_rows(choice, tokens)
    counts = _read_speculation(reply)
    with contextlib.suppress(AnswerRefused):  # then they stand for nothing told
        sound = rows and [_sound(row) for row in rows]
        return Reply(tokens, text, reason == "stop", rows=sound, **counts)
    return Reply(tokens, text, reason == "stop", **counts)


def _read_speculation(reply: Any) -> dict[str, Any]:
    """What scripts/serve.py tells with an answer; {} of other servers."""
    told = reply.get("speculation")
    keys = ("drafts", "drafted", "accepted")
    counts = {key: told.get(key) for key in keys} if isinstance(told, dict) else {}
    return counts if server_forms.is_ids([*counts.values()]) else {}


def _read_n_probs(reply: Any) -> dict[int, float]:
    try:
        rows = reply["completion_probabilities"][0]["top_logprobs"]
        distribution = {int(row["id"]): float(row["logprob"]) for row in rows}
    except (KeyError, IndexError, TypeError, ValueError):
        raise AnswerRefused("no n_probs in the answer (a server that drafts gives none)") from None
    return _sound(distribution)


def _read_prompt_logprobs(ids: list[int], start: int) -> Any:
    def read(reply: Any) -> list[dict[int, float]]:
        try:
            rows = reply["choices"][0]["prompt_logprobs"]
            distributions = [
                {int(token): float(entry["logprob"]) for token, entry in rows[at].items()}
                for at in range(start, len(ids))
            ]
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):
            raise AnswerRefused("no prompt_logprobs in the answer") from None
        return [_sound(distribution) for distribution in distributions]

    return read


def _sound(distribution: dict[int, float]) -> dict[int, float]:
    """Log-probabilities that are some: finite or -inf, with a sum of at most one and more than
    nothing, of ids that a token may have."""
    if not server_forms.is_ids([*distribution]):
        raise AnswerRefused("log-probabilities of token ids that are none")
    values = list(distribution.values())
    total = sum(math.exp(v) for v in values if v > -math.inf) if values else math.nan
    if not values or any(math.isnan(v) or v > CLOSE for v in values) or not 0 < total <= 1 + 1e-3:
        raise AnswerRefused(f"log-probabilities that are none (they sum to {total:.4g})")
    return distribution
