"""The Python side: load a target, train or load a head, generate.

    from outrider.api import generate, load_target, train

    target = load_target("smollm2")
    run = train("eagle3", "data.path=runs/data.jsonl", "out_dir=runs/eagle3", "steps=1000")
    answer = generate(target, "What is the capital of France?", drafter=f"{run}@tree")
    for piece in answer:
        print(piece.text, end="", flush=True)
    print(answer.token_ids, answer.accepted_length, answer.tokens_per_second)

It stands here because training and decoding meet nowhere else: imports point from scripts to
train to heads to decode.
"""

from __future__ import annotations

import secrets
import subprocess
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.conf import paths
from outrider.conf.errors import UserError
from outrider.conf.rules import OneOrMore, Seed
from outrider.conf.schema import CONF
from outrider.conf.typed import from_json, nearest, raise_all
from outrider.decode import stats
from outrider.decode.drafters import Drafter
from outrider.decode.engine import BatchLimits, Engine, Fresh, Generation, Request, Row
from outrider.decode.models import load as loading
from outrider.decode.models.arithmetic import dtype_on
from outrider.decode.models.config import AUTO
from outrider.decode.target import Target
from outrider.decode.text import Stream
from outrider.heads.drafters import resolve_drafter
from outrider.heads.names import NONE
from outrider.scripts import cli
from outrider.scripts.common.prompts import chat_ids, question_ids
from outrider.scripts.common.sampling_keys import SamplingKeys

__all__ = ["Answer", "Piece", "UserError", "generate", "load_drafter", "load_target", "train"]


def load_target(
    name: str = "smollm2", dtype: str = AUTO, device: str | None = None, **keys: Any
) -> Target:
    """Return the frozen target of conf/target/NAME.yaml, a repository of the Hugging Face
    hub such as "Qwen/Qwen3-8B", or a folder of save_pretrained. keys: of that file, such as
    load_target("Qwen/Qwen3-8B", revision="main") or load_target("tiny", layers=1).

    dtype: float32, bfloat16 or float16; auto: bfloat16, but float32 on a CPU without
    instructions for it. device: None = the GPU when there is one. Raises UserError for an
    unknown name or key, and for a model that cannot be loaded.
    """
    from omegaconf import OmegaConf

    known, name = cli.options("target"), str(name)
    if name not in known and (named := paths.model(name)):
        name, keys = named[0], {named[1]: name, **keys}
    if name not in known:
        raise UserError(f"name: {name}: no such target; {nearest(name, known)}")
    path = CONF / "target" / f"{name}.yaml"
    given: Any = OmegaConf.to_container(OmegaConf.load(path))
    given = {key: value for key, value in given.items() if value != "???"}
    cfg, problems = from_json({**given, **keys}, loading.TargetConfig)
    raise_all(problems)
    return loading.load_target(cfg, dtype_on(device) if dtype == AUTO else dtype, device)


def load_drafter(name: str, target: Target) -> Drafter:
    """Return a drafter by name: "none", "ngram", a run folder, a head folder or a smaller
    model, with @chain, @tree and the like behind it. Raises UserError as
    heads.resolve_drafter does."""
    if not isinstance(name, str):
        raise UserError(f"drafter: a {type(name).__name__}; give a drafter's name")
    return resolve_drafter(name, _a_target(target))


def train(head: str, *keys: str, processes: int = 1) -> Path:
    """Train a head as `outrider train HEAD KEY=VALUE ...` does, in a process of its own (so its
    output, its signals and its memory are not this one's); the same call again resumes.

    head: a name of `outrider ls heads`, or an entry point. Returns the run folder, which is a
    drafter's name. Raises UserError for an unknown head and for a run that ended with a code.
    """
    found = cli.trainer(str(head))
    if found is None:
        raise UserError(f"head: {head}: no such head; {nearest(str(head), cli.options('head'))}")
    verb, chosen = found
    if wrong := [key for key in keys if not isinstance(key, str) or "=" not in key]:
        raise UserError(f"keys: {wrong[0]!r}; give each as text, KEY=VALUE")
    if processes < 1:
        raise UserError(f"processes: {processes} is below 1; give 1 or more")
    code = subprocess.call(cli.launched(verb, processes, [*chosen, *keys]))
    if code:
        raise UserError(f"train {head}: ended with exit code {code}; see its message above")
    out = next((key.partition("=")[2] for key in keys if key.startswith("out_dir=")), "")
    return Path(out)


@dataclass(frozen=True)
class Piece:
    """A token as it arrives. text: what it added, "" while a character is incomplete. drafted:
    it was proposed by the drafter and accepted."""

    token: int
    text: str
    drafted: bool


