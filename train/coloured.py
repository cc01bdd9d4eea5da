"""Answers in colours, for the table that a run logs to wandb: who drafted which token, and what the
target refused.

An answer is its prefill's token and then cycle by cycle the accepted draft tokens and one of the
target's own. What hung behind the last accepted token was refused; of a tree that may be nothing,
though other branches went further.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor

from outrider.decode.drafters import Drafter
from outrider.decode.records import Generation
from outrider.decode.rng import Rng
from outrider.decode.sampling import Sampling
from outrider.decode.stats import passes
from outrider.decode.text import Stream
from outrider.decode.tree import DraftTree
from outrider.decode.wrapped import Wrapped

COLUMNS = (
    *("drafter", "prompt", "answer", "tokens_per_pass"),
    *("tokens", "drafted", "accepted", "refused_passes", "finish"),
)
PALE = ("#cfe0ff", "#ffd9bd", "#c6efdd", "#e6d7f8", "#ffd0d9")  # behind tokens, a drafter each
REFUSED = "#b3261e"
LONGEST = 300  # characters of a prompt that are shown, its last ones
Draft = list[tuple[int, int]]  # (token, node above) of every node; -1 stands for the root


@dataclass(frozen=True)
class ShownCycle:
    """tokens: what a verification committed, of which the first `drafted` were accepted. by: of a
    union, who proposed each of them, bit k for its k-th drafter. proposed: levels. refused: what
    was drafted in place of the token behind them; None: not known."""

    tokens: list[int]
    drafted: int
    proposed: int
    by: tuple[int, ...] = ()
    refused: list[int] | None = None

    @property
    def corrected(self) -> bool:
        """Whether a token of the target's own stands where a draft went on, as far as that is
        known."""
        went_on = self.drafted < self.proposed if self.refused is None else bool(self.refused)
        return went_on and self.drafted < len(self.tokens)


class Drafts(Wrapped):
    """Does what `inner` does and keeps all drafts of each request, in the order in which they
    begin: `kept[request][cycle]`."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(drafter)
        self._live = list[int]()
        self.kept = list[list[Draft]]()

    def begin(self, prompts: list[Tensor], sampling: Sampling) -> None:
        self._live += range(len(self.kept), len(self.kept) + len(prompts))
        self.kept += [[] for _ in prompts]
        super().begin(prompts, sampling)

    def select(self, rows: list[int]) -> None:
        self._live = [self._live[row] for row in rows]
        super().select(rows)

    def propose(self, budget: Tensor, sampling: Sampling, rng: Rng) -> DraftTree:
        tree = super().propose(budget, sampling, rng)
        tables = zip(tree.tokens.tolist(), tree.parents.tolist(), tree.size.tolist(), strict=True)
        for request, (tokens, above, size) in zip(self._live, tables, strict=True):
            self.kept[request].append(list(zip(tokens[:size], above[:size], strict=True)))
        return tree


def refused(draft: Draft, accepted: Sequence[int]) -> list[int]:
    """The tokens of a draft that hang behind the `accepted` ones; [] where none do."""
    at = -1
    for token in accepted:
        at = next((i for i, node in enumerate(draft) if node == (token, at)), len(draft))
    return [token for token, above in draft if above == at]


def cycles_of(generation: Generation, drafts: Sequence[Draft] = ()) -> list[ShownCycle]:
    """The cycles of an answer. drafts: what was proposed in each, where that was kept (a request
    that is read again, decode.models.rope, begins twice)."""
    out, known = generation, len(drafts) == len(generation.cycles)
    found = []
    for i, (cycle, end) in enumerate(passes(out)):
        tokens, count = out.token_ids[cycle.start : end], sum(out.from_draft[cycle.start : end])
        rest = refused(drafts[i], tokens[:count]) if known else None
        found.append(ShownCycle(tokens, count, cycle.proposed, cycle.drafters[:count], rest))
    return found


def rows_of(
    generations: Sequence[Generation], drafts: Drafts, tokenizer: Any, name: str
) -> list[list[Any]]:
    """Rows of COLUMNS for the first answers that `drafts` has seen begin."""
    asked = questions([found.prompt_ids for found in generations], tokenizer)
    return [
        row(
            name,
            question,
            found.token_ids[: found.cycles[0].start] if found.cycles else found.token_ids,
            cycles_of(found, kept),
            found.finish,
            tokenizer,
        )
        for question, found, kept in zip(asked, generations, drafts.kept, strict=False)
    ]


