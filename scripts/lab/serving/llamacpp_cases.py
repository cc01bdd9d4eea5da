"""llama.cpp beside our own engine: the same text, the same drafts, the same acceptance, each
counted prompt by prompt.

Its server drafts at most `draft_tokens`, and one token less than what is left of the answer,
as ours does; of what a cycle accepted it counts the tokens before a stop token. So at T = 0, with
the same float32 numbers, every count must be equal, and every draft token too (they stand in its
log).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from outrider.conf.errors import UserError
from outrider.decode import stats
from outrider.decode.drafters import Drafter
from outrider.decode.engine import Cycle, Request, generate
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.scripts.common.memo import Memo
from outrider.scripts.extra.llamacpp import server as llamacpp
from outrider.scripts.lab.serving.case import Runs
from outrider.scripts.reports.table import Table
from outrider.scripts.serving import contract
from outrider.scripts.serving.asking import Address, Endpoint, ServerRequest

METHODS = {"eagle3": "EAGLE3", "dflash": "DFLASH", "dspark": "DSPARK", "small_lm": "SIMPLE"}
PATIENCE = 600.0  # seconds for one answer on a busy machine


@dataclass(frozen=True)
class CaseBench:
    """What every case shares. python: of llama.cpp's environment. traced: prompts whose draft
    tokens are compared one by one."""

    python: Path
    work: Path
    runs: Runs
    limit: int
    traced: int


class DraftRecorder:
    """A drafter that writes down what it proposes; one row at a time."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.drafts: list[list[int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def propose(self, levels: Tensor, *rest: Any) -> Any:
        """See decode.drafters.Drafter."""
        tree = self._drafter.propose(levels, *rest)
        if tree.width:
            self.drafts.append(tree.tokens[0, : int(tree.size[0])].tolist())
        return tree


def served(
    bench: CaseBench, name: str, settings: llamacpp.LlamaServerSettings, key: str
) -> dict[str, Any]:
    """The server's answers to every prompt, from WORK when they were made before. key: what
    the files are, by hash.

    Returns replies [{tokens, drafted, accepted, drafts}], counters and version, and as `place`
    and `key` of a memo where they are kept.
    """
    place = bench.work / "answers" / name
    prompts = [list(p) for p in bench.runs.prompts]
    depends = {"files": key, "limit": bench.limit, "prompts": prompts}
    depends |= vars(replace(settings, model="", draft=""))  # files go by their hashes

    def made() -> dict[str, Any]:
        with llamacpp.running(bench.python, settings, bench.work, name) as server:
            replies, counters = asyncio.run(_ask(bench, server))
            return {"replies": replies, "counters": counters, "version": server.version}

    found = Memo(place, depends).once("served", made)
    return {**found, "place": place, "key": depends}


async def _ask(bench: CaseBench, server: llamacpp.Running) -> tuple[list[Any], Any]:
    replies = []
    async with Endpoint(Address(server.url, timeout=PATIENCE)) as door:
        for prompt in bench.runs.prompts:
            start = server.log.stat().st_size
            reply = await door.answer(list(prompt), ServerRequest(bench.limit))
            replies.append(
                {
                    "tokens": reply.tokens,
                    "drafted": reply.drafted,
                    "accepted": reply.accepted,
                    "drafts": llamacpp.drafts(server.log, start),
                }
            )
        return replies, await door.counters()


def plain_case(bench: CaseBench, answer: dict[str, Any]) -> dict[str, Any]:
    """The engine without a drafter, against ours."""
    return {"same_tokens": bench.runs.same(whole(bench, answer))}


def whole(bench: CaseBench, answer: dict[str, Any]) -> list[list[int]]:
    """The answers as ours are: the stop token stands in ours, and may not in theirs."""
    stops = set(bench.runs.target.eos_ids)
    out = []
    for mine, reply in zip(bench.runs.plain, answer["replies"], strict=True):
        tokens = list(reply["tokens"])
        short = len(tokens) < bench.limit and not (tokens and tokens[-1] in stops)
        ended = mine[len(tokens) :][:1]
        out.append([*tokens, *ended] if short and ended and ended[0] in stops else tokens)
    return out


