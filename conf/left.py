"""What left with version 0.3 and what does its work now: one table for verbs, keys, options and
kinds of heads, kept for one release.
"""

from __future__ import annotations

SINCE = "0.3"
LAST = "0.2 (commit 9286df1b)"  # the last version that has all of it

VERBS = {
    "fit": "outrider train HEAD start=OLD data.path=LOGS, then evaluate drafters=[OLD,NEW]",
    "forecast": "outrider train on a part of the data, then evaluate",
}
KINDS = {
    "medusa2": "medusa, which leaves the target as it is",
    "dflash_causal": "dflash, or dspark, whose tokens follow one another",
}
CHOICES = {"launch=zero3": "launch=fsdp2"}
_BENCH = "the engine's own bench, such as `vllm bench serve`"
_ROWS = "data.path of train, which reads logged requests and answers as rows"
KEYS = {
    "again": _ROWS,
    "answer_speed": "",
    "answers": "",
    "candidates": "drafters",
    "category": _ROWS,
    "controls": "",
    "costs": _BENCH,
    "curve_batches": "",
    "curve_rounds": "",
    "domain": "prompts",
    "drain": "",
    "expected": _BENCH,
    "features": "data.features of train",
    "first_gpu": "doctor gpu=true",
    "groups": "batch_size",
    "head.causal": "head=dspark",
    "head.draft_vocab_from": "head.draft_vocab",
    "head.lora.words": "",
    "head.tune.rank": "head=medusa",
    "later": _ROWS,
    "logs": _ROWS,
    "margin": "",
    "mask": "a tool such as Presidio, before the data are read",
    "max_body": "",
    "members": "",
    "monitor": "evaluate drafters=[none,DRAFTER]",
    "most_tokens": "tokens",
    "patience": "",
    "plain": "url",
    "processors": "repetition_penalty, top_k, top_p and min_p",
    "queue": "",
    "quick": "url",
    "row_sigma": "",
    "runs": "drafters",
    "served": _ROWS,
    "target.compile": "",
    "tie": "",
}
DRAFTS = dict.fromkeys(("monitor", "fallback"), "@adaptive")


def line(name: str, instead: str) -> str:
    """The one line about a name that left. instead: what does its work, "" for nothing."""
    fix = f"use {instead}" if instead else "leave it out"
    return f"{name}: left in {SINCE}; {fix}; {LAST} is the last that has it"


def head(kind: str, where: str) -> str:
    """The one line about a head, or a run of one, that this version does not read. where: the
    file or key that names the kind; "" where it is not of a kind that left."""
    if kind not in KINDS:
        return ""
    return f"{where}: {kind} left in {SINCE}; {LAST} is the last that reads it; train {KINDS[kind]}"
