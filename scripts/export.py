"""Export a trained drafter to a serving engine, checked before it counts.

    python scripts/export.py target=smollm2 drafter=runs/eagle3 format=vllm out=exports/eagle3

Formats: vllm, speculators (one folder for `vllm serve`), sglang, deepspec (DSpark), medusa and
eagle (the original repositories), transformers (separate drafts), gguf (llama.cpp: EAGLE-3,
DFlash, DSpark, separate drafts, and with drafter=none the target itself). Which version of an
engine loads which drafter: heads/interop/engines.yaml. OUT holds the weights in the engine's own
terms, README.md (the model card with the serve command), expected.json (what a server of it
must answer and accept: scripts/check.py) and outrider.json (hashes of everything). The
exported folder is read again by an independent reader and must draft what the head drafts,
token by token and logit by logit, on real prompts; otherwise it is removed and the exit code
is 2; one that is stopped leaves nothing. docs/serving.md tells how to serve and what to look at.
"""

from __future__ import annotations

import copy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # else scripts/ comes first and shadows libraries
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from outrider.conf.errors import UserError, resumable
from outrider.conf.schema import entry
from outrider.decode.models.load import DTYPES, load_target, torch_dtype
from outrider.decode.target import Target
from outrider.heads import find_head, load_head, tuned
from outrider.heads.base import Head
from outrider.heads.checkpoint import read_card
from outrider.heads.folders import is_plain
from outrider.heads.interop import (
    LAYOUTS,
    MANIFEST,
    Facts,
    find_layout,
    served,
)
from outrider.heads.names import NONE, DraftSpec
from outrider.heads.small_lm.plain import plain_model
from outrider.scripts.common import files
from outrider.scripts.common.prompts import load_prompts, question_ids, thinned
from outrider.scripts.exporting import card as export_card
from outrider.scripts.exporting import contract, gguf_export, notices
from outrider.scripts.exporting import draft as export_draft
from outrider.scripts.exporting.config import ExportConfig
from outrider.scripts.exporting.self_check import ExportCheck, check_export, comparable
from outrider.scripts.exporting.stage import check_room, free_place, writing

PROMPT_TOKENS = 192  # the self-check recomputes whole prompts at every draft step


@entry("export", ExportConfig)
@resumable()
def main(cfg: ExportConfig) -> int:
    """Write, check, move into place."""
    return export(cfg)


def export(cfg: ExportConfig) -> int:
    """The export behind `main`; its exit code."""
    out = free_place(Path(cfg.out).expanduser(), cfg.overwrite)
    if cfg.format == "gguf" and (cfg.drafter == NONE or is_plain(cfg.drafter)):
        return whole_model(cfg, out)
    if is_plain(cfg.drafter):
        raise UserError(
            f"drafter: {cfg.drafter}: an ordinary transformers model, which engines "
            "serve as it is (vLLM: "
            "method draft_model; SGLang: STANDALONE); there is nothing to export"
        )
    source = find_head(cfg.drafter)
    if out.resolve() in (source.resolve(), *source.resolve().parents):
        raise UserError(f"out: {out} holds the drafter itself; give another folder")
    card = read_card(source)
    target = target_of(cfg, card)
    head = load_head(source, target)
    imported = card["extra"].get("imported")
    stored = imported.get("dtype") if isinstance(imported, dict) else None
    facts = Facts.of(target, cfg.verifier or served.name_of(cfg.target, target))
    served.check(cfg.format, head, target, facts)
    about = export_card.About(
        cfg.format, head, card, facts, tuned.read(source), out, export_card.run_record(source)
    )
    if cfg.format == "gguf":
        return gguf(cfg, about, target, source)
    if head.kind == "small_lm" and cfg.format == "transformers":
        with writing(out) as stage:
            check = export_draft.write(
                source, stage, head, target, check_prompts(cfg, target), cfg.dtype
            )
            written = str(check.pop("dtype"))
            finish(stage, cfg, replace(about, check=check, dtype=written), target, head)
        return said(out, cfg, check["draft_tokens_equal"])
    layout = find_layout(cfg.format, head)
    head = first_heads(head, cfg.heads)
    dtype = torch_dtype(cfg.dtype or (stored if stored in DTYPES else "float32"))
    for line in notices.before(layout, head, target, facts, dtype):
        print(line, flush=True)
    check_room(out, layout.nbytes(head, facts, dtype), notices.smaller(head, dtype))
    config, tensors = layout.write(head, target, facts, dtype)
    with writing(out) as stage:
        files.write_json(stage / "config.json", config)
        export_draft.save(tensors, stage / layout.file)
        found: ExportCheck = check_export(
            stage, cfg.format, head, target, check_prompts(cfg, target), dtype
        )
        written = str(config["torch_dtype"])
        about = replace(about, head=head, check=found.json(), dtype=written)
        finish(stage, cfg, about, target, comparable(head, dtype))
    return said(out, cfg, found.tokens)


