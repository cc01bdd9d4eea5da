"""From logs to training rows: read, join, drop what comes twice, mask, split by time, write."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from outrider.conf.errors import UserError
from outrider.conf.jsonl import parse_line, read_lines
from outrider.decode.models.identity import sha256_template, sha256_tokenizer
from outrider.decode.models.load import TargetConfig
from outrider.scripts.common.files import installed, sha256, write_json, write_text
from outrider.scripts.common.progress import Steps, by_name, columns, named
from outrider.scripts.extra.logs import forms
from outrider.scripts.extra.logs.forms import Exchange, Half, Unusable
from outrider.scripts.extra.logs.prompts import Renderings
from outrider.scripts.extra.masking import across
from outrider.scripts.extra.masking import rules as masking
from outrider.scripts.extra.masking.across import HowMasked
from outrider.scripts.extra.masking.masker import Masker
from outrider.scripts.synthesis.config import REGIONS
from outrider.scripts.synthesis.ledger import damaged, differences, json_line
from outrider.train.texts.rows import ChatRow, interpret
from outrider.train.texts.workers import processes

FORMAT = 3  # raise when the same logs would give other rows
SHOWN = 20  # lines named for each reason
NOT_MASKED = (
    "masking knows what has a form; names, addresses, dates of birth and passwords in a sentence "
    "stay: look at a sample before you hand the files on (docs/fit.md)"
)
TWICE = "its custom_id stands twice"
TRAIN, LATER, RECORD = "train.jsonl", "later.jsonl", "logs.json"
FINDS = "finds.jsonl"  # where masking found something, for as long as it is at work
Ask = Callable[[list[dict[str, Any]], Path], list[dict[str, Any] | None]]


@dataclass(frozen=True)
class LogOptions:
    """What is done with a log.

    served: names under which the log's model is the target; () = the target's own name.
    later: share of the rows, the last ones in time, that training does not see.
    mask: replace secrets and personal data; module:function = what that finds as well. regions:
    where telephone numbers are valid.
    category_key: key of the log's metadata that names a category."""

    served: tuple[str, ...] = ()
    later: float = 0.2
    mask: bool | str = True
    regions: tuple[str, ...] = REGIONS
    category_key: str = "category"


@dataclass(frozen=True)
class LogWork:
    """How it is done, which changes nothing of what comes of it. workers: processes that mask; 0
    = as many as there are cores. quiet: no progress bars."""

    workers: int = 1
    quiet: bool = True


@dataclass
class LogsReport:
    """What came of the logs. train, later: files of chat rows. rows: how many each holds.
    counts: lines by what became of them. named: reason -> "file:line" of the first ones.
    masked: how many places each rule masked. split_at: ISO time of the first later row, ""
    where the logs tell no time and the order of the lines decided."""

    train: Path
    later: Path
    rows: dict[str, int]
    counts: dict[str, int]
    named: dict[str, list[str]] = field(default_factory=dict)
    masked: dict[str, int] = field(default_factory=dict)
    models: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    split_by: str = "time"
    split_at: str = ""

    def to_json(self) -> dict[str, Any]:
        """As logs.json keeps it; file names without their folder."""
        found = asdict(self)
        return {**found, "train": self.train.name, "later": self.later.name}

    def lines(self) -> list[str]:
        """What to tell a user."""
        counts = ", ".join(f"{n} {why}" for why, n in self.counts.items() if n)
        masked = sum(self.masked.values())
        when = f"from {self.split_at} on" if self.split_at else "by the order of the lines"
        notices = [
            f"{self.rows['train']} rows to train on, {self.rows['later']} later ones ({when})",
            f"lines: {counts}",
            f"masked: {masked} places by {len(self.masked)} rules" if masked else "masked: nothing",
        ]
        for reason, places in self.named.items():
            notices.append(f"left out, {reason}: {', '.join(places[:3])}")
        return notices + self.notes


@dataclass
class _Kept:
    """An exchange that will be a row. own: the answer is the target's."""

    exchange: Exchange
    row: ChatRow
    own: bool
    category: str = ""

    @property
    def chat(self) -> list[dict[str, Any]]:
        """Its messages, the answer last."""
        return self.row.chat or []


