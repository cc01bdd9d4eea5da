"""Which engines can serve a head: the one answer that an export goes by."""

from __future__ import annotations

from outrider.conf.errors import UserError
from outrider.decode.models.load import TargetConfig
from outrider.decode.target import Target
from outrider.heads.base import Head
from outrider.heads.block.head import BlockHead
from outrider.heads.interop import (
    FORMATS,
    LAYOUTS,
    Facts,
    engines,
    find_layout,
    gguf_write,
)
from outrider.heads.interop.gguf_block import block_refusals
from outrider.heads.small_lm.head import SmallLM

# Formats that are no layout of tensors -> the kinds of heads that they take, and who reads them.
WHOLE = {
    "transformers": (("small_lm",), (engines.VLLM, engines.SGLANG)),
    "gguf": (("eagle3", "dflash", "dspark", "small_lm"), (engines.LLAMACPP,)),
}


def name_of(cfg: TargetConfig, target: Target) -> str:
    """What an engine loads the target by: its repository, else its folder; "" where there
    is none (target=tiny)."""
    if cfg.kind == "hub":
        return cfg.name
    return target.identity.path if target.identity is not None else ""


def formats(kind: str) -> list[str]:
    """The formats that have a place for heads of a kind."""
    return [one for one in FORMATS if (one, kind) in LAYOUTS or kind in WHOLE.get(one, ((), ()))[0]]


def refusals(format: str, head: Head, target: Target, facts: Facts) -> list[str]:
    """Why `head` cannot go into a format for this target, each with its key and the
    nearest thing that works; [] where it can."""
    if isinstance(head, SmallLM) and format in WHOLE:
        return _whole(head, target) if format == "gguf" else []
    if format != "gguf":
        try:
            layout = find_layout(format, head)
        except UserError as error:
            return [str(error).removeprefix(f"format={format}: ")]
        return layout.refusals(head, facts)
    if isinstance(head, BlockHead):
        return block_refusals(head, target) + _no_layers(facts)
    return gguf_write.eagle3_refusals(head, target.num_layers) + _no_layers(facts)


def _no_layers(facts: Facts) -> list[str]:
    """That llama.cpp hands out no layer of such a target to a head."""
    if facts.architecture in engines.LLAMACPP_LAYERS:
        return []
    return [
        f"target: {engines.LLAMACPP.title} hands no layer of a {facts.architecture} to a draft "
        "head; choose another format (a separate draft, train/draft.py, needs no layer)"
    ]


def check(format: str, head: Head, target: Target, facts: Facts) -> None:
    """Raises UserError with every reason why `head` cannot go into a format."""
    if refused := refusals(format, head, target, facts):
        raise UserError(f"format={format}: {'; '.join(refused)}")


def gone(format: str, head: Head) -> list[str]:
    """Which of those who read a head in a format no longer load it, in words."""
    found = [engine.gone(head.kind) for engine in _readers(format, head.kind)]
    return [line for line in found if line]


def _readers(format: str, kind: str) -> tuple[engines.Engine, ...]:
    layout = LAYOUTS.get((format, kind))
    return WHOLE[format][1] if layout is None else (layout.engine,)


def _whole(head: SmallLM, target: Target) -> list[str]:
    """Why llama.cpp cannot run a separate draft."""
    ids, found = head.ids(), gguf_write.model_refusals(head.net, "head")
    if ids is not None:
        found.append(
            f"head.draft_vocab: {len(ids)}; llama.cpp would draft from all tokens: train with "
            "head.draft_vocab=0"
        )
    rows = head.net.get_input_embeddings().weight.shape[0]
    if rows != target.vocab_size:
        found.append(
            f"head: the draft has {rows} tokens, the target {target.vocab_size}; llama.cpp wants "
            "one vocabulary for both"
        )
    return found
