"""The negative controls of a certificate: known wrong code through the same layers. Each must
fail there.

They depend on the target, the settings, the rule and the code, not on the drafter: the ones
that need a draft take the target itself as its own draft model. So one certificate may run
them and others, of other drafters, name it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.conf.errors import UserError
from outrider.decode.draft_model import DraftModel
from outrider.decode.grow import Form
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.scripts.common import files
from outrider.scripts.common.files import ROOT
from outrider.scripts.common.memo import Memo
from outrider.scripts.common.progress import named
from outrider.scripts.proofs import uniformity
from outrider.scripts.proofs.certificate import CertificatePlan, World, passes_layer
from outrider.scripts.proofs.controls import drafters as wrong_drafters
from outrider.scripts.proofs.controls import rules as wrong_rules
from outrider.scripts.proofs.controls.catalogue import (
    Mangled,
    commits_wrong_rows,
    controls,
    leaks_siblings,
    measured,
)
from outrider.scripts.proofs.greedy import greedy_layer
from outrider.scripts.proofs.sampled import Sample, sampling_layer, texts_of

CONTROL_P = 1e-6  # a control is stopped early once its p falls below
# Below this temperature a distribution is nearly one-hot, and wrong code may emit it all but
# exactly (on SmolLM2 at T = 0.2 typical acceptance passes 10,000 tokens with p = 0.03).
# Whatever FAINT tokens do not reject there is tried at temperature 1: controls show that the
# layers see wrong code; how small a bias they see in the run's own distributions is what the
# power curve says.
COLD, FAINT = 0.5, 2000
PASSES = 400  # tokens of the controls of the layer passes
GREEDY_PROMPTS = 4  # wrong code differs at once, most times
TESTED = ("decode", "heads", "scripts/proofs")


def run(world: World) -> list[dict[str, Any]]:
    """Every control, in the words of certificate.json."""
    static = measured(controls(), world.memo, "static", world.on_progress)
    return [*_sampling(world), *_passes(world), *static, *_greedy(world)]


def identity(target: Target, plan: CertificatePlan) -> dict[str, Any]:
    """What the controls depend on. code: hash of the files under test and of the layers."""
    s, known = plan.sampling, target.identity
    return {
        "weights_sha256": known.weights_sha256 if known else None,
        "tokenizer_sha256": known.tokenizer_sha256 if known else None,
        "dtype": str(target.dtype).removeprefix("torch."),
        "temperature": s.temperature,
        "top_k": s.top_k,
        "top_p": s.top_p,
        "min_p": s.min_p,
        "repetition_penalty": s.repetition_penalty,
        "guidance_scale": plan.guidance,
        "verify": plan.verify,
        "code": code_sha256(),
    }


def code_sha256() -> str:
    """Hash of the verifier, of the drafters and of the layers that judge them."""
    return files.code_sha256(TESTED, ROOT)


def borrow(path: str, wanted: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The controls of another certificate (its folder or file), and where they come from.

    Raises UserError when there is no such certificate, it ran no controls, or they are of
    something else.
    """
    place = Path(path).expanduser()
    place = place / "certificate.json" if place.is_dir() else place
    try:
        raw = place.read_bytes()
        paper = json.loads(raw)
        listed, origin = list(paper["negative_controls"]), dict(paper["controls"])
        taken = [{**c, "rejected": bool(c["rejected"])} for c in listed]
        sound = all(c["p"] is None or (c["p"] >= 0 and c["tokens"] >= 0) for c in taken)
    except OSError as error:
        raise UserError(
            f"controls: {place}: {error.strerror}; set run, none or a certificate's folder"
        ) from None
    except (ValueError, KeyError, TypeError):
        sound = False
    if not sound:
        raise UserError(
            f"controls: {place} is no certificate of this version; set controls=run"
        ) from None
    if origin.get("from") != "this run" or not listed:
        raise UserError(
            f"controls: {place} ran no controls of its own; name the certificate that "
            "did, or controls=run"
        )
    if different := [k for k, v in wanted.items() if origin.get("identity", {}).get(k) != v]:
        raise UserError(f"controls: {place} differs in {', '.join(different)}; set controls=run")
    return taken, {
        "from": str(path),
        "sha256": hashlib.sha256(raw).hexdigest(),
        "created": paper.get("created"),
    }


def counted(listed: Sequence[dict[str, Any]], plan: CertificatePlan) -> list[dict[str, Any]]:
    """Borrowed controls for a run of this plan: one counts as rejected only if it was on no
    more tokens than this run's, at this run's alpha."""

    def holds(c: dict[str, Any]) -> bool:
        return c["p"] is None or (c["p"] < plan.alpha and c["tokens"] <= plan.tokens)

    return [{**c, "rejected": c["rejected"] and holds(c)} for c in listed]