class _Book:
    """Counts lines by what became of them, and names the first ones."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.named: dict[str, list[str]] = {}

    def out(self, reason: str, where: str) -> None:
        """A line that gives no row. The reason holds nothing of the line itself."""
        self.counts[reason] += 1
        places = self.named.setdefault(reason, [])
        if len(places) < SHOWN:
            places.append(where)


def _plain(error: ValueError) -> str:
    """A reader's reason without what it quotes of the line, and without places in it: equal
    mistakes count as one."""
    text = re.sub(r"\bturn \d+", "a turn", str(error))
    text = re.sub(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", "..", text)  # as repr writes them
    return re.sub(r" \(.*column \d+\)|\d+ bytes ", "", text)


def prepare(
    logs: Sequence[str | Path],
    out: Path,
    target: TargetConfig,
    tokenizer: Any,
    options: LogOptions | None = None,
    ask: Ask | None = None,
    work: LogWork | None = None,
) -> LogsReport:
    """Write train.jsonl, later.jsonl and logs.json into the folder `out`: chat rows
    {"messages", "complete"} with "category", "time" and "tools" where the log has them. Each
    file is whole or absent, logs.json comes last; the same call again finds it and does
    nothing.

    ask: gets the chats (without last answer) that another model answered, and a folder for
    what it needs to go on after an interruption; gives a row or None for each. Without it they
    are left out. Raises UserError in one line: no such file, nothing usable, settings other
    than those that `out` was made with."""
    options, work, out = options or LogOptions(), work or LogWork(), Path(out).expanduser()
    paths = files_of(logs)
    own = options.mask if isinstance(options.mask, str) else ""
    how = HowMasked(options.regions, own, processes(work.workers))
    rules = how.rules() if options.mask else []
    settings = _settings(paths, tokenizer, options, ask is not None)
    if (done := _finished(out, settings)) is not None:
        return done
    book = _Book()
    exchanges = list(_exchanges(paths, book, options.category_key))
    kept = _rows(exchanges, book, Renderings(tokenizer), _names(target, options))
    kept, models = _usable(kept, book, paths, ask is not None)
    masker = Masker(rules)
    if options.mask:
        finds = across.Kept(out / FINDS, _digest(settings))
        masker = _mask(kept, how, finds, work)
    order, split_by, notes = _ordered(kept)
    first = _first_later(order, options.later)
    rows = _answered(order, ask, out, book)
    train, later = ([row for row in part if row] for part in (rows[:first], rows[first:]))
    report = LogsReport(
        out / TRAIN,
        out / LATER,
        {"train": len(train), "later": len(later)},
        {"usable": len(train) + len(later), **dict(book.counts.most_common())},
        book.named,
        dict(masker.counts.most_common()),
        {masker.chat().mask(m): n for m, n in models.most_common()},
        [*notes, *_history(order), *([NOT_MASKED] if options.mask else [])],
        split_by,
        _iso(order[first].exchange.when) if split_by == "time" else "",
    )
    _check_rows(report, paths, book)
    for path, part in ((report.train, train), (report.later, later)):
        write_text(path, "".join(map(json_line, part)))
    _record(out, settings, report, rules)
    (out / FINDS).unlink(missing_ok=True)
    return report


def _check_rows(report: LogsReport, paths: Sequence[Path], book: _Book) -> None:
    """Raises UserError where a part has no row left."""
    for name, count in report.rows.items():
        if not count:
            raise UserError(
                f"logs: {paths[0]}: no row is left for {name}.jsonl, since "
                f"{book.counts['no answer when asked again']} chats got no answer when asked "
                "again; give a larger log, or another later"
            )


# -- reading


def files_of(logs: Sequence[str | Path]) -> list[Path]:
    """The files of logs; a folder stands for the JSONL files in it, by name. Raises UserError
    for one without any."""
    found: list[Path] = []
    for path in (Path(one).expanduser() for one in logs):
        inside = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        if not inside:
            raise UserError(
                f"logs: {path} holds no *.jsonl; unpack or rename its files, or name them: "
                "logs=[FILE,FILE]"
            )
        found += inside
    if not found:
        raise UserError("logs: empty; give the JSONL file of a server's log")
    return found


def _exchanges(paths: Iterable[Path], book: _Book, category_key: str) -> Iterable[Exchange]:
    requested: dict[str, Half] = {}
    answered: dict[str, Half] = {}
    twice: set[str] = set()
    for path in paths:
        for number, line in read_lines(path, "logs"):
            where = f"{path.name}:{number}"
            try:
                found = forms.read(parse_line(line), where, category_key)
            except (Unusable, ValueError) as error:
                book.out(str(error) if isinstance(error, Unusable) else _plain(error), where)
                continue
            if isinstance(found, Exchange):
                yield found
                continue
            side = requested if found.response is None else answered
            if found.custom_id in side:
                twice.add(found.custom_id)
                book.out(TWICE, where)
            else:
                side[found.custom_id] = found
    for side in (requested, answered):
        for name in twice & side.keys():
            book.out(TWICE, side.pop(name).where)
    for name, half in answered.items():
        if name not in requested:
            book.out("a batch's answer whose request is in none of the files", half.where)
            continue
        try:
            yield forms.joined(requested[name], half, category_key)
        except Unusable as error:
            book.out(str(error), half.where)
    for name, half in requested.items():
        if name not in answered:
            book.out("the answer is missing", half.where)


def _names(target: TargetConfig, options: LogOptions) -> set[str]:
    """Names under which a log may know the target, folded."""
    own = options.served or tuple(
        n for n in (target.name, Path(target.path).name if target.path else "", target.kind) if n
    )
    return {_folded(n) for n in own}


def _folded(name: str) -> str:
    """The last part of a model's name: `org/Name`, `openai/Name` and `/models/Name.gguf` alike."""
    return name.rstrip("/").rsplit("/", 1)[-1].removesuffix(".gguf").casefold()


