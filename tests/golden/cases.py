"""The golden tokens: what every kind of drafter writes on a committed tiny target with
committed heads.

Weights are read from files and computed with in float64, and random numbers are addressed
integers, so tokens do not depend on the machine, its threads or the versions of libraries,
short of a tie within 1e-12. The heads and the run folder were written by the version that
began this file; they are never written again, because what they are for is to be read by every
later one.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from outrider.decode.drafters import Drafter
from outrider.decode.engine import Request, generate
from outrider.decode.models.load import TargetConfig, load_target
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.heads.checkpoint import load_head
from outrider.heads.drafters import resolve_drafter
from outrider.heads.names import DraftSpec

FOLDER = Path(__file__).resolve().parent
TARGET, HEADS_FOLDER, RUN, DATA = (FOLDER / n for n in ("target", "heads", "run", "data.jsonl"))
TOKENS, SMOLLM2 = FOLDER / "tokens.json", FOLDER / "smollm2.json"
LOSSES = FOLDER / "losses.json"  # of commit 9286df1b, before the cut

TEMPERATURES = (0.0, 0.3, 1.0)
PROMPTS = (
    "<|im_start|>user\nthe rider goes<|im_end|>\n<|im_start|>assistant\n",
    "a slow horse, a slow",
)
LONG, SMOLLM2_LONG = 16, 32  # tokens of an answer
KINDS = (
    "medusa",
    "markov",
    "hydra_heads",
    "eagle1",
    "eagle3",
    "small_lm",
    "dflash",
    "dspark",
)  # folders under heads/
FREE = ("none", "ngram")
SHAPES = ("@chain", "@tree", "@tree@fixed")
OTHERS = ("ngram@2@adaptive", "medusa", "eagle3@chain:2", "eagle3@tree:3@adaptive")


def specs() -> list[str]:
    """Every drafter as it stands in the golden file: free ones, then head@shape."""
    return [*FREE, *(f"{kind}{shape}" for kind in KINDS for shape in SHAPES), *OTHERS]


def drafter_of(spec: str, target: Target) -> Drafter:
    """The drafter of a row, by the name that the version which wrote the file had for it: what was
    @fixed is head.tree_draw now, and ngram@K is ngram@chain:K."""
    source, _, rest = spec.partition("@")
    if source in FREE:
        return resolve_drafter(spec.replace("@2", "@chain:2"), target)
    if not rest.endswith("@fixed"):
        return resolve_drafter(str(HEADS_FOLDER / spec), target)
    head = load_head(HEADS_FOLDER / source, target)
    head.cfg = replace(head.cfg, tree_draw="fixed")
    return head.drafter(target, DraftSpec(shape="tree"))


def target() -> Target:
    """A fresh copy of the committed target in float64."""
    return load_target(TargetConfig(kind="local", path=str(TARGET)), "float64", "cpu")


def written(spec: str, target: Target, long: int = LONG) -> dict[str, Any]:
    """What `spec` writes, by temperature: tokens of each prompt, and the draft tokens accepted
    in each cycle.
    """
    found = {}
    requests = [
        Request(target.tokenizer(text)["input_ids"], long, id=i) for i, text in enumerate(PROMPTS)
    ]
    for temperature in TEMPERATURES:
        drafter = drafter_of(spec, target)
        run = generate(target, drafter, requests, Sampling(temperature), batch_size=2, eos_ids=())
        found[f"{temperature:g}"] = {
            "tokens": [g.token_ids for g in run.generations],
            "accepted": [[c.accepted for c in g.cycles] for g in run.generations],
        }
    return found


def golden() -> dict[str, Any]:
    """All of tokens.json."""
    shared = target()
    return {spec: written(spec, shared) for spec in specs()}


def smollm2() -> dict[str, Any]:
    """All of smollm2.json, in float64 as well."""
    model = load_target(TargetConfig(kind="smollm2"), "float64", "cpu")
    return {spec: written(spec, model, SMOLLM2_LONG) for spec in FREE}


def text_of(found: dict[str, Any]) -> str:
    """JSON with a line for each drafter and temperature, to read in a diff."""
    rows = []
    for spec, by_temperature in found.items():
        inner = ",\n".join(
            f"  {json.dumps(t)}: {json.dumps(row)}" for t, row in by_temperature.items()
        )
        rows.append(f" {json.dumps(spec)}: {{\n{inner}\n }}")
    return "{\n" + ",\n".join(rows) + "\n}\n"


def lines_of(found: dict[str, list[float]]) -> str:
    """JSON with a line for each kind."""
    return (
        "{\n" + ",\n".join(f" {json.dumps(k)}: {json.dumps(v)}" for k, v in found.items()) + "\n}\n"
    )