def _sampling(world: World) -> list[dict[str, Any]]:
    plan = world.plan
    if plan.sampling.greedy:
        return []
    helper = DraftModel(world.target, 3, name="the target itself")
    own = plan.sampling
    cut = own if own.top_p < 1 else dataclasses.replace(own, top_p=0.9)
    enough = min(CONTROL_P, plan.alpha)

    def tried(title: str, who: Any, verify: Any, sampling: Sampling, tokens: int) -> dict[str, Any]:
        changes: dict[str, Any] = {"verify": verify, "sampling": sampling, "tokens": tokens}
        how = dataclasses.replace(plan, chunk=1, **changes)
        drawn = named(world.on_progress, title)
        stop = lambda sample: _p(sample) < enough
        bad = sampling_layer(world.plain, world.target, who, world.prompts, how, stop, drawn)
        drawn(tokens, tokens)  # it may stop early
        p = _p(bad)
        return {"rejected": p < plan.alpha, "p": p, "tokens": len(bad.u)}

    def run(key: str, name: str, who: Any, verify: Any, sampling: Sampling = own) -> dict[str, Any]:
        known = [row for row in world.memo.lines(key) if row["p"] < enough]
        if known:  # one that got through is tried again, maybe with more tokens
            return known[0]
        cold = sampling.temperature < COLD
        title = f"control: {name}"
        most = min(plan.tokens, FAINT if cold else plan.tokens)
        found = tried(title, who, verify, sampling, most)
        if cold and not found["rejected"]:
            warm = dataclasses.replace(sampling, temperature=1.0)
            faint = {"temperature": sampling.temperature, **found}
            found = tried(f"{title}, T = 1", who, verify, warm, plan.tokens) | {"faint": faint}
        row = {"name": name, "layer": "sampling", **found, "drafter": helper.name}
        world.memo.add(key, row)
        return row

    mangled = Mangled(helper, wrong_drafters.scored_sharpened)
    merges = wrong_rules.merges_neighbours(0.2)
    return [
        run("typical", "typical acceptance", helper, wrong_rules.typical_acceptance),
        run("mislaid", "draft scored with the wrong distribution", mangled, plan.verify),
        run("merged", "every second token below 0.2 merged with its neighbour", helper, merges),
        run("uncut", "top-p ignored", helper, wrong_rules.ignores_truncation, cut),
    ]


def _p(sample: Sample) -> float:
    return 0.0 if sample.outside or sample.astray else uniformity.overall(sample.tests())


def _passes(world: World) -> list[dict[str, Any]]:
    """Wrong masks and caches: the distributions that verification used are not plain decoding's."""
    plan = world.plan
    if plan.sampling.greedy:
        return []
    how = dataclasses.replace(plan, tokens=min(PASSES, plan.tokens), chunk=1)

    def run(key: str, name: str, target: Target, who: Any) -> dict[str, Any]:
        world.on_progress(0, 1, f"control: {name}")

        def tried() -> dict[str, Any]:
            chunks = Memo(None)
            bad = sampling_layer(world.plain, target, who, world.prompts, how, memo=chunks)
            texts = texts_of(chunks.lines("sampling"), world.prompts)
            layer = passes_layer(world, bad, texts)
            return {
                "name": name,
                "layer": "passes",
                "rejected": not layer["passed"],
                "p": None,
                "variation": layer["variation"],
                "two_plain": layer["two_plain_computations"]["variation"],
                "tokens": layer["tokens"],
                "drafter": who.name,
            }

        row = world.memo.once(key, tried)
        world.on_progress(1, 1, f"control: {name}")
        return row

    target = world.target
    chain = DraftModel(target, 3, name="the target itself")
    found = [run("passes-rows", "cache keeps the wrong rows", commits_wrong_rows(target), chain)]
    if target.support == "tree":
        form = Form.tree(2, nodes=6, width=2)
        tree = DraftModel(target, form, name="the target itself, a tree")
        leaky = leaks_siblings(target)
        found.append(run("passes-leak", "mask lets siblings see each other", leaky, tree))
    return found


def _greedy(world: World) -> list[dict[str, Any]]:
    target = world.target
    helper = DraftModel(target, 3, name="the target itself")

    def run(key: str, name: str, who: Target, verify: Any) -> dict[str, Any]:
        most = len(world.chosen)
        known = [r for r in world.memo.lines(key) if r["rejected"] or r["prompts"] == most]
        if known:
            return known[0]
        world.on_progress(0, 1, f"control: {name}")
        how = dataclasses.replace(world.plan.reading(world.tie), verify=verify)
        for count in sorted({min(GREEDY_PROMPTS, most), most}):
            # in 16 bits many first differences are ties: look at more
            few, theirs = world.chosen[:count], world.theirs[:count]
            bad = greedy_layer(world.plain, who, helper, few, how, theirs)
            if bad.defects or bad.astray:
                break
        world.on_progress(1, 1, f"control: {name}")
        row = {
            "name": name,
            "layer": "greedy",
            "rejected": bad.defects + bad.astray > 0,
            "p": None,
            "defects": bad.defects,
            "not_the_verifiers_best": bad.astray,
            "prompts": bad.prompts,
            "drafter": helper.name,
        }
        world.memo.add(key, row)
        return row

    return [
        run("softmax", "softmax acceptance at T = 0", world.target, wrong_rules.softmax_acceptance),
        run(
            "rows",
            "cache keeps the wrong rows",
            commits_wrong_rows(world.target),
            world.plan.verify,
        ),
    ]
