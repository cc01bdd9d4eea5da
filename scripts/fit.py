"""Fit a drafter to your own traffic: know what it brought, and keep what you had.

    python scripts/fit.py target=smollm2 logs=requests.jsonl start=runs/eagle3 minutes=10 \\
        out=runs/fit
    python scripts/fit.py target=smollm2 train=monday.jsonl later=tuesday.jsonl \\
        start=runs/eagle3 head.lora.rank=8 minutes=10 out=runs/fit
    # on all GPUs; no head yet: an EAGLE-3 head is trained (kind= names another)
    python scripts/fit.py target=hub target.name=NAME logs=requests.jsonl minutes=600 \\
        accelerate=conf/launch/ddp.yaml out=runs/fit
    # model, head, rows and optimizer of a recipe of training (outrider ls recipes)
    python scripts/fit.py experiment=qwen3_8b_eagle3 logs=requests.jsonl minutes=600 out=runs/fit

Reads the logs (masked, split by time), turns minutes into steps by a pilot, trains from `start`
within them and stops early where decoded acceptance no longer rises, then compares before and
after on the later part and on general prompts. The head of `start` is
never written to. OUT/head is the better one of the two: the new one where the paired interval
of its accepted length on the later part lies above the old one's, else a copy of the old one.
OUT/fit.json holds everything that was found, OUT/certificate the certificate of OUT/head, and
OUT/export with format=FORMAT its export.

Stop it at any time: the same command goes on where it stopped, with the same result; a stage
that is done is not done again. Exit codes: 0; 1 the certificate found a bias, or training and
decoding disagree; 2 a mistake to mend; 130 stopped.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # else scripts/ comes first and shadows libraries
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from outrider.train import launcher

    launcher.set_memory()  # this process trains

from outrider.conf.errors import UserError
from outrider.conf.jsonl import parse_line, read_lines
from outrider.conf.schema import entry
from outrider.decode.models.load import load_target
from outrider.decode.target import Target
from outrider.heads import drafter_folders, hub, lora, tuned
from outrider.heads.base import Head
from outrider.heads.checkpoint import read_card, recover, staged
from outrider.heads.folders import find_head, head_in
from outrider.heads.interop import Facts, gguf_write, served
from outrider.heads.names import parse
from outrider.heads.warm import Start
from outrider.scripts import certify, evaluate, export
from outrider.scripts.common import files
from outrider.scripts.common.extra import extra
from outrider.scripts.common.pipeline import Pipeline
from outrider.scripts.common.prompts import load_prompts, question_ids, spoken
from outrider.scripts.fitting import ranks, train, verdict
from outrider.scripts.fitting.config import FitConfig, FitKeys
from outrider.scripts.fitting.train import BUDGET, Chats
from outrider.scripts.reports import fit_table
from outrider.scripts.synthesis.ledger import differences

NO_START = (
    "no start= is given, so a fresh {kind} head is trained (kind= names another, start=RUN fits "
    "one that you have); from scratch it takes hours, not minutes"
)
STARTED = (
    "note: of the chosen head's keys head.lora, head.draft_vocab and head.chunk hold; the "
    "others are as the head at start= has them"
)
SETTINGS, REPORT = "settings.json", "fit.json"
TRAFFIC = "traffic"  # folder of what was read from logs


@entry("fit", FitKeys)
def main(cfg: FitConfig) -> int:
    """Run the stages that are not done yet, and tell."""
    out = Path(cfg.out).expanduser()
    with files.sole_folder(out):
        return fitted(cfg, out)


def fitted(cfg: FitConfig, out: Path) -> int:
    """The run behind `main`: its exit code."""
    ranks.check_launch(cfg)
    sha256 = train.start_of(cfg)[1] if cfg.start else ""
    _apart(cfg, out)
    readable(cfg)
    begin(cfg, out, sha256)
    stages = Pipeline("fit", out)
    what = "the head that is fitted" if cfg.start else NO_START.format(kind=cfg.kind)
    about = stages.once("start", what, lambda: look(cfg))
    read = stages.once("chats", "the traffic", lambda: chats(cfg, out))
    known = sources(cfg, out)
    pilot_budget = piloted(cfg, known, out, stages)
    names = {"before": cfg.start, "after": str(out / "run" / "best")}
    names = {name: path for name, path in names.items() if path}
    record = stages.once(
        "training", "training", lambda: learn(cfg, known, out / "run", pilot_budget)
    )
    scratch = None
    if cfg.scratch:
        names["scratch"] = str(out / "scratch" / "best")
        scratch = stages.once(
            "scratch",
            "a fresh head with the same steps",
            lambda: learn(cfg, known, out / "scratch", pilot_budget, fresh=True),
        )
    later, general = scored(cfg, known, out, stages, names)
    gain = later["drafters"][1]["against_before"] if cfg.start else None
    kept = "new" if gain is None or verdict.better(gain) else "old"
    title = "the better one of the two" if cfg.start else "the new head"
    stages.once("head", title, lambda: keep(out, kept, names))
    paper = None
    if cfg.certify_tokens != 0:
        paper = stages.once("certificate", "its certificate", lambda: certified(cfg, out))
    if cfg.format:
        stages.once("export", f"its export, {cfg.format}", lambda: exported(cfg, out))
    report = {
        "format": 1,
        **files.origin(cfg.device or "cpu"),
        "target": about["target"],
        "settings": {k: v for k, v in cfg.settings().items() if k != "target"},
        "start": {**hub.origin(cfg.start), "kind": about["kind"], "sha256": sha256},
        "traffic": read,
        "budget": asdict(pilot_budget),
        "training": record,
        "scratch": scratch,
        "later": later,
        "general": general,
        "kept": kept,
        "gain": gain,
        "bytes": {name: weight(folder) for name, folder in names.items()},
        "certificate": paper,
        "export": str(out / "export") if cfg.format else None,
        "seconds": stages.seconds,
    }
    files.write_json(out / REPORT, report)
    fit_table.table(report).show()
    print(f"report: {out / REPORT}; drafter: {out}")
    return 1 if paper and paper["verdict"] == "not lossless" else 0


# -- the stages, in their order


def begin(cfg: FitConfig, out: Path, sha256: str) -> None:
    """Note what the folder is for; until a pilot is through that may change. Raises UserError
    for a folder of another fit."""
    now = json.loads(json.dumps({**cfg.settings(), "start": sha256, "content": content(cfg)}))
    path = out / SETTINGS
    if not path.exists():
        if out.is_dir() and any(p for p in out.iterdir() if not p.name.startswith(".")):
            raise UserError(f"out: {out} holds other files and no fit; give another folder")
        files.write_json(path, now)
        return
    try:
        before = json.loads(path.read_text())
        if not before.get("rounds"):  # a key of earlier versions, which could be left empty
            before.pop("rounds", None)
        apart = differences(before, now)
    except (ValueError, AttributeError):
        raise UserError(f"out: {path} is damaged; give another folder") from None
    if apart and not (out / BUDGET).exists():  # nothing has been learned yet
        for part in ("steps", TRAFFIC):
            shutil.rmtree(out / part, ignore_errors=True)
        files.write_json(path, now)
    elif apart:
        raise UserError(
            f"out: {out} holds a fit of other settings ({'; '.join(apart[:3])}); restore them, or "
            "give another folder"
        )


def content(cfg: FitConfig) -> dict[str, list[str]]:
    """sha256 of the files that are read, by key: what a stage found holds for these alone.

    Raises UserError for one that cannot be read, and where what is asked later is what is
    learned."""
    logs = cfg.logs if isinstance(cfg.logs, list) else [cfg.logs]
    named = {
        "logs": extra("logs", "logs").files_of(logs) if cfg.logs else [],
        "train": [cfg.train],
        "later": [cfg.later],
        "general": [cfg.general if cfg.general_prompts else ""],
    }
    found: dict[str, list[str]] = {}
    for key, paths in named.items():
        try:
            found[key] = [files.sha256(Path(path).expanduser()) for path in paths if str(path)]
        except OSError as error:
            raise UserError(
                f"{key}: cannot read {error.filename} ({error.strerror}); give an existing JSONL "
                "file"
            ) from None
    if found["train"] and found["train"] == found["later"]:
        raise UserError(
            f"later: {cfg.later} holds what is learned from, and would tell nothing; give chats "
            "of a later time"
        )
    return found


def readable(cfg: FitConfig) -> None:
    """Read what is asked behind the training, so that nothing is missing then. Raises
    UserError that names the key."""
    requested = {"later": cfg.later, "general": cfg.general if cfg.general_prompts else ""}
    for key, path in requested.items():
        try:
            if path:
                load_prompts(path)
        except UserError as error:
            raise UserError(f"{key}: {str(error).removeprefix('prompts: ')}") from None
    if cfg.start:
        tuned.read(find_head(cfg.start))  # the new head takes these settings over
        if cfg.head_kind:
            print(STARTED, file=sys.stderr)
    for name in cfg.against:
        try:
            drafter_folders(parse(name))
        except UserError as error:
            raise UserError(f"against: {str(error).removeprefix('drafters: ')}") from None
    if cfg.train:
        _later_is_new(cfg)
    borrowed = cfg.certify_tokens != 0 and cfg.controls not in ("run", "none")
    if borrowed and not (Path(cfg.controls).expanduser() / "certificate.json").is_file():
        raise UserError(
            f"controls: {cfg.controls}: no certificate there; set run, none or a certificate's "
            "folder"
        )


def _later_is_new(cfg: FitConfig) -> None:
    """Say how many of the later chats are learned from. Raises UserError where all are: the
    comparison would tell how well they were learned by heart."""
    learned, later = set(_talks("train", cfg.train)), _talks("later", cfg.later)
    again = sum(talk in learned for talk in later)
    if later and again == len(later):
        raise UserError(
            f"later: every chat of {cfg.later} is what is learned from ({cfg.train}), and would "
            "tell nothing; give chats of a later time"
        )
    if again:
        print(
            f"note: {again} of {len(later)} later chats stand in {cfg.train}, which is learned "
            "from; what they gain is no forecast for others",
            file=sys.stderr,
        )


def _talks(key: str, path: str) -> list[int]:
    """A number for what is said in every chat of a file, whatever stands beside it. Rows that
    are none are left to those who learn or ask."""
    found = []
    for _, line in read_lines(files.here(Path(path)), key):
        try:
            found.append(hash(str(spoken(parse_line(line))[1])))
        except ValueError:
            continue
    return found


def look(cfg: FitConfig) -> dict[str, Any]:
    """Load target and head once, so that what does not go together is said first."""
    kind = train.start_of(cfg)[0] if cfg.start else train.fresh_kind(cfg)
    target = load_target(cfg.target, cfg.dtype, cfg.device)
    if cfg.start:
        head = Start(cfg.start, kind, target).head
        if cfg.head.lora.rank and not head.own_lora:
            lora.layers(head, cfg.head.lora)
        exportable(cfg, head, target)
    askable(cfg, target, cfg.later)
    identity = target.identity.to_json() if target.identity else {}
    return {"kind": kind, "target": {k: v for k, v in identity.items() if k != "path"}}


def exportable(cfg: FitConfig, head: Head, target: Target) -> None:
    """Raises UserError where cfg.format has no place for such a head."""
    if not cfg.format:
        return
    served.check(cfg.format, head, target, Facts.of(target, served.name_of(cfg.target, target)))
    if cfg.format == "gguf":
        gguf_write.tokenizer_fields(target, None)


def askable(cfg: FitConfig, target: Target, later: str) -> None:
    """Raises UserError where the comparison behind the training would have too little to ask.
    later: the file of later chats, "" where the logs are not read yet."""
    requested = {
        "later": (later, cfg.prompts, 2),  # one prompt allows no interval
        "general": (cfg.general if cfg.general_prompts else "", cfg.general_prompts, 1),
    }
    for key, (path, count, least) in requested.items():
        if not path:
            continue
        wanted = evaluate.EvaluateConfig(out="", prompts=path, num_prompts=count)
        some = evaluate.chosen(load_prompts(path), wanted)
        sizes = [len(question_ids(target.tokenizer, one.turns[0])) for one in some]
        fit = sum(size < target.context_length for size in sizes)
        if fit < least:
            raise UserError(
                f"{key}: of {len(some)} prompts in {path} {fit} fit into the target's context of "
                f"{target.context_length} tokens, and {least} or more are compared; give more or "
                "shorter ones"
            )


def sources(cfg: FitConfig, out: Path) -> Chats:
    """Where the chats lie now: a folder of a fit may have been moved since its logs were read."""
    if cfg.logs:
        logs = extra("logs", "logs")
        return Chats(str(out / TRAFFIC / logs.TRAIN), str(out / TRAFFIC / logs.LATER))
    return Chats(cfg.train, cfg.later)


def chats(cfg: FitConfig, out: Path) -> dict[str, Any]:
    """What is learned from, and what is asked later."""
    if not cfg.logs:
        return {"train": cfg.train, "later": cfg.later}
    target = load_target(cfg.target, cfg.dtype, "cpu")
    logs = extra("logs", "logs")
    options = logs.LogOptions(tuple(cfg.served), cfg.later_share, cfg.mask)
    paths = cfg.logs if isinstance(cfg.logs, list) else [cfg.logs]
    work = logs.LogWork(cfg.data.workers, cfg.quiet)
    report = logs.prepare(paths, out / TRAFFIC, cfg.target, target.tokenizer, options, work=work)
    for line in report.lines():
        print(f"     {line}", flush=True)
    askable(cfg, target, str(report.later))
    body = {k: v for k, v in report.to_json().items() if k not in ("train", "later", "named")}
    return {**body, "train": str(report.train), "later": str(report.later)}


def piloted(cfg: FitConfig, known: Chats, out: Path, stages: Pipeline) -> train.PilotBudget:
    """What the minutes are here."""
    found = stages.once(
        "pilot", "a pilot: how many steps fit in", lambda: asdict(train.pilot(cfg, known, out))
    )
    pilot_budget = train.PilotBudget(**found)
    print(
        f"fit: {cfg.minutes:g} minutes are {pilot_budget.steps:,} steps here, decoded "
        f"acceptance every {pilot_budget.every:,}",
        flush=True,
    )
    return pilot_budget


def learn(
    cfg: FitConfig, known: Chats, folder: Path, budget: train.PilotBudget, fresh: bool = False
) -> dict[str, Any]:
    """Train, and say how it went. The head drafts as `start` was tuned to, so that both are
    compared in the same shape."""
    train.trained(cfg, known, folder, budget, fresh)
    if cfg.start:
        as_tuned(find_head(cfg.start), find_head(str(folder / "best")))
    return train.record(folder)


def as_tuned(source: Path, head: Path) -> None:
    """Give `head` the settings that scripts/tune.py has left for the head in `source`."""
    found = tuned.read(source)
    if found is not None:
        mine = replace(found, card_sha256=tuned.card_sha256(head))
        files.write_json(head / tuned.DECODE, mine.to_json())


def scored(
    cfg: FitConfig, known: Chats, out: Path, stages: Pipeline, names: dict[str, str]
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """All drafters on the later part, and on general prompts (None where
    nobody asks)."""
    later = stages.once(
        "later",
        "before against after on the later part",
        lambda: score(cfg, out / "later", known.later, cfg.prompts, names),
    )
    if not cfg.general_prompts:
        return later, None
    general = stages.once(
        "general",
        "what was forgotten",
        lambda: score(cfg, out / "general", cfg.general, cfg.general_prompts, names),
    )
    return later, general


def score(
    cfg: FitConfig, out: Path, prompts: str, count: int | None, names: dict[str, str]
) -> dict[str, Any]:
    """All drafters on a file of prompts, in turns."""
    shaped = [f"{name}@{cfg.shape}" if cfg.shape else name for name in names.values()]
    shaped += cfg.against
    wanted = evaluate.EvaluateConfig(
        out=str(out),
        target=cfg.target,
        drafters=["none", *dict.fromkeys(shaped)],
        prompts=prompts,
        num_prompts=count,
        temperature=cfg.temperature,
        max_new_tokens=cfg.max_new_tokens,
        dtype=cfg.dtype,
        device=cfg.device,
        seed=cfg.seed,
        parity=0,
        quiet=cfg.quiet,
    )
    evaluate.evaluated(wanted, out)
    return verdict.compared(out / "report.json", shaped, cfg.seed)


def keep(out: Path, kept: str, names: dict[str, str]) -> str:
    """OUT/head: the new head, or a copy of the old one. `start` itself is only read."""
    source = find_head(names["after"] if kept == "new" else names["before"])
    recover(out / "head")
    with staged(out / "head") as stage:
        shutil.copytree(source, stage, dirs_exist_ok=True)
    return kept


def certified(cfg: FitConfig, out: Path) -> dict[str, Any]:
    """The certificate of OUT/head."""
    shape = f"@{cfg.shape}" if cfg.shape else ""
    wanted = certify.CertifyConfig(
        out=str(out / "certificate"),
        drafter=f"{out / 'head'}{shape}",
        target=cfg.target,
        tokens=cfg.certify_tokens,
        controls=cfg.controls,
        device=cfg.device,
        seed=cfg.seed,
        quiet=cfg.quiet,
    )
    certify.certified(wanted, out / "certificate")
    paper = json.loads((out / "certificate" / "certificate.json").read_text())
    return {"verdict": paper["verdict"], "reasons": paper["reasons"]}


def exported(cfg: FitConfig, out: Path) -> str:
    """The export of OUT/head."""
    export.export(
        export.ExportConfig(
            drafter=str(out / "head"),
            format=cfg.format,
            out=str(out / "export"),
            target=cfg.target,
            overwrite=True,
            device=cfg.device,
        )
    )
    return str(out / "export")


def weight(folder: str) -> int:
    """Bytes of a head's weights file."""
    return int(read_card(find_head(folder))["weights"]["bytes"])


def _apart(cfg: FitConfig, out: Path) -> None:
    """Raises UserError where OUT would write into `start`."""
    place = head_in(cfg.start) if cfg.start else None
    if place is None:
        return
    source = {place.resolve(), Path(cfg.start).expanduser().resolve()}
    if out.resolve() in source or source & set(out.resolve().parents):
        raise UserError(f"out: {out} lies in the head that is fitted; give another folder")


if __name__ == "__main__":
    main()
