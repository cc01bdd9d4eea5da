"""The keys of scripts/evaluate.py."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from outrider.conf.rules import Filled, NotNegative, OneOrMore, Wandb, ZeroOrMore
from outrider.scripts.common.keys import DecodingKeys, LongKeys, PenaltyKeys
from outrider.scripts.common.names import SERVER, no_drafters, no_prompts, wrong_address
from outrider.scripts.data.suites import SuiteConfig


@dataclass(frozen=True)
class EvaluateConfig(PenaltyKeys, DecodingKeys, LongKeys):
    """Keys of scripts/evaluate.py."""

    # folder for report.json, report.html, outputs.jsonl and figures/
    out: str
    # none, ngram, hf_generate, run folders, head folders or hub:OWNER/NAME[@REVISION];
    # FOLDER@chain and FOLDER@tree choose the shape, @adaptive behind any of them an adaptive
    # draft length; FOLDER@tree+ngram joins the drafts of two; NAME@http://HOST:PORT is a
    # running server. All of them must load
    drafters: Filled[str] = field(default_factory=lambda: ["none", "ngram"])
    # JSONL of {question_id, category, turns: [...]}, as MT-Bench and Spec-Bench write it
    prompts: str = "scripts/prompts/demo.jsonl"
    # a published set in place of `prompts`: suite=mtbench (conf/suite)
    suite: SuiteConfig | None = None
    # how many prompts, spread evenly over the categories; null = all, of a suite as it says
    num_prompts: OneOrMore | None = None
    # several temperatures in one report; [] = temperature alone
    temperatures: list[NotNegative] = field(default_factory=list)
    # most tokens per answer
    max_new_tokens: OneOrMore = 128
    # prompts that are decoded together
    batch_size: OneOrMore = 1
    # prompts of the parity gate: a chain at T = 0 against the training pass and a reloaded
    # head; 0 = no gate
    parity: ZeroOrMore = 6
    # off, online or offline: table and figures to wandb in one of its modes, and no
    # error where it is not installed
    wandb: Wandb = "off"
    # project of wandb
    wandb_project: str = "outrider"

    def absent(self) -> list[str]:
        """Return what is named and not there, as "key: value; fix"."""
        return [
            *no_drafters(self.drafters, "drafters"),
            *([] if self.suite else no_prompts(self.prompts)),
        ]

    def validate(self) -> list[str]:
        """Return problems as "key: value; rule; fix", at every temperature."""
        every = {self.temperature, *self.temperatures}
        found = [line for t in every for line in PenaltyKeys.validate(replace(self, temperature=t))]
        wrong = (wrong_address(name) for name in self.drafters)
        found += [f"drafters: {line}" for line in wrong if line]
        served = [one for name in self.drafters if (one := SERVER.fullmatch(name))]
        if served and self.repetition_penalty != 1:
            found.append(
                f"drafters: {served[0][1]} is a server, which is asked without "
                f"repetition_penalty={self.repetition_penalty:g}; leave one of them out"
            )
        return found
