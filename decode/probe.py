"""What can this target do? Asked of the model itself with a few tiny passes, not of a table of names.

1. Which layers keep keys and values, and of what shape? State that cannot be cut back (recurrent, linear
   attention) means refusal.
2. Do logits follow from the last hidden state through the LM head, a scale and a softcap?
3. Does scoring a tree through `TreeCache` give each path the logits of a plain pass over that path, over
   ragged, appended, committed and selected rows? If not, do chains? Sliding windows are made four tokens wide
   meanwhile, so that a short probe reaches beyond them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from conf.errors import UserError
from decode import attention
from decode.cache import LayerShape
from decode.masks import FULL, Reach
from decode.tree import DraftTree

if TYPE_CHECKING:
    from decode.target import Target

# Largest accepted difference of one token's logits, relative to their spread (root mean squares). A mask that
# lets one wrong token in costs tens of percent in a trained model; half precision costs a few.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.15}
WINDOW = 4  # tokens, while probing


@dataclass(frozen=True)
class Head:
    """logits = cap * tanh(scale * lm_head(h) / cap), cap None: no cap. exact: the model's logits agree."""

    scale: float = 1.0
    cap: float | None = None
    exact: bool = False
    reason: str = ""

    def finish(self, logits: Tensor) -> Tensor:
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap


@dataclass
class Probe:
    """support "tree" or "chain" (and why), K/V shapes per layer, reach per layer type, mask rows per node."""

    support: str
    shapes: list[LayerShape | None]
    reaches: dict[str, Reach] = field(default_factory=lambda: {"full_attention": FULL})
    tile: int = 1
    reason: str = ""


def difference(found: Tensor, wanted: Tensor) -> float:
    """Largest over tokens of rms(found - wanted) / rms(wanted - mean), both [..., V]. NaN is infinite."""
    wanted, found = wanted.double(), found.double()
    spread = (wanted - wanted.mean(-1, keepdim=True)).square().mean(-1).sqrt()
    error = (found - wanted).square().mean(-1).sqrt() / spread.clamp(min=1e-30)
    return float(error.nan_to_num(nan=float("inf")).max()) if error.numel() else 0.0


