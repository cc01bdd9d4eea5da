"""Accepted length as vLLM's own script for speculative decoding counts it, so that figures which
were published with it can be laid beside ours: a chain of 3, the first turn of every prompt,
answers of up to 256 tokens at T = 0, the drafts of all prompts pooled, acceptance by position.

    python scripts/lab/vllm_protocol.py target=smollm2 'drafters=[runs/eagle3,ngram]' \\
        out=reports/vllm_protocol
    python scripts/lab/vllm_protocol.py target=smollm2 'drafters=[runs/eagle3]' suite=mtbench \\
        out=reports/mtbench

Accepted length = 1 + accepted / drafts; acceptance at a position = drafts that reach it / all
drafts. Every draft that begins before the answer's end counts, with all of it that the target
agrees to: what stands behind a stop token or the length limit, and loops (`evaluate` leaves
those cycles out, docs/metrics.md). Writes OUT/report.json; stopped, the same command goes on.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

if __name__ == "__main__":  # else scripts/ comes first and shadows libraries
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from outrider.conf.rules import Filled, NotEmpty, NotNegative, OneOrMore, one_of
from outrider.conf.schema import entry
from outrider.decode import stats
from outrider.decode.engine import Cycle, Generation, Request, generate
from outrider.decode.models.config import DTYPES, AutoDtype, TargetConfig
from outrider.decode.models.load import load_target
from outrider.decode.models.memory import MemoryPlan
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.heads import head_folder, resolve_drafter
from outrider.heads.checkpoint import read_card
from outrider.heads.names import NGRAM, parse
from outrider.scripts.common import files
from outrider.scripts.common.memo import Memo
from outrider.scripts.common.pipeline import Deadline
from outrider.scripts.common.prompts import Prompt, load_prompts, question_ids, spread
from outrider.scripts.reports.table import Columns, Table, interval
from outrider.scripts.scoring.names import labels
from outrider.scripts.scoring.suites import SuiteConfig, load_suite


@dataclass(frozen=True)
class ProtocolConfig(AutoDtype):
    """Keys of scripts/lab/vllm_protocol.py."""

    # folder of report.json
    out: NotEmpty
    # ngram, run folders, head folders or hub:OWNER/NAME, without a shape
    drafters: Filled[NotEmpty]
    # the frozen model
    target: TargetConfig = field(default_factory=TargetConfig)
    # JSONL of prompts
    prompts: NotEmpty = "scripts/prompts/demo.jsonl"
    # a published set in its place
    suite: SuiteConfig | None = None
    # how many, spread over the file; null = all
    num_prompts: OneOrMore | None = None
    # levels of the chain
    draft_tokens: OneOrMore = 3
    # most tokens of an answer
    max_new_tokens: OneOrMore = 256
    # prompts that are decoded together
    batch_size: OneOrMore = 8
    # number format of the target
    dtype: Annotated[str, one_of(DTYPES)] = "bfloat16"
    # of work before it stops; 0 = to the end
    minutes: NotNegative = 0.0

    def validate(self) -> list[str]:
        """Problems as "key: value; rule; fix"."""
        found = []
        for name in self.drafters:
            draft = parse(name)
            if draft.parts or draft.shape or draft.depth or draft.adaptive:
                found.append(
                    f"drafters: {name}; every drafter is a chain of draft_tokens here; name it "
                    "without a shape"
                )
        return found


def begun(generation: Generation, stop: Collection[int], limit: int) -> list[Cycle]:
    """The cycles that an engine runs of an answer which was decoded beyond its end: those that
    begin before its first token of `stop`, and before `limit` tokens."""
    tokens = generation.token_ids
    end = next((i + 1 for i, token in enumerate(tokens) if token in stop), limit)
    return [cycle for cycle in generation.cycles if cycle.start < min(end, limit)]


def pooled(each: Sequence[Sequence[Cycle]]) -> dict[str, Any]:
    """What a drafter is given for its drafts, [prompt][cycle]; intervals over prompts. A cycle
    without a draft is none."""
    drafted = [[cycle for cycle in cycles if cycle.proposed] for cycles in each]
    places = stats.position_intervals(drafted)
    return {
        "drafts": sum(map(len, drafted)),
        "accepted_length": stats.accepted_length(drafted).json(),
        "acceptance_by_position": [share.json() for _, share in places],
    }


def cycles_of(
    cfg: ProtocolConfig, target: Target, name: str, requests: Sequence[Request]
) -> list[list[list[int]]]:
    """[prompt][cycle] (proposed, accepted, start) of some prompts that are decoded together."""
    shape = "" if name == NGRAM else "chain:"
    drafter = resolve_drafter(f"{name}@{shape}{cfg.draft_tokens}", target)
    run = generate(target, drafter, requests, Sampling(0.0), batch_size=len(requests), eos_ids=())
    return [
        [[c.proposed, c.accepted, c.start] for c in begun(g, target.eos_ids, cfg.max_new_tokens)]
        for g in run.generations
    ]


def measured(
    cfg: ProtocolConfig, target: Target, prompts: Sequence[Prompt], memo: Memo, end: Deadline
) -> list[dict[str, Any]]:
    """A row for every drafter. What `memo` has is not decoded again. Raises Interrupted at
    `end`."""
    # a draft that begins before the limit is counted whole
    limit = cfg.max_new_tokens + cfg.draft_tokens + 1
    requests = [
        Request(question_ids(target.tokenizer, prompt.turns[0]), limit, id=i)
        for i, prompt in enumerate(prompts)
    ]
    size = cfg.batch_size
    chunks = [requests[i : i + size] for i in range(0, len(requests), size)]
    found = []
    for name, label in zip(cfg.drafters, labels(cfg.drafters), strict=True):

        def decoded(chunk: Sequence[Request], name: str = name) -> list[list[list[int]]]:
            end.left()
            return cycles_of(cfg, target, name, chunk)

        rows = [row for part in memo.each(label.replace("/", "-"), chunks, decoded) for row in part]
        each = [[Cycle(p, a, (), False, start) for p, a, start in row] for row in rows]
        found.append({"name": name, "label": label, **pooled(each)})
    return found


def _share(row: dict[str, Any], position: int) -> str:
    places = row["acceptance_by_position"]
    if position >= len(places):
        return "–"
    cell = {key: value and 100 * value for key, value in places[position].items()}
    return interval(cell, 1)


def table(report: dict[str, Any]) -> Table:
    """Every drafter of a report."""
    said = report["settings"]
    columns: Columns = [
        ("drafter", lambda row: row["label"]),
        ("accepted length", lambda row: interval(row["accepted_length"], 3)),
        *(
            (f"at {place + 1}, %", lambda row, place=place: _share(row, place))
            for place in range(said["draft_tokens"])
        ),
        ("drafts", lambda row: str(row["drafts"])),
    ]
    title = (
        f"{report['target']['name']} · as vLLM counts · chain of {said['draft_tokens']} · T = 0 · "
        f"first turns of {said['num_prompts']} prompts · up to {said['max_new_tokens']} tokens"
    )
    return Table.of(columns, report["drafters"], title=title)


@entry("vllm_protocol", ProtocolConfig)
def main(cfg: ProtocolConfig) -> None:
    """Decode, pool, write."""
    os.chdir(files.ROOT)
    end, out = Deadline(cfg.minutes, "vllm_protocol"), Path(cfg.out)
    loaded = load_suite(cfg.suite) if cfg.suite else None
    prompts = loaded.prompts if loaded else load_prompts(cfg.prompts)
    prompts = spread(prompts, cfg.num_prompts or len(prompts))
    longest = max(len(prompt.turns[0]) // 2 for prompt in prompts) + cfg.max_new_tokens
    plan = MemoryPlan(cfg.batch_size, longest, cfg.draft_tokens + 1)
    target = load_target(cfg.target, cfg.dtype, None, plan)
    settings = {k: v for k, v in asdict(cfg).items() if k not in ("target", "suite", "minutes")}
    settings |= {"num_prompts": len(prompts), "suite": loaded.described if loaded else None}
    about = {"target": target.identity and asdict(target.identity), "settings": settings}
    code = files.code_sha256(("decode", "heads"))
    with files.sole_folder(out):
        folders = [head_folder(parse(name)) for name in cfg.drafters]
        weights = [folder and read_card(folder)["weights"]["sha256"] for folder in folders]
        about["settings"]["weights"] = dict(zip(cfg.drafters, weights, strict=True))
        key = {**about, "code": code, "prompts": [asdict(prompt) for prompt in prompts]}
        memo = Memo(out / "unfinished", key)
        rows = measured(cfg, target, prompts, memo, end)
        report = {"format": 1, **files.origin(str(target.device)), **about, "drafters": rows}
        files.write_json(out / "report.json", report)
        memo.clear()
    table(report).show()


if __name__ == "__main__":
    main()
