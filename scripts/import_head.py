"""Bring a published head into this repository's format, so that evaluate, tune, certify and
chat run on it.

    outrider import target=smollm2 from=FOLDER out=runs/imported
    outrider import target=smollm2 from=hub:OWNER/NAME out=runs/imported

Reads Medusa (vLLM 0.32.0's names and the original ones), EAGLE-1, EAGLE-3, DFlash, DSpark and
speculators folders. Pickles are opened with torch.load(weights_only=True) alone. Missing, unknown
and ill-shaped tensors are named, all of them.

What files cannot show (layer numbers off by one, a norm that an engine puts elsewhere) shows in
behaviour: on a few prompts an EAGLE-3 head drafts as written and under every other known
convention. Where another one fits, nothing is written and its name is printed: import again
with convention=NAME.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from outrider.conf.errors import UserError
from outrider.conf.schema import entry
from outrider.decode.models.load import load_target
from outrider.decode.target import Target
from outrider.heads import hub
from outrider.heads.checkpoint import CARD, save_head
from outrider.heads.interop import Foreign, read_folder, read_head
from outrider.heads.names import HUB
from outrider.scripts.common import files
from outrider.scripts.common.prompts import load_prompts, question_ids, thinned
from outrider.scripts.exporting import probe as acceptance_probe
from outrider.scripts.exporting.config import AS_WRITTEN, ImportConfig
from outrider.scripts.exporting.place import free_place
from outrider.scripts.exporting.probe import Convention

PROMPTS, TOKENS = 16, 48  # of the probe; tokens of an answer


@entry("import_head", ImportConfig)
def main(cfg: ImportConfig) -> int:
    """Read, check, probe, write."""
    out = free_place(Path(cfg.out).expanduser(), cfg.overwrite, CARD)
    try:
        hub_name = cfg.from_.startswith(HUB)
        source = hub.served(cfg.from_) if hub_name else Path(cfg.from_).expanduser()
        foreign = read_folder(source)
    except UserError as error:
        raise UserError(f"from: {error}") from None
    if out.resolve() in (source.resolve(), *source.resolve().parents):
        raise UserError(f"out: {out} holds the head that is read; give another folder")
    target = load_target(cfg.target, cfg.dtype, cfg.device)
    same_target(foreign, target)
    made, format = read_head(foreign, target)
    head: Any = made.eval()
    found: list[Convention] = []
    if cfg.convention != AS_WRITTEN:
        known = acceptance_probe.conventions(head)
        if cfg.convention not in known:
            raise UserError(
                f"convention: {cfg.convention} is none of {', '.join([AS_WRITTEN, *known])} "
                f"({head.kind} head)"
            )
        head = acceptance_probe.read_as(head, cfg.convention)
    if cfg.probe:
        some = thinned(load_prompts(cfg.prompts), PROMPTS)
        ids = [question_ids(target.tokenizer, p.turns[0]) for p in some]
        batch = acceptance_probe.answers(target, ids, TOKENS)
        found = acceptance_probe.probe(head, batch, target)
        show(found, cfg.convention)
        best = acceptance_probe.fitting(found)
        if best.name != found[0].name:
            raise UserError(
                f"from: {source}: {best.about} fits, not what the files say: "
                f"{best.accepted:.2f} accepted of two draft tokens against "
                f"{found[0].accepted:.2f}; nothing was written: set "
                f"convention={best.name}, or probe=false to take the files at their word"
            )
        head.calibrate([batch], target)
    record = {
        "format": format,
        "dtype": foreign.dtype,
        "convention": cfg.convention,
        "files": {name: files.sha256(source / name) for name in foreign.files},
        "probe": [asdict(r) for r in found],
        **({"from": cfg.from_, "commit": commit} if (commit := hub.commit_of(source)) else {}),
    }
    save_head(head, out, target.identity, {"imported": record})
    print(f"{out}: {head.kind} head from {source} ({format} format, {foreign.dtype})")
    return 0


def same_target(foreign: Foreign, target: Target) -> None:
    """An export of ours names its target by hash. Raises UserError when it is another one."""
    said, mine = (foreign.manifest or {}).get("target"), target.identity
    if isinstance(said, dict) and mine and said.get("weights_sha256") != mine.weights_sha256:
        raise UserError(
            f"from: {foreign.folder}: was exported for another target "
            f"(weights_sha256 {said.get('weights_sha256')!s:.12}); give that one"
        )


def show(found: list[Convention], convention: str) -> None:
    """Print what the probe found: draft tokens of two that the target's own answers accept."""
    for one in [replace(found[0], name=convention), *found[1:6]]:
        print(f"{one.name}: {one.accepted:.3f} accepted of two draft tokens ({one.about})")
    if max(one.accepted for one in found) < acceptance_probe.LOW:
        print(
            "warning: under no convention does this head draft for this target; was it "
            "trained for it? It is read as it is written",
            file=sys.stderr,
        )


if __name__ == "__main__":
    main()
