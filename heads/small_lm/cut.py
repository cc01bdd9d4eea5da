"""Cutting a small model out of a large one: some of its layers, between its own embedding and
its own LM head.

No architecture is known by name: the layers are the module list as long as the model is deep,
and every weight keeps its name but for the layer's number.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from outrider.conf.errors import UserError
from outrider.decode.target import Target


def chosen_layers(total: int, count: int, spacing: str) -> list[int]:
    """Choose `count` of `total` layers: the first ones, or evenly spaced with the first and
    the last among them (as DistilBERT does, Sanh et al. 2019). Raises UserError for a count
    outside 1 .. total - 1."""
    if not 0 < count < total:
        raise UserError(
            f"head.from_target_layers: {count} of the target's {total} layers; give 1 to "
            f"{total - 1}"
        )
    if spacing == "first" or count == 1:
        return list(range(count))
    return [round(i * (total - 1) / (count - 1)) for i in range(count)]


def cut(target: Target, layers: list[int]) -> tuple[Any, dict[str, Tensor]]:
    """Return (a float32 model of the target's class with these layers, the target's tensors
    by the new model's names).

    Raises UserError for a model that is not built as a stack of layers.
    """
    whole, total = target.model, target.num_layers
    stacks = [
        n for n, m in whole.named_modules() if isinstance(m, nn.ModuleList) and len(m) == total
    ]
    if len(stacks) != 1:
        raise UserError(
            f"head.from_target_layers: {type(whole).__name__} has {len(stacks)} lists of {total} "
            "layers, not one; give a smaller model instead (head.path or head.name)"
        )
    model = empty(
        cut_config(target, layers), type(whole) if whole.config is target.config else None
    )
    prefix, place = stacks[0] + ".", {old: new for new, old in enumerate(layers)}
    given: dict[str, Tensor] = {}
    for name, tensor in whole.state_dict(keep_vars=True).items():
        if name.startswith(prefix):
            number, _, rest = name[len(prefix) :].partition(".")
            if int(number) not in place:
                continue
            name = f"{prefix}{place[int(number)]}.{rest}"
        given[name] = tensor
    found, same = model.load_state_dict(given, strict=False), aliases(model)
    odd = [k for k in found.missing_keys if k not in same] + found.unexpected_keys
    if odd:
        raise UserError(
            f"head.from_target_layers: {type(whole).__name__} does not fit its own config (weights "
            f"{', '.join(odd[:3])}); give a smaller model instead (head.path or head.name)"
        )
    model.generation_config = copy.deepcopy(whole.generation_config)
    return model, given


def cut_config(target: Target, layers: list[int]) -> Any:
    """Return the target's config for these of its layers; lists with an entry per layer are
    thinned alike.
    """
    config = copy.deepcopy(target.config)
    for key, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == target.num_layers:
            setattr(config, key, [value[i] for i in layers])
    config.num_hidden_layers = len(layers)
    config._attn_implementation = (
        "eager" if getattr(config, "attn_logit_softcapping", None) else "sdpa"
    )
    config.dtype = target.dtype
    return config


def empty(config: Any, kind: type | None = None) -> Any:
    """Make a float32 model of `config` whose weights mean nothing. The caller's random state
    is untouched."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        if kind is not None:
            return kind(config).float().eval()
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def aliases(model: nn.Module) -> dict[str, str]:
    """Return the name of a tied parameter -> the name it is stored under."""
    first: dict[int, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    return {n: known for n, p in named if (known := first.setdefault(id(p), n)) != n}
