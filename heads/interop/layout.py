"""What a layout is: names of tensors, config.json and refusals of one kind of head in one
engine's format; the keys of draft layers in both directions; and the checks that every file
goes through before a head is made of it.

Shape letters: V vocabulary, Vd draft vocabulary, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Generic, NoReturn, TypeVar

import torch
from torch import Tensor

from outrider.conf.errors import UserError
from outrider.conf.typed import from_json
from outrider.decode.target import Target
from outrider.heads import vocab
from outrider.heads.base import Head
from outrider.heads.interop import engines
from outrider.heads.interop.reading import Foreign
from outrider.heads.layers.shape import LayerShape

VERSION = "0.9.0"  # of the speculators package
EMBEDDING, LM_HEAD = "embed_tokens.weight", "lm_head.weight"
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
OTHERS = {"d2t": torch.int64, "t2d": torch.bool}
MASK = (
    "head.mask_token: -1; engines take the mask's embedding from the target's table: train with "
    "head.mask_token=ID of a reserved token"
)

H = TypeVar("H", bound=Head)


class Layout(Generic[H]):
    """One kind of head in one format. engine: who reads it."""

    def __init__(self, format: str, kind: str, engine: engines.Engine) -> None:
        self.format, self.kind, self.engine = format, kind, engine

    def refusals(self, head: H, target: Target, name: str) -> list[str]:
        """Return why this head cannot go into this layout, each with the nearest thing that
        works; [] when it can. name: by which the engine loads the target, "" for one
        without files."""
        found, known = [], self.engine.targets.get(self.kind)
        if known is not None and architecture(target) not in known:
            found.append(
                f"target: {self.engine.versions(self.kind)} serves no {self.kind} head on "
                f"{architecture(target)}: choose another format, or decode here"
            )
        if self.format == "speculators" and not name:
            found.append(
                "verifier: the folder must name its target, which has no files; set "
                "verifier=FOLDER_OR_REPOSITORY, or format=vllm"
            )
        return found

    def tensors(self, head: H, target: Target) -> dict[str, Tensor]:
        """Return the tensors of the file by its names."""
        raise TypeError("a subclass defines it")

    def config(self, head: H, target: Target, name: str, dtype: str) -> dict[str, Any]:
        """config.json."""
        raise TypeError("a subclass defines it")

    def write(
        self, head: H, target: Target, name: str, dtype: torch.dtype
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """(config.json, tensors). Raises UserError with every refusal."""
        if refused := self.refusals(head, target, name):
            raise UserError(f"format={self.format}: " + "; ".join(refused))
        out = {
            key: value.detach().to("cpu", dtype if value.is_floating_point() else value.dtype)
            for key, value in self.tensors(head, target).items()
        }
        for key, value in out.items():
            if not bool(value.isfinite().all()):
                raise UserError(f"format={self.format}: {key} holds NaN or infinite values")
        config = self.config(head, target, name, str(dtype).removeprefix("torch."))
        return config, {key: value.clone().contiguous() for key, value in out.items()}


def architecture(target: Target) -> str:
    """Return the transformers class of a target, as its config.json names it."""
    given = getattr(target.model.config, "architectures", None) or [type(target.model).__name__]
    return str(given[0])


def with_map(head: Head, tensors: dict[str, Tensor], size: int) -> dict[str, Tensor]:
    """Return the tensors, and where the head has a draft vocabulary its mask t2d. size: V."""
    ids = head.ids()
    return tensors if ids is None else {**tensors, "t2d": vocab.to_t2d(ids, size)}


# -- the keys of draft layers, as the EAGLE and block layouts share them


def layer_fields(layer: dict[str, Any], target: Target, dtype: str) -> dict[str, Any]:
    """Return keys of a LlamaConfig for layers of the shape `layer`
    (heads.layers.shape.layer_config). The rotary base is there twice: old engines read
    rope_theta and rope_scaling."""
    rope, eos = dict(layer["rope_parameters"]), list(target.eos_ids)
    scaled = {k: v for k, v in rope.items() if k != "rope_theta"}
    return {
        "model_type": "llama",
        **{k: v for k, v in layer.items() if k != "rope_parameters"},
        "vocab_size": target.vocab_size,
        "rope_theta": rope.get("rope_theta", 10000.0),
        "rope_parameters": rope,
        "rope_scaling": None if rope.get("rope_type") in (None, "default") else scaled,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": getattr(target.config, "bos_token_id", None),
        "eos_token_id": eos[0] if len(eos) == 1 else eos,
        "torch_dtype": dtype,
    }


def speculators(algorithm: str, target: Target, name: str, depth: int) -> dict[str, Any]:
    """Return keys of every folder of speculators: what it holds, how many tokens to draft,
    for which target."""
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": depth,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "speculators_model_type": algorithm,
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": algorithm,
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": name, "architectures": [architecture(target)]},
        },
    }


# -- reading


def refuse(foreign: Foreign, *found: str) -> NoReturn:
    """Raise the UserError of a folder that does not fit: every problem, one line each."""
    if len(found) == 1:
        raise UserError(f"{foreign.folder}: {found[0]}")
    shown = [*found[:20]] + ([f"and {len(found) - 20} more"] if len(found) > 20 else [])
    raise UserError(
        f"{foreign.folder}: {len(found)} problems:" + "".join(f"\n  {line}" for line in shown)
    )


def number(foreign: Foreign, config: Mapping[str, Any], key: str) -> int:
    """Return a whole number of a config. Raises UserError when it is missing or absurd."""
    value = config.get(key)
    if type(value) is not int or not 0 < value < 1 << 31:
        refuse(foreign, f"{key} is {value!r}; expected a whole number above 0")
    return value


def fitted(
    foreign: Foreign,
    tensors: Mapping[str, Tensor],
    shapes: Mapping[str, Sequence[int]],
    optional: Collection[str] = (),
) -> dict[str, Tensor]:
    """Return the tensors, floats as float32. shapes: of every tensor that the file may
    hold; optional: those that it may lack. Raises UserError that names every tensor that
    does not fit."""
    found = [
        f"{name}: missing; expected {list(shape)}"
        for name, shape in shapes.items()
        if name not in tensors and name not in optional
    ]
    for name, tensor in tensors.items():
        if name not in shapes:
            extra = "a bias where this layout has none" if name.endswith("bias") else ""
            found.append(f"{name}: unknown, {extra or 'no tensor of this layout'}")
            continue
        shape, wanted = list(tensor.shape), list(shapes[name])
        kinds = (OTHERS[name],) if name in OTHERS else FLOATS
        if tensor.dtype not in kinds:
            dtype, expected = (str(t).removeprefix("torch.") for t in (tensor.dtype, kinds[0]))
            found.append(f"{name}: its dtype is {dtype}, expected {expected}")
        if shape != wanted:
            hint = ", which is it transposed" if shape == wanted[::-1] else ""
            found.append(f"{name}: its shape is {shape}{hint}; expected {wanted}")
        elif tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            found.append(f"{name}: holds NaN or infinite values")
    if found:
        refuse(foreign, *found)
    return {k: v.float() if v.is_floating_point() else v for k, v in tensors.items()}


def loaded(
    foreign: Foreign,
    tensors: Mapping[str, Tensor],
    target: Target,
    make: Callable[[], Any],
    theirs: Callable[[str], str],
    known: Mapping[str, Tensor],
) -> Head:
    """Return the head that `make` makes with the tensors of a file. theirs: gives the file's
    name for one of ours; known: those of ours that come from the target. Raises UserError that
    names every tensor that does not fit."""
    with torch.device("meta"):
        wanted = {n: v.shape for n, v in make().state_dict().items() if n not in known}
    shapes = {theirs(name): shape for name, shape in wanted.items()}
    if "d2t" in tensors:
        shapes["t2d"] = torch.Size([target.vocab_size])
    found = fitted(foreign, tensors, shapes, ("t2d",))
    head: Head = make()
    own = {name: tensor.detach().float().cpu() for name, tensor in known.items()}
    head.load_state_dict({**{name: found[theirs(name)] for name in wanted}, **own})
    return head.to(target.device)


def draft_ids(foreign: Foreign, tensors: Mapping[str, Tensor], size: int) -> Tensor | None:
    """Return the target ids [Vd] of a draft vocabulary, None without one. d2t [Vd] must hold
    offsets: target id = i + d2t[i], ascending, below V = size; t2d [V] must mark the same
    tokens. Raises UserError, which says so where the file seems to hold the ids themselves."""
    if "d2t" not in tensors:
        return None
    d2t, t2d = tensors["d2t"], tensors.get("t2d")
    if d2t.dim() != 1 or d2t.dtype != torch.int64:
        dtype = str(d2t.dtype).removeprefix("torch.")
        refuse(
            foreign, f"d2t: its dtype is {dtype}, its shape {list(d2t.shape)}; expected [Vd] int64"
        )
    ids = vocab.from_d2t(d2t)
    absolute = vocab.ascends(d2t, size) and len(d2t) > 1
    marks = t2d is not None and absolute and vocab.to_t2d(d2t, size).equal(t2d)
    hint = "; these look like absolute token ids: subtract 0, 1, 2, .." if absolute else ""
    if marks or not vocab.ascends(ids, size):
        refuse(foreign, f"d2t: i + d2t[i] are no ascending ids of the {size} tokens{hint}")
    if t2d is not None and not vocab.to_t2d(ids, size).equal(t2d):
        refuse(foreign, f"t2d: does not mark the tokens of d2t; the two are of two heads{hint}")
    if t2d is None and absolute and len(d2t) >= 16:
        refuse(foreign, f"d2t: rises with every entry{hint}")
    return ids


def without_copies(
    foreign: Foreign, tensors: Mapping[str, Tensor], copies: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return a file's tensors without those that it copies from the target. copies: the
    target's own, by the file's names. Raises UserError where one is not the target's, up to
    the rounding of its dtype."""
    for name in copies.keys() & tensors.keys():
        theirs, ours = tensors[name], copies[name]
        error = torch.inf
        if theirs.shape == ours.shape:
            error = float((theirs.float() - ours.float()).norm() / ours.float().norm())
        if not error < 0.01:
            refuse(
                foreign,
                f"{name}: {list(theirs.shape)} differs from the target's own {list(ours.shape)} "
                f"(relative error {error:.3g}); this repository drafts with the target's: give the "
                "target that the head was trained for",
            )
    return {name: tensor for name, tensor in tensors.items() if name not in copies}


