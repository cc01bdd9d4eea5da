"""The keys of scripts/synthesize.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from annotated_types import Interval

from outrider.conf.errors import UserError
from outrider.conf.rules import (
    AboveZero,
    NotEmpty,
    NotNegative,
    OneOrMore,
    Seed,
    Share,
    ZeroOrMore,
)
from outrider.scripts.common.keys import DecodingKeys

UNSEEN = ("gsm8k", "humaneval", "math500", "mtbench")  # suites that are small to fetch

LONGEST = 4096  # tokens of an answer to a given question: a model that thinks needs them
INVENTED = 200  # tokens of an answer to an invented question
HERE = ("chat_template_kwargs",)  # keys of a request that mean something in this process


@dataclass(frozen=True)
class SynthesizeConfig(DecodingKeys):
    """Keys of scripts/synthesize.py."""

    # JSONL file to write or to continue
    out: NotEmpty
    # who answers. local: the target in this process; openai: a server
    backend: Literal["local", "openai"] = "local"
    # rows hold the tokens too, {input_ids, loss_mask} as they were read and drawn; training, here
    # and in other trainers, then reads those and renders no template
    tokens: bool = False
    # conversations that the file shall hold, a larger number extends a finished file; 0 = 600,
    # or all questions
    num_conversations: ZeroOrMore = 0
    # seed of all draws
    seed: Seed = 0
    # local: conversations decoded at a time, and the block by which the file grows
    batch: OneOrMore = 96
    # local: longest invented question, tokens
    max_question_tokens: OneOrMore = 64
    # longest answer, tokens; null = 200, with prompts 4096: a model that thinks needs them
    max_new_tokens: OneOrMore | None = None
    # temperature of the answers
    answer_temperature: NotNegative = 0.7
    # nucleus of the answers (1 = off)
    answer_top_p: Annotated[float, Interval(gt=0, le=1)] = 1.0
    # openai: address of the server's API, such as http://localhost:8000/v1
    base_url: str = ""
    # openai: the model's name at the server; empty = the only one it serves
    model: str = ""
    # JSONL file of messages, conversations, turns or prompt rows, whose user turns are asked; or a
    #     public set by name (`outrider ls prompts`), or a YAML that describes one; empty = the
    #     target invents the questions, with backend=local
    prompts: str = ""
    # a copy of that set on this disk, a file or folder, in place of the hub
    prompts_path: str = ""
    # suites and JSONL files whose prompts are left out of a public set
    unseen: list[NotEmpty] = field(default_factory=lambda: list(UNSEEN))
    # openai: questions asked at a time, as many as one server of a model wants; with several
    #     behind base_url give so many for each
    concurrency: OneOrMore = 256
    # openai: seconds that an answer may take
    timeout: AboveZero = 600.0
    # openai: tries after the first one, for each request; the waits between them grow to 8 s, or
    #     are what the server asks for
    retries: ZeroOrMore = 12
    # prompts: share of the questions that may stay without an answer (malformed, refused, all
    #     tries used up)
    max_failed: Share = 0.01
    # prompts: share of the answers that may be cut at max_new_tokens; above it the run stops
    max_cut: Share = 0.2
    # openai: name of the environment variable that holds the key, sent to base_url alone and
    #     never written
    api_key_env: str = "OPENAI_API_KEY"
    # further keys of every request to a server; chat_template_kwargs, such as {enable_thinking:
    #     false}, also in this process
    extra_body: dict[str, Any] = field(default_factory=dict)

    @property
    def longest(self) -> int:
        """max_new_tokens, or what is usual for such questions."""
        return self.max_new_tokens or (LONGEST if self.prompts else INVENTED)

    def validate(self) -> list[str]:
        """Return problems as "key: value; rule; fix"."""
        if self.backend == "local":
            given = [key for key in ("base_url", "model") if getattr(self, key)]
            given += [f"extra_body.{key}" for key in self.extra_body if key not in HERE]
            alone = [f"{key}: only with backend=openai; set that or leave it out" for key in given]
            return alone + self._prompt_problems()
        problems, address = [], urlsplit(self.base_url)
        told = address.username or address.password or address.query
        if address.scheme not in ("http", "https") or not address.hostname or told:
            problems.append(
                "base_url: give the bare address, http://HOST:PORT/v1; a key is in the "
                "environment variable that api_key_env names"
            )
        if not self.prompts:
            problems.append("prompts: empty; give a JSONL file of questions, or a set's name")
        problems += self._prompt_problems()
        problems += [
            f"extra_body: {key} is set by this command; leave it out"
            for key in ("messages", "model", "stream", "n")
            if key in self.extra_body
        ]
        return problems

    def _prompt_problems(self) -> list[str]:
        from outrider.scripts.data.prompt_sets import is_file, prompt_set

        if not self.prompts or is_file(self.prompts):
            return []
        try:
            prompt_set(self.prompts)
        except UserError as error:
            return [str(error)]
        return []
