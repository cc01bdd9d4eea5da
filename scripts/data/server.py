"""Talking to a server that speaks the OpenAI API (vLLM, SGLang, llama.cpp, a hosted one): one
question, one answer, with retries.

A rate limit (429) pauses every request and uses up no try; other passing troubles (5xx, a
broken or slow answer, no connection) are tried again with growing waits. The key comes from an
environment variable, goes to this server alone and is cut out of everything that is printed.
Redirects are not followed."""

from __future__ import annotations

import asyncio
import email.utils
import json
import random
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from outrider.conf.errors import UserError
from outrider.conf.jsonl import HALF, is_whole
from outrider.train.data.spans import arguments

PASSING = (408, 409, 425, 429, 500, 502, 503, 504, 520, 522, 524, 529)  # worth another try
LONGEST_WAIT = 60.0  # seconds between two tries, unless the server asks for more
LONGEST_PAUSE = 600.0  # seconds that a server's Retry-After is believed
CONNECT = 60.0  # seconds that a connection may take
FIRST = 6.0  # seconds for the list of models, as long as nothing was ever heard of the server
MAX_BYTES = 16 << 20  # a longer answer is no answer
MOST_TOKENS = 1 << 31  # of an answer; a larger count is none


class AnswerRefused(Exception):
    """The server will not answer this question, however often it is asked."""


class GivenUp(Exception):
    """All tries are used up; the text says why the last one failed."""


class Again(Exception):
    """One try failed and the next may not. wait: seconds the server asked for. limited: by a
    rate limit. unheard: there was no connection."""

    def __init__(
        self, reason: str, wait: float = 0.0, limited: bool = False, unheard: bool = False
    ):
        super().__init__(reason)
        self.wait, self.limited, self.unheard = wait, limited, unheard


@dataclass(frozen=True)
class ServerAnswer:
    """text: as the server sent it. finished: the model ended it, no limit did. tokens: the
    server's count, -1 unknown.
    token_ids: where the server sent them (vLLM with return_token_ids). reasoning: what a
    reasoning parser of the server's cut out of the text. calls: of tools, as the API has them."""

    text: str
    finished: bool
    tokens: int
    token_ids: list[int] | None
    reasoning: str = ""
    calls: list[dict[str, Any]] | None = None