def described(foreign: Foreign, kind: str) -> dict[str, Any]:
    """Return the keys that describe the layers: those of config.json, of a folder of
    speculators its transformer_layer_config. Raises UserError where that is missing or not
    of `kind`."""
    config = foreign.config
    if "speculators_model_type" not in config:
        return config
    found = config.get("transformer_layer_config")
    if not isinstance(found, dict):
        refuse(foreign, "transformer_layer_config is missing; export the head again")
    if found.get("model_type", kind) != kind:
        refuse(foreign, f"its layer is a {found['model_type']!r:.40} layer; {kind} layers are read")
    return found


def depth_in(config: dict[str, Any], most: int) -> int | None:
    """Return how many tokens a folder of speculators is to draft, None where it does not
    tell or tells more than `most`."""
    try:
        depth = config["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    except (KeyError, IndexError, TypeError):
        return None
    return depth if type(depth) is int and 0 < depth <= most else None


def window_in(foreign: Foreign, config: dict[str, Any]) -> int | None:
    """Return how many positions the layers look back over, None: over all. As in engines,
    layer_types decides: `sliding_window` alone is in many configs and means nothing.

    Raises UserError for a window of no whole number above 0, and for layers that differ."""
    kinds = config.get("layer_types")
    if not isinstance(kinds, list) or "sliding_attention" not in kinds:
        return None
    if any(kind != "sliding_attention" for kind in kinds):
        refuse(
            foreign,
            "layer_types: some layers slide and some do not; heads whose layers are alike are read",
        )
    return number(foreign, config, "sliding_window")


# Keys of a config that change what draft layers compute, with the values that change nothing.
UNREAD: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("attention_bias", "mlp_bias", "qkv_bias", "rope_interleave"), (None, False)),
    **dict.fromkeys(("qk_norm", "use_qk_norm", "clip_qkv"), (None, False)),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), (None,)),
    **dict.fromkeys(("logit_scale", "logits_scaling"), (None, 1)),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier"), (None, 1)),
}


