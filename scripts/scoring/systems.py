"""From names to rows of the table: drafters and references."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from outrider.conf.errors import UserError
from outrider.conf.typed import raise_all
from outrider.decode.draft_model import DraftModel
from outrider.decode.drafters import Drafter
from outrider.decode.engine import DecodedRun, Request, generate
from outrider.decode.target import Target
from outrider.heads import hub
from outrider.heads.checkpoint import read_card, trained_for
from outrider.heads.drafters import drafter_folders, resolve_drafter
from outrider.heads.folders import head_folder
from outrider.heads.names import NONE, DraftSpec, parse
from outrider.scripts.common.names import ASSISTED, GENERATE, SERVER, labels, wrong_drafter
from outrider.scripts.scoring.interleaved import ContestSettings, System
from outrider.scripts.scoring.reference import hf_assisted, hf_generate
from outrider.scripts.scoring.served import ServedSystem

Run = Callable[[Sequence[Request], ContestSettings], DecodedRun]


def systems_of(specs: Sequence[str], target: Target) -> list[System]:
    """Return the rows of the table. `none` is put in front when it is not listed. Raises
    UserError that names every one that cannot be loaded."""
    systems: list[System] = []
    problems: list[str] = []
    for spec in [*([] if NONE in specs else [NONE]), *specs]:
        try:
            systems.append(_system(spec, target))
        except UserError as error:
            problems.append(str(error))
    raise_all(problems)
    for system, short in zip(systems, labels([s.name for s in systems]), strict=True):
        system.label = short
    return systems


def _system(spec: str, target: Target) -> System:
    if wrong := wrong_drafter(spec):
        raise UserError(f"drafters: {wrong}")
    if spec == GENERATE:
        return _reference(
            spec,
            lambda requests, s: hf_generate(
                target, requests, s.sampling, batch_size=s.batch_size, seed=s.seed
            ),
        )
    if spec.startswith(f"{ASSISTED}@"):
        return _assisted(spec, target)
    if (server := SERVER.fullmatch(spec)) is not None:
        return _server(spec, ServedSystem(target, *server.groups()))
    requested = parse(spec)
    system = drafting(spec, resolve_drafter(spec, target), target)
    system.draft, system.files = requested, _files(requested)
    system.facts |= facts_of(spec, target)
    return system


def facts_of(spec: str, target: Target) -> dict[str, Any]:
    """Return what is known of a drafter's heads: trained_for: other targets; weights_sha256;
    hub: commits."""
    cards = [_card(part) for part in parse(spec).each]
    known = {
        "trained_for": ", ".join(other for c in cards if (other := trained_for(c, target))),
        "weights_sha256": [card["weights"]["sha256"] for card in cards if card is not None],
        "hub": hub.commits(spec),
    }
    return {key: value for key, value in known.items() if value}


def _assisted(spec: str, target: Target) -> System:
    """Return the row of transformers' loop with a separate draft model, K as ours. Raises
    UserError for anything else, and for a draft that transformers itself would refuse."""
    given = parse(spec.removeprefix(f"{ASSISTED}@"))
    card = _card(given) if not given.parts else None
    if given.parts or (card is not None and card["kind"] != "small_lm"):
        raise UserError(
            f"drafters: {spec}: transformers takes one language model as an assistant; give a "
            "separate draft model"
        )
    draft = resolve_drafter(f"{given.source}@chain", target)
    assert isinstance(draft, DraftModel), "all other kinds have been refused"
    mine, theirs = (m.model.config.get_text_config().vocab_size for m in (draft.draft, target))
    if mine != theirs:
        raise UserError(
            f"drafters: {spec}: transformers takes no assistant with {mine} rows of vocabulary for "
            f"a target with {theirs}; leave this reference out"
        )
    helper, k = draft.draft, draft.max_depth
    system = _reference(
        spec,
        lambda requests, s: hf_assisted(target, helper, k, requests, s.sampling, seed=s.seed),
        k,
    )
    system.files = _files(given)
    return system


def drafting(spec: str, drafter: Drafter, target: Target) -> System:
    """Return the row of a drafter under the name `spec`."""
    nodes, depth = drafter.max_nodes, drafter.max_depth

    def run(requests: Sequence[Request], s: ContestSettings) -> DecodedRun:
        size, seed = s.batch_size, s.seed
        return generate(target, drafter, requests, s.sampling, batch_size=size, seed=seed)

    return System(
        spec,
        spec,
        getattr(drafter, "kind", spec),
        ("chain" if nodes == depth else "tree") if nodes else "none",
        depth,
        nodes,
        run,
        target=target,
    )


def _reference(name: str, run: Run, k: int = 0) -> System:
    # nodes 0: its cycles are read off from outside, so it is in no comparison of drafters
    return System(name, name, "reference", "none", k, 0, run)


def _server(spec: str, served: ServedSystem) -> System:
    """Return the row of a running server. Raises UserError where none answers."""
    served.check()
    system = _reference(spec, lambda requests, s: served(requests, s.sampling, s.seed))
    system.server = True
    return system


def _card(draft: DraftSpec) -> dict[str, Any] | None:
    """Return the card of the head that `draft` asks for; None where it asks for no head.
    Raises UserError when damaged."""
    folder = head_folder(draft)
    return None if folder is None else read_card(folder)


def _files(draft: DraftSpec) -> list[list[Any]]:
    """Name, bytes and time of the files that `draft` is loaded from."""
    stats = (
        (path, path.stat())
        for folder in drafter_folders(draft)
        for path in sorted(folder.iterdir())
        if path.is_file()
    )
    return [[str(path), stat.st_size, stat.st_mtime_ns] for path, stat in stats]
