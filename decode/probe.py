"""What can this target do? Asked of the model itself with a few tiny passes, not of a table of
names.

1. Which layers keep keys and values, and of what shape? Which keep a recurrent or convolution
   state? A model of the latter alone is refused.
2. Do logits follow from the last hidden state through the LM head, a scale and a softcap?
3. Does scoring a tree through `TreeCache` give each path the logits of a plain pass over that
   path, over ragged, appended, committed and selected rows? Where positions follow from the
   cache's slots (ALiBi) it does not. Of a model with states: a chain through `StateCache`, of
   which one row is accepted whole and one is put back and read again.
4. Do a token's logits hang on what is drafted behind it? Then the output distribution would hang
   on the drafter, by less than the third question can see.

What depends on the length of a text must show in a short probe: windows are made four
tokens wide meanwhile, so that one row is longer than two windows and one does not.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from outrider.conf.errors import UserError, first_line
from outrider.decode import attention, devices
from outrider.decode.cache import LayerShape
from outrider.decode.masks import FULL, Reach
from outrider.decode.models import facts
from outrider.decode.scorer import LMHead, Probe, Scorer
from outrider.decode.states import cache_like
from outrider.decode.tree import DraftTree

# Largest accepted difference of one token's logits, relative to their spread (root mean
# squares). A mask that lets one wrong token in costs tens of percent in a trained model; half
# precision costs a few.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.15}
# While probing, in tokens: windows, the two prompts (beyond two of them and not).
WINDOW, PROMPTS = 4, (10, 6)
DEEPEST = 6  # tokens that the script adds to a prompt: the last token and a chain of five
DRAFTS = 6  # that are put behind one context

# LookupError: of a list or a dictionary. ImportError: a layer's kernels are not installed.
FAILURES = (ValueError, TypeError, RuntimeError, AttributeError, LookupError, ImportError)


def difference(found: Tensor, wanted: Tensor) -> float:
    """Return largest over tokens of rms(found - wanted) / rms(wanted - mean), both [...,
    V]. NaN is infinite."""
    wanted, found = wanted.double(), found.double()
    spread = (wanted - wanted.mean(-1, keepdim=True)).square().mean(-1).sqrt()
    error = (found - wanted).square().mean(-1).sqrt() / spread.clamp(min=1e-30)
    return float(error.nan_to_num(nan=float("inf")).max()) if error.numel() else 0.0


def _ids(target: Scorer, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(20240607)
    return torch.randint(0, target.vocab_size, shape, generator=generator).to(target.device)


@torch.no_grad()
def probe_head(target: Scorer) -> LMHead:
    """Find scale and softcap among the numbers in the model's config; the model's own logits
    decide. Raises UserError for a model that cannot read a text.
    """
    ids = _ids(target, 1, 8)
    if target.model.get_output_embeddings() is None:
        return LMHead(reason="it has no output embeddings")
    try:
        hidden = target.body(input_ids=ids, use_cache=False, return_dict=True).last_hidden_state
        wanted = target.model(input_ids=ids, use_cache=False, return_dict=True).logits
    except FAILURES as error:
        if target.model.config._attn_implementation == attention.NAME:
            raise  # the model's own is tried next
        raise UserError(
            f"target: {type(target.model).__name__} fails on a text of 8 tokens "
            f"({first_line(error)}); choose another model"
        ) from error
    try:
        raw = target.lm_head(hidden)
    except RuntimeError as error:
        return LMHead(reason=str(error))
    numbers = [
        (name, float(value))
        for name, value in vars(target.config).items()
        if isinstance(value, int | float) and not isinstance(value, bool) and value
    ]
    scales = [s for k, v in numbers if "scal" in k or "mult" in k for s in (v, 1 / v)]
    caps = [v for k, v in numbers if "softcap" in k and v > 0]
    found = [LMHead(s, c) for s in (1.0, *scales) for c in (None, *caps)]
    errors = [difference(head.finish(raw), wanted) for head in found]
    least = min(errors)
    exact = least <= TOLERANCE[target.dtype] / 10
    reason = "" if exact else f"relative error {least:.2g}"
    return replace(found[errors.index(least)], exact=exact, reason=reason)


def probe_target(target: Scorer) -> Probe:
    """Try our attention, then the model's own, and leave the model with the one that was right,
    else with its own. Raises UserError with the reason when trees cannot be scored."""
    if why := facts.refusal(target.config):
        raise UserError(why)
    shapes, states = _layer_shapes(target)
    _check_windows(target)
    heads = getattr(target.config, "num_attention_heads", 1)
    group = max(1, heads // max((s[0] for s in shapes if s), default=heads))
    problems = []
    with _short_windows(target):
        script, reaches = _Script(target, bool(states)), _reaches(target.config, shapes, states)
        kinds = [cache_like(states, single) for single in (False, True)] if states else [None]
        names = ((attention.NAME, group), (script.own, 1))
        for kind, (name, tile) in itertools.product(kinds, names):
            probe = Probe(shapes, reaches, tile, states=kind)
            if not (problem := _problem(script, probe, name)):
                break
            problems.append(f"with {name}: {problem}")
            target.model.set_attn_implementation(script.own)
    if not problem:  # its reaches at their full length
        reaches = _reaches(target.config, shapes, states)
        return replace(probe, reaches=reaches, tested=script.longest)
    windows = ", ".join(f"{name}={length}" for name, length in _windows(target).items())
    where = f" once its window ({windows}) is full" if windows else ""
    said = "; ".join(dict.fromkeys(problems))
    raise UserError(
        f"target: {type(target.model).__name__} cannot score draft "
        f"{'chains' if states else 'trees'} from a K/V cache{where} "
        f"({said}); choose a target with attention over a K/V cache, whose positions are given"
    )


def _problem(script: _Script, probe: Probe, name: str) -> str:
    """Return what is wrong with scoring as `probe` says and the attention `name`; "" for
    nothing."""
    model, dtype = script.target.model, script.target.dtype
    try:
        if name != script.own:
            # Does the model look its attention up by name? Asked first: it would warn.
            if not getattr(model, "_can_set_attn_implementation", lambda: True)():
                return "the model's attention cannot be exchanged"
            model.set_attn_implementation(name)
        error = script.error(probe)
        if error > TOLERANCE[dtype]:
            return f"logits differ from plain passes by {error:.2g} of their spread"
        if probe.states and not probe.states.single and script.forgets(probe):
            return "a pass of several tokens does not go on from the recurrent state"
        return _dependence(script, probe)
    except FAILURES as failure:
        return _line(failure)


def _dependence(script: _Script, probe: Probe) -> str:
    """Return what is wrong where a token's logits hang on what is drafted behind it; empty
    when they do not.

    Two passes of one shape through kernels that compute every row by itself give the same
    bits. What is left to sums that an accelerator takes in no fixed order is single
    precision's rounding, or that a few numbers of a half precision fall to the other side.
    A mixture of experts groups rows by expert, so that other tokens make other shapes and
    round otherwise: there the tolerance is that of the third question."""
    target = script.target
    experts = any("expert" in name for name, _ in target.model.named_modules())
    eps = max(torch.finfo(torch.float32).eps, torch.finfo(target.dtype).eps / 16)
    limit = TOLERANCE[target.dtype] if experts else eps
    found = script.dependence(probe)
    if found <= limit:
        return ""
    return (
        f"what is drafted behind a token changes its logits by {found:.2g} of their spread, "
        f"and {limit:.2g} is what {target.dtype} may"
    )


def _line(error: Exception) -> str:
    return f"{type(error).__name__} {str(error).splitlines()[0] if str(error) else ''}".strip()


@torch.no_grad()
def _layer_shapes(target: Scorer) -> tuple[list[LayerShape | None], type | None]:
    """(Hkv, key size, value size) per layer, None for layers without own keys; and the class of the
    model's cache where layers keep a recurrent or convolution state beside them, else None. Refuses
    such state alone.
    """
    name = type(target.model).__name__
    try:
        out = target.model(input_ids=_ids(target, 1, 2), use_cache=True, return_dict=True)
    except FAILURES as error:
        raise UserError(
            f"target: {name} cannot run with a cache ({_line(error)}); choose another model"
        ) from error
    cache = getattr(out, "past_key_values", None)
    layers = getattr(cache, "layers", [])
    keep_states = ("recurrent_states", "conv_states")
    recurrent = [any(hasattr(one, kind) for kind in keep_states) for one in layers]
    states = type(cache) if any(recurrent) or hasattr(cache, "get_linear_cache") else None
    shapes: list[LayerShape | None] = []
    for layer in layers:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None or keys.dim() != 4:
            shapes.append(None)
        else:
            shapes.append((keys.shape[1], keys.shape[3], values.shape[3]))
    if not any(shapes):
        raise UserError(
            f"target: {name} keeps no K/V cache (recurrent or other state alone); choose a model "
            "that has layers with full or sliding-window attention"
        )
    return shapes, states


def _reaches(
    config: Any, shapes: Sequence[LayerShape | None], states: type | None
) -> dict[str, Reach]:
    """Layer types and how far back they see, from `layer_types` or, for uniform models,
    `sliding_window`. Of a model with states also the names under which its own code looks masks up.
    """
    window = getattr(config, "sliding_window", None)
    window = window or getattr(config, "sliding_window_size", None)
    chunk = getattr(config, "attention_chunk_size", None)
    uniform = ["sliding_attention" if window else "full_attention"]
    known: dict[str, Reach] = {}
    if window:
        known["sliding_attention"] = known["hybrid_sliding"] = ("window", window)
    if chunk:
        known["chunked_attention"] = ("chunk", chunk)
    kinds = getattr(config, "layer_types", None) or uniform
    found = {kind: known.get(kind, FULL) for kind in dict.fromkeys(kinds)}
    if states is not None:
        attend = {kind for kind, shape in zip(kinds, shapes, strict=False) if shape}
        named = {"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"}
        found = {kind: reach for kind, reach in found.items() if kind in attend}
        found |= {named[kind]: reach for kind, reach in found.items() if kind in named}
    return found


# -- what depends on the length of a text


def _is_window(name: Any, value: Any) -> bool:
    """Is it a number of tokens beyond which attention changes? index_topk: tokens that a sparse
    layer keeps."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        return False
    counted = "pattern" in str(name) or "layers" in str(name)
    return name in ("attention_chunk_size", "index_topk") or "window" in str(name) and not counted


