"""The keys of scripts/fit.py."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Interval

from outrider.conf.rules import (
    AboveZero,
    Inside,
    NotEmpty,
    NotNegative,
    OneOrMore,
    Seed,
    ZeroOrMore,
    one_of,
)
from outrider.decode.models.config import TargetConfig
from outrider.heads.config import LoraKeys
from outrider.heads.formats import FORMATS
from outrider.scripts.synthesis.config import Mask

# Keys under whose other values a folder goes on: where things lie, and what is told.
LOGISTICS = ("out", "quiet", "device")


@dataclass(frozen=True)
class FitConfig:
    """Keys of scripts/fit.py."""

    # run or head folder, or hub:OWNER/NAME[@REVISION], that is fitted; it is never written to
    start: NotEmpty
    # folder of the fit: head/ (the better of the two), fit.json and every stage
    out: NotEmpty
    # the frozen model that answers
    target: TargetConfig = field(default_factory=TargetConfig)
    # request and response logs, FILE or [FILE,FILE] (scripts/synthesize.py says which forms)
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
    # a LoRA in place of full weights
    lora: LoraKeys = field(default_factory=LoraKeys)
    # peak learning rate; null = as train/ takes it
    lr: AboveZero | None = None
    # chats of an optimizer step
    batch_size: OneOrMore = 16
    # longer chats are cut here, tokens
    max_length: Annotated[int, Ge(8)] = 512
    # share of the training chats that the evaluations ask
    held_out: Inside = 0.05
    # evaluations within the budget
    evaluations: OneOrMore = 4
    # stop after so many evaluations in a row without a longer accepted length; 0 = never
    patience: ZeroOrMore = 2
    # prompts of an evaluation
    eval_prompts: OneOrMore = 8
    # prompts of the parity gate behind the training; 0 = no gate
    parity: ZeroOrMore = 4
    # later prompts that are compared, by turns from the categories; null = all
    prompts: Annotated[int, Ge(2)] | None = 60
    # general prompts, to see what was forgotten
    general: str = "scripts/prompts/demo.jsonl"
    # how many of them; 0 = none
    general_prompts: ZeroOrMore = 24
    # most tokens of an answer
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
    # of the target: float32, bfloat16
    dtype: Literal["bfloat16", "float32", "float64"] = "bfloat16"
    # cpu, cuda, cuda:1; null = the GPU when there is one
    device: str | None = None
    # of every random number
    seed: Seed = 0
    # no progress bars
    quiet: bool = False

    def validate(self) -> list[str]:
        """Exactly one source of text, as "key: value; rule; fix"."""
        given = [key for key in ("logs", "train") if getattr(self, key)]
        if len(given) != 1:
            message = f"{' and '.join(given)} are given" if given else "is empty"
            return [f"logs: {message}; give one of logs=FILE and train=FILE"]
        if self.logs and self.later:
            return ["later: the logs are split by time; leave it out, or give train=FILE"]
        if not self.logs and not self.later:
            return [f"later: is empty; beside {given[0]}= give later=FILE, a JSONL file of chats"]
        return []

    def settings(self) -> dict[str, Any]:
        """What decides the result."""
        return {k: v for k, v in asdict(self).items() if k not in LOGISTICS}