def case(
    bench: CaseBench, drafter: Drafter, depth: int, answer: dict[str, Any], plain: dict[str, Any]
) -> dict[str, Any]:
    """The engine with a drafter: against plain decoding here, its own plain answers, and our
    chain of the same depth."""
    drafter.max_depth = drafter.max_nodes = depth
    prompts = bench.runs.prompts
    requests = [Request(list(p), bench.limit, id=i) for i, p in enumerate(prompts)]
    target = bench.runs.target
    mine = ours(bench, drafter, requests, Memo(answer["place"], answer["key"]))
    replies = answer["replies"]
    theirs = [contract.until_stop(cycles_of(r), r["tokens"], target.eos_ids) for r in replies]
    unlike = [
        i
        for i, reply in enumerate(replies)
        if (sum(c.proposed for c in mine[i]), sum(c.accepted for c in mine[i]))
        != (reply["drafted"], reply["accepted"])
    ]
    traced = sorted({*range(min(bench.traced, len(prompts))), *unlike[:4]})
    counters = answer["counters"] or {}
    here = contract.rates(mine)
    drafts = counters.get("drafts", 0)
    return {
        "same_tokens": bench.runs.same(whole(bench, answer)),
        **own_plain(bench, answer, plain),
        "accepted_length": {
            "ours": here["accepted_length"],
            "engine": 1 + counters.get("accepted_tokens", 0) / drafts if drafts else None,
        },
        "cycles": {"ours": here["cycles"], "engine": drafts},
        "drafted": {
            "ours": sum(c.proposed for row in mine for c in row),
            "engine": counters.get("draft_tokens"),
        },
        "accepted_by_position": {
            "ours": here["accepted_by_position"],
            "engine": counters.get("accepted_by_position"),
        },
        "paired_difference": stats.paired_difference(theirs, mine).json(),
        "prompts_unlike": unlike,
        "equal": not unlike
        and here["accepted_by_position"] == counters.get("accepted_by_position"),
        "traced": [
            trace(target, drafter, requests[i], replies[i]["drafts"]) | {"prompt": i}
            for i in traced
        ],
    }


