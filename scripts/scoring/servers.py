"""Ask a running server, whatever it is: llama.cpp, SGLang, vLLM, or the bare API of completions.

    async with Endpoint(url) as door:
        reply = await door.answer(ids, ServerRequest(64, temperature=1.0, seed=3))
        distributions = await door.distributions([*ids, *reply.tokens], len(ids), 64)

Prompts go out as token ids, so that no tokenizer is between. What comes back is checked
before it is believed; what a server does not tell is None.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from typing import Any

from outrider.conf.errors import UserError
from outrider.scripts.data.server import AnswerRefused, GivenUp, OpenAIServer
from outrider.scripts.scoring import server_forms
from outrider.scripts.scoring.server_forms import OTHER, Question, Reply, ServerRequest

SERVE = "serve with llama.cpp, vLLM or SGLang"
# what a reader raises for an answer of another form
MALFORMED = (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError)


@dataclass
class Endpoint:
    """A server; use as `async with`, as often as it is wanted. key_env: the environment variable
    that holds a key, "" for none. setting: the key of the command line that messages name.
    key_setting: that of key_env, "" where the command has none. Raises UserError for an empty
    variable.

    Once it was recognised: kind: llama.cpp, vllm, sglang or other. model: its name there. unread:
    why its metrics could not be read, "" where they could or it has none."""

    url: str
    timeout: float = 120.0
    retries: int = 4
    key_env: str = ""
    setting: str = "url"
    key_setting: str = "key_env"
    kind: str = OTHER
    model: str = ""
    unread: str = ""

    def __post_init__(self) -> None:
        self.root = self.url.rstrip("/").removesuffix("/v1")
        key = os.environ.get(self.key_env, "") if self.key_env else ""
        if self.key_env and not key:
            raise UserError(
                f"key_env: the environment variable {self.key_env} is empty; set it, or "
                "leave key_env out"
            )
        names, mend = (self.setting, self.key_setting), f"mend the address, or {SERVE}"
        self._server = OpenAIServer(self.root, key, self.timeout, self.retries, *names, mend)

    async def __aenter__(self) -> Endpoint:
        await self._server.__aenter__()
        try:
            reply = await self._server.ask("GET", "/v1/models")
            self.model = str(reply["data"][0]["id"])
            self.kind = server_forms.OWNERS.get(str(reply["data"][0].get("owned_by", "")), OTHER)
        except BaseException as error:
            await self._server.__aexit__()
            if isinstance(error, MALFORMED):
                error = AnswerRefused("lists no models")
            if isinstance(error, GivenUp | AnswerRefused):
                raise self._wrong("GET /v1/models", error) from None
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.__aexit__()

    def _wrong(self, requested: str, error: Exception) -> UserError:
        """Return what was asked, what came of it, and what to do."""
        if isinstance(error, AnswerRefused):
            fix = f"{SERVE}, with room for the prompts"
        elif self._server.heard:
            fix = "look into the server's log, then give the same command again"
        else:
            fix = "start the server there, or mend the address"
        return UserError(f"{self.setting}: {self.root}: asked {requested}; {error}; {fix}")

    async def _ask(self, question: Question) -> Any:
        """Raise UserError that names address, question, answer."""

        def read(reply: Any) -> Any:
            try:
                return question.read(reply)
            except MALFORMED:
                raise AnswerRefused("an answer of another form") from None

        try:
            return await self._server.ask("POST", question.path, question.body, read)
        except (GivenUp, AnswerRefused) as error:
            raise self._wrong(f"POST {question.path} ({question.about})", error) from None

    async def answer(self, ids: list[int], ask: ServerRequest) -> Reply:
        """Return one answer behind a prompt. Raises UserError."""
        reply: Reply = await self._ask(server_forms.answer(self.kind, self.model, ids, ask))
        return reply

    async def distributions(self, ids: list[int], start: int, top: int) -> list[dict[int, float]]:
        """Raw log-probabilities of the `top` best tokens (and, where it tells it, of the text's
        own) at every place from `start` on, of the model alone: [{token: logprob}], len(ids) -
        start of them. Raises UserError where the server gives none."""
        if start >= len(ids):
            return []
        kind, model = self.kind, self.model
        if at_once := server_forms.scores(kind, model, ids, start, top):
            return list(await self._ask(at_once))
        places = range(start, len(ids))
        ones = (server_forms.next_scores(kind, model, ids[:at], top) for at in places)
        return [await self._ask(one) for one in ones]

    async def tokenized(self, text: str) -> list[int]:
        """Return the ids that a text becomes as a prompt. Raises UserError where it does
        not tell."""
        return list(await self._ask(server_forms.tokenize(self.kind, self.model, text)))

    async def metrics(self) -> str | None:
        """Its Prometheus page; None where it has none, or one that cannot be read (`unread`)."""
        try:
            return await self._server.page("/metrics")
        except GivenUp as error:
            self.unread = f"GET /metrics: {error}"
            return None

    async def connect(self, count: int) -> None:
        """Open connections, so that none is opened while somebody takes the time."""
        lists = (self._server.ask("GET", "/v1/models") for _ in range(count))
        try:
            await asyncio.gather(*lists)
        except (GivenUp, AnswerRefused) as error:
            raise self._wrong("GET /v1/models", error) from None

    @property
    def troubles(self) -> int:
        """How many tries have failed so far: each costs a wait before the next one."""
        return self._server.troubles.total()
