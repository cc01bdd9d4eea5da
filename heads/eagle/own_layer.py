"""The target's own decoder-layer class in an EAGLE drafter (head.layer=target), in place of
the Llama-style layer.

The class, its config, its biases, norms on heads, experts and rotary embedding are the
target's; windows are left out, since a drafter looks at everything. What EAGLE changes is done
from outside: the layer's input norm gives way to one that hands on what the drafter has
prepared, and EAGLE-3's first layer gets attention projections of twice the width. Serving
engines run Llama-style layers, so such a head stays in this house.

Shape letters: B rows, T positions, n rows of a packed pass, D width.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from conf.errors import UserError
from decode.target import Target
from heads.eagle.layer import Rope, take

PROJECTIONS = (
    "q_proj",
    "k_proj",
    "v_proj",
    "qkv_proj",
    "query_key_value",
)  # what reads the attention's input
KEY = "head.layer: target"
FIX = "use head.layer=llama"


@dataclass(frozen=True)
class Own:
    """kind: the target's layer class. config: a copy of its config for a stack of draft
    layers. rotary: its rotary embedding's class."""

    kind: type[nn.Module]
    config: Any
    rotary: type[nn.Module]

    def rope(self, length: int, dtype: torch.dtype, device: torch.device) -> Rope:
        """cos and sin [length, rotated width] of positions 0 .. length - 1."""
        rotary = self.rotary(self.config).to(device)  # type: ignore[call-arg]
        more = (
            {"layer_type": "full_attention"}
            if "layer_type" in inspect.signature(rotary.forward).parameters
            else {}
        )
        cos, sin = rotary(
            torch.empty(0, dtype=dtype, device=device),
            torch.arange(length, device=device)[None],
            **more,
        )
        return cos[0], sin[0]


def backbone(target: Target) -> Any:
    """The target's stack of layers with its final norm; of a model that also sees, the
    language part.
    """
    body = target.model.base_model
    return getattr(body, "language_model", body)


def own(target: Target, layers: int) -> Own:
    """What a stack of `layers` of the target's own layers is made of. Raises UserError where
    it cannot work.
    """
    body = backbone(target)
    stack, rotary = getattr(body, "layers", None), getattr(body, "rotary_emb", None)
    name = type(target.model).__name__
    if not isinstance(stack, nn.ModuleList) or rotary is None:
        raise UserError(
            f"{KEY}; {name} has no layers with rotary positions given from outside; {FIX}"
        )
    config = copy.deepcopy(target.config)
    if getattr(config, "attn_logit_softcapping", None):
        raise UserError(
            f"{KEY}; {name} caps its attention scores, which training-time test cannot "
            f"follow; {FIX}"
        )
    config.num_hidden_layers = layers
    for key, value in (
        ("sliding_window", None),
        ("use_sliding_window", False),
        ("attention_dropout", 0.0),
        ("layer_types", ["full_attention"] * layers),
    ):
        if getattr(config, key, None) is not None:
            setattr(config, key, value)
    kinds = getattr(target.config, "layer_types", None) or ["full_attention"] * len(stack)
    full = next(
        (layer for layer, kind in zip(stack, kinds, strict=False) if kind == "full_attention"),
        stack[0],
    )
    return Own(type(full), config, type(rotary))


class _Given(nn.Module):
    """Stands where a layer norms its input: returns what the drafter has prepared."""

    value: Tensor

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.value


class OwnLayer(nn.Module):
    """The counterpart of heads.eagle.layer.DraftLayer; the same calls."""

    def __init__(self, spec: Own, index: int, wide: bool, norm: bool) -> None:
        super().__init__()
        try:
            self.inner: Any = spec.kind(spec.config, index)
        except Exception as error:  # other people's classes: whatever they raise, the fix is one
            line = (str(error).splitlines() or [type(error).__name__])[0]
            raise UserError(
                f"{KEY}; {spec.kind.__name__} cannot be built ({line}); {FIX}"
            ) from None
        if not isinstance(getattr(self.inner, "input_layernorm", None), nn.Module):
            raise UserError(
                f"{KEY}; {spec.kind.__name__} does not norm its input, so the token's "
                "embedding has no "
                f"place to enter; {FIX}"
            )
        self.input_layernorm = self.inner.input_layernorm if norm else None
        self.inner.input_layernorm = _Given()
        width, found = spec.config.hidden_size, 0
        for part in list(self.inner.modules()) if wide else []:
            for name in PROJECTIONS:
                old = getattr(part, name, None)
                if type(old) is nn.Linear and old.in_features == width:
                    new = nn.Linear(2 * width, old.out_features, bias=old.bias is not None)
                    setattr(part, name, new)
                    found += 1
        if wide and not found:
            raise UserError(
                f"{KEY}; {spec.kind.__name__} has none of the projections "
                f"{', '.join(PROJECTIONS)}; {FIX}"
            )
        self.past = (
            "layer_past" in inspect.signature(self.inner.forward).parameters
        )  # GPT-NeoX's name of a cache
        for module in self.inner.modules():
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(
        self, residual: Tensor, x: Tensor, rope: Rope, keep: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """See DraftLayer; all rows go through the whole layer."""
        self.inner.input_layernorm.value = x
        cast = {
            n: p if p.dtype == x.dtype else p.to(x.dtype) for n, p in self.inner.named_parameters()
        }
        if self.past and "past_key_values" in kwargs:
            kwargs["layer_past"] = kwargs.pop("past_key_values")
        given = {
            "attention_mask": None,
            **kwargs,
            "hidden_states": residual,
            "position_embeddings": rope,
        }
        out = torch.func.functional_call(self.inner, cast, kwargs=given)
        del (
            self.inner.input_layernorm.value
        )  # no graph may outlive its pass in a module that is copied
        out = out[0] if isinstance(out, tuple) else out
        return out if keep is None else take(out.reshape(-1, out.shape[-1]), keep)

    @torch.no_grad()
    def copy_from(self, given: nn.Module) -> None:
        """Take over the weights of a layer of the target; a wide projection gets zeros on the
        embedding half.
        """
        for name, mine in self.inner.named_parameters():
            weight = given.get_parameter(name)
            if mine.shape == weight.shape:
                mine.copy_(weight)
            else:
                mine.zero_()
                mine[:, -weight.shape[1] :] = weight.float()
        if self.input_layernorm is not None:
            source = given.get_submodule("input_layernorm")
            for name, mine in self.input_layernorm.named_parameters():  # type: ignore[union-attr]
                mine.copy_(source.get_parameter(name))


class CountingCache:
    """Stands for a cache while a layer is tried out: counts what is written."""

    def __init__(self) -> None:
        self.written = 0

    def update(
        self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """transformers' cache interface."""
        self.written += 1
        return key, value
