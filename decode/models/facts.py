"""What a Hugging Face model says about itself: its body, the length of its context, where its
answers end.
"""

from __future__ import annotations

from typing import Any, Protocol

from outrider.conf.errors import UserError

UNBOUNDED = 2**31 - 1

# What a generation_config may ask for that is a key of decode.sampling.
OURS = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p")
# How Phi-3-128k, Phi-3.5 and Phi-4-mini name theirs; "su" in Microsoft's own files.
LONGROPE = ("longrope", "su")
ORIGINAL = "original_max_position_embeddings"  # where the first range of longrope is written
# In the name of a layer type: an index of its own picks the keys that a token sees.
SPARSE = ("indexed", "sparse", "compressed")
# Layer types without attention, and models of them alone whose config names no types.
UNATTENDING = {"linear_attention", "conv", "mamba", "mlp", "moe"}
RECURRENT = ("rwkv", "xlstm")


def language_model(model: Any) -> Any:
    """Return the part of a model that its config's text part describes: itself for most."""
    kind = type(model.config.get_text_config(decoder=True))
    parts = (part for part in model.modules() if type(getattr(part, "config", None)) is kind)
    return next(parts, model)


def body(model: Any) -> Any:
    """Return the model without its LM head: what its prefix names, else the child that
    holds the embeddings."""
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
    """Return most tokens of a text, prompt and answer: as many as the model has positions,
    and not beyond the length where its rotary frequencies change (`_first_range`)."""
    return min(positions(config), _first_range(config) or UNBOUNDED)


def positions(config: Any) -> int:
    """Return tokens that a model's config has room for; UNBOUNDED where it names no number."""
    names = ("max_position_embeddings", "n_positions", "max_seq_len")
    given = [getattr(config, name, None) for name in names]
    return next((n for n in given if isinstance(n, int) and n > 0), UNBOUNDED)


def _first_range(config: Any) -> int | None:
    """Return longest text, in tokens, that is rotated by the first set of frequencies;
    None: there is but one set. transformers chooses the set of `longrope` and of `dynamic`
    by the largest position of a whole pass, and keys in a cache that were rotated by one
    set do not fit the other. So no text leaves the first range (decode/checks.py refuses
    it)."""
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    given = given if isinstance(given, dict) else {}
    longest, lengths = getattr(config, "max_position_embeddings", None), []
    for one in [v for v in given.values() if isinstance(v, dict)] or [given]:  # by layer type
        kind = one.get("rope_type", one.get("type"))
        if kind in LONGROPE:
            lengths.append(one.get(ORIGINAL) or getattr(config, ORIGINAL, None) or longest)
        elif kind == "dynamic":
            lengths.append(longest)
    return min((length for length in lengths if length), default=None)


def refusal(config: Any) -> str:
    """Return why no draft can be scored by a model of this text config, "" where its layer types
    say nothing against it."""
    kinds = list(dict.fromkeys(map(str, getattr(config, "layer_types", None) or ())))
    name = (getattr(config, "architectures", None) or [config.model_type])[0]
    sparse = [kind for kind in kinds if any(word in kind for word in SPARSE)]
    if sparse:
        return (
            f"target: {name} has sparse attention ({sparse[0]}), and nothing is kept here of the "
            "index that picks its keys; choose a target with full, sliding-window or linear "
            "attention"
        )
    if config.model_type in RECURRENT or (kinds and UNATTENDING.issuperset(kinds)):
        return (
            f"target: {name} is recurrent alone, and a draft is scored from the keys and values of "
            "attention layers; choose a model that has some (hybrids do)"
        )
    return ""


def eos_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Return the end-of-turn ids that generation stops at: those of the generation config, the
    config and the tokenizer, and the one that the chat template writes behind an answer."""
    holders = (getattr(model, "generation_config", None), model.config, tokenizer)
    named = (getattr(holder, "eos_token_id", None) for holder in holders)
    lists = [value if isinstance(value, list | tuple) else [value] for value in named]
    return tuple(sorted({*sum(map(list, lists), []), *_template_end(tokenizer)} - {None}))


def _template_end(tokenizer: Any) -> list[int]:
    """Return the special token that the chat template writes behind an answer, if it does."""
    word = "\u241fanswer\u241f"
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": word}]
    try:
        text = tokenizer.apply_chat_template(chat, tokenize=False)
    except Exception:  # no template, or one that refuses this chat in its own words
        return []
    _, found, behind = text.rpartition(word)
    ids = tokenizer(behind.lstrip(), add_special_tokens=False)["input_ids"][:1]
    return [i for i in ids if found and i in specials(tokenizer).values()]


def specials(tokenizer: Any) -> dict[str, int]:
    """Return the special tokens and their ids, those without a role among them."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {str(t): int(i) for i, t in added.items() if getattr(t, "special", True)}


def ignored(model: Any, sampling: Any) -> dict[str, Any]:
    """Return what of decode.sampling's keys the model's generation_config asks for and a run under
    `sampling` does not apply, by name. Without do_sample its temperature and truncation mean
    nothing."""
    requested = vars(getattr(model, "generation_config", None) or object)
    names = OURS if requested.get("do_sample") else OURS[:1]
    given = {name: requested.get(name) for name in names}
    return {k: value for k, value in given.items() if value and value != getattr(sampling, k)}


class LoadedTarget(Protocol):
    """What is asked of a decode.target.Target here. context_length: tokens."""

    config: Any
    context_length: int

    @property
    def model(self) -> Any: ...


def notes(target: LoadedTarget, sampling: Any) -> list[str]:
    """Return what a run under `sampling` does with this target that its files would not
    lead one to expect: a line each."""
    lines = []
    requested = ignored(target.model, sampling)
    if requested:
        what = " ".join(f"{name}={value}" for name, value in requested.items())
        lines.append(
            f"target: its generation_config asks for {what}, which this run does not apply: set "
            "them to make them part of the distribution"
        )
    longest = positions(target.config)
    if target.context_length < longest:
        lines.append(
            f"target: texts of more than {target.context_length} tokens are refused, of {longest} "
            "that it has positions for: beyond, its rotary embedding changes (LongRoPE)"
        )
    return lines