def _rows(
    exchanges: Iterable[Exchange], book: _Book, renderings: Renderings, names: set[str]
) -> list[_Kept]:
    """Exchanges as chat rows, checked as training checks its own."""
    kept = []
    for one in exchanges:
        own = any(_folded(m) in names for m in one.models)
        messages = one.request
        if one.prompt is not None:
            messages = renderings.chat(one.prompt)
            if not messages and isinstance(one.prompt, str):
                # Said to the model without its template: what it answers to the same words in
                # a chat is another text.
                messages, own = [{"role": "user", "content": one.prompt}], False
        chat = [*messages, one.answer]
        record = {"messages": chat, "complete": one.complete, "tools": one.tools}
        try:
            row = interpret(record, one.where)
        except ValueError as error:
            book.out(_plain(error), one.where)
            continue
        if not row.chat or row.chat[-1]["role"] != "assistant":
            book.out("the answer is missing", one.where)
            continue
        if not any(m["role"] == "user" for m in row.chat):
            book.out("has no user turn", one.where)
            continue
        if not _is_json([row.chat, row.tools]):
            book.out("holds NaN or Infinity, which no JSON has", one.where)
            continue
        kept.append(_Kept(one, row, own, one.category))
    return kept


def _is_json(value: Any) -> bool:
    """Whether other readers than Python's can read what would be written."""
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return False
    return True


# -- what comes twice


def _key(message: dict[str, Any]) -> bytes:
    text = message.get("content")
    plain = " ".join(text.split()) if isinstance(text, str) else text
    more = {k: v for k, v in message.items() if k in ("tool_calls", "name")}
    return json.dumps([message["role"], plain, more], sort_keys=True, default=str).encode()


def _chain(chat: Sequence[dict[str, Any]]) -> list[bytes]:
    """A digest for the first message, the first two, .."""
    digest, found = hashlib.sha256(), []
    for message in chat:
        digest.update(_key(message) + b"\n")
        found.append(digest.digest())
    return found


