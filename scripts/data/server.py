"""A server of the OpenAI API, asked by the `openai` client, which tries again what may pass (a rate
limit, 5xx, a lost connection). The key comes from an environment variable, goes to this server
alone and is cut out of everything that is printed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from outrider.conf.errors import UserError
from outrider.conf.jsonl import HALF, is_whole
from outrider.train.data.spans import arguments

CONNECT = 60.0  # seconds that a connection may take
FIRST = 6.0  # seconds for a first page, as long as nothing was ever heard of the server
MAX_BYTES = 16 << 20  # of a page
MOST_TOKENS = 1 << 31  # of an answer; a larger count is none
ENDED = ("stop", "tool_calls", "function_call")  # reasons for which the model itself ends
PASSING = (408, 409, 429)  # the client tries again, as after every 5xx


class AnswerRefused(Exception):
    """The server will not answer this question, however often it is asked."""


class GivenUp(Exception):
    """All tries are used up, or an answer has no known form; the text says what was wrong."""


@dataclass(frozen=True)
class ServerAnswer:
    """text: as the server sent it. finished: the model ended it, no limit did. tokens: the
    server's count, -1 unknown.
    token_ids, prompt_ids: where the server sent them (vLLM with return_token_ids). reasoning: what
    a reasoning parser of the server's cut out of the text. calls: of tools, as the API has them."""

    text: str
    finished: bool
    tokens: int
    token_ids: list[int] | None
    reasoning: str = ""
    calls: list[dict[str, Any]] | None = None
    prompt_ids: list[int] | None = None