def _spaces(config: Any) -> list[dict[str, Any]]:
    """Return the names and values of a config, and of the configs and mappings inside it."""
    found: list[dict[str, Any]] = []
    waiting = [config]
    while waiting:
        holder = waiting.pop()
        if isinstance(holder, (list, tuple)):
            waiting += holder
        elif isinstance(holder, dict) or hasattr(holder, "to_diff_dict"):
            space = holder if isinstance(holder, dict) else vars(holder)
            if not any(space is known for known in found):
                found.append(space)
                waiting += space.values()
    return found


def _windows(target: Scorer) -> dict[str, int]:
    """Return every window that the config names, unless it says that no layer uses it, and
    its length in tokens."""
    spaces = _spaces(target.config)
    found = {k: v for space in spaces for k, v in space.items() if _is_window(k, v)}
    kinds = " ".join(getattr(target.config, "layer_types", None) or ["sliding chunked"])
    if "sliding" not in kinds or getattr(target.config, "use_sliding_window", True) is False:
        found.pop("sliding_window", None)
    if "chunk" not in kinds:
        found.pop("attention_chunk_size", None)
    return found


@torch.no_grad()
def _check_windows(target: Scorer) -> None:
    """Raise UserError where a window stays what it is while the probe runs."""
    given = {"input_ids": _ids(target, 1, PROMPTS[0]), "use_cache": False, "return_dict": True}
    for name, length in _windows(target).items():
        if length <= WINDOW or length >= target.context_length:
            continue
        as_loaded = target.model(**given).logits
        with _short_windows(target, name):
            if not torch.equal(target.model(**given).logits, as_loaded):
                continue
        raise UserError(
            f"target: {type(target.model).__name__} keeps {name}={length} of its config in a "
            f"form that cannot be probed; set {name}=null there if no layer uses it, else "
            "choose another target"
        )


