"""The keys of scripts/fit.py."""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Interval
from omegaconf import DictConfig, OmegaConf, open_dict

from outrider.conf.errors import UserError
from outrider.conf.paths import neither, no_file
from outrider.conf.rules import Inside, NotEmpty, NotNegative, OneOrMore, Seed, ZeroOrMore, one_of
from outrider.decode.models.config import AutoDtype, TargetConfig
from outrider.heads.config import HeadConfig, LoraKeys
from outrider.heads.folders import no_head
from outrider.heads.formats import FORMATS
from outrider.heads.limits import Count, CountOrZero
from outrider.scripts.common.absent import no_prompts
from outrider.scripts.synthesis.config import Mask
from outrider.train.config import EvalKeys, OptimConfig, RowsConfig, entry_of, is_logistics

# Keys under whose other values a folder goes on: where things lie, how fast, and what is told.
LOGISTICS = ("out", "quiet", "device", "accelerate", "processes", "micro_batch", "micro_tokens")
LOGS = "give request and response logs in JSONL, or a folder of them"
# What a recipe says of how long a run is and when it is saved: `minutes` decide that here.
DECIDED = ("steps", "epochs", "save_every", "log_every")


@dataclass(frozen=True)
class FitHead:
    """Keys of the head, named as a training run names them."""

    # a LoRA on the frozen head at start, in place of all its weights
    lora: LoraKeys = field(default_factory=LoraKeys)
    # frequent tokens the head predicts; 0 = all, null = those of the head at start, else 8,192
    draft_vocab: CountOrZero | None = None
    # folder of a head whose draft vocabulary is taken; empty = the tokens that are supervised
    # most often
    draft_vocab_from: str = ""
    # supervised tokens whose logits exist at the same time; null = 512 on CPUs, 4096 on GPUs
    chunk: Count | None = None


