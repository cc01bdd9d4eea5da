"""Foreign JSON with wrong values in it: head.json, decode.json and what import_head reads.

Every mutation works or ends in one UserError of one line within a few seconds. The whole of it
is slow; a sample of what used to end in a traceback or a hang runs always.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.conf.errors import UserError
from outrider.decode.engine import Request, generate
from outrider.decode.sampling import Sampling
from outrider.heads.checkpoint import load_head, save_head
from outrider.heads.drafters import resolve_drafter
from outrider.heads.interop import LAYOUTS, read_folder, read_head
from outrider.heads.names import DraftSpec
from outrider.heads.tuned import DECODE, DraftSettings, Tuned, card_sha256
from outrider.scripts.import_head import same_target
from outrider.scripts.scoring.systems import systems_of
from tests.helpers.fuzz_heads import KINDS, made, target_of, works, write
from tests.helpers.interop import DEEP, deep_target, folder, random_head
from tests.helpers.mutations import DELETED, changed, mutations, outcome

TREE = DraftSettings("tree", depth=2, nodes=3)
EVIDENCE = {
    "curves": {"chain": [{"depth": 1, "speedup": 1.2}], "tree": []},
    "latency": {"target": {"1": [[1, 2.5]]}},
    "rows": [{"name": "chain K=1", "kind": "chain", "settings": {"depth": 1}}],
}

# kind -> places and values that ended in a traceback before cards were typed (10**9 layers: in
# a hang)
SAMPLE: dict[str, list[tuple[str, Any]]] = {
    "medusa": [
        ("kind", []),
        ("format", DELETED),
        ("weights", 3),
        ("target", True),
        ("head", []),
        ("head.config.nodes", 10**9),
        ("head.config.decay", float("nan")),
        ("head.vocab_size", 10**9),
        ("head.taps.0", 99),
        ("head.calibration.paths", [[7]]),
        ("head.calibration.paths.0.0", -1),
        ("head.config.loss", "${oc.env:HOME}"),
    ],
    "hydra-prefix": [
        ("head.embed_scale", float("inf")),
        ("head.prefix.num_hidden_layers", 10**9),
        ("head.config.prefix_layers", 0),
    ],
    "eagle3": [
        ("head.layer.num_hidden_layers", 10**9),
        ("head.layer.hidden_act", "x"),
        ("head.layer.rms_norm_eps", -1),
        ("head.layer.rope_parameters", {"rope_type": "yarn"}),
        ("head.config.depth", 10**9),
        ("head.config.kind", "eagle1"),
    ],
    "small_lm path": [
        ("head.model.num_hidden_layers", 10**9),
        ("head.model.model_type", "x"),
        ("head.draft_ids", [5, 5]),
        ("head.layers", [0]),
    ],
}


def refusal(action: Any) -> str:
    """The one line of a refusal; the test fails for anything else."""
    wrong = outcome(action)
    assert not wrong, wrong
    with pytest.raises(UserError) as error:
        action()
    return str(error.value)


@pytest.mark.parametrize("kind", SAMPLE)
def test_wrong_values_in_a_card_are_named(kind: str, tmp_path: Path) -> None:
    _, place, card = made(kind, tmp_path)
    target = target_of(kind)
    for name, value in SAMPLE[kind]:
        path = tuple(int(p) if p.isdigit() else p for p in name.split("."))
        write(place, changed(card, path, value))
        said = refusal(lambda: load_head(place, target))
        assert said.startswith(str(place)), (name, said)
    write(place, card)
    assert load_head(place, target).calibration == card["head"]["calibration"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_wrong_value_in_a_card(kind: str, tmp_path: Path) -> None:
    _, place, card = made(kind, tmp_path)
    works(place, kind)
    found = {}
    for name, mutant in mutations(card):
        write(place, mutant)
        if wrong := outcome(lambda: works(place, kind)):
            found[name] = wrong
    assert not found, f"{len(found)}: {dict(list(found.items())[:20])}"


# -- decode.json


def tuned_head(place: Path) -> tuple[Path, dict[str, Any]]:
    _, head, _ = made("medusa", place)
    message = Tuned(card_sha256(head), TREE, DraftSettings("chain", depth=2), TREE, EVIDENCE)
    return head, json.loads(json.dumps(message.to_json()))


def drafts(head: Path) -> None:
    """What evaluate does with a drafter."""
    target = target_of("medusa")
    for how in ("", "@chain", "@tree"):
        drafter = resolve_drafter(f"{head}{how}", target)
        generate(target, drafter, [Request([5, 6, 7], 4)], Sampling(), eos_ids=())
    systems_of([str(head)], target)


@pytest.mark.slow
def test_every_wrong_value_in_decode_json(tmp_path: Path) -> None:
    head, message = tuned_head(tmp_path)
    (head / DECODE).write_text(json.dumps(message))
    drafts(head)
    (head / DECODE).write_text("[" * 100_000)
    assert "cannot be read" in refusal(lambda: resolve_drafter(str(head), target_of("medusa")))
    found = {}
    for name, mutant in mutations(message):
        (head / DECODE).write_text(json.dumps(mutant))
        if wrong := outcome(lambda: drafts(head)):
            found[name] = wrong
    assert not found, found


# -- what import_head reads


def imported(place: Path, target: Any, out: Path) -> None:
    """What import_head does but for its probe, and a draft of what came of it."""
    foreign = read_folder(place)
    same_target(foreign, target)
    head = read_head(foreign, target)[0].eval()
    save_head(head, out, target.identity)
    drafter = load_head(out, target).drafter(target, DraftSpec(shape="chain"))
    generate(target, drafter, [Request([5, 6, 7], 3)], Sampling(), eos_ids=())


# Every kind once, and every format.
PAIRS = [*{kind: (format, kind) for format, kind in sorted(LAYOUTS)}.values(), ("vllm", "eagle3")]


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS)
def test_every_wrong_value_of_a_published_head(pair: tuple[str, str], tmp_path: Path) -> None:
    target, (format, kind) = deep_target(), pair
    shared = format == "sglang" and kind in ("dflash", "dspark")  # it takes no LM head of its own
    head = random_head(
        target, kind, **({"share_lm_head": True, "draft_vocab": 0} if shared else {})
    )
    place = folder(tmp_path / "theirs", target, head, format)
    imported(place, target, tmp_path / "out")
    config = json.loads((place / "config.json").read_text())
    found = {}
    for name, mutant in mutations(config):
        (place / "config.json").write_text(json.dumps(mutant))
        if wrong := outcome(lambda: imported(place, target, tmp_path / "out")):
            found[name] = wrong
    assert DEEP["layers"] == 8 and not found, found
