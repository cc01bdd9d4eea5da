"""What a Hugging Face model says about itself: its body, the length of its context, where its answers end."""

from __future__ import annotations

from typing import Any

from conf.errors import UserError

UNBOUNDED = 2**31 - 1


def body(model: Any) -> Any:
    """The model without its LM head: what its prefix names, else the child that holds the embeddings."""
    if model.base_model is not model:
        return model.base_model
    embedding = model.get_input_embeddings()
    for child in model.children():
        if child is not embedding and any(part is embedding for part in child.modules()):
            return child
    raise UserError(f"target: {type(model).__name__} has no body apart from its LM head; choose another model")


def context_length(config: Any) -> int:
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return UNBOUNDED


def eos_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """The end-of-turn ids generation stops at: the generation config's, else the config's, else the
    tokenizer's.
    """
    for holder in (getattr(model, "generation_config", None), model.config, tokenizer):
        value = getattr(holder, "eos_token_id", None)
        if value is not None:
            return tuple(sorted(set(value if isinstance(value, (list, tuple)) else [value])))
    return ()
