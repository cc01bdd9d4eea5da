"""How fast a run is against what the device could do: floating point operations, counted once,
over time and over the device's peak.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from outrider.conf.errors import first_line

# Dense bfloat16 matrix products with float32 sums, TFLOP/s, without sparsity, as the makers'
# data sheets give them. The first name that is a part of the device's counts, so a variant
# stands before its family.
PEAKS = (
    ("GB200", 2500.0),
    ("B200", 2250.0),
    ("GH200", 989.4),
    ("H200", 989.4),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.4),
    ("H800", 989.4),
    ("H20", 148.0),
    ("A100", 311.9),
    ("A800", 311.9),
    ("A40", 149.7),
    ("A30", 165.0),
    ("L40S", 362.1),
    ("L40", 181.1),
    ("L4", 121.0),
    ("RTX 4090", 165.2),
    ("MI325X", 1307.4),
    ("MI300X", 1307.4),
)


def peak_flops(name: str, dtype: str) -> float | None:
    """The most FLOP/s of a device for products in `dtype`, None where it is not known. name:
    as torch.cuda.get_device_name gives it."""
    if dtype != "bfloat16":
        return None
    found = (peak for known, peak in PEAKS if _names(known, name))
    return next((1e12 * peak for peak in found), None)


def _names(known: str, name: str) -> bool:
    """Whether a device of this name is one of the known kind: "A100-SXM4-80GB" is an A100,
    "A1000" is none."""
    at = name.find(known)
    return at >= 0 and not name[at + len(known) :][:1].isalnum() and not name[:at][-1:].isalnum()


def _forward(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(q.shape, k.shape, v.shape))


def _backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(grad.shape, q.shape, k.shape, v.shape))


OWN: dict[Any, Any] = {  # attention on CPUs, which torch's counter leaves out
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _forward,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _backward,
}


def operations(name: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> int:
    """Floating point operations of a call of the packet `name`; 0 for what nobody counts."""
    if "attention" in str(name):
        args = _per_query_head(args, 1 if str(name).endswith("_backward") else 0)
    if formula := OWN.get(name):
        return int(formula(*args, **kwargs))
    if name in flop_registry:
        return int(cast(Any, flop_registry[name])(*args, **kwargs, out_val=out))
    return 0


def _per_query_head(args: Sequence[Any], at: int) -> Sequence[Any]:
    """Arguments of attention whose query is the one at `at`, keys and values behind it, all with
    their heads in dimension 1: torch 2.11 refuses to count fewer heads of keys than of queries,
    so keys and values take the shape that every query head reads, without numbers."""
    query, *pair = args[at : at + 3]
    shapes = [(kept.shape[0], query.shape[1], *kept.shape[2:]) for kept in pair]
    spread = (
        kept.new_empty(shape, device="meta") for kept, shape in zip(pair, shapes, strict=True)
    )
    return *args[: at + 1], *spread, *args[at + 3 :]


class Counter(TorchDispatchMode):
    """Counts by torch's formulas and changes no bit. (torch's FlopCounterMode takes some
    operations apart, such as the gradient of SiLU, which then round differently.)

    failed: "" or, where a formula raised, why the total is worth nothing; what is computed
    goes on. Formulas differ by torch's version."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self.failed = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = getattr(func, "_overloadpacket", func)
        try:
            self.total += operations(name, args, kwargs, out)
        except Exception as error:
            self.failed = self.failed or (
                f"torch {torch.__version__} cannot count the operations of {name} "
                f"({first_line(error)})"
            )
        return out


class Flops:
    """Floating point operations of a token, target and head, forward and backward: counted in
    the first training pass of this process as it runs. What activation checkpointing computes
    again counts, what an optimizer does does not. Where this torch cannot count them, that is
    told once and no rate is made of them."""

    def __init__(
        self, dtype: str, device: torch.device, say: Callable[[str], None] = print
    ) -> None:
        """say: tells people a line."""
        self.total = 0
        self._say = say
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        self.peak = peak_flops(name, dtype)
        self._done = False
        self._tokens: Tensor | None = None  # None: not counted

    @contextlib.contextmanager
    def counted(self, mask: Tensor) -> Iterator[None]:
        """Count what runs inside, unless a pass was counted already. mask: bool, its real
        tokens."""
        if self._done:
            yield
            return
        with Counter() as counter:
            yield
        self._done = True
        if counter.failed:
            self._say(f"{counter.failed}: no TFLOP/s in the metrics; the run goes on")
            return
        self.total = int(counter.total)
        self._tokens = mask.sum()

    def rates(self, tokens_per_second: float, world: int) -> dict[str, float]:
        """For a line of metrics: tokens and TFLOP per second of each of `world` devices, and
        the share of their peak where that is known (MFU)."""
        each = tokens_per_second / world
        found = {"tokens_per_second_per_device": round(each, 1)}
        if self._tokens is None:
            return found
        flops = self.total / max(float(self._tokens), 1.0) * each
        found["tflops_per_device"] = float(f"{flops / 1e12:.4g}")
        if self.peak is not None:
            found["mfu"] = round(flops / self.peak, 4)
        return found