def _ids(target: Target, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(20240607)
    return torch.randint(0, target.vocab_size, shape, generator=generator).to(target.device)


@torch.no_grad()
def probe_head(target: Target) -> Head:
    """Find scale and softcap among the numbers in the model's config; the model's own logits decide."""
    ids = _ids(target, 1, 8)
    if target.model.get_output_embeddings() is None:
        return Head(reason="it has no output embeddings")
    hidden = target.body(input_ids=ids, use_cache=False, return_dict=True).last_hidden_state
    wanted = target.model(input_ids=ids, use_cache=False, return_dict=True).logits
    try:
        raw = target.lm_head(hidden)
    except RuntimeError as error:
        return Head(reason=str(error))
    numbers = {
        k: float(v)
        for k, v in vars(target.config).items()
        if isinstance(v, (int, float)) and not isinstance(v, bool) and v
    }
    scales = [1.0] + [s for k, v in numbers.items() if "scal" in k or "mult" in k for s in (v, 1 / v)]
    caps = [None] + [v for k, v in numbers.items() if "softcap" in k and v > 0]
    found = [Head(s, c) for s in scales for c in caps]
    errors = [difference(h.finish(raw), wanted) for h in found]
    best = min(range(len(found)), key=errors.__getitem__)
    limit = TOLERANCE[target.dtype] / 10
    return Head(
        found[best].scale,
        found[best].cap,
        errors[best] <= limit,
        "" if errors[best] <= limit else f"relative error {errors[best]:.2g}",
    )


def probe_target(target: Target) -> Probe:
    """Raises UserError when neither trees nor chains can be scored, with the reason."""
    shapes = _layer_shapes(target)
    heads = getattr(target.config, "num_attention_heads", 1)
    kv_heads = max((s[0] for s in shapes if s), default=heads)
    own = target.model.config._attn_implementation
    reasons = []
    with _short_windows(target):
        reaches = _reaches(target.config)
        wanted = None
        for name in dict.fromkeys([attention.NAME, own]):
            tile = max(1, heads // kv_heads) if name == attention.NAME else 1
            try:
                wanted = wanted if wanted is not None else _Expected(target)
                if name != own and not _switchable(target.model):
                    raise ValueError("the model's attention cannot be exchanged")
                target.model.set_attn_implementation(name)
                error = wanted.error(Probe("tree", shapes, reaches, tile), chain=False)
            except (ValueError, TypeError, RuntimeError, AttributeError, KeyError, IndexError) as failure:
                reasons.append(f"{name}: {_line(failure)}")
                continue
            if error <= TOLERANCE[target.dtype]:
                break
            reasons.append(f"{name}: tree logits differ from plain passes by {error:.2g} of their spread")
        else:
            target.model.set_attn_implementation(own)
            return _chain_or_refuse(target, shapes, "; ".join(reasons))
    return Probe("tree", shapes, _reaches(target.config), tile)


def _chain_or_refuse(target: Target, shapes: list[LayerShape | None], reason: str) -> Probe:
    try:
        error = _Expected(target).error(Probe("chain", shapes), chain=True)
        failure = f"chain logits differ by {error:.2g} of their spread"
    except (ValueError, TypeError, RuntimeError, AttributeError, KeyError, IndexError) as caught:
        error, failure = float("inf"), _line(caught)
    if error <= TOLERANCE[target.dtype]:
        return Probe("chain", shapes, reason=f"no trees: {reason}")
    raise UserError(
        f"target: {type(target.model).__name__} can score neither trees nor chains from a cache "
        f"({reason}; {failure}); choose a target with attention over a K/V cache"
    )


def _switchable(model: Any) -> bool:
    """Does the model look its attention function up by name? (Asking beforehand avoids a warning.)"""
    return getattr(model, "_can_set_attn_implementation", lambda: True)()


def _line(error: Exception) -> str:
    return f"{type(error).__name__} {str(error).splitlines()[0] if str(error) else ''}".strip()


@torch.no_grad()
def _layer_shapes(target: Target) -> list[LayerShape | None]:
    """(Hkv, key size, value size) per layer, None for layers without own keys. Refuses recurrent state."""
    name = type(target.model).__name__
    try:
        out = target.model(input_ids=_ids(target, 1, 2), use_cache=True, return_dict=True)
    except (ValueError, TypeError, RuntimeError, AttributeError) as error:
        raise UserError(f"target: {name} cannot run with a cache ({_line(error)}); choose another model") from error
    cache = getattr(out, "past_key_values", None)
    layers = getattr(cache, "layers", None)
    if layers is None:
        raise UserError(
            f"target: {name} keeps no K/V cache (recurrent state cannot be cut back to an accepted path); "
            "choose an attention model"
        )
    shapes: list[LayerShape | None] = []
    for index, layer in enumerate(layers):
        if hasattr(layer, "recurrent_states") or hasattr(layer, "conv_states"):
            raise UserError(
                f"target: {name}: layer {index} is recurrent or linear attention, whose state cannot be cut "
                "back to an accepted path; choose a model with full or sliding-window attention"
            )
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None or keys.dim() != 4:
            shapes.append(None)
        else:
            shapes.append((keys.shape[1], keys.shape[3], values.shape[3]))
    return shapes


def _reaches(config: Any) -> dict[str, Reach]:
    """Layer types and how far back they see, from `layer_types` or, for uniform models, `sliding_window`."""
    window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"]
    known: dict[str, Reach] = {}
    if window:
        known["sliding_attention"] = ("window", window)
    if chunk:
        known["chunked_attention"] = ("chunk", chunk)
    return {kind: known.get(kind, FULL) for kind in dict.fromkeys(kinds)}


@contextlib.contextmanager
def _short_windows(target: Target) -> Iterator[None]:
    """Windows and chunks of WINDOW tokens in config and modules, restored on exit."""
    changed = []
    for holder in [target.config, *target.model.modules()]:
        for name in ("sliding_window", "attention_chunk_size"):
            value = vars(holder).get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value > WINDOW:
                changed.append((holder, name, value))
                setattr(holder, name, WINDOW)
    try:
        yield
    finally:
        for holder, name, value in changed:
            setattr(holder, name, value)


class _Expected:
    """The probe's script and what plain passes over each path say, computed with the model's own attention.

    Row 0: 5 prompt tokens, then a branching tree of 5 nodes, of which [1, 4] is kept; row 1 joins later with
    3 tokens and a chain of 2 nodes, of which [0] is kept. Then row 1 alone scores the empty tree.
    """

    def __init__(self, target: Target):
        self.target = target
        self.own = target.model.config._attn_implementation
        self.prompts = list(_ids(target, 8).split([5, 3]))
        # chosen once for trees and chains; the tokens of row 1's padding nodes are never read
        self.last, self.tokens, self.then = (
            _ids(target, 2),
            _ids(target, 2, 5).flip(1),
            _ids(target, 1).flip(0),
        )
        self._plain: dict[tuple[int, ...], Tensor] = {}

    def plain(self, ids: Tensor) -> Tensor:
        """Logits [V] after `ids` [T], by a pass without a cache."""
        key = tuple(ids.tolist())
        if key not in self._plain:
            out = self.target.model(input_ids=ids[None], use_cache=False, return_dict=True)
            self._plain[key] = out.logits[0, -1]
        return self._plain[key]

    @torch.no_grad()
    def error(self, probe: Probe, chain: bool) -> float:
        target, device = self.target, self.target.device
        parents = torch.tensor([[-1, 0, 1, 2, 3] if chain else [-1, -1, 0, 0, 1], [-1, 0, -1, -1, -1]], device=device)
        paths = [
            [[], [0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4]]
            if chain
            else [[], [0], [1], [0, 2], [0, 3], [1, 4]],
            [[], [0], [0, 1]],
        ]
        kept = [[0, 1] if chain else [1, 4], [0, -1]]
        tree = DraftTree(self.tokens, parents, torch.tensor([5, 2], device=device))
        text = [torch.cat([p, self.last[b : b + 1]]) for b, p in enumerate(self.prompts)]
        found, wanted = [], []
        with _using(target, probe):
            cache = target.new_cache(2, 16, 5)
            firsts = [target.prefill(cache, [p]).logits[0, 0] for p in self.prompts]
            step = target.score(cache, self.last, tree)
            cache.commit(torch.tensor(kept, device=device), torch.tensor([2, 1], device=device))
            cache.select([1])
            after = target.score(cache, self.then, DraftTree.empty(1, device)).logits[0, 0]
        own = target.model.config._attn_implementation
        target.model.set_attn_implementation(self.own)
        try:
            for b, prompt in enumerate(self.prompts):
                found.append(firsts[b])
                wanted.append(self.plain(prompt))
                for slot, path in enumerate(paths[b]):
                    found.append(step.logits[b, slot])
                    wanted.append(self.plain(torch.cat([text[b], self.tokens[b, path]])))
            found.append(after)
            wanted.append(self.plain(torch.cat([text[1], self.tokens[1, :1], self.then])))
        finally:
            target.model.set_attn_implementation(own)
        return difference(torch.stack(found), torch.stack(wanted))


@contextlib.contextmanager
def _using(target: Target, probe: Probe) -> Iterator[None]:
    """Let the target decode under an assumption about itself."""
    saved = target._probe, target._masks
    target._probe, target._masks = probe, None
    try:
        yield
    finally:
        target._probe, target._masks = saved