def _apart(kept: list[_Kept], book: _Book) -> list[_Kept]:
    """Without what was asked before in the same words, and without requests that a later one
    goes on from: that one holds them."""
    first: dict[bytes, tuple[_Kept, bytes]] = {}  # by what was asked: the row, its whole chat
    inner: set[bytes] = set()
    for one in kept:
        *begun, whole = _chain(one.chat)
        if begun[-1] in first:
            book.out("duplicates", one.exchange.where)
            continue
        first[begun[-1]] = one, whole
        inner.update(begun)
    out = []
    for one, whole in first.values():
        if whole in inner:
            book.out("held by a later request of the same chat", one.exchange.where)
        else:
            out.append(one)
    return out


def _usable(
    kept: list[_Kept], book: _Book, paths: list[Path], asks: bool
) -> tuple[list[_Kept], Counter[str]]:
    """(each chat once, only the target's own where nobody asks again; the models of the log).
    Raises UserError for fewer than two."""
    models = Counter(m for k in kept for m in k.exchange.models[:1] or ("(not named)",))
    kept = _apart(kept, book)
    if not asks:
        kept = _own_alone(kept, book, models, paths)
    if len(kept) < 2:
        raise UserError(_nothing(paths, book, len(kept)))
    return kept, models


def _own_alone(
    kept: list[_Kept], book: _Book, models: Counter[str], paths: list[Path]
) -> list[_Kept]:
    """The target's own answers. Raises UserError where there are none but others."""
    own = [k for k in kept if k.own]
    for one in kept:
        bare = one.exchange.prompt is not None
        why = "said without the chat template" if bare else "answered by another model"
        if not one.own:
            book.out(why, one.exchange.where)
    if kept and not own:
        name = next(iter(models))
        raise UserError(
            f"served: {paths[0]}: no answer is known to be the target's, {len(kept)} are of "
            f"{name[:60]!r} and {len(models) - 1} other names; say served={name[:60]} if that is "
            "the target, or ask again by scripts/synthesize.py logs="
        )
    return own


def _nothing(paths: list[Path], book: _Book, left: int) -> str:
    notices = ", ".join(
        f"{book.counts[why]} {why} (first {places[0]})" for why, places in book.named.items()
    )
    what = f"{left} usable line, two are needed" if left else "nothing usable"
    return (
        f"logs: {paths[0]} holds {what}: {notices or 'it is empty'}; give the JSONL of requests "
        "and responses that a server of the OpenAI API writes"
    )


# -- masking


def _mask(kept: list[_Kept], how: HowMasked, finds: across.Kept, work: LogWork) -> Masker:
    """In place: first everything is looked at, then everything is masked."""
    values = [[one.row.chat, one.row.tools, one.category] for one in kept]
    with Steps(*columns(28), quiet=work.quiet, transient=True) as bar:
        shown = by_name(bar)
        masker = across.find(values, how, finds, named(shown, "looking for secrets, kB"))
        writing = named(shown, "masking, kB")
        for one, value in zip(
            kept, across.mask(values, masker.known, how.workers, writing), strict=True
        ):
            one.row.chat, one.row.tools, one.category = value
    return masker


