"""Publish a head on the Hugging Face hub, from where `hub:OWNER/NAME` names it wherever a
head may stand.

    outrider push runs/eagle3 OWNER/NAME license=apache-2.0 report=reports/eagle3
    outrider evaluate 'drafters=[none,hub:OWNER/NAME@tree]' out=reports/theirs

What goes up, in one commit: at the top the head as an engine reads it (format=, exported and
checked as scripts/export.py does), expected.json, the model card, and outrider.json with
every hash; in head/ the head in our own form. All of it is safetensors (GGUF for llama.cpp)
and JSON. The card says what an evaluation of this very head has measured (report=), else "not
measured"; no file names a folder of this machine. A push that is interrupted leaves the
repository as it was; the same command goes on, and sends no large file twice.

RUN may be a run, one of its head folders, or an exported folder, which goes up alone. The
token is huggingface_hub's: `hf auth login`, or HF_TOKEN. out=FOLDER writes what would go up
and sends nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # else scripts/ comes first and shadows libraries
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from outrider.conf.disk import size
from outrider.conf.errors import UserError, resumable
from outrider.conf.schema import entry
from outrider.decode.models.packages import TARGETS
from outrider.heads import find_head
from outrider.heads.checkpoint import read_card, staged
from outrider.heads.interop import engines, exported
from outrider.heads.interop.served import formats
from outrider.heads.names import HUB
from outrider.scripts import export
from outrider.scripts.exporting.card import run_record
from outrider.scripts.exporting.config import ExportConfig
from outrider.scripts.exporting.stage import free_place
from outrider.scripts.publishing import measured, upload
from outrider.scripts.publishing.config import AUTO, NONE, REPOSITORY, PushConfig, keyed
from outrider.scripts.publishing.form import Form
from outrider.scripts.publishing.page import Published, page
from outrider.scripts.publishing.places import without_places

BASES = {target.name: target.repository for target in TARGETS.values()}
FOR_VLLM = ("vllm", "deepspec", "transformers")  # of format=auto, the first that takes the kind


@entry("push", PushConfig)
@resumable()
def main(cfg: PushConfig) -> int:
    """Look, gather, check, upload."""
    remote, source = None, source_of(cfg)  # what is not there is said before the hub is asked
    if not cfg.out:
        upload.allowed(cfg.repository)
        remote = upload.look(cfg.repository, cfg.revision)
        upload.check(remote, cfg.private, cfg.overwrite)
    with ExitStack() as stack:
        form, about = gathered(cfg, source, stack)
        form.finish(page(form, about))
        if remote is None:
            written(cfg, form)
            return 0
        print(f"{cfg.repository}: {size(form.bytes)} to push: {', '.join(sorted(form.files))}")
        sys.stdout.flush()
        what = f"{form.kind} head for {about.base_model or form.target.get('name')}"
        commit = upload.push(remote, form, cfg.private, f"Push a {what}")
    branch = "" if cfg.revision == "main" else f"@{cfg.revision}"
    print(f"{upload.client().endpoint}/{cfg.repository}: pushed, commit {commit[:12]}")
    if form.card:
        print(f"drafter: {HUB}{cfg.repository}{branch}")
    return 0


def written(cfg: PushConfig, form: Form) -> None:
    """Leave in cfg.out what would go up. Raises UserError as scripts/export.py does of its
    out."""
    with staged(free_place(Path(cfg.out).expanduser(), cfg.overwrite)) as stage:
        form.write(stage)
    print(f"{cfg.out}: {size(form.bytes)} in {len(form.files)} files; nothing was pushed")


def source_of(cfg: PushConfig) -> Path:
    """The exported folder or the head folder that cfg.run names. Raises UserError for neither."""
    run = Path(cfg.run).expanduser()
    return run if run.is_dir() and exported(run) else head_of(cfg.run)


def gathered(cfg: PushConfig, source: Path, stack: ExitStack) -> tuple[Form, Published]:
    """Everything that goes up but for its card, and what its owner says of it. source: see
    source_of. stack: holds what is needed until it is up. Raises UserError for what cannot be
    published."""
    run, form, given = Path(cfg.run).expanduser(), Form(), exported(source)
    card = {} if given else read_card(source)
    known = (given or card).get("target") or {}
    base = cfg.base_model or named_on_hub(known)
    weights = str((given or {}).get("source", {}).get("weights_sha256", ""))
    weights = weights if given else str(card["weights"]["sha256"])
    figures = None
    if cfg.report:
        place = Path(cfg.report).expanduser()
        figures = measured.read(place, weights, str(known.get("weights_sha256", "")))
    about = Published(
        cfg.repository,
        license_of(cfg, base),
        base,
        tuple(cfg.datasets),
        figures,
        *trained_on(source, card),
    )
    places = {str(known.get("path", "")): base or "TARGET", str(Path.home()): "~"}
    folder = run if given else engine_form(cfg, run, source, card, base)
    if not given:
        form.add_head(source, places)
    if folder is not None:
        form.add_export(folder, {**places, **named_in_lines(cfg, folder, base)})
    return form, scrubbed(about, places)


def head_of(run: str) -> Path:
    """The head folder of a run. Raises UserError where there is none on this disk."""
    if run.startswith(HUB):
        raise UserError(f"run: {run}: is on the hub already; give a run, head or exported folder")
    try:
        return find_head(run)
    except UserError as error:
        raise UserError(f"run: {str(error).removeprefix('drafters: ')}") from None


def named_on_hub(known: dict[str, Any]) -> str:
    """The target's repository, "" where nobody has told it."""
    name = str(known.get("name", "")).partition(" (")[0]  # behind it: how it was quantised
    name = BASES.get(name, name)
    if REPOSITORY.fullmatch(name):
        return name
    print("note: base_model= is not given, and the card names no repository", file=sys.stderr)
    return ""


