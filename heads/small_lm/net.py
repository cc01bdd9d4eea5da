"""The model of a separate small draft: where it is loaded from, what of it learns, its LoRA
(heads/small_lm/head.py).
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from outrider.conf.errors import UserError
from outrider.decode.models.load import TargetConfig, load_target
from outrider.decode.models.tokenizers import compare
from outrider.decode.target import Target
from outrider.heads.small_lm.config import LoraKeys, SmallLMConfig
from outrider.heads.small_lm.cut import aliases

ADAPTER = "draft"  # peft's name of the LoRA


def load_base(cfg: SmallLMConfig, target: Target) -> Any:
    """The float32 model that head.path or head.name means. Raises UserError when it cannot be
    loaded or its tokenizer is another one."""
    try:
        source = TargetConfig(
            "local" if cfg.path else "hub", path=cfg.path, name=cfg.name, revision=cfg.revision
        )
        base = load_target(source, "float32", "cpu")
    except UserError as error:
        raise UserError(
            str(error).replace("target.", "head.").replace("target:", "head:")
        ) from None
    if target.tokenizer is not None:
        verdict = compare(target.tokenizer, base.tokenizer, target.vocab_size, base.vocab_size)
        if not verdict.compatible:
            raise UserError(
                f"head.{'path' if cfg.path else 'name'}: {cfg.path or cfg.name}: another tokenizer "
                f"than the target's: {verdict.reason}; choose a draft of the same family"
            )
    return base.model


def parameters(model: nn.Module) -> int:
    """Number of parameters, tied ones once."""
    return sum(p.numel() for p in model.parameters())


def freeze(net: Any, cfg: SmallLMConfig, dtype: torch.dtype, given: dict[str, Tensor]) -> set[str]:
    """Decide what of `net` learns; frozen weights become the target's own tensors (`given`, by
    net's names) where they come from it, else `dtype`. Returns the names (in the head's
    state_dict, "net." in front) that are not the head's to store. Raises UserError where
    embedding and LM head cannot be tied."""
    into, out = net.get_input_embeddings(), net.get_output_embeddings()
    if cfg.embedding == "tied" and out.weight is not into.weight:
        if out.weight.shape != into.weight.shape:
            raise UserError(
                "head.embedding: the draft's embedding and LM head differ in shape; use "
                "own or shared"
            )
        into.weight = out.weight
        net.config.tie_word_embeddings = True
    words = {id(into.weight), id(out.weight)}
    outside = {f"net.{name}" for name in aliases(net)}
    groups: dict[int, list[str]] = {}
    for name, weight in net.named_parameters(remove_duplicate=False):
        groups.setdefault(id(weight), []).append(name)
    for key, names in groups.items():
        weight = net.get_parameter(names[0])
        if not (cfg.lora.rank or (cfg.embedding == "shared" and key in words)):
            weight.requires_grad_(True)
            continue
        mine = given.get(names[0])
        if mine is not None:
            outside |= {f"net.{name}" for name in names}
        fresh = nn.Parameter(
            (weight.to(dtype) if mine is None else mine).detach(), requires_grad=False
        )
        for name in names:
            holder, _, last = name.rpartition(".")
            setattr(net.get_submodule(holder), last, fresh)
    return outside


def inject(net: Any, keys: LoraKeys, outside: set[str]) -> set[str]:
    """Put a LoRA (Hu et al. 2021) on linear layers of `net`, by peft, in float32. Returns
    `outside` and the new names of the layers in it that are wrapped now. Raises UserError for
    layers that do not exist."""
    from peft import LoraConfig, inject_adapter_in_model

    outside = set(outside)
    before = {id(p): name for name, p in net.named_parameters(remove_duplicate=False)}
    config = LoraConfig(
        r=keys.rank,
        lora_alpha=keys.alpha,
        lora_dropout=keys.dropout,
        target_modules=_linear_layers(net, keys.targets),
    )
    inject_adapter_in_model(config, net, ADAPTER)
    for name, weight in net.named_parameters(remove_duplicate=False):
        if id(weight) not in before:
            weight.data = weight.data.float()
        elif f"net.{before[id(weight)]}" in outside:  # wrapped layers have moved
            outside.add(f"net.{name}")
    return outside


def _linear_layers(net: Any, targets: list[str]) -> list[str]:
    """Names of the linear layers of `net` but its LM head: those whose name ends in one of
    `targets`, or all. Raises UserError for a target that names no such layer."""
    out = net.get_output_embeddings()
    names = [n for n, m in net.named_modules() if isinstance(m, nn.Linear) and m is not out]
    for wanted in targets:
        if not any(f".{name}".endswith(f".{wanted}") for name in names):
            known = ", ".join(sorted({name.rpartition(".")[2] for name in names}))
            raise UserError(f"head.lora.targets: {wanted[:80]!r} is no layer; choose among {known}")
    return [n for n in names if not targets or any(f".{n}".endswith(f".{t}") for t in targets)]


def merged(net: Any, rank: int, outside: set[str], dtype: torch.dtype) -> Any:
    """A copy of `net` in `dtype` with its LoRA of that rank merged: what drafts, and what is
    saved. Weights that are the target's own (`outside`) are not copied."""
    own = {
        id(p): p
        for n, p in net.named_parameters(remove_duplicate=False)
        if f"net.{n}" in outside and not p.requires_grad
    }
    made = copy.deepcopy(net, memo=own if not rank else {})  # type: ignore[arg-type]
    _merge(made)
    for weight in made.parameters():  # not made.to(): rotary frequencies stay in float32
        weight.data = weight.data.to(dtype)
    return made.requires_grad_(False).eval()


def _merge(root: nn.Module) -> None:
    """Put the layers of `root` that are wrapped back, in place, the update added to them in
    float32 or better."""
    for name, part in [(n, m) for n, m in root.named_modules() if hasattr(m, "lora_A")]:
        layer: Any = part
        base = layer.get_base_layer()
        wide = torch.promote_types(base.weight.dtype, torch.float32)
        base.weight.data = base.weight.data.to(wide)
        layer.merge()
        parent, _, last = name.rpartition(".")
        setattr(root.get_submodule(parent), last, base)
    if hasattr(root, "peft_config"):
        del root.peft_config