@contextlib.contextmanager
def _short_windows(target: Scorer, only: str | None = None) -> Iterator[None]:
    """Windows of WINDOW tokens in config and modules, restored on exit. only: those of this
    name.
    """
    spaces = _spaces(target.config) + [vars(module) for module in target.model.modules()]
    changed = [
        (space, name, value)
        for space in spaces
        for name, value in space.items()
        if _is_window(name, value) and only in (None, name) and value > WINDOW
    ]
    for space, name, _ in changed:
        space[name] = WINDOW
    try:
        yield
    finally:
        for space, name, value in changed:
            space[name] = value


class _Script:
    """What the probe does, and what plain passes over each path say, computed with the model's
    own attention.

    Row 0: the longer prompt, then a branching tree of 5 nodes, of which [1, 4] is kept; row 1
    joins later with the shorter one and a chain of 2 nodes, of which [0] is kept. Then row 1
    alone scores the empty tree. chains: row 0 has a chain of 4 nodes, all of them kept, and scores
    the empty tree behind row 1.
    longest: tokens of the longest text compared so far.
    """

    def __init__(self, target: Scorer, chains: bool = False):
        self.target, self.longest, self.chains = target, 0, chains
        self.own = target.model.config._attn_implementation
        room = target.context_length - DEEPEST
        lengths = [max(1, min(length, room)) for length in PROMPTS]
        # Three tokens over and over, as text repeats itself: sparse attention that ranks its
        # keys has ties.
        self.prompts = list(_ids(target, 3).repeat(sum(lengths))[: sum(lengths)].split(lengths))
        # the tokens of row 1's padding nodes are never read
        self.last, self.tokens = _ids(target, 2), _ids(target, 2, 5).flip(1)
        self.then = _ids(target, 2)
        self.parents = [[-1, -1, 0, 0, 1], [-1, 0, -1, -1, -1]]
        self.paths = [[], [0], [1], [0, 2], [0, 3], [1, 4]]  # of row 0, the last one is kept
        if chains:
            self.tokens, self.parents = self.tokens[:, :4], [[-1, 0, 1, 2]] * 2
            self.paths = [[*range(depth)] for depth in range(5)]
        self._plain: dict[tuple[int, ...], Tensor] = {}

    def plain(self, *parts: Tensor) -> Tensor:
        """Return logits [V] after a text in parts [T], by a pass without a cache."""
        ids = torch.cat(parts)
        key = tuple(ids.tolist())
        self.longest = max(self.longest, len(key))
        if key not in self._plain:
            out = self.target.model(input_ids=ids[None], use_cache=False, return_dict=True)
            self._plain[key] = out.logits[0, -1]
        return self._plain[key]

    def _tree(self, tokens: Tensor) -> DraftTree:
        """Return the first trees of the script, as many as `tokens` [rows, 5] has rows."""
        rows, nodes = tokens.shape
        parents = torch.tensor(self.parents[:rows], device=self.target.device)
        return DraftTree(tokens, parents, devices.send([nodes, 2][:rows], parents.device))

    @torch.no_grad()
    def dependence(self, probe: Probe) -> float:
        """Return how much other tokens behind and beside the first node of a tree change
        the logits of its root and of that node, relative to their spread: one token over
        and over, which brings little of its own into a pass, against DRAFTS drafts of many."""
        target, prompt = self.target, self.prompts[0]
        drafts = _ids(target, DRAFTS + 1, self.tokens.shape[1])
        drafts[:, 0] = drafts[0, 0]
        drafts[0] = drafts[0, 0]
        trial = target.assuming(probe)
        cache = trial.new_cache(1, len(prompt) + DEEPEST, 5)
        trial.prefill(cache, [prompt])
        found = []
        for tokens in drafts.split(1):
            step = trial.score(cache, self.last[:1], self._tree(tokens))
            found.append(step.logits[0, :2].clone())
            cache.lengths = [len(prompt)]
        return max(difference(one, found[0]) for one in found[1:])

    @torch.no_grad()
    def forgets(self, probe: Probe) -> bool:
        """Return whether a chain has the same logits whatever the recurrent states before it:
        those of a short text may weigh less than what rounding is allowed to."""
        trial = self.target.assuming(probe)
        cache: Any = trial.new_cache(1, len(self.prompts[0]) + DEEPEST, 5)
        trial.prefill(cache, self.prompts[:1])
        tree, found = self._tree(self.tokens[:1]), []
        for _ in range(2):
            found.append(trial.score(cache, self.last[:1], tree).logits)
            others = {
                k: torch.full_like(s, 64) for k, s in cache.kept.items() if k[0] == "recurrent"
            }
            cache.kept |= others
        return bool(others) and torch.equal(*found)

    @torch.no_grad()
    def error(self, probe: Probe) -> float:
        """Return largest difference of the script's logits from plain passes over the same
        texts."""
        target, device, paths = self.target, self.target.device, self.paths
        trial = target.assuming(probe)
        cache = trial.new_cache(2, max(map(len, self.prompts)) + DEEPEST, 5)
        found = [trial.prefill(cache, [p]).logits[0, 0] for p in self.prompts]
        step = trial.score(cache, self.last, self._tree(self.tokens))
        found += [*step.logits[0, : len(paths)], *step.logits[1, :3]]
        kept = [paths[-1], [0, *[-1] * (len(paths[-1]) - 1)]]
        cache.commit(devices.send(kept, device), devices.send([len(paths[-1]), 1], device))
        order = [1, 0] if self.chains else [1]
        cache.select(order)
        then = self.then[: len(order)]
        found += trial.score(cache, then, DraftTree.empty(len(order), device)).logits[:, 0]
        used = target.model.config._attn_implementation
        target.model.set_attn_implementation(self.own)
        try:
            wanted = [self.plain(prompt) for prompt in self.prompts]
            for b, each in enumerate((paths, [[], [0], [0, 1]])):
                text = self.prompts[b], self.last[b : b + 1]
                wanted += [self.plain(*text, self.tokens[b, path]) for path in each]
            for b, last in zip(order, then.split(1), strict=True):
                text = self.prompts[b], self.last[b : b + 1]
                wanted.append(self.plain(*text, self.tokens[b, [paths[-1], [0]][b]], last))
        finally:
            target.model.set_attn_implementation(used)
        return difference(torch.stack(found), torch.stack(wanted))