def gguf(cfg: ExportConfig, about: export_card.About, target: Target, source: Path) -> int:
    """A head or a separate draft that was trained here, as one GGUF file."""
    kind, head = gguf_kind(cfg), about.head
    prompts = check_prompts(cfg, target)
    with writing(about.out) as stage:
        if head.kind == "small_lm":
            found = gguf_export.write_draft(stage, source, head, target, prompts, kind)
            twin = head
        else:
            twin, found = gguf_export.write_head(stage, head, target, prompts, kind)
        about = replace(about, check=found.json(), dtype=kind.dtype)
        finish(stage, cfg, about, target, twin)
    return said(about.out, cfg, found.tokens)


def whole_model(cfg: ExportConfig, out: Path) -> int:
    """The target itself (drafter=none), or an ordinary model as its separate draft, as one
    GGUF file."""
    kind = gguf_kind(cfg)
    target = load_target(cfg.target, "float32", cfg.device)
    prompts = check_prompts(cfg, target)
    with writing(out) as stage:
        if cfg.drafter == NONE:
            name, model = gguf_export.TARGET, target.model
        else:
            name, model = gguf_export.DRAFT, plain_model(cfg.drafter, target).draft.model
        found = gguf_export.write_model(stage / name, model, target, prompts, kind)
        identity = target.identity.to_json() if target.identity is not None else None
        files.write_text(stage / "README.md", gguf_export.page(name, cfg.drafter, kind, found))
        about = {
            "engine_format": "gguf",
            "kind": "target" if cfg.drafter == NONE else "small_lm",
            "dtype": kind.dtype,
            "target": identity,
            "check": found.json(),
        }
        files.write_json(stage / MANIFEST, gguf_export.manifest(about, stage))
    print(f"{out}: {name}, its logits behind {found.prompts} prompts are the model's")
    return 0


def gguf_kind(cfg: ExportConfig) -> gguf_export.Kind:
    """How the numbers are stored."""
    source = Path(cfg.tokenizer_from).expanduser() if cfg.tokenizer_from else None
    return gguf_export.Kind(cfg.dtype or "float32", source)


def target_of(cfg: ExportConfig, card: dict[str, Any]) -> Target:
    """The target in float32. Raises UserError that also says what the export needs it for."""
    try:
        return load_target(cfg.target, "float32", cfg.device)
    except UserError as error:
        layout = LAYOUTS.get((cfg.format, card["kind"]))
        if layout is None:
            raise
        config = card["head"].get("config", {})
        holder = type(
            "Saved",
            (),
            {"cfg": type("Keys", (), {"share_lm_head": config.get("share_lm_head", False)})},
        )
        needs = layout.needs(holder)
        writes = f"writes its {', '.join(needs)}; " if needs else "writes none of its tensors, but "
        raise UserError(
            f"{error}. The export {writes}the self-check needs the whole target"
        ) from None


def check_prompts(cfg: ExportConfig, target: Target) -> list[Any]:
    """Token ids of the prompts, the ends of long ones, thinned over the file."""
    import torch

    some = thinned(load_prompts(cfg.prompts), cfg.num_prompts)
    room = min(PROMPT_TOKENS, target.context_length - 16)
    return [torch.tensor(question_ids(target.tokenizer, p.turns[0])[-room:]) for p in some]


def first_heads(head: Head, count: int | None) -> Head:
    """A copy of a Medusa head with its first `count` heads."""
    if count is None or head.kind != "medusa":
        if count is not None:
            raise UserError(
                f"heads: {count} is for Medusa heads, this is {head.kind}; leave it out"
            )
        return head
    if count > head.cfg.heads:
        raise UserError(
            f"heads: {count}, but there are {head.cfg.heads}; give {head.cfg.heads} or fewer"
        )
    small = copy.deepcopy(head)
    small.cfg = replace(head.cfg, heads=count)
    for name in ("block_weight", "block_bias", "proj"):
        weight = getattr(small, name)
        if weight is not None:
            weight.data = weight.data[:count].clone()
    return small


def finish(
    stage: Path, cfg: ExportConfig, about: export_card.About, target: Target, twin: Head
) -> None:
    """The card, the contract, and last the manifest with the hashes of every other file.

    twin: the head with the exported numbers.
    """
    prompts = [ids.tolist() for ids in check_prompts(cfg, target)]
    chain = twin.drafter(target, DraftSpec(shape="chain"))
    wanted = contract.expected(target, chain, prompts, about.depth, cfg.max_new_tokens)
    files.write_json(stage / contract.NAME, wanted)
    files.write_text(stage / "README.md", export_card.page(about))
    files.write_json(
        stage / MANIFEST, export_card.manifest(about, stage, files.command(), files.environment())
    )


def said(out: Path, cfg: ExportConfig, tokens: int) -> int:
    """Tell where it lies and how to serve it."""
    print(
        f"{out}: {cfg.format} export, {tokens} draft tokens equal to the head's; how to serve it: "
        f"{out / 'README.md'}"
    )
    return 0


if __name__ == "__main__":
    main()
