"""The typed configuration of a training run. conf/*.yaml fills it; a doc line stands above
every key.

Keys are either *meaning* (what is learned: a resumed run refuses to change them) or
*logistics* (LOGISTICS below).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from dataclasses import dataclass, field
from typing import Any

from decode.models.load import DTYPES, TargetConfig
from heads.base import HeadConfig
from heads.eagle.config import EagleConfig
from heads.parallel.medusa import MedusaConfig
from heads.small_lm.config import SmallLMConfig
from train.measure.profile import problems as profile_problems

WANDB = ("off", "online", "offline")
TRACKERS = ("wandb", "tensorboard", "mlflow", "trackio")

# Keys that may differ when a run is resumed: they change where, when and how fast, not what is
# learned. Data are compared by the hash of their tokens, targets by their identity, so their
# names and folders are logistics too.
LOGISTICS = (
    "out_dir",
    "epochs",
    "start",
    "save_every",
    "async_save",
    "keep",
    "log_every",
    "bad_steps",
    "micro_batch",
    "micro_tokens",
    "profile",
    "trackers",
    "wandb",
    "wandb_project",
    "eval",
    "device",
    "shard_target",
    "shard_group",
    "target.path",
    "target.name",
    "target.revision",
    "target.kind",
    "target.attn",
    "data.path",
    "data.name",
    "data.split",
    "data.revision",
    "data.kind",
    "data.max_bad_fraction",
    "data.cache",
    "data.streaming",
    "data.workers",
    "data.wait",
    "data.features",
    "data.packing",
    "head.activation_checkpointing",
    "head.chunk",
    "head.compile",
    "head.shape",
    "head.nodes",
    "head.depth",
    "head.width",
    "head.tree_draw",
)


# Keys that change what is learned and may all the same differ when a run is resumed: from there
# on the run is that of the new value.
REPLANNED = {
    "data.skip": "the order of the rows is drawn anew",
    "optim.lr": "the rate follows the new peak",
    "steps": "the schedule is that of a run of so many steps",
}


@dataclass
class DataConfig:
    """Where the training text comes from."""

    # jsonl (a file of chats or texts), hub (a `datasets` name or local folder), text (a plain
    # text file), rounds (a folder of scripts/log_rounds.py)
    kind: str = "jsonl"
    # jsonl, text: the file, or [FILE,FILE]; rounds: the folder; hub: a local folder in place
    # of a name
    path: str | list[str] = ""
    # of several files: what share of an epoch's rows each gives, relative to the others; empty
    # = every row of each once
    weights: list[float] = field(default_factory=list)
    # hub: repository of a data set
    name: str = ""
    # hub: split
    split: str = "train"
    # hub: branch, tag or commit
    revision: str = "main"
    # longer rows are cut here, tokens
    max_length: int = 1024
    # share of rows kept out of training for decoded acceptance, chosen by a hash of their
    # prompt; or a file of such rows
    held_out: float | str = 0.03
    # chat: a chat is a row; rows: one row for each assistant turn, ending with it, as reasoning
    # models see a chat when they answer (templates drop the reasoning of earlier turns)
    turns: str = "chat"
    # supervise the last assistant turn of a chat alone
    last_turn_only: bool = False
    # further arguments of the chat template, such as {enable_thinking: false}
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    # lines of the file (rows of a data set) that are not trained on, though they can be read;
    # FILE:LINE where there are several
    skip: list[int | str] = field(default_factory=list)
    # stop when a larger share of the rows is malformed
    max_bad_fraction: float = 0.001
    # rows are sorted by length inside windows of this many batches: less padding, steps of very
    # different weight; 1 = no sorting across batches
    window: int = 1
    # hub: read the files one after the other instead of downloading and converting all of them
    #     first
    streaming: bool = False
    # keep the tokens in the cache folder for the next run, and read them from there: they need
    # not fit into memory
    cache: bool = True
    # processes that tokenize; 0 = as many as there are cores
    workers: int = 0
    # minutes to wait for another process or rank that prepares data; 0 = no limit
    wait: float = 0.0
    # put rows end to end into sequences of up to max_length tokens; none sees another, and the
    # batches stay the same
    packing: bool = False
    # folder of scripts/cache_features.py: read the target's features there; empty = run the
    # target
    features: str = ""

    def validate(self) -> list[str]:
        """Problems as "key: value; rule; fix"."""
        found = []
        if self.kind not in ("jsonl", "hub", "text", "rounds"):
            found.append(f"kind: {self.kind!r}; choose jsonl, hub, text or rounds")
        if self.kind in ("jsonl", "text", "rounds") and not all(self.paths):
            found.append("path: is empty; set data.path=FILE")
        if self.kind == "rounds" and isinstance(self.held_out, str):
            found.append("held_out: a file only with data=jsonl or data=text; give a share")
        if self.kind in ("hub", "rounds") and len(self.paths) > 1:
            found.append("path: several only with data=jsonl and data=text; give one folder")
        if self.weights and len(self.weights) != len(self.paths):
            found.append(
                f"weights: {len(self.weights)} for {len(self.paths)} files; give one for each file "
                "of data.path, or none"
            )
        if not all(0 < weight < math.inf for weight in self.weights):
            found.append(f"weights: {self.weights} are not all above 0; leave a file out instead")
        if self.kind == "hub" and not (self.name or self.path):
            found.append("name: is empty; set data.name=REPOSITORY or data.path=FOLDER")
        for line in self.skip:
            if not re.fullmatch(r"(.+:)?\d+", str(line)) or (
                isinstance(line, str) and line.isdigit()
            ):
                found.append(f"skip: {line!r} is no line; give LINE or FILE:LINE as messages do")
        if self.turns not in ("chat", "rows"):
            found.append(f"turns: {self.turns!r}; choose chat or rows")
        taken = {"tokenize", "tools", "add_generation_prompt", "return_dict", "chat_template"}
        if wrong := sorted(taken & set(self.chat_template_kwargs)):
            found.append(f"chat_template_kwargs: {wrong[0]} is set here; leave it out")
        if self.max_length < 8:
            found.append(f"max_length: {self.max_length} is below 8; give 8 or more tokens")
        if not isinstance(self.held_out, str) and not 0 <= self.held_out < 1:
            found.append(f"held_out: {self.held_out} is outside [0, 1); 0.03 is usual")
        if self.held_out == "":
            found.append("held_out: is empty; give a file, or a share of the rows such as 0.03")
        if not 0 <= self.max_bad_fraction <= 1:
            found.append(
                f"max_bad_fraction: {self.max_bad_fraction} is outside [0, 1]; 0.001 is usual"
            )
        if self.streaming and self.kind != "hub":
            found.append(
                f"streaming: only for data=hub; a {self.kind} file is read line by line in any case"
            )
        if self.streaming and not self.cache:
            found.append("streaming: needs data.cache=true, where the tokens are kept")
        if self.workers < 0:
            found.append(f"workers: {self.workers} is below 0; 0 takes all cores")
        if not 0 <= self.wait < math.inf:
            found.append(f"wait: {self.wait} is no number of minutes; 0 waits without limit")
        if self.window < 1:
            found.append(f"window: {self.window} is below 1; give 1 or more batches")
        return found

    @property
    def paths(self) -> list[str]:
        """data.path as a list, never empty."""
        return [*self.path] or [""] if isinstance(self.path, list) else [self.path]


@dataclass
class OptimConfig:
    """AdamW and its schedule."""

    # peak learning rate; null = by the width of the target, 1e-3 up to 576 and as 1 / width above
    lr: float | None = None
    # decay of the first moment
    beta1: float = 0.9
    # decay of the second moment
    beta2: float = 0.95
    # added to the root of the second moment
    eps: float = 1e-8
    # decoupled weight decay
    weight_decay: float = 0.0
    # share of the steps in which the rate rises from 0
    warmup: float = 0.05
    # cosine, linear or constant, after the warm-up
    schedule: str = "cosine"
    # the schedule ends at this share of the peak
    final: float = 0.05
    # gradients are scaled down to this norm; 0 = never
    clip: float = 1.0

    def validate(self) -> list[str]:
        """Problems as "key: value; rule; fix"."""
        rules = {
            "lr": (
                self.lr is None or 0 < self.lr < math.inf,
                "must be above 0",
                "null takes one for the size of the target",
            ),
            "beta1": (0 <= self.beta1 < 1, "is outside [0, 1)", "0.9 is usual"),
            "beta2": (0 <= self.beta2 < 1, "is outside [0, 1)", "0.95 is usual"),
            "eps": (0 < self.eps < 1, "is outside (0, 1)", "1e-8 is usual"),
            "weight_decay": (0 <= self.weight_decay < 1, "is outside [0, 1)", "0 is usual"),
            "warmup": (
                0 <= self.warmup < 1,
                "is outside [0, 1)",
                "it is a share of the steps; 0.05 is usual",
            ),
            "schedule": (
                self.schedule in ("cosine", "linear", "constant"),
                "is unknown",
                "choose cosine, linear or constant",
            ),
            "final": (0 <= self.final <= 1, "is outside [0, 1]", "0.05 is usual"),
            "clip": (0 <= self.clip < math.inf, "is below 0", "1.0 is usual, 0 switches it off"),
        }
        return [
            f"{k}: {getattr(self, k)} {why}; {fix}"
            for k, (good, why, fix) in rules.items()
            if not good
        ]


@dataclass
class EvalConfig:
    """Decoded acceptance on held-out prompts while training."""

    # evaluate every so many steps, and at the end; 0 = never
    every: int = 200
    # stop when accepted length has not risen for so many evaluations in a row; 0 = never
    patience: int = 0
    # number of held-out prompts
    prompts: int = 16
    # longest answer, tokens
    max_new_tokens: int = 64
    # sampling temperature; 0 = greedy
    temperature: float = 0.0
    # shape of the draft that ranks checkpoints: chain or tree; empty = the head's own
    shape: str = ""
    # prompts decoded at the same time
    batch_size: int = 1
    # held-out rows on which acceptance by rank is measured (it shapes the tree)
    calibration_rows: int = 64
    # prompts of the parity gate at the end of the run: training, decoding and the saved head
    # must agree; 0 = no gate
    parity: int = 8

    def validate(self) -> list[str]:
        """Problems as "key: value; rule; fix"."""
        lows = (
            ("every", 0),
            ("patience", 0),
            ("prompts", 0),
            ("max_new_tokens", 1),
            ("batch_size", 1),
            ("calibration_rows", 0),
            ("parity", 0),
        )
        found = [
            f"{k}: {getattr(self, k)} is below {low}; give {low} or more"
            for k, low in lows
            if getattr(self, k) < low
        ]
        if self.temperature < 0:
            found.append(f"temperature: {self.temperature} is below 0; 0 is greedy")
        if self.shape not in ("", "chain", "tree"):
            found.append(f"shape: {self.shape!r}; choose chain, tree or nothing")
        return found


@dataclass
class TrainConfig:
    """A training run."""

    # the frozen target
    target: TargetConfig
    # training text
    data: DataConfig
    # the run folder: head/, best/, checkpoints/step-N/, metrics.jsonl
    out_dir: str
    # the draft head
    head: HeadConfig
    # optimizer steps of the whole run; the schedule ends there
    steps: int = 0
    # in place of steps: how often an epoch of batches is trained on; 0.5 is half of one
    epochs: float = 0.0
    # run or head folder whose weights the head starts from; the optimizer is new; empty = a
    # fresh head
    start: str = ""
    # optimizer and schedule
    optim: OptimConfig = field(default_factory=OptimConfig)
    # decoded acceptance while training
    eval: EvalConfig = field(default_factory=EvalConfig)
    # order of the rows, and every random number of the run
    seed: int = 0
    # rows of an optimizer step, over all ranks
    batch_size: int = 32
    # most rows of one forward pass of a rank; 0 = all of its rows
    micro_batch: int = 0
    # most tokens of one forward pass of a rank, padding included, one row in any case; 0 = any
    # number
    micro_tokens: int = 0
    # dtype of the target and of the matmuls; master weights are float32: float32, bfloat16,
    # float64
    dtype: str = "bfloat16"
    # cpu, cuda, cuda:N (one process), or empty for what is there
    device: str = ""
    # spread the target's layers over the ranks (FSDP2), for targets that do not fit on one
    # device
    shard_target: bool = False
    # with shard_target: so many neighbouring ranks hold a copy together, such as those of a
    # node; 0 = all ranks hold one
    shard_group: int = 0
    # save a checkpoint every so many steps, and at the end; 0 = only at the end
    save_every: int = 500
    # write checkpoints in a thread beside the training; costs host memory of three times the
    # head
    async_save: bool = True
    # checkpoints to keep, at least 2
    keep: int = 2
    # write a line of metrics every so many steps
    log_every: int = 10
    # stop at this many steps in a row with rows whose loss or gradient is not finite; in fewer
    # such rows are left out; 1 = stop at the first
    bad_steps: int = 8
    # [FROM,TO]: record these steps, counted from 1, with torch.profiler; the trace lies in
    # OUT/profile
    profile: list[int] = field(default_factory=list)
    # where metrics go beside metrics.jsonl: wandb, tensorboard, mlflow, trackio
    trackers: list[str] = field(default_factory=list)
    # off, online or offline: wandb in one of its modes, and no error where it is not installed
    wandb: str = "off"
    # project of wandb and trackio, experiment of mlflow
    wandb_project: str = "outrider"

    def validate(self) -> list[str]:
        """Problems as "key: value; rule; fix"."""
        lows = (
            ("steps", 0),
            ("epochs", 0),
            ("batch_size", 1),
            ("micro_batch", 0),
            ("micro_tokens", 0),
            ("save_every", 0),
            ("keep", 2),
            ("log_every", 1),
            ("bad_steps", 1),
            ("shard_group", 0),
        )
        found = [
            f"{k}: {getattr(self, k)} is below {low}; give {low} or more"
            for k, low in lows
            if getattr(self, k) < low
        ]
        if not self.steps and not self.epochs:
            found.append("steps: is required; set steps=N, or epochs=E")
        if self.steps > 0 and self.epochs > 0:
            found.append(
                f"steps: {self.steps} beside epochs={self.epochs:g}; leave one out (steps=0)"
            )
        for k, most in (("steps", 2**53), ("epochs", 1e9)):
            if getattr(self, k) > most:
                found.append(f"{k}: {getattr(self, k):g} is above {most:g}; give fewer")
        if not self.out_dir:
            found.append("out_dir: is empty; set out_dir=runs/NAME")
        if self.dtype not in DTYPES:
            found.append(f"dtype: {self.dtype!r}; choose {', '.join(DTYPES)}")
        if self.dtype == "float16":
            found.append(
                "dtype: float16 overflows, since losses are sums and nothing scales them; choose "
                "bfloat16"
            )
        if not re.fullmatch(r"(cpu|cuda(:\d+)?)?", self.device):
            found.append(f"device: {self.device!r}; choose cpu, cuda, cuda:N or nothing")
        if self.wandb not in WANDB:
            found.append(f"wandb: {self.wandb!r}; choose {', '.join(WANDB)}")
        if wrong := [name for name in self.trackers if name not in TRACKERS]:
            found.append(f"trackers: {wrong[0]!r}; choose {', '.join(TRACKERS)}")
        found += profile_problems(self.profile)
        return found


@dataclass
class MedusaRun(TrainConfig):
    """A Medusa run: conf/medusa.yaml."""

    head: MedusaConfig = field(default_factory=MedusaConfig)


@dataclass
class EagleRun(TrainConfig):
    """An EAGLE run: conf/eagle.yaml."""

    head: EagleConfig = field(default_factory=EagleConfig)


@dataclass
class DraftRun(TrainConfig):
    """A run of a separate small draft model: conf/draft.yaml."""

    head: SmallLMConfig = field(default_factory=SmallLMConfig)


def flat(cfg: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value of a config dataclass."""
    found: dict[str, Any] = {}
    for item in dataclasses.fields(cfg):
        value = getattr(cfg, item.name)
        if dataclasses.is_dataclass(value):
            found |= flat(value, f"{prefix}{item.name}.")
        else:
            found[prefix + item.name] = value
    return found


def defaults(cfg: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> default of every key of a config dataclass that has one."""
    found: dict[str, Any] = {}
    for item in dataclasses.fields(cfg):
        value = getattr(cfg, item.name)
        if dataclasses.is_dataclass(value):
            found |= defaults(value, f"{prefix}{item.name}.")
        elif item.default is not dataclasses.MISSING:
            found[prefix + item.name] = item.default
        elif item.default_factory is not dataclasses.MISSING:
            found[prefix + item.name] = item.default_factory()
    return found


def is_logistics(key: str) -> bool:
    """Whether a dotted key may change between a run and its resumption."""
    return any(key == known or key.startswith(known + ".") for known in LOGISTICS)


def meaning_hash(cfg: Any) -> str:
    """sha256 over the keys that decide what is learned."""
    kept = {k: v for k, v in flat(cfg).items() if not is_logistics(k)}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()
