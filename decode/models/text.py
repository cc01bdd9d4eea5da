"""The language model of a vision-language checkpoint (Mistral 3, Qwen-VL, Llama 4, Gemma 3 and
4): transformers' own class, without the parts that no text passes through, whose weights are never
read.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    PreTrainedModel,
    initialization,
)

from outrider.conf.errors import UserError
from outrider.decode.models import facts


def beside(config: Any) -> bool:
    """Is the language model one part among others of what `config` describes?"""
    return bool(config.sub_configs) and config.get_text_config(decoder=True) is not config


def model_class(config: Any) -> Any:
    """Return what makes a language model of `config`, by `from_pretrained`: of a part among others
    a class whose models come without these, else transformers' own choice.
    Raises UserError where it cannot be told which part reads text."""
    if not beside(config):
        return AutoModelForCausalLM
    kind, text = type(config), type(config.get_text_config(decoder=True))
    for known in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING):
        if kind in known:
            whole: Any = known[kind]
            return AutoModelForCausalLM if whole.config_class is text else _alone(whole)
    if getattr(config, "auto_map", None):  # code of its own
        return AutoModelForCausalLM
    raise UserError(
        f"target: transformers has no class that reads text alone for {config.model_type} "
        "checkpoints; give the folder of a language model"
    )


def empty(config: Any, trust_remote_code: bool = False) -> Any:
    """Return the language model of `config` on torch's meta device, where weights take no memory.
    Raises what transformers raises of such a config, and UserError as `model_class`."""
    kind, given = model_class(config), {"dtype": torch.bfloat16}
    with torch.device("meta"), initialization.no_init_weights():
        if kind is AutoModelForCausalLM:
            model = kind.from_config(config, trust_remote_code=trust_remote_code, **given)
        else:
            model = kind._from_config(config, **given)
    model.tie_weights()
    return model


@functools.cache
def _alone(whole: Any) -> Any:
    """Return a class of the same name whose models have their language model alone."""

    def made(self: Any, config: Any, *args: Any, **named: Any) -> None:
        whole.__init__(self, config, *args, **named)
        _drop(self)

    def attend(self: Any, chosen: Any, *args: Any, **named: Any) -> None:
        config, text = self.config, self.config.get_text_config(decoder=True)
        own = [key for key in config.sub_configs if getattr(config, key) is text]
        if own and isinstance(chosen, str):  # transformers warns of parts that are not there
            chosen = {"": chosen, own[0]: chosen}
        whole.set_attn_implementation(self, chosen, *args, **named)

    how = {"__init__": made, "set_attn_implementation": attend, "__module__": whole.__module__}
    return type(whole.__name__, (whole,), how)


def _drop(model: Any) -> None:
    """Take off the modules beside the language model, but for what holds embeddings of its own
    (Gemma 3n), through which text passes too."""
    inner, lm_head = facts.language_model(model), model.get_output_embeddings()
    if inner is model:
        raise UserError(
            f"target: it cannot be told which part of {type(model).__name__} reads text; give the "
            "folder of a language model"
        )
    unread = set(model._keys_to_ignore_on_load_unexpected or ())
    holders = [m for m in model.modules() if m is not inner and inner in m.modules()]
    for holder in holders:
        for name, part in [*holder.named_children()]:
            words = any(isinstance(m, nn.Embedding) for m in part.modules())
            if part is lm_head or part in holders or part is inner:
                continue
            if isinstance(part, PreTrainedModel) or not words:
                setattr(holder, name, None)
                unread.add(rf"(^|\.){name}\.")
    model._keys_to_ignore_on_load_unexpected = unread