# What passes without a cache can do, for training
# -------------------------------------------------------------------------------------------


def layer_stack(target: Scorer) -> list[nn.Module]:
    """Return the one list of as many modules as the target has layers; [] where there is
    not one."""
    stacks = [
        part
        for part in target.body.modules()
        if isinstance(part, nn.ModuleList) and len(part) == target.num_layers
    ]
    return list(stacks[0]) if len(stacks) == 1 else []


def probe_layers(target: Scorer) -> list[nn.Module]:
    """Return the layers whose inputs are the hidden states that transformers lists; []
    where that does not hold. Asked by one short pass each way."""
    stack = layer_stack(target)
    if not stack:
        return []
    ids = torch.arange(3, 8, device=target.device).remainder(target.vocab_size)[None]
    kwargs: dict[str, Any] = {"input_ids": ids, "use_cache": False, "return_dict": True}
    if target.takes_positions:
        kwargs["position_ids"] = torch.arange(5, device=target.device)[None]
    listed = target.body(**kwargs, output_hidden_states=True).hidden_states
    try:
        found = caught(target, stack, range(target.num_layers + 1), kwargs)
    except FAILURES:  # layers of another build
        return []
    same = listed is not None and torch.equal(torch.stack(listed, 2), found)
    return stack if same else []


def caught(
    scorer: Scorer, layers: Sequence[nn.Module], taps: Sequence[int], kwargs: dict[str, Any]
) -> Tensor:
    """Return the hidden states `taps` [B, T, taps, D] of a pass with `kwargs`, and no other
    one held meanwhile: what goes into the layers is read on the way."""
    found: dict[int, Tensor] = {}

    def reader(tap: int) -> Any:
        def read(_: nn.Module, args: Any, named: Any) -> None:
            found[tap] = args[0] if args else named["hidden_states"]

        return read

    wanted = {tap for tap in taps if tap < scorer.num_layers}
    hooks = [layers[t].register_forward_pre_hook(reader(t), with_kwargs=True) for t in wanted]
    try:
        found[scorer.num_layers] = scorer.body(**kwargs).last_hidden_state
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack([found[tap] for tap in taps], 2)
