"""What a layout is: the tables, the config.json and the refusals of one kind of head in one
engine's format.

`write` and `read` are all that scripts use. A new format is one file with a subclass and a
line in LAYOUTS.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, NoReturn, TypeVar

import torch
from torch import Tensor

from outrider.conf.errors import UserError
from outrider.decode.target import Target
from outrider.heads import vocab
from outrider.heads.base import Head
from outrider.heads.interop import engines
from outrider.heads.interop.reading import Foreign
from outrider.heads.interop.table import Sizes, TensorRow, problems, spots, to_ours, to_theirs


@dataclass(frozen=True)
class Facts:
    """What an export says about the target. name: what the engine loads it by.
    architecture: its transformers class.
    """

    name: str
    architecture: str
    hidden: int
    vocab: int
    layers: int
    context: int
    bos: int | None
    eos: list[int] = field(default_factory=list)
    scale: float = 1.0

    @classmethod
    def of(cls, target: Target, name: str) -> Facts:
        """Read off a loaded target."""
        given = getattr(target.model.config, "architectures", None) or [type(target.model).__name__]
        return cls(
            name,
            str(given[0]),
            target.hidden_size,
            target.vocab_size,
            target.num_layers,
            target.context_length,
            getattr(target.config, "bos_token_id", None),
            list(target.eos_ids),
            float(target.head.scale),
        )

    @property
    def default_taps(self) -> tuple[int, ...]:
        """The inner layers that vLLM, SGLang and the original EAGLE code read when a config
        names none.
        """
        return (2, self.layers // 2, self.layers - 3)


H = TypeVar("H", bound=Head)


class HeadLayout(Generic[H]):
    """One kind of head in one format. engine: who reads it; needs: tensors of the target
    that an export holds (for the message when the target is not there); serves:
    architectures of targets that the engine takes (None: not restricted); embeds: the
    file carries the target's embedding."""

    format: ClassVar[str] = ""
    kind: ClassVar[str] = ""
    engine: ClassVar[engines.Engine]
    file: ClassVar[str] = "model.safetensors"
    serves: ClassVar[frozenset[str] | None] = None
    embeds: ClassVar[bool] = False

    def refusals(self, head: H, facts: Facts) -> list[str]:
        """Why this head cannot go into this layout, each with the nearest thing that
        works; [] when it can.
        """
        found = []
        if self.serves is not None and facts.architecture not in self.serves:
            near = ", ".join(
                sorted(
                    n for n in self.serves if n.startswith(("Llama", "Qwen", "Mistral", "Gemma"))
                )[:6]
            )
            found.append(
                f"target: {self.engine.versions(self.kind)} serves no {self.kind} head on "
                f"{facts.architecture}; it does on {near} "
                "and others: choose another format, or decode with this repository's own engine"
            )
        return found

    def reader(self, head: H) -> str:
        """The engine and its versions that load this head."""
        return self.engine.versions(*engines.required(self.kind, head.cfg))

    def nbytes(self, head: H, facts: Facts, dtype: torch.dtype) -> int:
        """Size of the weights file in bytes, before anything is computed for it."""
        sizes, kinds = self.sizes(head, facts), {"int64": torch.int64, "bool": torch.bool}
        return sum(
            math.prod(spot.shape) * kinds.get(spot.row.dtype, dtype).itemsize
            for spot in spots(self.rows(sizes), sizes)
            if not spot.row.optional or spot.row.when or self.embeds
        )

    def needs(self, head: H) -> list[str]:
        """Tensors of the target that the exported file holds."""
        return []

    def rows(self, sizes: Sizes) -> list[TensorRow]:
        """The table of tensors."""
        raise TypeError("a subclass defines it")

    def sizes(self, head: H, facts: Facts) -> dict[str, int]:
        """The letters of the table for a head."""
        raise TypeError("a subclass defines it")

    def extras(self, head: H, target: Target) -> dict[str, Tensor]:
        """Tensors that follow from the target or from others. Default: of a draft
        vocabulary its mask, and the target's embedding."""
        ids, found = head.ids(), dict[str, Tensor]()
        if ids is not None:
            found["t2d"] = vocab.to_t2d(ids, target.vocab_size)
        if self.embeds:
            found["embed_tokens.weight"] = embedding(target)
        return found

    def config(self, head: H, facts: Facts, dtype: str) -> dict[str, Any]:
        """config.json."""
        raise TypeError("a subclass defines it")

    def state(self, head: H, target: Target, dtype: torch.dtype) -> Mapping[str, Tensor]:
        """Our tensors as the table names them; `dtype` is what they will be written in."""
        return head.state_dict()

    def write(
        self, head: H, target: Target, facts: Facts, dtype: torch.dtype
    ) -> tuple[dict, dict[str, Tensor]]:
        """(config.json, tensors). Raises UserError with every refusal."""
        refused = self.refusals(head, facts)
        if refused:
            raise UserError(f"format={self.format}: " + "; ".join(refused))
        sizes = self.sizes(head, facts)
        tensors = to_theirs(self.rows(sizes), sizes, self.state(head, target, dtype)) | self.extras(
            head, target
        )
        out = {
            k: v.detach()
            .to("cpu", dtype if v.is_floating_point() else v.dtype)
            .clone()
            .contiguous()
            for k, v in tensors.items()
        }
        wrong = problems(self.rows(sizes), sizes, out)
        if wrong:
            raise UserError(
                f"format={self.format}: the head does not fit the layout ({'; '.join(wrong[:3])})"
            )
        return self.config(head, facts, str(dtype).removeprefix("torch.")), out

    def read(self, foreign: Foreign, target: Target) -> Head:
        """A head of ours for a folder in this layout. Raises UserError that lists all that
        does not fit.
        """
        raise TypeError("a subclass defines it")

    def checked(
        self, foreign: Foreign, sizes: Sizes, tensors: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Our state from their tensors in float32. Raises UserError that names every tensor
        that does not fit.
        """
        found = problems(self.rows(sizes), sizes, tensors)
        if found:
            refuse(foreign, *found)
        state = to_ours(self.rows(sizes), sizes, tensors)
        return {k: v.float() if v.is_floating_point() else v for k, v in state.items()}


def refuse(foreign: Foreign, *found: str) -> NoReturn:
    """Raises the UserError of a folder that does not fit: every problem, one line each."""
    if len(found) == 1:
        raise UserError(f"{foreign.folder}: {found[0]}")
    shown = [*found[:20]] + ([f"and {len(found) - 20} more"] if len(found) > 20 else [])
    raise UserError(
        f"{foreign.folder}: {len(found)} problems:" + "".join(f"\n  {line}" for line in shown)
    )


def number(
    foreign: Foreign, config: Mapping[str, Any], key: str, default: int | None = None
) -> int:
    """A whole number of a config. Raises UserError when it is missing or absurd."""
    value = config.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 31:
        raise UserError(
            f"{foreign.folder / 'config.json'}: {key} is {value!r}; expected a whole number above 0"
        )
    return value


def check_draft_map(foreign: Foreign, tensors: Mapping[str, Tensor], size: int) -> None:
    """d2t [Vd] must hold offsets: target id = i + d2t[i], ascending, below V = size; t2d
    [V] must say the same.

    Raises UserError; names absolute ids where the file shows them.
    """
    d2t = tensors["d2t"]
    ids = d2t + torch.arange(d2t.numel())
    absolute = (
        d2t.numel() == len(torch.unique(d2t))
        and bool((d2t >= 0).all())
        and bool((d2t < size).all())
    )
    t2d = tensors.get("t2d")
    if t2d is not None and int(t2d.sum()) != d2t.numel():
        refuse(
            foreign,
            f"t2d: marks {int(t2d.sum())} tokens, d2t has {d2t.numel()}; the two are "
            "of different heads",
        )
    if absolute and t2d is not None and bool(t2d[d2t].all()) and not torch.equal(ids, d2t):
        refuse(
            foreign,
            "d2t: holds absolute token ids; offsets are expected (target id = i + d2t[i]): "
            "subtract 0, 1, 2, ..",
        )
    if bool((ids < 0).any()) or bool((ids >= size).any()):
        hint = "; these look like absolute token ids: subtract 0, 1, 2, .." if absolute else ""
        refuse(foreign, f"d2t: i + d2t[i] leaves the vocabulary of {size}{hint}")
    if bool((ids[1:] <= ids[:-1]).any()):
        refuse(
            foreign,
            "d2t: the target ids i + d2t[i] do not ascend; a token stands there "
            "twice or out of order",
        )
    if absolute and d2t.numel() >= 16 and bool((d2t[1:] > d2t[:-1]).all()):
        refuse(
            foreign,
            "d2t: rises with every entry, as absolute token ids do; offsets are expected: subtract "
            "0, 1, 2, ..",
        )
    if t2d is not None and not bool(t2d[ids].all()):
        refuse(foreign, "t2d: does not mark the tokens of d2t; the two are of different heads")


def embedding(target: Target) -> Tensor:
    """[V, D], the target's own."""
    return target.embedding_weight.detach()  # type: ignore[no-any-return]


def check_same(
    foreign: Foreign, tensors: Mapping[str, Tensor], ours: Tensor, name: str = "embed_tokens.weight"
) -> None:
    """A copy of the target's tensor in the file must be the target's, up to the rounding of
    its dtype.
    """
    if name not in tensors:
        return
    theirs = tensors[name]
    error = (theirs.float() - ours.float()).norm() / ours.float().norm().clamp(min=1e-9)
    if not float(error) < 0.01:
        refuse(
            foreign,
            f"{name}: differs from the target's own (relative error {float(error):.3g}); this "
            "repository drafts with the target's: give the target that the head was trained for",
        )
