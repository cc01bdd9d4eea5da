"""Export a trained drafter to a serving engine, checked before it counts.

    python scripts/export.py target=smollm2 drafter=runs/eagle3 format=vllm out=exports/eagle3

Formats: vllm, speculators (one folder for `vllm serve`), sglang, medusa and eagle (the
original repositories), transformers (separate drafts). OUT holds config.json and weights in
the engine's own terms, README.md (the model card with the serve command) and outrider.json
(hashes of everything). The exported folder is read again by an independent reader and must
draft what the head drafts, token by token and logit by logit, on real prompts; otherwise it is
removed and the exit code is 2. docs/serving.md tells how to serve and what to look at.
"""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # else scripts/ comes first and shadows libraries
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from conf.errors import UserError
from conf.schema import entry
from decode.models.load import DTYPES, TargetConfig, load_target, torch_dtype
from decode.target import Target
from heads import find_head, load_head, tuned
from heads.base import Head
from heads.checkpoint import read_card, recover, staged
from heads.folders import is_plain
from heads.interop import FORMATS, LAYOUTS, MANIFEST, Facts, exported, find_layout
from scripts.common import files
from scripts.common.prompts import chat_ids, load_prompts
from scripts.serving import card as export_card
from scripts.serving import draft as export_draft
from scripts.serving.check import Check, check_export

PROMPT_TOKENS = 192  # the self-check recomputes whole prompts at every draft step


@dataclass
class ExportConfig:
    """Keys of scripts/export.py."""

    # run folder or head folder to export
    drafter: str
    # vllm, speculators, sglang, medusa, eagle or transformers
    format: str
    # folder to write
    out: str
    # the target that the head was trained for
    target: TargetConfig = field(default_factory=TargetConfig)
    # replace an earlier export in `out`, as a whole
    overwrite: bool = False
    # float32, bfloat16 or float16; null = as the head was imported, else float32
    dtype: str | None = None
    # Medusa: export the first so many heads (vLLM drafts with all that it is given); null =
    # all
    heads: int | None = None
    # name or folder by which the engine loads the target; empty = its repository, else its
    # folder
    verifier: str = ""
    # prompts of the self-check, JSONL as scripts/evaluate.py reads it
    prompts: str = "scripts/prompts/demo.jsonl"
    # how many of them
    num_prompts: int = 8
    # cpu, cuda, cuda:1; null = the GPU when there is one
    device: str | None = None

    def validate(self) -> list[str]:
        """Problems as "key: value; rule; fix"."""
        found = []
        if self.format not in FORMATS:
            found.append(f"format: {self.format} is unknown; choose among {', '.join(FORMATS)}")
        if self.dtype is not None and self.dtype not in DTYPES:
            found.append(f"dtype: {self.dtype} is none of {', '.join(DTYPES)}")
        if self.num_prompts < 1:
            found.append(
                f"num_prompts: {self.num_prompts} is below 1; the self-check needs one or more"
            )
        if self.heads is not None and self.heads < 1:
            found.append(f"heads: {self.heads} is below 1; give 1 or more, or null for all")
        return found


@entry("export", ExportConfig)
def main(cfg: ExportConfig) -> int:
    """Write, check, move into place."""
    out = free_place(Path(cfg.out).expanduser(), cfg.overwrite)
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
    dtype = torch_dtype(cfg.dtype or (stored if stored in DTYPES else "float32"))
    facts = Facts.of(
        target, cfg.verifier or (cfg.target.name if cfg.target.kind == "hub" else name_of(target))
    )
    about = export_card.About(
        cfg.format, head, card, facts, tuned.read(source), out, export_card.run_record(source)
    )
    if head.kind == "small_lm" and cfg.format == "transformers":
        with staged(out) as stage:
            check = export_draft.write(
                source, stage, head, target, check_prompts(cfg, target), cfg.dtype
            )
            written = str(check.pop("dtype"))
            finish(stage, replace(about, check=check, dtype=written))
        return said(out, cfg, check["draft_tokens_equal"])
    layout = find_layout(cfg.format, head)
    head = first_heads(head, cfg.heads)
    config, tensors = layout.write(head, target, facts, dtype)
    with staged(out) as stage:
        files.write_json(stage / "config.json", config)
        export_draft.save(tensors, stage / layout.file)
        found: Check = check_export(
            stage, cfg.format, head, target, check_prompts(cfg, target), dtype
        )
        written = str(config["torch_dtype"])
        finish(stage, replace(about, head=head, check=found.json(), dtype=written))
    return said(out, cfg, found.tokens)


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


def name_of(target: Target) -> str:
    """The folder of the target; "" where there is none (target=tiny)."""
    return target.identity.path if target.identity is not None else ""


def free_place(out: Path, overwrite: bool) -> Path:
    """`out`, if it may be written. Raises UserError for a folder that exists, unless it is an
    export to be replaced.
    """
    if not out.parent.exists() or out.parent.is_dir():
        recover(out)
    if not out.exists() and not out.is_symlink():
        return out
    if not out.is_dir():
        raise UserError(f"out: {out} is a file; give a folder")
    if not any(out.iterdir()):
        return out
    if not overwrite:
        raise UserError(
            f"out: {out} exists; set overwrite=true to replace it as a whole, or give "
            "another folder"
        )
    if exported(out) is None:
        raise UserError(
            f"out: {out} holds files that are no export (no {MANIFEST}); overwrite=true "
            "would delete them "
            "all: give another folder"
        )
    return out


def check_prompts(cfg: ExportConfig, target: Target) -> list[Any]:
    """Token ids of the prompts, the ends of long ones, spread over the file."""
    import torch

    known = load_prompts(cfg.prompts)
    step = max(1, len(known) // cfg.num_prompts)
    room = min(PROMPT_TOKENS, target.context_length - 16)
    ids = [
        chat_ids(target.tokenizer, [{"role": "user", "content": p.turns[0]}]) for p in known[::step]
    ]
    return [torch.tensor(i[-room:]) for i in ids[: cfg.num_prompts]]


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


def finish(stage: Path, about: export_card.About) -> None:
    """The card, and last the manifest with the hashes of every other file."""
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