def _digest(settings: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


# -- time


def _ordered(kept: list[_Kept]) -> tuple[list[_Kept], str, list[str]]:
    """Rows in the order of time; in that of the lines where fewer than half tell one. A row
    without a time takes that of the row before it."""
    notices = sum(k.exchange.when is not None for k in kept)
    if notices * 2 < len(kept) or len({k.exchange.when for k in kept if k.exchange.when}) < 2:
        why = "the logs tell no time" if notices * 2 < len(kept) else "all lines have the same time"
        return kept, "order", [f"{why}: split by the order of the lines"]
    notes = []
    if notices < len(kept):
        notes.append(f"{len(kept) - notices} rows without a time stand behind the row before them")
    last = min(k.exchange.when for k in kept if k.exchange.when is not None)
    for one in kept:
        if one.exchange.when is None:
            one.exchange.when = last
        last = one.exchange.when
    return sorted(kept, key=lambda k: k.exchange.when or 0.0), "time", notes


def _first_later(order: list[_Kept], share: float) -> int:
    """Index of the first later row: rows of the same time fall on one side."""
    times = [k.exchange.when for k in order]
    at = min(max(round(len(order) * (1 - share)), 1), len(order) - 1)
    if times[0] == times[-1]:
        return at
    down = up = at
    while down > 0 and times[down - 1] == times[down]:
        down -= 1
    while up < len(order) and times[up - 1] == times[up]:
        up += 1
    return up if up < len(order) and (down == 0 or up - at < at - down) else down


def _iso(when: float | None) -> str:
    return "" if when is None else datetime.fromtimestamp(when, UTC).isoformat(timespec="seconds")


def _history(kept: list[_Kept]) -> list[str]:
    several = sum(sum(m["role"] == "assistant" for m in k.chat) > 1 for k in kept)
    if not several:
        return []
    return [
        f"{several} rows hold earlier answers, as the requests brought them: with "
        "data.last_turn_only=true the last one alone is learnt"
    ]


# -- writing


def _answered(
    order: list[_Kept], ask: Ask | None, out: Path, book: _Book
) -> list[dict[str, Any] | None]:
    """The rows; what another model answered is asked again. None: no answer came."""
    known = []
    for one in order:
        row: dict[str, Any] = {"messages": one.chat, "complete": one.row.complete}
        when = _iso(one.exchange.when)
        more = {"tools": one.row.tools, "category": one.category, "time": when}
        known.append(row | {key: value for key, value in more.items() if value})
    rows: list[dict[str, Any] | None] = [*known]
    again = [n for n, one in enumerate(order) if not one.own]
    if ask is None or not again:
        return rows
    questions = [{**known[n], "messages": order[n].chat[:-1]} for n in again]
    for n, made in zip(again, ask(questions, out), strict=True):
        rows[n] = None if made is None else {**known[n], **made}
        if made is None:
            book.out("no answer when asked again", order[n].exchange.where)
    book.counts["asked again"] = sum(rows[n] is not None for n in again)
    return rows


def _settings(paths: list[Path], tokenizer: Any, options: LogOptions, asks: bool) -> dict[str, Any]:
    """What decides the rows."""
    wanted = ("detect-secrets", "phonenumbers") if options.mask else ()
    try:
        digests = [sha256(p) for p in paths]
    except OSError as error:
        raise UserError(
            f"logs: cannot read {error.filename} ({error.strerror}); give an existing JSONL file"
        ) from None
    own = {"hook": masking.source(options.mask)} if isinstance(options.mask, str) else {}
    return {
        "format": FORMAT,
        "logs": digests,
        **json.loads(json.dumps(asdict(options))),  # lists in place of tuples
        **own,
        "ask": asks,
        "packages": {name: installed(name) or "absent" for name in wanted},
        "tokenizer": sha256_tokenizer(tokenizer),
        "template": sha256_template(tokenizer),
    }


def _sums(report: LogsReport) -> dict[str, str]:
    return {p.name: sha256(p) for p in (report.train, report.later)}


def _record(
    out: Path, settings: dict[str, Any], report: LogsReport, rules: Sequence[masking.Rule]
) -> None:
    value = {
        "settings": settings,
        "sha256": _sums(report),
        "report": report.to_json(),
        "rules": [{"name": r.name, "stand_in": r.stand_in, "source": r.source} for r in rules],
    }
    write_json(out / RECORD, value)


def _finished(out: Path, settings: dict[str, Any]) -> LogsReport | None:
    """What `out` holds already. Raises UserError for other settings and damaged files."""
    record = out / RECORD
    if out.exists() and not out.is_dir():
        raise UserError(f"out: {out} is a file; give a folder")
    if not record.exists():
        return None
    try:
        value = json.loads(record.read_text(encoding="utf-8"))
        wrong = differences(value["settings"], settings)
        report = LogsReport(**{**value["report"], "train": out / TRAIN, "later": out / LATER})
        sound = _sums(report) == value["sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise damaged(out, record) from error
    if wrong:
        raise UserError(
            f"out: {out} was made with other settings ({'; '.join(wrong)}); give another folder"
        )
    if not sound:
        raise UserError(
            f"out: {report.train} or {report.later.name} was changed since it was written; delete "
            f"{record} to write both again"
        )
    return report