def own_plain(bench: CaseBench, answer: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    """How many answers are those of the same server without a drafter, and where the others
    part: `gap` is the distance of both tokens in our float32 logits. Rows of other numbers of
    tokens are added up in another order, which decides where two tokens lie that near."""
    parted = []
    rows = zip(answer["replies"], plain["replies"], strict=True)
    for number, (one, other) in enumerate(rows):
        a, b = one["tokens"], other["tokens"]
        if a == b:
            continue
        at = next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
        prompt = list(bench.runs.prompts[number])
        gap = None if at is None else bench.runs.gap([*prompt, *b[:at]], a[at], b[at])
        parted.append({"prompt": number, "token": at, "gap": gap})
    return {
        "same_as_its_plain": len(answer["replies"]) - len(parted),
        "parted_from_its_plain": parted,
    }


def ours(
    bench: CaseBench, drafter: Drafter, requests: Sequence[Request], memo: Memo
) -> list[list[Cycle]]:
    """Our cycles that drafted, prompt by prompt, counted as llama.cpp does; beside the server's
    answers, and from there when they were counted before."""
    target = bench.runs.target

    def made() -> list[list[list[int]]]:
        run = generate(target, drafter, requests, Sampling(), batch_size=bench.runs.batch)
        counted = [
            contract.until_stop(g.cycles, g.token_ids, target.eos_ids) for g in run.generations
        ]
        return [[[c.proposed, c.accepted, c.start] for c in cycles] for cycles in counted]

    rows = memo.once("ours", made)
    return [[Cycle(p, a, (), False, at) for p, a, at in row if p] for row in rows]


def cycles_of(reply: dict[str, Any]) -> list[Cycle]:
    """The server's cycles of one answer, read off its drafts and its tokens."""
    tokens = reply["tokens"]
    at = 1
    out: list[Cycle] = []
    for behind, path in reply["drafts"]:
        if tokens[at - 1 : at] != [behind]:
            raise UserError("llama.cpp: its log and its answer disagree; run the case again")
        hits = 0
        while hits < len(path) and tokens[at + hits : at + hits + 1] == [path[hits][0]]:
            hits += 1
        out.append(Cycle(len(path), hits, (), False, at))
        at += hits + 1
    return out


def trace(
    target: Target, drafter: Drafter, request: Request, theirs: Sequence[Any]
) -> dict[str, Any]:
    """Draft tokens of one answer compared one by one: how many are equal, and the first that
    differs, with its share among the ten best on both sides."""
    recorder = DraftRecorder(drafter)
    generate(target, recorder, [request], Sampling())
    equal = total = 0
    first = None
    for number, (mine, (_, path)) in enumerate(zip(recorder.drafts, theirs, strict=False)):
        for depth, (a, (b, share)) in enumerate(zip(mine, path, strict=False)):
            total += 1
            equal += a == b
            if a != b and first is None:
                first = {"cycle": number, "position": depth + 1, "ours": a, "engine": b}
                first["engine_share"] = share
    lengths = len(recorder.drafts) == len(theirs) and all(
        len(a) == len(b) for a, (_, b) in zip(recorder.drafts, theirs, strict=True)
    )
    return {"draft_tokens": total, "equal": equal, "same_lengths": lengths, "first": first}


COLUMNS = (
    "served by llama.cpp",
    "target",
    "K",
    "same text as plain decoding here",
    "as its own plain decoding",
    "accepted length here",
    "in llama.cpp",
    "accepted by position here",
    "in llama.cpp",
    "draft tokens compared",
    "equal",
)


def cells(report: dict[str, Any]) -> list[list[str]]:
    """The table's rows as text."""
    out = []
    for row in report["cases"]:
        same = row["same_tokens"]
        ties = f" +{same['ties']}≈" if same["ties"] else ""
        line = [row["case"], row["target"], str(row.get("draft_tokens", ""))]
        line.append(f"{same['equal']}/{same['answers']}{ties}{_gap(same['different'])}")
        if "accepted_length" not in row:
            out.append(line + ["–"] * (len(COLUMNS) - len(line)))
            continue
        length, places = row["accepted_length"], row["accepted_by_position"]
        both = [" ".join(map(str, places[side] or [])) for side in ("ours", "engine")]
        traced = row["traced"]
        line += [
            f"{row['same_as_its_plain']}/{same['answers']}"
            + _gap(row.get("parted_from_its_plain", [])),
            f"{length['ours']['mean']:.4f}",
            f"{length['engine']:.4f}" if length["engine"] else "–",
            *both,
            str(sum(t["draft_tokens"] for t in traced)),
            str(sum(t["equal"] for t in traced)),
        ]
        out.append(line)
    return out


def _gap(parted: Sequence[dict[str, Any]]) -> str:
    """The largest distance at which answers part, "" where none does."""
    gaps = [row["gap"] for row in parted if row["gap"] is not None]
    return f", gap ≤ {max(gaps):.2g}" if gaps else ""


def table(report: dict[str, Any]) -> Table:
    """Every case; its title says where and how it was measured."""
    said = report["settings"]
    title = (
        f"llama.cpp (xllamacpp {report['engine']['xllamacpp']}) on the CPU · greedy (T = 0) · "
        f"{said['num_prompts']} prompts × {said['max_new_tokens']} tokens"
    )
    return Table(COLUMNS, cells(report), title=title, words=(0, 1))