def row(
    name: str,
    question: str,
    first: Sequence[int],
    cycles: Sequence[ShownCycle],
    finish: str,
    tokenizer: Any,
    parts: Sequence[str] = (),
) -> list[Any]:
    """A row of COLUMNS, the answer in it as HTML. first: the prefill's token. parts: the names of
    a union's drafters."""
    committed = sum(len(cycle.tokens) for cycle in cycles)
    return [
        name,
        question,
        as_html(first, cycles, [*parts] or [name], tokenizer),
        round(committed / len(cycles), 3) if cycles else None,
        len(first) + committed,
        sum(cycle.proposed for cycle in cycles),
        sum(cycle.drafted for cycle in cycles),
        sum(cycle.corrected for cycle in cycles),
        finish,
    ]


def questions(prompts: Sequence[Sequence[int]], tokenizer: Any) -> list[str]:
    """The end of each prompt, without what all begin and end with: a template's words."""
    known = {tuple(prompt) for prompt in prompts}
    before = _shared(known) if len(known) > 1 else 0
    behind = _shared({one[before:][::-1] for one in known}) if len(known) > 1 else 0
    found = []
    for prompt in prompts:
        ids = list(prompt)[before : len(prompt) - behind]
        text = str(tokenizer.decode(ids, skip_special_tokens=True)).strip()
        found.append(text if len(text) <= LONGEST else f"… {text[-LONGEST:].lstrip()}")
    return found


def _shared(rows: Iterable[Sequence[int]]) -> int:
    """Tokens that all rows begin with."""
    return next((i for i, column in enumerate(zip(*rows, strict=False)) if len({*column}) > 1), 0)


def as_html(
    first: Sequence[int], cycles: Sequence[ShownCycle], names: Sequence[str], tokenizer: Any
) -> str:
    """An answer: an accepted token on the colour of whoever drafted it, a refused one struck
    through, the target's own on none. names: of the drafters, in the order of the bits."""
    stream, colors, body = Stream(tokenizer), dict[str, str](), []
    for token in first:
        body.append(_escaped(stream.push(token)))
    for cycle in cycles:
        for i, token in enumerate(cycle.tokens):
            text = _escaped(stream.push(token))
            if i < cycle.drafted:
                who = _who(cycle.by[i] if i < len(cycle.by) else 1, names)
                color = colors.setdefault(who, PALE[len(colors) % len(PALE)])
                body.append(f'<span style="background:{color}" title="{who}">{text}</span>')
                continue
            body += [_struck(cycle, tokenizer)] if cycle.corrected else []
            body.append(text)
    body.append(_escaped(stream.rest()))
    return (
        '<div style="font:14px/1.8 system-ui,sans-serif;background:#fff;color:#1d2433">'
        f'<p style="margin:0 0 .5em;font-size:12px">{" ".join(_legend(colors))}</p>'
        f'<div style="white-space:pre-wrap">{"".join(body)}</div></div>'
    )


def _legend(colors: dict[str, str]) -> Iterator[str]:
    for who, color in colors.items():
        yield f'<span style="background:{color}">drafted by {who}, accepted</span>'
    yield f'<del style="color:{REFUSED}">drafted, refused</del>'
    yield "<span>the target's own</span>"


def _who(bits: int, names: Sequence[str]) -> str:
    return _escaped(" and ".join(name for k, name in enumerate(names) if bits >> k & 1))


def _struck(cycle: ShownCycle, tokenizer: Any) -> str:
    """The first refused token, the others in its title; a mark where they are not known."""
    tokens = dict.fromkeys(cycle.refused or ())
    words = [_escaped(str(tokenizer.decode([token]))) for token in tokens]
    title = f"refused: {', '.join(words)}" if words else "the draft went further, in vain"
    return f'<del style="color:{REFUSED}" title="{title}">{words[0] if words else "×"}</del>'


def _escaped(text: str) -> str:
    return html.escape(text)


def lines_of(outputs: Sequence[dict[str, Any]]) -> Iterator[tuple[list[int], list[ShownCycle]]]:
    """(the prefill's token, the cycles) of lines of outputs.jsonl."""
    for line in outputs:
        tokens, sizes = line["token_ids"], line["cycles"]
        starts = [len(tokens) - sum(sizes)]
        for size in sizes:
            starts.append(starts[-1] + size)
        by = iter(line.get("by", ()))
        cycles = [
            ShownCycle(tokens[start:end], count, proposed, tuple(next(by, 1) for _ in range(count)))
            for (start, end), count, proposed in zip(
                pairwise(starts), line["drafted"], line["proposed"], strict=True
            )
        ]
        yield tokens[: starts[0]], cycles