def read_layer(foreign: Foreign, config: dict[str, Any], target: Target) -> dict[str, Any]:
    """Return the draft layers (heads.layers.shape.layer_config) that a LlamaConfig
    describes.

    Raises UserError for a key that is missing or absurd, and for layers that this repository
    cannot run with this target."""
    for key, alike in UNREAD.items():
        if config.get(key) not in alike:
            refuse(foreign, f"{key}: {config[key]!r:.40}; layers without it are read")
    width, heads = (number(foreign, config, key) for key in ("hidden_size", "num_attention_heads"))
    said = foreign.config.get("target_hidden_size") or width
    if width != said == target.hidden_size:
        refuse(
            foreign,
            f"hidden_size: {width}, its target's is {said}; heads as wide as their target are read",
        )
    if not width == said == target.hidden_size:
        refuse(
            foreign,
            f"hidden_size: {width} (target_hidden_size {said!r:.40}); the target's is "
            f"{target.hidden_size}: give the target that the head was trained for",
        )
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if isinstance(rope, dict):
        rope = {"rope_type": "default", "rope_theta": config.get("rope_theta", 10000.0), **rope}
        if "type" in rope:  # the key's older name
            rope["rope_type"] = rope.pop("type")
        part = rope.pop("partial_rotary_factor", config.get("partial_rotary_factor"))
        if part not in (None, 1):
            refuse(
                foreign,
                f"partial_rotary_factor: {part!r:.40}; layers that turn whole heads are read",
            )
    usual = {
        "num_hidden_layers": 1,
        "num_key_value_heads": heads,
        "head_dim": width // heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
    }
    given = {k: config[k] for k in LayerShape.__dataclass_fields__ if config.get(k) is not None}
    known, found = from_json({**usual, **given, "rope_parameters": rope}, LayerShape)
    if found:
        refuse(foreign, f"{found[0].partition('; set ')[0]}; no draft layer can be made of it")
    return asdict(known)
