"""The keys of scripts/synthesize.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from decode.models.load import DTYPES, TargetConfig

REGIONS = ("US", "GB", "DE", "FR")  # whose telephone numbers are known without being told

FORMAT = 1  # raise when the same settings would give other rows


@dataclass
class SynthesizeConfig:
    """Keys of scripts/synthesize.py."""

    # JSONL file to write or to continue
    out: str
    # the model that writes the conversations
    target: TargetConfig = field(default_factory=TargetConfig)
    # local: this process runs the target and invents the questions; openai: a server answers
    #     the questions of a file
    backend: str = "local"
    # conversations that the file shall hold, a larger number extends a finished file; 0 = 600,
    # or all questions
    num_conversations: int = 0
    # seed of all draws
    seed: int = 0
    # logs of a served model in JSONL (see scripts/synthesis/logs), also several; out is a folder
    # then, for train.jsonl, later.jsonl and logs.json
    logs: str | list[str] = ""
    # logs: names under which the log knows the target; empty = the target's own name. Answers of
    # other models are asked again by backend
    served: list[str] = field(default_factory=list)
    # logs: ask answers of other models again; false = leave them out
    again: bool = True
    # logs: share of the rows, the last ones in time, that go to later.jsonl
    later: float = 0.2
    # logs: replace secrets and personal data by stand-ins such as [EMAIL_1]
    mask: bool = True
    # logs: countries in which a telephone number may be valid
    regions: list[str] = field(default_factory=lambda: list(REGIONS))
    # logs: key of the log's metadata that names a category
    category: str = "category"
    # local: ask the questions of a made-up domain (recipes, sql, letters, unit_tests) in place of
    # invented ones; empty = invented
    domain: str = ""
    # local: conversations decoded at a time, and the block in which the file grows
    batch: int = 96
    # local: number format of the target: bfloat16, float32 or float16
    dtype: str = "bfloat16"
    # local: longest invented question, tokens
    max_question_tokens: int = 64
    # longest answer, tokens
    max_new_tokens: int = 200
    # local: temperature of the questions
    question_temperature: float = 1.0
    # local: nucleus of the questions (1 = off)
    question_top_p: float = 0.95
    # temperature of the answers
    answer_temperature: float = 0.7
    # nucleus of the answers (1 = off)
    answer_top_p: float = 1.0
    # openai: address of the server's API, such as http://localhost:8000/v1
    base_url: str = ""
    # openai: the model's name at the server; empty = the only one it serves
    model: str = ""
    # openai: JSONL file of messages, conversations, turns or prompt rows; their user turns are
    #     asked
    prompts: str = ""
    # openai: questions asked at a time
    concurrency: int = 32
    # openai: seconds that a whole answer may take
    timeout: float = 600.0
    # openai: tries after the first one, for each question; a rate limit uses up none
    retries: int = 6
    # openai: seconds before the first retry; every further one waits twice as long, up to 60
    backoff: float = 1.0
    # openai: share of the questions that may stay without an answer (malformed, refused, all
    #     tries used up)
    max_failed: float = 0.01
    # openai: name of the environment variable that holds the key, sent to base_url alone and
    #     never written
    api_key_env: str = "OPENAI_API_KEY"
    # openai: further keys of every request, such as {chat_template_kwargs: {enable_thinking:
    #     false}}
    extra_body: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.backend == "local" and not self.num_conversations and not self.log_files:
            self.num_conversations = 600

    @property
    def log_files(self) -> list[str]:
        """`logs` as a list."""
        return list(self.logs) if isinstance(self.logs, list) else [self.logs] * bool(self.logs)

    def validate(self) -> list[str]:
        """Problems with the values, one line each."""
        problems = self.target.validate()
        if not self.out:
            problems.append("out: empty; give the JSONL file to write")
        problems += self._log_problems()
        lows = {
            "num_conversations": 0,
            "batch": 1,
            "max_question_tokens": 1,
            "max_new_tokens": 1,
            "concurrency": 1,
            "retries": 0,
            "backoff": 0,
        }
        for key, low in lows.items():
            if getattr(self, key) < low:
                problems.append(f"{key}: {getattr(self, key)} must be at least {low}")
        problems += self._server_problems() + self._domain_problems()
        if self.dtype not in DTYPES:
            problems.append(f"dtype: {self.dtype!r} is none of {', '.join(DTYPES)}")
        for key in ("question_temperature", "answer_temperature"):
            if getattr(self, key) < 0:
                problems.append(f"{key}: {getattr(self, key)} must be >= 0")
        for key in ("question_top_p", "answer_top_p"):
            if not 0 < getattr(self, key) <= 1:
                problems.append(f"{key}: {getattr(self, key)} must lie in (0, 1]")
        if self.question_temperature == 0:
            problems.append("question_temperature: 0 would invent one question only; use 1.0")
        return problems

    def _log_problems(self) -> list[str]:
        if not self.log_files:
            changed = {
                "served": bool(self.served),
                "again": not self.again,
                "mask": not self.mask,
                "later": self.later != 0.2,
                "category": self.category != "category",
            }
            return [
                f"{key}: only with logs=FILE; give that or leave it out"
                for key, is_changed in changed.items()
                if is_changed
            ]
        problems = []
        if not all(self.log_files):
            problems.append("logs: a name is empty; give JSONL files")
        problems += [
            f"{key}: not with logs, whose chats are what is asked; leave it out"
            for key in ("prompts", "num_conversations", "domain")
            if getattr(self, key)
        ]
        if not 0 < self.later < 1:
            problems.append(f"later: {self.later} must lie between 0 and 1; 0.2 is a fifth")
        if not self.category:
            problems.append("category: empty; give the key of the log's metadata")
        return problems

    def _domain_problems(self) -> list[str]:
        if not self.domain:
            return []
        if self.backend != "local":
            return ["domain: only with backend=local; leave it out"]
        from scripts.synthesis.domains import domains

        known = domains()
        if self.domain in known:
            return []
        return [f"domain: {self.domain!r} is none of {', '.join(known)}"]

    def _server_problems(self) -> list[str]:
        if self.backend == "local":
            return [
                f"{key}: only with backend=openai; set that or leave it out"
                for key in ("base_url", "model", "prompts", "extra_body")
                if getattr(self, key)
            ]
        if self.backend != "openai":
            return [f"backend: {self.backend!r} is none of local, openai"]
        problems = []
        address = urlsplit(self.base_url)
        if address.scheme not in ("http", "https") or not address.hostname:
            problems.append(f"base_url: {self.base_url!r} is no address; give http://HOST:PORT/v1")
        elif address.username or address.password or address.query:
            problems.append(
                "base_url: holds a name, key or query; give the bare address, and the key in the "
                "environment variable that api_key_env names"
            )
        if not self.prompts and not self.log_files:
            problems.append("prompts: empty; give the JSONL file whose questions shall be answered")
        if not self.timeout > 0:
            problems.append(f"timeout: {self.timeout} must be above 0")
        if not 0 <= self.max_failed <= 1:
            problems.append(f"max_failed: {self.max_failed} must lie in [0, 1]")
        problems += [
            f"extra_body: {key} is set by this command; leave it out"
            for key in ("messages", "model", "stream", "n")
            if key in self.extra_body
        ]
        return problems

    def settings(self) -> dict[str, Any]:
        """What decides the rows, apart from the target's identity and how many there are."""
        keys = (
            "seed",
            "batch",
            "dtype",
            "max_question_tokens",
            "max_new_tokens",
            "question_temperature",
            "question_top_p",
            "answer_temperature",
            "answer_top_p",
        )
        domain = {"domain": self.domain} if self.domain else {}
        return {"format": FORMAT, **{key: getattr(self, key) for key in keys}, **domain}
