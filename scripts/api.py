"""The Python side: load a target, train or load a head, generate.

    from outrider.api import generate, load_target, train

    target = load_target("smollm2")
    run = train("eagle3", "data.path=runs/data.jsonl", "out_dir=runs/eagle3", "steps=1000")
    answer = generate(target, "What is the capital of France?", drafter=f"{run}@tree")
    for piece in answer:
        print(piece.text, end="", flush=True)
    print(answer.token_ids, answer.accepted_length, answer.tokens_per_second)

It is here because only scripts/ may import both training and decoding: imports point from scripts
to train to heads to decode.
"""

from __future__ import annotations

import secrets
import subprocess
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outrider.conf import paths
from outrider.conf.errors import UserError
from outrider.conf.rules import OneOrMore, Seed
from outrider.conf.schema import CONF
from outrider.conf.typed import from_json, nearest, raise_all
from outrider.decode import stats
from outrider.decode.detokenize import Stream
from outrider.decode.drafters import Drafter
from outrider.decode.engine import BatchLimits, Engine, Fresh, Generation, Request
from outrider.decode.models import load as loading
from outrider.decode.models.arithmetic import dtype_on
from outrider.decode.models.config import AUTO
from outrider.decode.target import Target
from outrider.heads.drafters import resolve_drafter
from outrider.heads.names import NONE
from outrider.scripts import cli
from outrider.scripts.common.keys import SamplingKeys
from outrider.scripts.common.prompts import chat_ids, question_ids

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
    return resolve_drafter(str(name), _a_target(target))


def train(head: str, *keys: str, processes: int = 1) -> Path:
    """Train a head as `outrider train HEAD KEY=VALUE ...` does, in a process of its own (so its
    output, its signals and its memory are not this one's); the same call again resumes.

    head: a name of `outrider ls heads`, or an entry point. Returns the run folder, which is a
    drafter's name. Raises UserError for an unknown head and for a run that ended with a code.
    """
    found = cli.trainer(str(head))
    if found is None:
        raise UserError(f"head: {head}: no such head; {nearest(str(head), cli.options('head'))}")
    file, chosen = found
    code = subprocess.call(cli.launched(file, processes, [*chosen, *keys]))
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


class Answer:
    """An answer that is decoded as far as it is read: a loop over it gives pieces as they come,
    and every figure decodes the rest first. Reading it twice decodes once.

    seconds: spent in passes so far, prefill included; neither what the reader did between two
    pieces counts, nor what a target does once."""

    def __init__(self, batch: Engine, request: Request, stream: Stream) -> None:
        self.seconds = 0.0
        self._pieces: list[Piece] = []
        self._stream = stream
        self._batch: Engine | None = batch  # until the end
        self._made = batch.join(request, self._take).generation

    def _take(self, fresh: Fresh) -> None:
        for token, drafted in zip(fresh.tokens, fresh.drafted, strict=True):
            self._pieces.append(Piece(token, self._stream.push(token), drafted))

    def __iter__(self) -> Iterator[Piece]:
        """Every piece, decoded when it is asked for."""
        at = 0
        while at < len(self._pieces) or self._batch is not None:
            if at < len(self._pieces):
                yield self._pieces[at]
                at += 1
            else:
                self._step()

    def _step(self) -> None:
        batch = self._batch
        assert batch is not None
        batch.step()
        self.seconds = batch.timing.total_s
        if not batch.busy:
            if said := batch.left_out():
                warnings.warn(said, stacklevel=4)
            self.stop()

    def stop(self) -> None:
        """End it here: what was decoded so far is the whole answer."""
        if self._batch is None:
            return
        if self._pieces:
            last = self._pieces[-1]
            self._pieces[-1] = replace(last, text=last.text + self._stream.rest())
        self._batch.close()  # answers are kept, caches are not
        self._batch = None

    def _whole(self) -> Generation:
        for _ in self:
            pass
        return self._made

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
        """ "eos" or "length"; "" of an answer that was stopped."""
        return self._whole().finish

    @property
    def accepted_length(self) -> float:
        """Tokens that a pass over the target committed, over all cycles (decode/stats.py); NaN
        where the answer ended with its first token."""
        return stats.accepted_length([self._whole().cycles]).mean

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over `seconds`."""
        count = len(self._whole().token_ids)
        return count / self.seconds if self.seconds > 0 else float("nan")


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
    if all(isinstance(one, dict) for one in each):
        return chat_ids(target.tokenizer, each)
    raise UserError(
        "prompt: none of a message's text, a conversation [{'role': .., 'content': ..}] and token "
        "ids; give one of them"
    )


def generate(
    target: Target,
    prompt: str | Sequence[dict[str, Any]] | Sequence[int],
    drafter: str | Drafter = NONE,
    max_new_tokens: int = 256,
    seed: int | None = None,
    **sampling: float,
) -> Answer:
    """Return the target's answer, the same distribution whatever drafts.

    prompt: a user's message or a conversation, [{"role": "user", "content": ..}], put through
    the chat template, or token ids as they are. drafter: a name (see load_drafter) or a drafter,
    which then serves one answer at a time. seed: the same one gives the same answer; None =
    another one each time. sampling: temperature (0 = greedy, as without any), top_k, top_p, min_p.
    Nothing is decoded before the answer is read. Raises UserError for settings out of range and
    for a prompt that is empty, too long or of another vocabulary.
    """
    given = {"max_new_tokens": max_new_tokens, "seed": seed, **sampling}
    settings, problems = from_json(given, _Settings)
    raise_all(problems)
    ids = _ids(_a_target(target), prompt)
    made: Any = drafter if hasattr(drafter, "reset") else load_drafter(str(drafter), target)
    longest = min(target.context_length, len(ids) + settings.max_new_tokens)
    batch = Engine(target, made, settings.sampling(), BatchLimits(1, longest), cuts=True)
    key = secrets.randbits(63) if seed is None else seed
    request = Request(ids, settings.max_new_tokens, id=key)
    return Answer(batch, request, Stream(target.tokenizer))
