"""Any transformers folder or Hugging Face repository as a separate draft model, checked against the target first."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from conf.errors import UserError
from decode.draft_model import DraftModel
from decode.load import TargetConfig, load_target
from decode.target import Target
from decode.tokenizers import compare
from heads.small_lm_net import parameters

REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
OURS = ("runs", "reports", "exports", "checkpoints")  # folders of this tool, also where they are not made yet
DEPTH = 5  # levels of a chain or tree of a model that was never tuned


def is_plain(path: str) -> bool:
    """Whether `path` is an ordinary model folder, or reads like the name of a repository (and its first part is no
    folder here or of ours, which would rather be a misspelt path: the hub is not asked for those)."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return (folder / "config.json").is_file()
    first = path.partition("/")[0]
    return bool(REPOSITORY.fullmatch(path)) and first not in OURS and not Path(first).exists()


def plain_drafter(path: str, target: Target, shape: str | None = None) -> DraftModel:
    """A drafter over the causal language model in a folder or repository, in the target's dtype on its device.

    Raises UserError when it cannot be loaded or does not share the target's tokenizer (the first difference is named).
    """
    local = Path(path).expanduser().is_dir()
    source = TargetConfig(kind="local" if local else "hub", path=path if local else "", name="" if local else path)
    try:
        draft = load_target(source, target.dtype, target.device)
    except UserError as error:
        raise UserError(f"drafters: {path}: {_strip(str(error))}") from None
    if target.tokenizer is not None and draft.tokenizer is not None:
        verdict = compare(target.tokenizer, draft.tokenizer, target.vocab_size, draft.vocab_size)
        if not verdict.compatible:
            raise UserError(f"drafters: {path}: another tokenizer than the target's: {verdict.reason}; choose a draft "
                            "of the same family")
    size, whole = parameters(draft.model), parameters(target.model)
    if size >= whole:
        print(f"warning: {path} ({size:,} parameters) is no smaller than its target ({whole:,}); drafting with it can "
              "hardly pay, see the break-even figure", file=sys.stderr)
    chosen = shape or ("tree" if draft.support == target.support == "tree" else "chain")
    return DraftModel(draft, DEPTH, path, shape=chosen, vocab_size=target.vocab_size)


def _strip(text: str) -> str:
    """An error about a target, told about a draft."""
    return text.removeprefix("target: ").replace("target.path: ", "").replace("target.name: ", "")
