"""One engine case: our answers and cycles beside the engine's, counted the same way.

How the counts meet: an engine takes a whole draft in every step and counts all that it
accepts, also behind a stop token or the length limit, and then stops. So our run goes on
behind both, and the cycles that begin before the stop are counted.
"""

from __future__ import annotations

import copy
import hashlib
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from outrider.conf.errors import UserError, last_line
from outrider.decode import stats
from outrider.decode.drafters import Drafter, NoDraft
from outrider.decode.engine import Cycle, Generation, Request, generate
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.heads.base import Batch, Head
from outrider.heads.interop import detect, read_folder
from outrider.heads.names import DraftSpec
from outrider.scripts.common import files
from outrider.scripts.reports.table import Columns, Table, interval, number
from outrider.scripts.serving.check import comparable

TIE = 1e-3  # logits that lie this near may change places with the order of sums


class Runs:
    """Our side. Plain answers are made once; a head's chain once per head."""

    def __init__(
        self, target: Target, prompts: Sequence[Sequence[int]], limit: int, batch: int, work: Path
    ) -> None:
        self.target, self.prompts, self.limit, self.batch, self.work = (
            target,
            prompts,
            limit,
            batch,
            work,
        )
        self.plain = [g.token_ids for g in self._run("plain", NoDraft(), limit, None)]

    def _run(
        self, name: str, drafter: Drafter, limit: int, eos: Sequence[int] | None
    ) -> list[Generation]:
        """Answers of a drafter; from WORK when they were made before. name: what they depend
        on beside the prompts.
        """
        who = self.target.identity.weights_sha256 if self.target.identity else ""
        key = json.dumps([who, name, limit, eos, [list(p) for p in self.prompts]])
        file = self.work / f"ours.{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
        if not file.is_file():
            requests = [Request(list(p), limit, id=i) for i, p in enumerate(self.prompts)]
            run = generate(
                self.target, drafter, requests, Sampling(), batch_size=self.batch, eos_ids=eos
            )
            rows = [
                [
                    g.prompt_ids,
                    g.token_ids,
                    [[c.proposed, c.accepted, c.cut, c.start] for c in g.cycles],
                ]
                for g in run.generations
            ]
            files.write_json(file, rows)
        return [
            Generation(prompt, tokens, [Cycle(p, a, (), cut, start) for p, a, cut, start in cycles])
            for prompt, tokens, cycles in json.loads(file.read_text())
        ]

    def same(self, theirs: Sequence[Sequence[int]]) -> dict[str, Any]:
        """The engine's answers against plain decoding: equal ones, those that part at a tie,
        and the others.
        """
        out: dict[str, Any] = {"answers": len(self.plain), "equal": 0, "ties": 0, "different": []}
        for i, (mine, other) in enumerate(zip(self.plain, theirs, strict=True)):
            if mine == list(other):
                out["equal"] += 1
                continue
            at = next(
                (k for k, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b), None
            )
            gap = (
                None
                if at is None
                else self.gap([*self.prompts[i], *mine[:at]], mine[at], other[at])
            )
            if gap is not None and gap < TIE:
                out["ties"] += 1
            else:
                out["different"].append({"prompt": i, "token": at, "gap": gap})
        return out

    @torch.inference_mode()
    def gap(self, ids: list[int], a: int, b: int) -> float:
        """The distance of two tokens in our float32 logits behind a text."""
        row = self.target.model(torch.tensor([ids])).logits[0, -1].float()
        return abs(float(row[a] - row[b]))

    def plain_case(self, answer: dict[str, Any]) -> dict[str, Any]:
        """The engine without a drafter."""
        return {
            "same_tokens": self.same(answer["tokens"]),
            "tokens_per_second": rate(answer["laps"]),
        }

    def case(
        self, head: Head, name: str, depth: int, answer: dict[str, Any], plain: dict[str, Any]
    ) -> dict[str, Any]:
        """The engine with a drafter against our chain of the same depth. name: what tells this
        head from others.
        """
        twin = comparable(head, torch.float32) if head.kind != "small_lm" else head
        drafter = twin.drafter(self.target, DraftSpec(shape="chain", depth=depth))
        counted = [
            self.counted(g)
            for g in self._run(f"{name} K={depth}", drafter, self.limit + depth + 1, ())
        ]
        mine = stats.accepted_length(counted)
        cycles = [c for row in counted for c in row]
        counters = {name.split(":")[-1]: value for name, value in answer["counters"].items()}
        drafts = counters["spec_decode_num_drafts"]
        hits = counters["spec_decode_num_accepted_tokens_per_pos"]
        theirs = 1 + counters["spec_decode_num_accepted_tokens"] / drafts
        positions = [sum(c.accepted > d for c in cycles) for d in range(depth)]
        timed_runs, base = answer["laps"], plain["laps"]
        (work, spent), (plain_work, plain_spent) = (
            [[timed_run[i] for timed_run in rows] for i in (0, 1)] for rows in (timed_runs, base)
        )
        ratio = (
            stats.ratio_of_rates(work, spent, plain_work, plain_spent).json()
            if timed_runs
            else None
        )
        return {
            "same_tokens": self.same(answer["tokens"]),
            "accepted_length": {
                "ours": mine.json(),
                "engine": theirs,
                "within": mine.low is not None and mine.low <= theirs <= (mine.high or 0),
            },
            "cycles": {"ours": len(cycles), "engine": int(drafts)},
            "accepted_by_position": {"ours": positions, "engine": [int(h) for h in hits]},
            "tokens_per_second": rate(timed_runs),
            "speed_against_plain": ratio,
        }

    def counted(self, generation: Generation) -> list[Cycle]:
        """The cycles that an engine would have run: those that begin before the stop."""
        stop = next(
            (i + 1 for i, t in enumerate(generation.token_ids) if t in self.target.eos_ids),
            self.limit,
        )
        return [c for c in generation.cycles if c.start < min(stop, self.limit)]


