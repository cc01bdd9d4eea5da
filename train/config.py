"""The typed configuration of a training run. conf/*.yaml fills it; a doc line is above
every key.

A key that does not change what is learned is in MAY_CHANGE of train/resuming.py as well.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Interval
from omegaconf import DictConfig, OmegaConf
from pydantic import AfterValidator

from outrider.conf.errors import UserError
from outrider.conf.rules import (
    AboveZero,
    BelowOne,
    Device,
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
from outrider.conf.typed import default
from outrider.decode.models.config import AUTO, DTYPES, AutoDtype, TargetConfig
from outrider.heads.config import HeadConfig
from outrider.heads.folders import no_head
from outrider.train.data.config import DataConfig

# of a dry run: bytes of memory, name in the table of peaks (train/measure.py)
GPUS = {
    "h100-80gb": (80e9, "H100"),
    "h200-141gb": (141e9, "H200"),
    "b200-180gb": (180e9, "B200"),
    "a100-80gb": (80e9, "A100"),
    "a100-40gb": (40e9, "A100"),
    "l40s-48gb": (47e9, "L40S"),
    "rtx4090-24gb": (24e9, "RTX 4090"),
}
TRACKERS = ("wandb", "tensorboard", "mlflow", "trackio")


def _summed(value: str) -> str:
    """Return the rule of a dtype in which losses are sums."""
    if value in ("float16", "fp16", "half"):
        why = "overflows, since losses are sums and nothing scales them; choose bfloat16"
        raise ValueError(why)
    return str(one_of((*DTYPES, AUTO)).func(value))  # type: ignore[call-arg]


@dataclass(frozen=True)
class OptimConfig:
    """AdamW and its schedule."""

    # peak learning rate; null = by the width of the target, 1e-3 up to 576 and as 1 / width
    # above, six times that for a LoRA on a frozen head
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
class EvalConfig:
    """Decoded acceptance on held-out prompts while training."""

    # evaluate every so many steps, and at the end; 0 = never
    every: ZeroOrMore = 200
    # sampling temperature; 0 = greedy
    temperature: NotNegative = 0.0
    # shape of the draft that ranks checkpoints: chain or tree; empty = the head's own
    shape: Literal["", "chain", "tree"] = ""
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
    # auto: on a GPU the target's layers, and what stands between the products of the head's,
    # are compiled for training passes, where the first one has the same loss and gradients;
    # none: they run as they are
    compile: Literal["auto", "none"] = "auto"
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
    # checkpoints to keep, at least 2
    keep: Annotated[int, Ge(2)] = 2
    # write a line of metrics every so many steps
    log_every: OneOrMore = 10
    # stop at this many steps in a row whose loss or gradient is not finite; fewer make no
    # update; 1 = stop at the first
    bad_steps: OneOrMore = 8
    # [FROM,TO]: record these steps, counted from 1, with torch.profiler; the trace is in
    # OUT/profile
    profile: list[int] = field(default_factory=list)
    # where metrics go beside metrics.jsonl: wandb, tensorboard, mlflow, trackio
    trackers: list[Annotated[str, one_of(TRACKERS)]] = field(default_factory=list)
    # off, online or offline: wandb in one of its modes, and no error where it is not installed
    wandb: Wandb = "off"
    # project of wandb and trackio, experiment of mlflow
    wandb_project: str = "outrider"

    def validate(self) -> list[str]:
        """Return problems as "key: value; rule; fix"."""
        found = []
        if not (self.steps or self.epochs or self.minutes):
            found.append("steps: is required; set steps=N, or epochs=E, or minutes=M")
        if self.steps and self.epochs:
            found.append(f"steps: {self.steps} beside epochs={self.epochs:g}; set the other to 0")
        first, last = self.profile if len(self.profile) == 2 else (0, 0)
        if not (1 <= first <= last < first + 100 or not self.profile):
            found.append(
                f"profile: {self.profile} is no [FROM,TO]; give two steps, counted from 1, and not "
                "over 100 of them: no viewer opens a larger trace"
            )
        return found

    def absent(self) -> list[str]:
        """Return what is named and not there, as "key: value; fix"."""
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
    # of a dry run: which, such as h200-141gb
    gpu: Annotated[str, one_of(GPUS)] = "h100-80gb"
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


def flat(cfg: Any, of: Callable[[Any, Any], Any] = lambda _, value: value) -> dict[str, Any]:
    """Return dotted key -> value of a config dataclass. of: (field, value) -> what to take."""
    found: dict[str, Any] = {}
    for item in dataclasses.fields(cfg):
        value = getattr(cfg, item.name)
        if dataclasses.is_dataclass(value):
            found |= {f"{item.name}.{key}": one for key, one in flat(value, of).items()}
        else:
            found[item.name] = of(item, value)
    return found


def defaults(cfg: Any) -> dict[str, Any]:
    """Return dotted key -> default of every key of a config dataclass that has one."""
    found = flat(cfg, lambda item, _: default(item))
    return {key: value for key, value in found.items() if value is not dataclasses.MISSING}


# The schedule
# -------------------------------------------------------------------------------------------


def learning_rate(step: int, steps: int, cfg: OptimConfig) -> float:
    """Return the rate of update number `step` (0-based) of `steps`: linear warm-up, then
    cosine, linear or constant."""
    assert cfg.lr is not None, "chosen by the target's width before"
    warm = round(cfg.warmup * steps)
    if step < warm:
        return cfg.lr * (step + 1) / (warm + 1)
    done = (step - warm) / max(1, steps - 1 - warm)
    if cfg.schedule == "constant":
        return cfg.lr
    shape = 1 - done if cfg.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return cfg.lr * (cfg.final + (1 - cfg.final) * shape)


def planned_steps(done: int, seconds: float, steps: int, minutes: float) -> int:
    """Return the steps of a run: `steps`, or with `minutes` (0 = no limit) at most as many
    as fit in at the pace of the first `done`, which took `seconds`."""
    if not minutes or not seconds or done < 1:
        return steps
    return max(done + 1, min(steps, int(60 * minutes * done / seconds)))


def over(done: int, seconds: float, minutes: float) -> bool:
    """Return whether `minutes` hold no step beside the first `done`, which took `seconds`,
    and the one behind them."""
    return bool(minutes and done > 0) and seconds * (done + 2) / done > 60 * minutes


def usual_rate(width: int, narrows: bool = True) -> float:
    """Return the peak rate where nobody gives one, for a target of that width, to two digits.

    A layer under AdamW wants its rate as 1 / width (Yang et al. 2022, "Tensor Programs V"),
    and 1e-3 was found at 576. That is 1.4e-4 at 4,096, where EAGLE heads are trained with
    5e-5 to 2e-4. narrows: False for heads that start as the target's own and whose authors
    keep 1e-3 at 4,096 (Medusa).
    """
    return float(f"{1e-3 * min(1.0, 576 / width):.2g}") if narrows else 1e-3


# The keys of each entry point under train/: those above and those of its heads
# -------------------------------------------------------------------------------------------

# kind of head -> the script under train/ that trains it, by whose name conf/ has its defaults
ENTRIES = {
    "medusa": "medusa",
    "hydra_heads": "hydra_heads",
    "eagle1": "eagle",
    "eagle3": "eagle",
    "dflash": "block",
    "dspark": "block",
    "small_lm": "draft",
}
# script -> the keys of its heads, in heads/; head.py has those of any kind
HEAD_KEYS = {
    "medusa": "medusa.config:MedusaConfig",
    "hydra_heads": "medusa.config:HydraHeadsConfig",
    "eagle": "eagle.config:EagleConfig",
    "block": "block.config:BlockConfig",
    "draft": "small_lm.config:SmallLMConfig",
    "head": "",
}


@dataclass(frozen=True)
class HeadRun(TrainConfig):
    """A run of any kind of head, those of own packages too: conf/head.yaml."""

    # the keys of conf/head/NAME.yaml; head=NAME chooses
    head: dict[str, Any]  # type: ignore[assignment]

    @classmethod
    def exact(cls, cfg: DictConfig) -> type[TrainConfig]:
        """Return the schema with the keys of the kind that `cfg` names. Raises UserError
        where it names none that there is."""
        if not cfg.get("head"):
            return cls  # the key is missing
        if (kind := OmegaConf.select(cfg, "head.kind")) is None:
            raise UserError("head.kind: is required; choose a head by head=NAME")
        return entry_of(str(kind))[1]


@functools.cache
def keys_of(script: str) -> type[TrainConfig]:
    """Return the keys of a script under train/."""
    module, _, name = HEAD_KEYS[script].partition(":")
    if not name:
        return HeadRun
    return _run_of(getattr(importlib.import_module(f"outrider.heads.{module}"), name))


def _run_of(keys: Any) -> type[TrainConfig]:
    """Return TrainConfig with these keys of a head."""
    head = ("head", keys, field(default_factory=keys))
    return dataclasses.make_dataclass("HeadRun", [head], bases=(TrainConfig,), frozen=True)


def entry_of(kind: str) -> tuple[str, type[TrainConfig]]:
    """Return the script that trains any kind of head, and the schema of its keys. Raises
    UserError for a kind that nobody brings."""
    if kind in ENTRIES:
        return ENTRIES[kind], keys_of(ENTRIES[kind])
    from outrider.heads.registry import head_class

    return "head", _run_of(head_class(kind).Config)
