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
CHOICES = {
    "launch=zero3": "launch=fsdp2",
    **dict.fromkeys(
        (
            f"experiment=smollm2_{kind}_{size}"
            for kind in ("draft", "eagle1", "eagle3", "hydra_heads", "medusa")
            for size in ("smoke", "2h")
        ),
        "experiment=smollm2_HEAD_20min, or debug=tiny",
    ),
}
WORDS = {
    "engine": "the engine's own bench, such as `vllm bench serve`",
    "first_gpu": "doctor gpu=true",
    "quick": "certify url=ADDRESS",
}
_BENCH = WORDS["engine"]
_ROWS = "data.path of train, which reads logged requests and answers as rows"
KEYS = {  # a group stands for all of its keys
    "again": _ROWS,
    "answer_speed": "",
    "answers": "",
    "block": "outrider train block head=dspark",
    "candidates": "drafters",
    "category": _ROWS,
    "concurrency": "",
    "controls": "",
    "costs": _BENCH,
    "curve_batches": "",
    "curve_rounds": "",
    "distribution_top_k": "",
    "domain": "prompts",
    "drain": "",
    "features": "data.features of train",
    "groups": "batch_size",
    "head.causal": "head=dspark",
    "head.draft_vocab_from": "head.draft_vocab",
    "head.lora": "start=RUN, which trains the whole head on",
    "head.tune": "head=medusa, which leaves the target as it is",
    "key_env": "",
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
    "regions": "a tool such as Presidio, before the data are read",
    "row_sigma": "",
    "runs": "drafters",
    "served": _ROWS,
    "target.compile": "",
    "tie": "",
    "workers": "",
}
DRAFTS = dict.fromkeys(("monitor", "fallback"), "@adaptive")


def line(name: str, instead: str) -> str:
    """The one line about a name that left. instead: what does its work, "" for nothing."""
    fix = f"use {instead}" if instead else "leave it out"
    return f"{name}: left in {SINCE}; {fix}; {LAST} is the last that has it"


def of_key(key: str) -> str:
    """The one line about a key that no command knows; "" where it, or its group, did not leave."""
    for name in (key, key.rpartition(".")[0]):
        if name in KEYS:
            return line(key, KEYS[name])
    return ""


def head(kind: str, where: str) -> str:
    """The one line about a head, or a run of one, that this version does not read. where: the
    file or key that names the kind; "" where it is not of a kind that left."""
    if kind not in KINDS:
        return ""
    return f"{where}: {kind} left in {SINCE}; {LAST} is the last that reads it; train {KINDS[kind]}"