def rate(timed_runs: Sequence[Sequence[float]]) -> float | None:
    """Tokens per second over timed answers [tokens, seconds]."""
    return sum(n for n, _ in timed_runs) / sum(s for _, s in timed_runs) if timed_runs else None


def package(
    python: Path, folder: Path, head: Head, target: Target, prompt: Sequence[int], work: Path
) -> dict[str, Any]:
    """The speculators package on an exported folder: what it saves against what we wrote,
    tensor by tensor, and of EAGLE-3 its draft logits against ours (three steps,
    teacher-forced). Raises UserError when it cannot load the folder."""
    saved, given, out = (
        work / "package.saved",
        work / "package.in.safetensors",
        work / "package.out.safetensors",
    )
    command = [python, Path(__file__).with_name("run_speculators.py"), folder, saved]
    forced = head.kind == "eagle3" and not head.cfg.parallel
    batch = None
    if forced:
        ids = torch.tensor([list(prompt)[:96]])
        mask = torch.ones_like(ids, dtype=torch.bool)
        feats = target.features(ids, mask, head.taps)
        shown = {"features": feats[:, :-1].flatten(2).contiguous(), "ids": ids[:, 1:].contiguous()}
        save_file(shown, given)
        command += [given, out]
        batch = Batch(ids, mask, mask, torch.zeros(1, dtype=torch.int64))
    log = work / "package.log"
    with open(log, "w") as file:
        code = subprocess.run(
            [str(part) for part in command], stdout=file, stderr=subprocess.STDOUT, check=False
        ).returncode
    if code:
        said = last_line(log.read_text())
        raise UserError(f"speculators: cannot load {folder} ({said}); all of it: {log}")
    before, after = load_file(folder / "model.safetensors"), load_file(saved / "model.safetensors")
    same = before.keys() == after.keys() and all(
        torch.equal(t, after[k]) for k, t in before.items()
    )
    foreign = read_folder(saved)
    again = detect(foreign, "auto").read(foreign, target).state_dict()
    return {
        **(_logits(head, target, batch, load_file(out)) if batch is not None else {}),
        "saved_tensors_bitwise_equal": same,
        "imported_tensors_bitwise_equal": all(
            torch.equal(v, again[k]) for k, v in head.state_dict().items()
        ),
    }


@torch.no_grad()
def _logits(
    head: Head, target: Target, batch: Batch, theirs: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """Draft logits of the package, logits.{step} [T, Vd], against those of the head."""
    twin = copy.deepcopy(head).float().eval()
    error, largest, rows = 0.0, 0.0, 0
    for flat, level, logits in twin.forced(batch, target, 3):
        if level < 3:
            wanted = theirs[f"logits.{level}"][flat - 2 - level]
            error = max(error, float((logits - wanted).abs().max()))
            largest, rows = max(largest, float(logits.abs().max())), rows + len(flat)
    return {
        "rows": rows,
        "largest_logit_difference": error,
        "largest_logit": largest,
        "relative": error / largest,
    }


def _same(row: dict[str, Any]) -> str:
    """Answers equal to plain decoding's, of all; +n more at a tie."""
    same = row["same_tokens"]
    tie = f" +{same['ties']}≈" if same["ties"] else ""
    return f"{same['equal']}/{same['answers']}{tie}"


def _hits(row: dict[str, Any], side: str) -> str:
    """Shares of the cycles of a side, "ours" or "engine", that accepted each position."""
    if "accepted_by_position" not in row:
        return "–"
    counts, cycles = row["accepted_by_position"][side], row["cycles"][side]
    return " ".join(f"{100 * hit / cycles:.1f}%" for hit in counts)


def _length(row: dict[str, Any], side: str) -> str:
    """The accepted length of a side; our own has an interval."""
    if "accepted_length" not in row:
        return "–"
    found = row["accepted_length"][side]
    return interval(found, 3) if side == "ours" else f"{found:.3f}"


COLUMNS: Columns = (
    ("served by vLLM", lambda row: row["case"]),
    ("K", lambda row: str(row.get("draft_tokens", ""))),
    ("same tokens as plain decoding", _same),
    ("accepted length here", lambda row: _length(row, "ours")),
    ("in vLLM", lambda row: _length(row, "engine")),
    ("accepted by position here", lambda row: _hits(row, "ours")),
    ("in vLLM", lambda row: _hits(row, "engine")),
    ("tokens/s", lambda row: number(row["tokens_per_second"], 1)),
    ("against plain vLLM", lambda row: _times(row.get("speed_against_plain"))),
)


def _times(ratio: dict[str, Any] | None) -> str:
    return f"{ratio['mean']:.2f}×" if ratio else "–"


def table(report: dict[str, Any]) -> Table:
    """Every case; its title says where and how it was measured."""
    said = report["settings"]
    title = (
        f"vLLM {report['engine']['vllm']} on the CPU · float32 · greedy (T = 0) · "
        f"{said['num_prompts']} prompts × "
        f"{said['max_new_tokens']} tokens"
    )
    return Table.of(COLUMNS, report["cases"], title=title)