@dataclass(frozen=True)
class FitConfig(AutoDtype):
    """Keys of scripts/fit.py."""

    # folder of the fit: head/ (the better of the two), fit.json and every stage
    out: NotEmpty
    # run or head folder, or hub:OWNER/NAME[@REVISION], that is fitted; it is never written to.
    # Empty: a fresh head is trained
    start: str = ""
    # without start: which head (outrider ls heads), with its usual keys; head=NAME and the head of
    # experiment=NAME come with theirs
    kind: NotEmpty = "eagle3"
    # the frozen model that answers
    target: TargetConfig = field(default_factory=TargetConfig)
    # request and response logs, FILE, [FILE,FILE] or a folder of *.jsonl (scripts/synthesize.py
    # says which forms)
    logs: str | list[str] = ""
    # share of the logs, the last in time, that training does not see
    later_share: Inside = 0.2
    # names under which the logs' model is the target; empty = the target's own name
    served: list[str] = field(default_factory=list)
    # replace secrets and personal data in the logs (scripts/synthesize.py says which); false,
    # or module:function for what that finds as well
    mask: Mask = True
    # in place of logs: a JSONL file of chats to learn from
    train: str = ""
    # in place of logs: a JSONL file of later chats, whose questions are asked
    later: str = ""
    # minutes of training on this machine, its evaluations counted; a pilot turns them into
    # steps
    minutes: Annotated[float, Interval(gt=0, le=1e9)] = 10.0
    # accelerate's file by which the training runs in several processes, such as
    # conf/launch/ddp.yaml; empty = in this one. The comparison runs in one
    accelerate: str = ""
    # with accelerate: how many; 0 = as many as the file says
    processes: ZeroOrMore = 0
    # what of a head the fit decides; the rest is as `start` has it, or the kind's usual keys, or
    # those of the head that is chosen
    head: FitHead | HeadConfig = field(default_factory=FitHead)
    # what becomes of the chats
    data: RowsConfig = field(default_factory=RowsConfig)
    # optimizer and schedule
    optim: OptimConfig = field(default_factory=OptimConfig)
    # acceptance while training
    eval: EvalKeys = field(default_factory=EvalKeys)
    # chats of an optimizer step, over all processes
    batch_size: OneOrMore = 16
    # most chats of one forward pass of a process; 0 = all of its chats
    micro_batch: ZeroOrMore = 0
    # most tokens of one forward pass of a process, padding included, one chat in any case; 0 =
    # any number
    micro_tokens: ZeroOrMore = 0
    # evaluations within the budget
    evaluations: OneOrMore = 4
    # later prompts that are compared, by turns from the categories; null = all
    prompts: Annotated[int, Ge(2)] | None = 60
    # general prompts, to see what was forgotten
    general: str = "scripts/prompts/demo.jsonl"
    # how many of them; 0 = none
    general_prompts: ZeroOrMore = 24
    # most tokens of an answer of the comparison
    max_new_tokens: OneOrMore = 64
    # temperature of the comparison; 0 = greedy
    temperature: NotNegative = 0.0
    # shape of the drafts: chain, tree, or nothing for the head's own
    shape: Literal["", "chain", "tree"] = ""
    # also train a fresh head of the same kind with the same steps, and compare it
    scratch: bool = False
    # further drafters that are compared
    against: list[str] = field(default_factory=list)
    # tokens of the certificate of the result, at temperature 1; null = as many as its verdict
    # takes, 0 = no certificate
    certify_tokens: ZeroOrMore | None = None
    # its negative controls: run, none, or the folder of a certificate of this target that ran
    # them
    controls: str = "run"
    # export the result for an engine: vllm, speculators, sglang, gguf, ...; empty = no export
    format: Annotated[str, one_of(["", *FORMATS])] = ""
    # of the target: auto (bfloat16, but float32 on a CPU without instructions for it), bfloat16,
    # float32
    dtype: Literal["bfloat16", "float32", "float64"] = "bfloat16"
    # cpu, cuda, cuda:1; null = the GPU when there is one
    device: str | None = None
    # of every random number
    seed: Seed = 0
    # no progress bars
    quiet: bool = False

    def absent(self) -> list[str]:
        """What is named and not there, as "key: value; fix"."""
        logs = [self.logs] if isinstance(self.logs, str) else self.logs
        chats = {"train": self.train, "later": self.later}
        fix = "give a JSONL file of chats"
        return [
            *[line for path in filter(None, logs) for line in neither("logs", path, LOGS)],
            *[line for key, path in chats.items() if path for line in no_file(key, path, fix)],
            *[f"start: {line}" for line in no_head(self.start)],
            *(no_prompts(self.general, "general") if self.general_prompts else []),
        ]

    def validate(self) -> list[str]:
        """Exactly one source of text, as "key: value; rule; fix"."""
        return [*self._source_problems(), *self._start_problems()]

    def _source_problems(self) -> list[str]:
        given = [key for key in ("logs", "train") if getattr(self, key)]
        if len(given) != 1:
            message = f"{' and '.join(given)} are given" if given else "is empty"
            return [f"logs: {message}; give one of logs=FILE and train=FILE"]
        if self.logs and self.later:
            return ["later: the logs are split by time; leave it out, or give train=FILE"]
        if not self.logs and not self.later:
            return [f"later: is empty; beside {given[0]}= give later=FILE, a JSONL file of chats"]
        return []

    def _start_problems(self) -> list[str]:
        found = []
        if (chosen := self.head_kind) and chosen != self.kind:
            found.append(
                f"kind: {self.kind}, and the chosen head is of kind {chosen}; leave kind out"
            )
        if not self.start and self.head.lora.rank:
            found.append(
                f"head.lora.rank: {self.head.lora.rank} learns on a head that stays frozen; name "
                "that by start=FOLDER, or leave it out"
            )
        if not self.start and self.scratch:
            found.append("scratch: without start= the head is a fresh one; leave it out")
        if self.processes and not self.accelerate:
            found.append("processes: only with accelerate=conf/launch/ddp.yaml; give that as well")
        return found

    @property
    def head_kind(self) -> str:
        """Kind of the head whose keys are all given, by a recipe or head=NAME; "" without one."""
        return self.head.kind if isinstance(self.head, HeadConfig) else ""

    def settings(self) -> dict[str, Any]:
        """What decides the result."""
        kept = {k: v for k, v in asdict(self).items() if k not in LOGISTICS}
        kept["data"] = {k: v for k, v in kept["data"].items() if not is_logistics(f"data.{k}")}
        del kept["eval"]["batch_size"], kept["head"]["chunk"]
        kept["head"].pop("activation_checkpointing", None)
        return kept


@dataclass(frozen=True)
class FitKeys(FitConfig):
    """What scripts/fit.py takes: the keys above, and of a chosen head all of its kind's."""

    # keys of the head
    head: dict[str, Any] = field(default_factory=dict)  # type: ignore[assignment]

    @classmethod
    def exact(cls, composed: DictConfig) -> type[FitConfig]:
        """The schema with the keys of the head that `composed`, which is no configuration yet,
        chooses; what a recipe says of a run's length is taken out of it. Raises UserError for a
        recipe that a fit cannot follow."""
        if composed.get("shard_target"):
            raise UserError(
                "experiment: this recipe spreads the target over the GPUs (shard_target), and a "
                "fit needs one that a device holds; take the recipe to `outrider train`, "
                "data.path=FILE"
            )
        with open_dict(composed):
            for key in DECIDED:
                composed.pop(key, None)
            if "eval" in composed:
                composed.eval.pop("every", None)
        kind = OmegaConf.select(composed, "head.kind")
        if kind is None:
            return FitConfig
        keys = typing.get_type_hints(entry_of(str(kind))[1])["head"]
        return dataclasses.make_dataclass(
            FitConfig.__name__,
            [("head", keys, field(default_factory=keys))],
            bases=(FitConfig,),
            frozen=True,
        )
