"""Export a trained drafter to a serving engine, checked before it counts.

    outrider export target=smollm2 drafter=runs/eagle3 format=vllm out=exports/eagle3

Formats: vllm, speculators (one folder for `vllm serve`), sglang, deepspec (DSpark), transformers
(separate drafts), gguf (llama.cpp: EAGLE-3, DFlash, DSpark). Which version of an engine loads
which drafter: heads/interop/engines.yaml. OUT holds the weights in the engine's own terms,
README.md (the model card with the serve command), expected.json (what a server of it must answer
and accept: scripts/check.py) and outrider.json (hashes of everything). The exported folder is
read again by an independent reader, whose logits must be the head's on real prompts; otherwise
it is removed and the exit code is 2; one that is stopped leaves nothing. docs/export.md tells
how to serve and what to look at.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import torch

from outrider.conf.errors import UserError, resumable
from outrider.conf.schema import entry
from outrider.decode.models.load import DTYPES, load_target
from outrider.decode.target import Target
from outrider.heads import tuned
from outrider.heads.checkpoint import load_head, read_card, staged
from outrider.heads.drafters import refuse_other
from outrider.heads.folders import find_head, is_plain
from outrider.heads.interop import ENGINE, MANIFEST, architecture, refusals
from outrider.heads.names import DraftSpec
from outrider.scripts.common import files
from outrider.scripts.common.prompts import load_prompts, question_ids, thinned
from outrider.scripts.exporting import card as export_card
from outrider.scripts.exporting import contract
from outrider.scripts.exporting.config import ExportConfig
from outrider.scripts.exporting.place import free_place
from outrider.scripts.exporting.write import write_head

PROMPT_TOKENS = 192  # the self-check recomputes whole prompts at every draft step


@entry("export", ExportConfig)
@resumable()
def main(cfg: ExportConfig) -> int:
    """Write, check, move into place."""
    out = free_place(Path(cfg.out).expanduser(), cfg.overwrite, MANIFEST)
    if is_plain(cfg.drafter):
        raise UserError(
            f"drafter: {cfg.drafter}: an ordinary transformers model, which engines serve as it is "
            "(vLLM: method draft_model; SGLang: STANDALONE; llama.cpp: through its converter); "
            "there is nothing to export"
        )
    refuse_other([cfg.drafter], cfg.target)
    source = find_head(cfg.drafter)
    if out.resolve() in (source.resolve(), *source.resolve().parents):
        raise UserError(f"out: {out} holds the drafter itself; give another folder")
    card = read_card(source)
    target = load_target(cfg.target, "float32", cfg.device)
    head = load_head(source, target)
    # by which an engine loads the target: its repository, else its folder
    named = cfg.target.name if cfg.target.kind == "hub" else getattr(target.identity, "path", "")
    name = cfg.verifier or named
    if refused := refusals(cfg.format, head, target, name):
        raise UserError(f"format={cfg.format}: {'; '.join(refused)}")
    if gone := ENGINE[cfg.format].gone(head.kind):
        print(gone, flush=True)
    prompts = check_prompts(cfg, target)
    imported = card["extra"].get("imported")
    stored = imported.get("dtype") if isinstance(imported, dict) else None
    dtype = cfg.dtype or (stored if stored in DTYPES and cfg.format != "gguf" else "float32")
    depth, run = export_card.usual_depth(head, tuned.read(source)), export_card.run_record(source)
    about = export_card.About(
        cfg.format, head, card, name, architecture(target), out, depth, run, dtype
    )
    with staged(out) as stage:
        twin, check = write_head(
            stage, cfg.format, head, target, name, prompts, dtype, cfg.tokenizer_from
        )
        about.check = asdict(check)
        chain = twin.drafter(target, DraftSpec(shape="chain"))
        asked = [ids.tolist() for ids in prompts]
        wanted = contract.expected(target, chain, asked, depth, cfg.max_new_tokens)
        files.write_json(stage / contract.NAME, asdict(wanted))
        files.write_text(stage / "README.md", export_card.page(about))
        files.write_json(stage / MANIFEST, export_card.manifest(stage, about))
    print(
        f"{out}: {cfg.format} export; read again, it drafts as the head does at "
        f"{check.draft_tokens_equal} positions; how to serve it: {out / 'README.md'}"
    )
    return 0


def check_prompts(cfg: ExportConfig, target: Target) -> list[torch.Tensor]:
    """Return token ids of the prompts, the ends of long ones, spread over the file."""
    some = thinned(load_prompts(cfg.prompts), cfg.num_prompts)
    room = min(PROMPT_TOKENS, target.context_length // 2)
    return [torch.tensor(question_ids(target.tokenizer, p.turns[0])[-room:]) for p in some]


if __name__ == "__main__":
    main()
