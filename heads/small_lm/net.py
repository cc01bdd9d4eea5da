"""The model of a separate small draft (heads/small_lm/head.py): how it is cut out of the
target or loaded, what of it learns, its LoRA.

No architecture is known by name: the layers are the module list as long as the model is deep,
and every weight keeps its name but for the layer's number.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
from torch import Tensor, nn

from outrider.conf.errors import UserError
from outrider.decode.models.facts import refusal
from outrider.decode.models.load import TargetConfig, load_target
from outrider.decode.target import Target
from outrider.heads.small_lm.config import LoraKeys, SmallLMConfig
from outrider.heads.small_lm.tokenizers import compare

ADAPTER = "draft"  # peft's name of the LoRA


def load_draft(
    source: TargetConfig, target: Target, dtype: torch.dtype | str, device: Any, key: str
) -> Target:
    """Load a smaller causal language model. key: that names it, for an error.

    Raises UserError when it cannot be loaded or does not share the target's tokenizer (the
    first difference is named)."""
    try:
        draft = load_target(source, dtype, device)
    except UserError as error:
        said = re.sub(r"target(\.path|\.name)?: ", "", str(error))
        raise UserError(f"{key}: {said}") from None
    both = target.tokenizer is not None and draft.tokenizer is not None
    if both and (apart := compare(target.tokenizer, draft.tokenizer, draft.vocab_size)):
        raise UserError(
            f"{key}: another tokenizer than the target's: {apart}; choose another draft"
        )
    return draft


def load_base(cfg: SmallLMConfig, target: Target) -> Any:
    """Load the float32 model that head.path or head.name means. Raises UserError as
    load_draft."""
    key = "head.path" if cfg.path else "head.name"
    source = TargetConfig(
        "local" if cfg.path else "hub", path=cfg.path, name=cfg.name, revision=cfg.revision
    )
    return load_draft(source, target, "float32", "cpu", f"{key}: {cfg.path or cfg.name}").model


def parameters(model: nn.Module) -> int:
    """Count the parameters, tied ones once."""
    return sum(p.numel() for p in model.parameters())


def bare(name: str) -> str:
    """Return the name of a weight of the head in its model, whether a LoRA wraps its layer or
    not."""
    return name.removeprefix("net.").replace(".base_layer.", ".")


def freeze(net: Any, cfg: SmallLMConfig, dtype: torch.dtype, given: dict[str, Tensor]) -> set[str]:
    """Decide what of `net` learns; frozen weights become the target's own tensors (`given`, by
    net's names) where they come from it, else `dtype`. Returns the names that are not the
    head's to store: of the target's own tensors and of tied ones."""
    words = {id(net.get_input_embeddings().weight), id(net.get_output_embeddings().weight)}
    tied = aliases(net)
    outside = set(tied)
    for name, weight in list(net.named_parameters()):
        if not (cfg.lora.rank or (cfg.embedding == "shared" and id(weight) in words)):
            weight.requires_grad_(True)
            continue
        mine, names = given.get(name), [name, *(n for n, first in tied.items() if first == name)]
        if mine is not None:
            outside.update(names)
        value = weight.to(dtype) if mine is None else mine
        fresh = nn.Parameter(value.detach(), requires_grad=False)
        for one in names:
            holder, _, last = one.rpartition(".")
            setattr(net.get_submodule(holder), last, fresh)
    return outside


def inject(net: Any, keys: LoraKeys) -> None:
    """Put a LoRA (Hu et al. 2021) on linear layers of `net`, by peft, in float32: on those
    whose name ends in one of keys.targets, or all but the LM head. Raises UserError for a
    target that names no such layer."""
    from peft import LoraConfig, inject_adapter_in_model

    out = net.get_output_embeddings()
    names = [n for n, m in net.named_modules() if isinstance(m, nn.Linear) and m is not out]
    for wanted in keys.targets:
        if not any(f".{name}".endswith(f".{wanted}") for name in names):
            known = ", ".join(sorted({name.rpartition(".")[2] for name in names}))
            raise UserError(f"head.lora.targets: {wanted[:80]!r} is no layer; choose among {known}")
    ends = tuple(f".{wanted}" for wanted in keys.targets)
    config = LoraConfig(
        r=keys.rank,
        lora_alpha=keys.alpha,
        lora_dropout=keys.dropout,
        target_modules=[name for name in names if not ends or f".{name}".endswith(ends)],
    )
    inject_adapter_in_model(config, net, ADAPTER)
    for name, weight in net.named_parameters():
        if ".lora_" in name:
            weight.data = weight.data.float()


def merged(net: Any, outside: set[str], dtype: torch.dtype) -> Any:
    """Return a copy of `net` in `dtype` with its LoRA merged, in float32 or better: what
    drafts, and what is saved. Weights that are the target's own (`outside`) are copied only
    where a LoRA is added to them."""
    weights = net.named_parameters(remove_duplicate=False)
    memo = {id(p): p for n, p in weights if n in outside and not p.requires_grad}
    made = copy.deepcopy(net, memo=memo)  # type: ignore[arg-type]
    for name, part in [(n, m) for n, m in made.named_modules() if hasattr(m, "lora_A")]:
        layer: Any = part
        base = layer.get_base_layer()
        wide = torch.promote_types(base.weight.dtype, torch.float32)
        base.weight.data = base.weight.data.to(wide)
        layer.merge()
        parent, _, last = name.rpartition(".")
        setattr(made.get_submodule(parent), last, base)
    if hasattr(made, "peft_config"):
        del made.peft_config
    for weight in made.parameters():  # not made.to(): rotary frequencies stay in float32
        weight.data = weight.data.to(dtype)
    return made.requires_grad_(False).eval()


# -- cut out of the target


def chosen_layers(total: int, count: int) -> list[int]:
    """Choose `count` of `total` layers, evenly spaced with the first and the last among them
    (as DistilBERT does, Sanh et al. 2019). Raises UserError for a count outside 1 .. total -
    1."""
    if not 0 < count < total:
        raise UserError(
            f"head.from_target_layers: {count} of the target's {total} layers; give 1 to "
            f"{total - 1}"
        )
    return [round(i * (total - 1) / max(1, count - 1)) for i in range(count)]


def cut(target: Target, layers: list[int]) -> tuple[Any, dict[str, Tensor]]:
    """Return (a float32 model of the target's class with these layers, the target's tensors
    by the new model's names).

    Raises UserError for a model that is not built as a stack of layers, and where none of
    these attends."""
    whole, total = target.model, target.num_layers
    if refusal(cut_config(target, layers)):
        counts = [n for n in range(1, total) if _attends(target, n)]
        others = f"{', '.join(map(str, counts[:9]))}, or " if counts else ""
        raise UserError(
            f"head.from_target_layers: {len(layers)} would make a draft of recurrent layers alone "
            f"({', '.join(map(str, layers))} of the target's), and it drafts from the keys and "
            f"values of attention layers; give {others}a smaller model (head.path or head.name)"
        )
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


def _attends(target: Target, count: int) -> bool:
    layers = chosen_layers(target.num_layers, count)
    kinds, made = target.config.layer_types, cut_config(target, layers)
    return not refusal(made) and made.layer_types == [kinds[i] for i in layers]


def cut_config(target: Target, layers: list[int]) -> Any:
    """Return the target's config for these of its layers; lists with an entry per layer are
    thinned alike."""
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