@dataclass
class OpenAIServer:
    """One server. Use as `async with`. timeout: seconds that an answer may be waited for.
    retries: tries after the first one. setting, key_setting: the keys that messages about the
    address and about the variable of the key name ("" none). mend: what to do where nothing is
    there. troubles: replies that were asked for again, by status. heard: it has answered once."""

    base_url: str
    key: str
    timeout: float
    retries: int
    setting: str = "base_url"
    key_setting: str = "api_key_env"
    mend: str = "mend base_url (it usually ends with /v1) or model"
    troubles: Counter[str] = field(default_factory=Counter)
    heard: bool = False

    async def __aenter__(self) -> OpenAIServer:
        import openai

        async def hear(reply: Any) -> None:
            self.heard = True
            if reply.status_code in PASSING or reply.status_code >= 500:
                self.troubles[f"status {reply.status_code}"] += 1

        self._http = openai.DefaultAsyncHttpxClient(
            follow_redirects=False, event_hooks={"response": [hear]}
        )
        self._client = openai.AsyncOpenAI(
            api_key=self.key or "none",
            base_url=self.base_url,
            timeout=openai.Timeout(self.timeout, connect=min(self.timeout, CONNECT)),
            max_retries=self.retries,
            http_client=self._http,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def model(self, wanted: str) -> str:
        """Return the name of the model to ask: `wanted` if the server has it, the only one
        if `wanted` is empty.

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
        if wanted in names or (not wanted and len(names) == 1):
            return wanted or names[0]
        shown = ", ".join(names[:8]) or "nothing"
        asked = f" and does not serve {wanted!r}" if wanted else ""
        raise UserError(f"model: {self.base_url} serves {shown}{asked}; choose one with model=NAME")

    async def ask(
        self, method: str, path: str, body: Any = None, read: Callable[[Any], Any] = lambda v: v
    ) -> Any:
        """Any request; `read` turns the JSON into a value. Raises AnswerRefused, GivenUp, or
        UserError when no request can succeed. Nobody waits for what was never there."""
        import openai

        client, limit = self._client, self.timeout
        if method == "GET" and not self.heard:
            limit = min(limit, FIRST)
            client = client.with_options(max_retries=0, timeout=limit)
        try:
            if method == "GET":
                reply: Any = await client.get(path, cast_to=object)
            else:
                reply = await client.post(path, cast_to=object, body=body)
            if isinstance(reply, str):  # whatever type the server says that it is of
                reply = json.loads(reply)
        except openai.APITimeoutError:
            raise GivenUp(f"no answer within {limit:g} s") from None
        except openai.APIConnectionError as error:
            raise GivenUp(f"no connection ({self._safe(str(error.__cause__))})") from None
        except openai.APIStatusError as error:
            raise self._meaning(error, path) from None
        except (ValueError, RecursionError):
            raise GivenUp("an answer that is no JSON") from None
        return read(reply)

    async def page(self, path: str) -> str | None:
        """Return the text of a page, asked for once; None where there is none. Raises
        GivenUp for one that cannot be read."""
        content = bytearray()
        try:
            async with self._http.stream("GET", self.base_url + path) as reply:
                async for part in reply.aiter_bytes():
                    content += part
                    if len(content) > MAX_BYTES:
                        raise GivenUp("an endless answer")
        except GivenUp:
            raise
        except Exception as error:  # whichever transport the client uses
            raise GivenUp(f"a broken connection ({type(error).__name__})") from None
        return content.decode(errors="replace") if reply.status_code == 200 else None

    def _meaning(self, error: Any, path: str) -> Exception:
        """Return what a status means for the caller."""
        status, url, body = error.status_code, self.base_url + path, error.body
        if isinstance(body, dict):
            body = body.get("message", body.get("detail", ""))
        text = self._safe(str(body or ""))
        said = f"status {status}" + (f", {text}" if text and text[0] != "<" else "")
        if status in (401, 403):
            refused, key = f"{url} refuses the key ({said})", self.key_setting
            if not key:
                return UserError(f"{self.setting}: {refused}; ask a server that wants none")
            return UserError(f"{key}: {refused}; set the environment variable that {key} names")
        if 300 <= status < 400:
            place = self._safe(str(error.response.headers.get("location")))
            return UserError(f"{self.setting}: {url} redirects to {place}; give the final address")
        if status == 404 and not path.endswith("/models"):
            return UserError(f"{self.setting}: {url} is not there ({said}); {self.mend}")
        if status in PASSING or status >= 500:
            return GivenUp(f"{said}, {self.retries + 1} tries")
        return AnswerRefused(said)

    def _safe(self, text: str) -> str:
        """Return one short printable line without the key."""
        text = " ".join(text.split()).replace(self.key or "\0", "***")
        return "".join(filter(str.isprintable, text))[:200]


def read_answer(reply: Any) -> ServerAnswer:
    """Return the first choice of a chat completion. Raises GivenUp for a form that is none,
    AnswerRefused for an empty answer, one that ended within nothing but reasoning, half a
    character, and a tool call that is cut or cannot be read."""
    try:
        choice = reply["choices"][0]
        message, reason = choice["message"], choice["finish_reason"]
        text, called = message.get("content") or "", message.get("tool_calls")
        found = (message.get(key) for key in ("reasoning_content", "reasoning"))  # vLLM's newer
        thought = next((said for said in found if isinstance(said, str) and said.strip()), "")
        tokens = (reply.get("usage") or {}).get("completion_tokens", -1)
    except (KeyError, IndexError, TypeError, AttributeError):
        raise GivenUp("an answer of another form") from None
    if reason == "content_filter":
        raise AnswerRefused("the answer is filtered")
    if not isinstance(text, str) or reason not in (*ENDED, "length", None):
        raise GivenUp("an answer of another form")
    finished = reason in ENDED
    calls = _calls(called, finished) if called else None
    if not is_whole(text + thought + json.dumps(calls, ensure_ascii=False)):
        raise AnswerRefused(f"the answer holds {HALF}")
    if not text.strip() and not calls and (finished or not thought):
        raise AnswerRefused("the answer is empty" + (" behind its reasoning" if thought else ""))
    drawn, read = (
        ids if isinstance(ids, list) and all(isinstance(i, int) for i in ids) else None
        for ids in (choice.get("token_ids"), reply.get("prompt_token_ids"))
    )
    counted = type(tokens) is int and 0 <= tokens < MOST_TOKENS
    return ServerAnswer(text, finished, tokens if counted else -1, drawn, thought, calls, read)


def _calls(called: Any, finished: bool) -> list[dict[str, Any]]:
    """Tool calls as they go into a row. Raises AnswerRefused for a cut one and for another
    form."""
    if not finished:
        raise AnswerRefused("the answer is a tool call that was cut")
    try:
        if isinstance(called, str):
            raise ValueError("tool_calls are not a list of objects")
        arguments(called)
    except ValueError as error:
        raise AnswerRefused(f"the answer is a tool call that cannot be read ({error})") from None
    return [{k: c[k] for k in ("id", "type", "function") if k in c} for c in called]