@dataclass
class OpenAIServer:
    """One server. Use as `async with`. timeout: seconds for a whole answer. retries: tries
    after the first. backoff: first wait, seconds; it doubles. on_trouble: told (reason,
    seconds until the next try)."""

    base_url: str
    key: str
    timeout: float
    retries: int
    backoff: float
    connections: int
    on_trouble: Callable[[str, float], None] = lambda reason, wait: None
    setting: str = "base_url"  # the key that messages about the address name
    key_setting: str = "api_key_env"  # the key that names the variable of the server's key, "" none
    mend: str = "mend base_url (it usually ends with /v1) or model"  # what is not there
    troubles: Counter[str] = field(default_factory=Counter)
    _resume_at: float = 0.0
    _heard: float = field(default_factory=time.monotonic)
    _there: bool = False  # whether it has ever answered anything

    async def __aenter__(self) -> OpenAIServer:
        import httpx

        limits = httpx.Limits(
            max_connections=self.connections, max_keepalive_connections=self.connections
        )
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        self._client = httpx.AsyncClient(
            headers=headers,
            limits=limits,
            timeout=httpx.Timeout(self.timeout, connect=min(self.timeout, CONNECT)),
            follow_redirects=False,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def model(self, wanted: str) -> str:
        """The name of the model to ask: `wanted` if the server has it, the only one if
        `wanted` is empty.

        Raises UserError: no server, another model, several to choose from."""
        try:
            reply = await self.ask("GET", "/models")
            names = sorted(str(m["id"]) for m in reply["data"])
        except (AnswerRefused, KeyError, TypeError):
            if wanted:
                return wanted  # some servers have no list
            raise UserError(f"model: {self.base_url} lists no models; set model=NAME") from None
        except GivenUp as error:
            raise UserError(
                f"{self.setting}: nothing usable at {self.base_url} ({error}); start the "
                "server, or mend the address (it usually ends with /v1)"
            ) from None
        shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        if wanted and wanted not in names:
            raise UserError(
                f"model: {self.base_url} does not serve {wanted!r}; it serves "
                f"{shown or 'nothing'}; choose one with model=NAME"
            )
        if not wanted and len(names) != 1:
            raise UserError(
                f"model: {self.base_url} serves {shown or 'nothing'}; choose one with model=NAME"
            )
        return wanted or names[0]

    @property
    def heard(self) -> bool:
        """Whether it has ever answered anything."""
        return self._there

    async def alive(self) -> bool:
        """Whether the server still answers anything at all."""
        try:
            await self._once("GET", "/models", None)
        except (Again, UserError):
            return False
        except AnswerRefused:
            pass
        return True

    async def chat(self, body: dict[str, Any]) -> ServerAnswer:
        """The answer to one chat request. Raises Refused, GivenUp, or UserError when no
        request can succeed.
        """
        return await self.ask("POST", "/chat/completions", body, read_answer)

    async def ask(
        self, method: str, path: str, body: Any = None, read: Callable[[Any], Any] = lambda v: v
    ) -> Any:
        """Any request; `read` turns the JSON into a value. Raises as `chat` does."""
        tries = 0
        while True:
            while (left := self._resume_at - time.monotonic()) > 0:
                await asyncio.sleep(left)
            try:
                value = read(await self._once(method, path, body))
                self._heard = time.monotonic()
                return value
            except Again as error:
                self.troubles[str(error).partition(",")[0][:60]] += 1
                tries += not error.limited
                if error.unheard and not self._there:
                    raise GivenUp(str(error)) from None
                if error.limited and time.monotonic() - self._heard > self.timeout + error.wait:
                    explained = f"{error}, and nothing else for {self.timeout:.0f} s"
                    raise GivenUp(explained) from None
                if tries > self.retries:
                    raise GivenUp(f"{error}, {tries} tries") from None
                own = min(LONGEST_WAIT, self.backoff * 2 ** min(tries, 16))
                wait = max(own * random.uniform(0.5, 1.0), error.wait)
                self.on_trouble(str(error), wait)
                if error.limited:
                    self._resume_at = max(self._resume_at, time.monotonic() + wait)
                else:
                    await asyncio.sleep(wait)

    async def page(self, path: str) -> str | None:
        """The text of a page, asked for once; None where there is none. Raises Again for one
        that cannot be read."""
        status, _, content = await self._fetched("GET", path, None)
        return content.decode(errors="replace") if status == 200 else None

    async def _once(self, method: str, path: str, body: Any) -> Any:
        return self._judged(*await self._fetched(method, path, body), path)

    async def _fetched(self, method: str, path: str, body: Any) -> tuple[int, Any, bytes]:
        """(status, headers, content) of any reply, of MAX_BYTES and within the time at most.
        Raises Again."""
        import httpx

        silent = method == "GET" and not self._there
        limit = min(self.timeout, FIRST) if silent else self.timeout
        try:
            async with asyncio.timeout(limit):
                async with self._client.stream(method, self.base_url + path, json=body) as reply:
                    self._there = True
                    content = bytearray()
                    async for part in reply.aiter_bytes():
                        content += part
                        if len(content) > MAX_BYTES:
                            raise Again("an endless answer")
        except httpx.ConnectTimeout:
            raise Again(f"no connection within {CONNECT:g} s", unheard=True) from None
        except (TimeoutError, httpx.TimeoutException):
            if silent and not self._there:
                raise Again(f"no answer within {limit:g} s", unheard=True) from None
            raise Again(f"no whole answer within timeout={self.timeout:g} s") from None
        except httpx.UnsupportedProtocol as error:
            raise UserError(
                f"{self.setting}: {self._safe(str(error))}; give http://HOST:PORT/v1"
            ) from None
        except httpx.ConnectError as error:
            raise Again(
                f"no connection ({self._safe(str(error)) or type(error).__name__})", unheard=True
            ) from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:  # cut off, no HTTP, wrong length
            raise Again(f"a broken connection ({type(error).__name__})") from None
        return reply.status_code, reply.headers, bytes(content)

    def _judged(self, status: int, headers: Any, content: bytes, path: str) -> Any:
        url = self.base_url + path
        said = f"{status}" + (f", {text}" if (text := self._safe(_message(content))) else "")
        if status == 200:
            try:
                return json.loads(content)
            except (ValueError, RecursionError):
                raise Again("an answer that is no JSON") from None
        if status in PASSING or status >= 500:
            raise Again(f"status {said}", retry_after(headers.get("retry-after")), status == 429)
        if status in (401, 403):
            refused, key = f"{url} refuses the key ({said})", self.key_setting
            if not key:
                raise UserError(f"{self.setting}: {refused}; ask a server that wants none")
            raise UserError(f"{key}: {refused}; set the environment variable that {key} names")
        if 300 <= status < 400:
            raise UserError(
                f"{self.setting}: {url} redirects to "
                f"{self._safe(str(headers.get('location')))[:200]}; give the final address"
            ) from None
        if status == 404 and path != "/models":
            raise UserError(f"{self.setting}: {url} is not there ({said}); {self.mend}")
        raise AnswerRefused(f"status {said}")

    def _safe(self, text: str) -> str:
        """One short line without the key."""
        text = " ".join(text.split())
        if self.key:
            text = text.replace(self.key, "***")
        return re.sub(r"[^\x20-\x7e\xa0-\uffff]", "", text)[:200]


def read_answer(reply: Any) -> ServerAnswer:
    """The first choice of a chat completion. Raises Again for a form that is none, Refused for
    an empty answer, one that ended within nothing but reasoning, half a character, and a tool
    call that is cut or cannot be read."""
    try:
        choice = reply["choices"][0]
        message, reason = choice["message"], choice["finish_reason"]
        called, thought = message.get("tool_calls"), _reasoning(message)
        text = message.get("content") if called or thought else message["content"]
        tokens = (reply.get("usage") or {}).get("completion_tokens", -1)
    except (KeyError, IndexError, TypeError, AttributeError):
        raise Again("an answer of another form") from None
    if reason == "content_filter":
        raise AnswerRefused("the answer is filtered")
    if not is_whole(f"{text}{thought}"):
        raise AnswerRefused(f"the answer holds {HALF}")
    if not isinstance(text, str | None) or reason not in (*ENDED, "length", None):
        raise Again("an answer of another form")
    finished, blank = reason in ENDED, not (text or "").strip()
    calls = _calls(called, finished) if called else None
    if blank and not calls and (finished or not thought.strip()):
        raise AnswerRefused("the answer is empty" + (" behind its reasoning" if thought else ""))
    ids = choice.get("token_ids")
    whole = isinstance(ids, list) and all(isinstance(i, int) for i in ids)
    return ServerAnswer(
        text or "",
        finished,
        tokens if type(tokens) is int and 0 <= tokens < MOST_TOKENS else -1,
        ids if whole else None,
        thought,
        calls,
    )


ENDED = ("stop", "tool_calls", "function_call")  # reasons for which the model itself ends


def _reasoning(message: dict[str, Any]) -> str:
    """What a reasoning parser kept apart, under its old name or vLLM's newer one."""
    found = (message.get(key) for key in ("reasoning_content", "reasoning"))
    return next((text for text in found if isinstance(text, str) and text.strip()), "")


def _calls(called: Any, finished: bool) -> list[dict[str, Any]]:
    """Tool calls as they go into a row. Raises Refused for a cut one and for another form."""
    try:
        if isinstance(called, str):
            raise ValueError("tool_calls are not a list of objects")
        arguments(called)
        if not is_whole(json.dumps(called, ensure_ascii=False)):
            raise ValueError(f"it holds {HALF}")
    except ValueError as error:
        raise AnswerRefused(f"the answer is a tool call that cannot be read ({error})") from None
    if not finished:
        raise AnswerRefused("the answer is a tool call that was cut")
    return [{k: c[k] for k in ("id", "type", "function") if k in c} for c in called]


def retry_after(value: str | None) -> float:
    """Seconds in a Retry-After header, which holds seconds or a date; 0 where it holds
    neither.
    """
    if not value:
        return 0.0
    try:
        wait = float(value)
    except ValueError:
        try:
            wait = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, TypeError, OverflowError):
            return 0.0
    return min(max(wait, 0.0), LONGEST_PAUSE) if wait == wait else 0.0


def _message(content: bytes) -> str:
    """What an error body says, in the forms in use."""
    text = content[:2000].decode(errors="replace")
    try:
        value = json.loads(text)
        found = value.get("error", value)
        said = found if isinstance(found, str) else found.get("message", found.get("detail", ""))
        return str(said)
    except (ValueError, AttributeError, RecursionError):
        return "" if text.lstrip().startswith("<") else text