def license_of(cfg: PushConfig, base: str) -> str:
    """The licence of the card. Raises UserError where nobody tells one."""
    if cfg.license:
        return cfg.license
    if base:
        try:
            found = getattr(upload.client().model_info(base).card_data, "license", None)
        except Exception:  # without the hub, or without that repository, its owner has to say it
            found = None
        if isinstance(found, str):
            print(f"license: {found}, as that of {base}")
            return found
    raise UserError(
        f"license: is empty, and the hub tells none of {base or 'the target'}; set "
        "license=apache-2.0, or whichever yours is"
    )


def trained_on(source: Path, card: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """(what the run says of its data; amounts of its training, and what it started from)."""
    record = run_record(source)
    seen = card.get("extra", {}).get("training") or {}
    amounts = {
        name: f"{seen[key]:,.0f}"
        for key, name in (("tokens_seen", "tokens"), ("supervised_seen", "tokens with a loss"))
        if isinstance(seen.get(key), int | float)
    }
    begun = {"started from": record["start"]} if "start" in record else {}
    return str(record.get("data", "")), {**amounts, **begun}


def scrubbed(about: Published, places: dict[str, str]) -> Published:
    """The same without folders of this machine."""
    training = {k: without_places(v, places) for k, v in about.training.items()}
    return replace(about, data=without_places(about.data, places), training=training)


def engine_form(
    cfg: PushConfig, run: Path, source: Path, card: dict[str, Any], base: str
) -> Path | None:
    """The folder that an engine reads, exported where it is not there; None where none is
    wanted or no engine reads such a head. Raises UserError as scripts/export.py does."""
    kind = str(card["kind"])
    known = [one for one in FOR_VLLM if one in formats(kind) and engines.VLLM.loads(kind)]
    format = cfg.format if cfg.format != AUTO else next(iter(known), NONE)
    if cfg.format == AUTO and format == NONE:
        print(f"format: {engines.VLLM.title} reads no {kind} heads; it goes up in our own form")
    if format == NONE:
        return None
    place = Path(cfg.export).expanduser() if cfg.export else run / f"export-{format}"
    made = exported(place) if place.is_dir() else None
    if made is not None and made.get("engine_format") == format:
        source_sha256 = made.get("source", {}).get("card_sha256")
        if source_sha256 == card["sha256"]:
            print(f"export: {place} is of this head")
            return place
    export.export(
        ExportConfig(
            drafter=str(source),
            format=format,
            out=str(place),
            target=cfg.target,
            overwrite=True,
            dtype=cfg.dtype,
            verifier=base,
            prompts=cfg.prompts,
            num_prompts=cfg.num_prompts,
            device=cfg.device,
        )
    )
    return place


def named_in_lines(cfg: PushConfig, folder: Path, base: str) -> dict[str, str]:
    """What stands in an export's lines for an engine, and what everybody else writes in its place:
    the repository for the folder (for llama.cpp the folder that it is fetched into), and the base
    model for the target."""
    made = exported(folder) or {}
    here = cfg.repository.rpartition("/")[2]
    place = here if made.get("engine_format") == "gguf" else cfg.repository
    own = (str(made.get("folder", "")), str(folder), str(folder.resolve()))
    target = str((made.get("target") or {}).get("path", ""))
    served = {f"{word} TARGET ": f"{word} {base} " for word in ("serve", "--model-path") if base}
    return {**dict.fromkeys(own, place), target: base or "TARGET", **served}


def command(argv: Sequence[str] | None = None) -> None:
    """`push.py RUN OWNER/NAME KEY=VALUE ...`; the first two may also be written as keys."""
    main(keyed(sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    command()
