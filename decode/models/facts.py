"""What a Hugging Face model says about itself: its body, the length of its context, where its
answers end.
"""

from __future__ import annotations

import json
from typing import Any, Protocol

from outrider.conf.errors import UserError
from outrider.decode.models import rope

UNBOUNDED = 2**31 - 1

# What a generation_config may ask for and what leaves the text as it is. The first row are
# keys of decode.sampling.
NEUTRAL: dict[str, Any] = {
    "repetition_penalty": 1,
    "temperature": 1,
    "top_k": 0,
    "top_p": 1,
    "min_p": 0,
    "typical_p": 1,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "num_beams": 1,
    "num_beam_groups": 1,
    "length_penalty": 1,
    "diversity_penalty": 0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1,
    "min_length": 0,
    "min_new_tokens": 0,
    "guidance_scale": 1,
}
OURS = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p")
# What says nothing about which text is written, or is honoured (the ids), or is set by every
# run.
SILENT = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "decoder_start_token_id",
    "do_sample",
    "max_length",
    "max_new_tokens",
    "early_stopping",
    "num_return_sequences",
    "use_cache",
    "cache_implementation",
    "cache_config",
    "max_cache_len",
    "prefill_chunk_size",
    "low_memory",
    "compile_config",
    "disable_compile",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "output_logits",
    "return_dict_in_generate",
    "is_assistant",
    "use_mtp",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
    "prompt_lookup_num_tokens",
    "max_matching_ngram_size",
    "assistant_early_exit",
    "assistant_lookbehind",
    "target_lookbehind",
    "speculation_type",
    "transformers_version",
    "continuous_batching_config",
)
SHOWN = 40  # letters of a value in a note


def body(model: Any) -> Any:
    """The model without its LM head: what its prefix names, else the child that holds the
    embeddings.
    """
    if model.base_model is not model:
        return model.base_model
    embedding = model.get_input_embeddings()
    for child in model.children():
        if child is not embedding and any(part is embedding for part in child.modules()):
            return child
    raise UserError(
        f"target: {type(model).__name__} has no body apart from its LM head; choose another model"
    )


def context_length(config: Any) -> int:
    """Most tokens of a text, prompt and answer: as many as the model has positions, and not beyond
    the length where its rotary frequencies change (rope.first_range)."""
    return min(positions(config), rope.first_range(config) or UNBOUNDED)


def positions(config: Any) -> int:
    """Tokens that a model's config has room for; UNBOUNDED where it names no number."""
    names = ("max_position_embeddings", "n_positions", "max_seq_len")
    given = [getattr(config, name, None) for name in names]
    return next((n for n in given if isinstance(n, int) and n > 0), UNBOUNDED)


def eos_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """The end-of-turn ids generation stops at: the generation config's, else the config's,
    else the tokenizer's.
    """
    for holder in (getattr(model, "generation_config", None), model.config, tokenizer):
        value = getattr(holder, "eos_token_id", None)
        if value is not None:
            return tuple(sorted(set(value if isinstance(value, (list, tuple)) else [value])))
    return ()


def ignored(model: Any, sampling: Any) -> dict[str, Any]:
    """What the model's generation_config asks for and a run under `sampling`
    (decode.sampling.Sampling) does not apply.

    Name -> value, fit for JSON; our own keys first. Without do_sample its temperature and
    truncation mean nothing.
    """
    config = getattr(model, "generation_config", None)
    requested = {} if config is None else vars(config)
    if not requested.get("do_sample"):
        requested = {name: value for name, value in requested.items() if name not in OURS[1:]}
    found: dict[str, Any] = {}
    for name in [*OURS, *(n for n in requested if n not in OURS)]:
        value = requested.get(name)
        if (
            name.startswith("_")
            or name in SILENT
            or value is None
            or value is False
            or value in ([], {}, ())
        ):
            continue
        if value == getattr(sampling, name, NEUTRAL.get(name)):
            continue
        try:
            json.dumps(value)
        except TypeError:  # token tuples as keys, settings of a watermark
            value = str(value)
        found[name] = value
    return found


class LoadedTarget(Protocol):
    """What is asked of a decode.target.Target here. context_length: tokens."""

    config: Any
    context_length: int

    @property
    def model(self) -> Any: ...


def notes(target: LoadedTarget, sampling: Any) -> list[str]:
    """What a run under `sampling` does with this target that its files would not
    lead one to expect: a line each."""
    lines = []
    requested = ignored(target.model, sampling)
    if requested:
        ours = [f"{name}={value}" for name, value in requested.items() if name in OURS]
        what = ", ".join(f"{name}={_clipped(value)}" for name, value in requested.items())
        remedy = f": set {' '.join(ours)} to make them part of the distribution" if ours else ""
        lines.append(
            f"target: its generation_config asks for {what}, which this run does not apply{remedy}"
        )
    longest = positions(target.config)
    if target.context_length < longest:
        lines.append(
            f"target: texts of more than {target.context_length} tokens are refused, of {longest} "
            "that it has positions for: beyond, its rotary embedding changes (LongRoPE)"
        )
    return lines


def _clipped(value: Any) -> str:
    text = str(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