@dataclass
class Answer:
    """An answer that is decoded as far as it is read: a loop over it gives pieces as they come,
    and every figure decodes the rest first. Reading it twice decodes once."""

    _batch: Engine = field(repr=False)
    _seat: Row = field(repr=False)
    _pieces: list[Piece] = field(repr=False)

    def __iter__(self) -> Iterator[Piece]:
        """Every piece, decoded when it is asked for."""
        at = 0
        while at < len(self._pieces) or self._batch.busy:
            if at < len(self._pieces):
                yield self._pieces[at]
                at += 1
                continue
            self._batch.step()
            if not self._batch.busy:
                self._batch.close()  # answers are kept, caches are not
                if said := self._batch.left_out():
                    warnings.warn(said, stacklevel=2)

    def _whole(self) -> Generation:
        for _ in self:
            pass
        return self._seat.generation

    @property
    def text(self) -> str:
        """All of it, special tokens left out."""
        self._whole()
        return "".join(piece.text for piece in self._pieces)

    @property
    def token_ids(self) -> list[int]:
        """Generated tokens, the stop token included."""
        return list(self._whole().token_ids)

    @property
    def from_draft(self) -> list[bool]:
        """Per token: was it an accepted draft token."""
        return list(self._whole().from_draft)

    @property
    def finish(self) -> str:
        """ "eos" or "length"."""
        return self._whole().finish

    @property
    def accepted_length(self) -> float:
        """Tokens that a pass over the target committed, over all cycles (decode/stats.py); NaN
        where the answer ended with its first token."""
        return stats.accepted_length([self._whole().cycles]).mean

    @property
    def acceptance_by_position(self) -> list[stats.Position]:
        """Acceptance at every level of the draft."""
        return stats.acceptance_by_position(self._whole().cycles)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over the seconds spent in passes, prefill included; neither what
        the reader did between two pieces counts, nor what a target does once (decode/engine.py)."""
        count, spent = len(self._whole().token_ids), self._batch.timing.total_s
        return count / spent if spent > 0 else float("nan")


@dataclass(frozen=True, kw_only=True)
class _Settings(SamplingKeys):
    """The settings of an answer, with the rules of the commands' keys."""

    max_new_tokens: OneOrMore = 256
    seed: Seed | None = None


def _a_target(given: object) -> Target:
    if not isinstance(given, Target):
        raise UserError(f"target: a {type(given).__name__}; give what load_target returns")
    return given


def _ids(target: Target, prompt: Any) -> list[int]:
    """Return token ids of a prompt in one of its three forms. Raises UserError for another one."""
    if isinstance(prompt, str):
        return question_ids(target.tokenizer, prompt)
    several = isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray)
    each: list[Any] = [*prompt] if several else [None]
    if all(type(one) is int for one in each):
        return each
    turns = all(isinstance(one, dict) and {"role", "content"} <= one.keys() for one in each)
    if turns and all(isinstance(text, str) for one in each for text in one.values()):
        return chat_ids(target.tokenizer, each)
    raise UserError(
        "prompt: none of a message's text, a conversation [{'role': .., 'content': ..}] and token "
        "ids; give one of them"
    )


def generate(
    target: Target,
    prompt: str | Sequence[dict[str, str]] | Sequence[int],
    drafter: str | Drafter = NONE,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int | None = None,
) -> Answer:
    """Return the target's answer, the same distribution whatever drafts.

    prompt: a user's message or a conversation, [{"role": "user", "content": ..}], put through
    the chat template, or token ids as they are. drafter:
    a name (see load_drafter) or a drafter, which then serves one answer at a time. seed: the
    same one gives the same answer; None = another one each time. Nothing is decoded before the
    answer is read. Raises UserError for settings out of range and for a prompt that is empty,
    too long or of another vocabulary.
    """
    given = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
    settings, problems = from_json({"max_new_tokens": max_new_tokens, **given}, _Settings)
    raise_all(problems)
    ids = _ids(_a_target(target), prompt)
    made: Any = drafter
    if not hasattr(drafter, "reset"):
        made = load_drafter(made, target)
    longest = min(target.context_length, len(ids) + settings.max_new_tokens)
    batch = Engine(target, made, settings.sampling(), BatchLimits(1, longest), cuts=True)
    pieces: list[Piece] = []
    stream = Stream(target.tokenizer)

    def watch(fresh: Fresh) -> None:
        for token, drafted in zip(fresh.tokens, fresh.drafted, strict=True):
            pieces.append(Piece(token, stream.push(token), drafted))

    key = secrets.randbits(63) if seed is None else seed
    request = Request(ids, settings.max_new_tokens, id=key)
    return Answer(batch, batch.join(request, watch), pieces)
