"""What a sliding window of the draft layer costs and brings at several lengths of context: the
accepted length of a head that looks back over the whole text and of the same head within
windows, on the same answers.

    python train/bench_context.py target=smollm2 chats=FILE start=runs/eagle3 out_dir=runs/window

A question of FILE stands at the end of a text of each length that is made of other chats of the
file, and the target answers it greedily. On that answer the heads are forced, which says exactly
what a chain of `depth` levels accepts at T = 0 (heads/forced.py).

With steps=0 the windows are put on the head as it is, as a server's flag does. With steps above
0 heads that start alike learn from long chats first, made of the first `train_chats` of the
file: one without a window, one with each.

Writes OUT_DIR/window.json after every question. A run that is there is not made again.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, cast

sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from torch import Tensor

from conf.errors import UserError
from conf.rules import Filled, OneOrMore, ZeroOrMore
from conf.schema import entry
from decode.models.load import TargetConfig, load_target
from decode.target import Target
from heads import load_head
from heads.base import Head
from heads.batch import Batch
from heads.folders import head_in
from heads.forced import ranks
from train.log import git_commit
from train.texts.rows import Row, raw_row, read_lines

ROOT = Path(__file__).resolve().parents[1]
SEED = 0
KEPT = ("layers", "draft_vocab", "norm_before_fc", "norm_output")  # what a start decides


@dataclass
class WindowConfig:
    """Keys of train/bench_context.py."""

    # JSONL of short chats that the target has answered itself
    chats: str = ""
    # how many of them, from the first on, are learned from
    train_chats: OneOrMore = 3000
    # head that all arms start from; empty = from scratch
    start: str = ""
    # where runs and window.json lie
    out_dir: str = "runs/window"
    # positions that the windowed arms look back over
    windows: Filled[int] = field(default_factory=lambda: [256, 1024])
    # tokens of a training row
    row: OneOrMore = 2048
    # updates of each arm; 0 = nothing is learned
    steps: ZeroOrMore = 0
    # rows of an update
    batch_size: OneOrMore = 2
    # learning rate of the arms
    lr: float = 3e-4
    # tokens before the answers that are asked for
    contexts: Filled[OneOrMore] = field(default_factory=lambda: [2000, 6000])
    # questions at each length
    questions: OneOrMore = 8
    # tokens of an answer
    answer: OneOrMore = 64
    # levels of the chain
    depth: OneOrMore = 5
    # float32, bfloat16, float16 or float64
    dtype: str = "bfloat16"
    # conf/target
    target: TargetConfig = field(default_factory=TargetConfig)

    def validate(self) -> list[str]:
        """Problems as "key: value; rule; fix"."""
        found = []
        if min(self.windows) <= self.depth:
            found.append(f"windows: {self.windows}; give sizes above the depth of {self.depth}")
        return found


def short_chats(path: Path) -> list[list[dict[str, Any]]]:
    """The chats of a file; rows that are none are left out."""
    found = (raw_row(str(path), *line) for line in read_lines(path, "chats"))
    return [row.chat for row in found if isinstance(row, Row) and row.chat]


def long_chats(
    short: list[list[dict[str, Any]]], tokenizer: Any, size: int
) -> Iterator[list[dict[str, Any]]]:
    """Chats one after the other, until the next would make more than `size` tokens."""
    long: list[dict[str, Any]] = []
    for chat in short:
        if long and length(tokenizer, [*long, *chat]) > size:
            yield long
            long = []
        long = [*long, *chat]


def length(tokenizer: Any, chat: list[dict[str, Any]]) -> int:
    """Tokens of a chat."""
    return len(tokenizer(tokenizer.apply_chat_template(chat, tokenize=False))["input_ids"])


def trained(
    cfg: WindowConfig, data: Path, name: str, window: int | None, start: Head | None
) -> Path:
    """An arm's run folder. start: the head that it begins with, whose keys it keeps."""
    out = Path(cfg.out_dir) / name
    if (out / "done.ok").is_file():
        return out
    command = [
        *(sys.executable, str(ROOT / "train" / "eagle.py"), f"target={cfg.target.kind}"),
        *(
            f"target.{k}={v}"
            for k, v in (("name", cfg.target.name), ("path", cfg.target.path))
            if v
        ),
        *(f"data.path={data}", f"data.max_length={cfg.row}", "data.held_out=0", f"seed={SEED}"),
        *(f"out_dir={out}", f"steps={cfg.steps}", f"batch_size={cfg.batch_size}", "micro_batch=1"),
        *("head=eagle3", f"head.sliding_window={'null' if window is None else window}"),
        *(f"head.depth={cfg.depth}", f"optim.lr={cfg.lr}", f"dtype={cfg.dtype}"),
        *("eval.every=0", "eval.parity=0", "save_every=0", "log_every=10", "data.workers=1"),
    ]
    if start is not None:
        kept = {key: getattr(start.cfg, key) for key in KEPT}
        command += [f"start={cfg.start}", *(f"head.{k}={v}" for k, v in kept.items())]
    if subprocess.run(command, cwd=ROOT, env=os.environ, check=False).returncode:
        raise UserError(f"out_dir: the run in {out} failed; its words stand above")
    return out


