"""The typed configuration of a training run. conf/*.yaml fills it; a doc line stands above
every key.

A key that does not change what is learned stands in LOGISTICS of train/resuming.py as well.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Interval
from omegaconf import OmegaConf
from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from outrider.conf.paths import no_file, no_folder
from outrider.conf.rules import (
    AboveZero,
    BelowOne,
    Device,
    FileName,
    Inside,
    NotEmpty,
    NotNegative,
    OneOrMore,
    Seed,
    Share,
    Wandb,
    ZeroOrMore,
    one_of,
)
from outrider.conf.typed import ALSO, default
from outrider.decode.models.config import DTYPES, AutoDtype, TargetConfig
from outrider.heads.config import HeadConfig
from outrider.heads.folders import no_head

TRACKERS = ("wandb", "tensorboard", "mlflow", "trackio")

MOST_PROFILED = 100  # steps of a window of the profiler: a trace of more opens nowhere


def _summed(value: str) -> str:
    """The rule of a dtype in which losses are sums."""
    if ALSO.get(value, value) == "float16":
        why = f"{value} overflows, since losses are sums and nothing scales them; choose bfloat16"
        raise PydanticCustomError("value_error", "", {"error": why})
    return str(one_of(DTYPES).func(value))  # type: ignore[call-arg]


def profile_problems(window: list[int]) -> list[str]:
    """What is wrong with the key `profile`."""
    if not window:
        return []
    good = len(window) == 2 and 1 <= window[0] <= window[1]
    if not good:
        return [f"profile: {window} is no [FROM,TO]; give two steps, counted from 1"]
    count = window[1] - window[0] + 1
    if count > MOST_PROFILED:
        return [
            f"profile: {count} steps make a trace that opens nowhere; give {MOST_PROFILED} or fewer"
        ]
    return []


@dataclass(frozen=True)
class RowsConfig:
    """What becomes of chats, wherever they come from."""

    # longer rows are cut here, tokens
    max_length: Annotated[int, Ge(8)] = 1024
    # share of rows kept out of training for decoded acceptance, chosen by a hash of their
    # prompt, and at least 8 where there are 100 rows; or a file of such rows; 0 = none
    held_out: BelowOne | FileName = 0.03
    # chat: a chat is a row; rows: one row for each assistant turn, ending with it, as reasoning
    # models see a chat when they answer (templates drop the reasoning of earlier turns)
    turns: Literal["chat", "rows"] = "chat"
    # supervise the last assistant turn of a chat alone
    last_turn_only: bool = False
    # further arguments of the chat template, such as {enable_thinking: false}
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    # lines of the file (rows of a data set) that are not trained on, though they can be read;
    # FILE:LINE where there are several
    skip: list[int | str] = field(default_factory=list)
    # stop when a larger share of the rows is malformed
    max_bad_fraction: Share = 0.001
    # rows are sorted by length inside windows of this many batches: less padding, steps of very
    # different weight; 1 = no sorting across batches
    window: OneOrMore = 1
    # keep the tokens in the cache folder for the next run, and read them from there: they need
    # not fit into memory
    cache: bool = True
    # processes that tokenize; 0 = as many as there are cores
    workers: ZeroOrMore = 0
    # minutes to wait for another process or rank that prepares data; 0 = no limit
    wait: NotNegative = 0.0
    # put rows end to end into sequences of up to max_length tokens; none sees another, and the
    # batches stay the same
    packing: bool = False


@dataclass(frozen=True)
class DataConfig(RowsConfig):
    """Where the training text comes from."""

    # jsonl (a file of chats or texts), hub (a `datasets` name or local folder), text (a plain
    # text file)
    kind: Literal["jsonl", "hub", "text"] = "jsonl"
    # jsonl, text: the file, or [FILE,FILE]; hub: a local folder in place of a name
    path: str | list[str] = ""
    # of several files: what share of an epoch's rows each gives, relative to the others; empty
    # = every row of each once
    weights: list[AboveZero] = field(default_factory=list)
    # hub: repository of a data set
    name: str = ""
    # hub: split
    split: str = "train"
    # hub: branch, tag or commit
    revision: str = "main"
    # hub: read the files one after the other instead of downloading and converting all of them
    #     first
    streaming: bool = False
    # folder of scripts/cache_features.py: read the target's features there; empty = run the
    # target
    features: str = ""

    def validate(self) -> list[str]:
        """Problems as "key: value; rule; fix"."""
        found = []
        if self.kind in ("jsonl", "text") and not all(self.paths):
            found.append("path: is empty; set data.path=FILE")
        if self.kind == "hub" and len(self.paths) > 1:
            found.append("path: several only with data=jsonl and data=text; give one folder")
        if self.weights and len(self.weights) != len(self.paths):
            found.append(
                f"weights: {len(self.weights)} for {len(self.paths)} files; give one for each file "
                "of data.path, or none"
            )
        if self.kind == "hub" and not (self.name or self.path):
            found.append("name: is empty; set data.name=REPOSITORY or data.path=FOLDER")
        for line in self.skip:
            if not re.fullmatch(r"(.+:)?\d+", str(line)) or (
                isinstance(line, str) and line.isdigit()
            ):
                found.append(f"skip: {line!r} is no line; give LINE or FILE:LINE as messages do")
        taken = {"tokenize", "tools", "add_generation_prompt", "return_dict", "chat_template"}
        if wrong := sorted(taken & set(self.chat_template_kwargs)):
            found.append(f"chat_template_kwargs: {wrong[0]} is set here; leave it out")
        if self.streaming and self.kind != "hub":
            found.append(
                f"streaming: only for data=hub; a {self.kind} file is read line by line in any case"
            )
        if self.streaming and not self.cache:
            found.append("streaming: needs data.cache=true, where the tokens are kept")
        return found

    def absent(self) -> list[str]:
        """What is named and not there, as "key: value; fix"."""
        found = []
        if self.kind != "hub":
            fix = f"give a {'JSONL' if self.kind == 'jsonl' else 'text'} file"
            found += [line for path in self.paths for line in no_file("path", path, fix)]
        if isinstance(self.held_out, str) and not Path(self.held_out).expanduser().is_file():
            found.append(f"held_out: {self.held_out} is neither a file nor a share of the rows")
        if self.features:
            fix = "give one that scripts/cache_features.py wrote, or leave it out"
            found += no_folder("features", self.features, fix)
        return found

    @property
    def paths(self) -> list[str]:
        """data.path as a list, never empty."""
        return [*self.path] or [""] if isinstance(self.path, list) else [self.path]


@dataclass(frozen=True)
class OptimConfig:
    """AdamW and its schedule."""

    # peak learning rate; null = by the width of the target, 1e-3 up to 576 and as 1 / width above,
    # six times that for a LoRA on a frozen head
    lr: AboveZero | None = None
    # decay of the first moment
    beta1: BelowOne = 0.9
    # decay of the second moment
    beta2: BelowOne = 0.95
    # added to the root of the second moment
    eps: Inside = 1e-8
    # decoupled weight decay
    weight_decay: BelowOne = 0.0
    # share of the steps in which the rate rises from 0
    warmup: BelowOne = 0.05
    # cosine, linear or constant, after the warm-up
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    # the schedule ends at this share of the peak
    final: Share = 0.05
    # gradients are scaled down to this norm; 0 = never
    clip: NotNegative = 1.0


@dataclass(frozen=True)
class EvalKeys:
    """How acceptance is measured while training."""

    # stop when accepted length has not risen for so many evaluations in a row; 0 = never
    patience: ZeroOrMore = 0
    # number of held-out prompts
    prompts: ZeroOrMore = 16
    # longest answer, tokens
    max_new_tokens: OneOrMore = 64
    # prompts decoded at the same time
    batch_size: OneOrMore = 1
    # held-out rows on which acceptance by rank is measured (it shapes the tree)
    calibration_rows: ZeroOrMore = 64
    # prompts of the parity gate at the end of the run: training, decoding and the saved head
    # must agree; 0 = no gate
    parity: ZeroOrMore = 8


@dataclass(frozen=True)
class EvalConfig(EvalKeys):
    """Decoded acceptance on held-out prompts while training."""

    # evaluate every so many steps, and at the end; 0 = never
    every: ZeroOrMore = 200
    # sampling temperature; 0 = greedy
    temperature: NotNegative = 0.0
    # shape of the draft that ranks checkpoints: chain or tree; empty = the head's own
    shape: Literal["", "chain", "tree"] = ""


@dataclass(frozen=True)
class TrainConfig(AutoDtype):
    """A training run."""

    # the frozen target
    target: TargetConfig
    # training text
    data: DataConfig
    # the run folder: head/, best/, checkpoints/step-N/, metrics.jsonl
    out_dir: NotEmpty
    # the draft head
    head: HeadConfig
    # optimizer steps of the whole run; the schedule ends there
    steps: Annotated[int, Interval(ge=0, le=2**53)] = 0
    # in place of steps: how often an epoch of batches is trained on; 0.5 is half of one
    epochs: Annotated[float, Interval(ge=0, le=1e9)] = 0.0
    # train for at most so many minutes, those of evaluations and saves apart; the schedule ends
    # there, or with steps or epochs (8 where neither is given) if they come first; 0 = no limit
    minutes: NotNegative = 0.0
    # run or head folder, or hub:OWNER/NAME[@REVISION], whose weights the head starts from; the
    # optimizer is new; empty = a fresh head
    start: str = ""
    # optimizer and schedule
    optim: OptimConfig = field(default_factory=OptimConfig)
    # decoded acceptance while training
    eval: EvalConfig = field(default_factory=EvalConfig)
    # order of the rows, and every random number of the run
    seed: Seed = 0
    # rows of an optimizer step, over all ranks
    batch_size: OneOrMore = 32
    # most rows of one forward pass of a rank; 0 = all of its rows
    micro_batch: ZeroOrMore = 0
    # most tokens of one forward pass of a rank, padding included, one row in any case; 0 = any
    # number
    micro_tokens: ZeroOrMore = 0
    # dtype of the target and of the matmuls; master weights are float32: auto (bfloat16, but
    # float32 on a CPU without instructions for it), bfloat16, float32, float64
    dtype: Annotated[str, AfterValidator(_summed)] = "bfloat16"
    # cpu, cuda, cuda:N (one process), or empty for what is there
    device: Device = ""
    # spread the target's layers over the ranks (FSDP2), for targets that do not fit on one
    # device
    shard_target: bool = False
    # with shard_target: so many neighbouring ranks hold a copy together, such as those of a
    # node; 0 = all ranks hold one
    shard_group: ZeroOrMore = 0
    # save a checkpoint every so many steps, and at the end; 0 = only at the end
    save_every: ZeroOrMore = 500
    # write checkpoints in a thread beside the training; costs host memory of three times the
    # head
    async_save: bool = True
    # checkpoints to keep, at least 2
    keep: Annotated[int, Ge(2)] = 2
    # write a line of metrics every so many steps
    log_every: OneOrMore = 10
    # stop at this many steps in a row with rows whose loss or gradient is not finite; in fewer
    # such rows are left out; 1 = stop at the first
    bad_steps: OneOrMore = 8
    # [FROM,TO]: record these steps, counted from 1, with torch.profiler; the trace lies in
    # OUT/profile
    profile: list[int] = field(default_factory=list)
    # where metrics go beside metrics.jsonl: wandb, tensorboard, mlflow, trackio
    trackers: list[Annotated[str, one_of(TRACKERS)]] = field(default_factory=list)
    # off, online or offline: wandb in one of its modes, and no error where it is not installed
    wandb: Wandb = "off"
    # project of wandb and trackio, experiment of mlflow
    wandb_project: str = "outrider"

    def validate(self) -> list[str]:
        """Problems as "key: value; rule; fix"."""
        found = []
        if not (self.steps or self.epochs or self.minutes):
            found.append("steps: is required; set steps=N, or epochs=E, or minutes=M")
        if self.steps and self.epochs:
            found.append(f"steps: {self.steps} beside epochs={self.epochs:g}; set the other to 0")
        return found + profile_problems(self.profile)

    def absent(self) -> list[str]:
        """What is named and not there, as "key: value; fix"."""
        found = [f"data.{line}" for line in self.data.absent()]
        return found + [f"start: {line}" for line in no_head(self.start)]


@dataclass(frozen=True)
class ValidateConfig(TrainConfig):
    """A run of any kind of head: conf/validate.yaml."""

    # the keys of conf/head/KIND.yaml
    head: dict[str, Any]  # type: ignore[assignment]
    # plan the run for GPUs that are not here: memory by part and hours, from the configs alone
    dry_run: bool = False
    # of a dry run: how many GPUs
    gpus: OneOrMore = 8
    # of a dry run: which
    gpu: Literal[
        "h100-80gb",
        "h200-141gb",
        "b200-180gb",
        "a100-80gb",
        "a100-40gb",
        "l40s-48gb",
        "rtx4090-24gb",
    ] = "h100-80gb"
    # of a dry run: rows of the training data, which are not read
    rows: OneOrMore = 500_000
    # of a dry run: tokens of a row on average; some 2,500 where the target thinks before it answers
    row_tokens: OneOrMore = 800
    # of a dry run: share of the tokens that is supervised
    supervised: Annotated[float, Interval(gt=0, le=1)] = 0.8

    @classmethod
    def exact(cls, cfg: Any) -> type[ValidateConfig]:
        """Itself; a dry run needs no data."""
        if cfg.get("dry_run") and OmegaConf.is_missing(cfg.data, "path"):
            cfg.data.path = "none"
        return cls

    def absent(self) -> list[str]:
        """See TrainConfig; a dry run needs no file."""
        return [] if self.dry_run else super().absent()

    def auto(self) -> dict[str, str]:
        """See AutoDtype; the GPUs of a dry run are not here."""
        return {"dtype": "bfloat16"} if self.dry_run else super().auto()


def _leaves(cfg: Any, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any], Any]]:
    for item in dataclasses.fields(cfg):
        value = getattr(cfg, item.name)
        if dataclasses.is_dataclass(value):
            yield from _leaves(value, f"{prefix}{item.name}.")
        else:
            yield prefix + item.name, item, value


def flat(cfg: Any) -> dict[str, Any]:
    """Dotted key -> value of a config dataclass."""
    return {key: value for key, _, value in _leaves(cfg)}


def defaults(cfg: Any) -> dict[str, Any]:
    """Dotted key -> default of every key of a config dataclass that has one."""
    found = {key: default(item) for key, item, _ in _leaves(cfg)}
    return {key: value for key, value in found.items() if value is not dataclasses.MISSING}