class Remembering:
    """A target that computes the features of a text once for all heads that read the same."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.known: dict[tuple[int, ...], Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.target, name)

    def features(self, ids: Tensor, mask: Tensor, taps: Any, position: Any = None) -> Tensor:
        """See Target."""
        if tuple(taps) not in self.known:
            self.known[tuple(taps)] = self.target.features(ids, mask, taps, position=position)
        return self.known[tuple(taps)]


@torch.no_grad()
def answered(target: Target, prompt: list[int], count: int) -> list[int]:
    """What the target writes greedily behind a prompt, up to its end."""
    from decode.drafters import NoDraft
    from decode.engine import Request, generate
    from decode.sampling import Sampling

    run = generate(target, NoDraft(), [Request(prompt, count)], Sampling())
    return run.generations[0].token_ids


def accepted(
    head: Head, target: Remembering, prompt: list[int], answer: list[int], depth: int
) -> Tensor:
    """[A] int64: of how many levels a chain is right, at each place of the answer."""
    ids = torch.tensor([[*prompt, *answer]])
    on = torch.ones_like(ids, dtype=torch.bool)
    loss = torch.arange(ids.shape[1])[None] >= len(prompt)
    batch = Batch(ids, on, loss, torch.zeros(1, dtype=torch.int64))
    right = ranks(head, batch, cast(Target, target), depth) == 0
    return right.cumprod(1).sum(1)


def interval(values: list[float], draws: int = 4000) -> tuple[float, float]:
    """95 % interval of a mean by bootstrap over questions."""
    drawn = torch.Generator().manual_seed(SEED)
    pick = torch.randint(len(values), (draws, len(values)), generator=drawn)
    means = torch.tensor(values, dtype=torch.float64)[pick].mean(1)
    return tuple(means.quantile(torch.tensor([0.025, 0.975], dtype=means.dtype)).tolist())  # type: ignore[return-value]


def arms(cfg: WindowConfig, target: Target, chats: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """The heads to compare, by name; "all" has no window."""
    start = load_head(_folder(Path(cfg.start)), target) if cfg.start else None
    found = {"all": start}
    if cfg.steps:
        data = Path(cfg.out_dir) / "long.jsonl"
        long = long_chats(chats[: cfg.train_chats], target.tokenizer, cfg.row)
        some = islice(long, cfg.steps * cfg.batch_size)
        data.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in some))
        runs = {"all": trained(cfg, data, "all", None, start)}
        for size in cfg.windows:
            name = f"learned with window {size}"
            runs[name] = trained(cfg, data, f"window-{size}", size, start)
        found = {name: load_head(_folder(run), target) for name, run in runs.items()}
    for size in cfg.windows:
        head = copy.deepcopy(found["all"])
        assert head is not None
        head.cfg.sliding_window = size
        found[f"window {size}"] = head
    return found


def measure(cfg: WindowConfig) -> Iterator[dict[str, Any]]:
    """Force all arms on the same answers; what is known after each question."""
    if not cfg.chats:
        raise UserError("chats: not set; give a JSONL file of chats that the target answered")
    if not cfg.steps and not cfg.start:
        raise UserError("start: not set, and with steps=0 nothing is learned; give a head")
    begun, target = time.process_time(), load_target(cfg.target, cfg.dtype, "cpu")
    chats = short_chats(Path(cfg.chats))
    Path(cfg.out_dir).mkdir(parents=True, exist_ok=True)
    heads, asked = arms(cfg, target, chats), chats[cfg.train_chats :]
    if not asked:
        raise UserError(f"train_chats: {cfg.train_chats} leaves no chat to ask about; lower it")
    found: dict[int, dict[str, list[float]]] = {c: {n: [] for n in heads} for c in cfg.contexts}
    places: dict[int, list[int]] = {context: [] for context in cfg.contexts}
    for number in range(cfg.questions):
        for context in cfg.contexts:
            prompt = _prompt(asked, number, target.tokenizer, context)
            answer = answered(target, prompt, cfg.answer)
            places[context].append(len(prompt))
            remembering = Remembering(target)
            for name, head in heads.items():
                runs = accepted(head.eval(), remembering, prompt, answer, cfg.depth)
                found[context][name].append(1 + float(runs.double().mean()))
            told = ", ".join(f"{name} {v[-1]:.2f}" for name, v in found[context].items())
            print(f"{context} tokens, question {number + 1}: {told}", flush=True)
        yield {
            "contexts": {str(c): _compared(places[c], by) for c, by in found.items()},
            "questions": number + 1,
            "cpu_seconds": time.process_time() - begun,
        }


def _compared(tokens: list[int], by: dict[str, list[float]]) -> dict[str, Any]:
    pairs = {
        name: _summary([a - b for a, b in zip(v, by["all"], strict=True)])
        for name, v in by.items()
        if name != "all"
    }
    lengths = {name: _summary(v) for name, v in by.items()}
    return {
        "tokens_before": tokens,
        "accepted_length": lengths,
        "paired_difference_to_all": pairs,
    }


def _folder(run: Path) -> Path:
    folder = head_in(str(run))
    if folder is None:
        raise UserError(f"start: no head in {run}; give a run folder or a head folder")
    return folder


def _prompt(
    asked: list[list[dict[str, Any]]], number: int, tokenizer: Any, context: int
) -> list[int]:
    """The tokens of a question behind so many of other chats: those that follow it in the file,
    the same ones at every length as far as they reach."""
    turn = asked[number % len(asked)][:1]
    others = [*asked[number + 1 :], *asked[:number]]
    long = next(long_chats(others, tokenizer, context - length(tokenizer, turn)), [])
    text = tokenizer.apply_chat_template([*long, *turn], tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _summary(values: list[float]) -> dict[str, Any]:
    low, high = interval(values)
    return {"mean": sum(values) / len(values), "low": low, "high": high, "each": values}


@entry("bench_context", WindowConfig)
def main(cfg: WindowConfig) -> None:
    """Measure and write OUT_DIR/window.json."""
    path = Path(cfg.out_dir) / "window.json"
    told = {
        "command": "python train/bench_context.py " + " ".join(sys.argv[1:]),
        "environment": {"torch": torch.__version__, "commit": git_commit()},
    }
    report: dict[str, Any] = {}
    for report in measure(cfg):
        path.write_text(json.dumps({**report, **told}, indent=1) + "\n")
    for context, by in report["contexts"].items():
        lengths = ", ".join(
            f"{name} {v['mean']:.2f} [{v['low']:.2f}, {v['high']:.2f}]"
            for name, v in by["accepted_length"].items()
        )
        print(f"{context} tokens before the answer: {lengths}")
    print(path)


if __name__ == "__main__":
    main()
