"""Attention kernels of this machine: which there are, which a run takes, and whether they
compute what plain operations in float64 do.

Shape letters: B rows, T positions, H query heads, Hkv key heads, hd head size, n rows that go
on, S later steps.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._triton import has_triton

from outrider.heads.eagle import attention as ttt
from outrider.heads.eagle import kernels
from outrider.heads.eagle.layout import PassLayout

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
NAMES = {id(kernels.CPU): "the CPU's flash kernel", id(kernels.FLASH): "CUDA's flash attention"}
BLOCKS = "dense blocks, document by document"
# Relative error, in norm, of what a kernel gives and of its gradients.
LIMITS = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4, torch.float64: 1e-9}


@dataclass
class Compared:
    """A kernel beside the reference. error: relative, in norm, the worst of output and
    gradients. limit: what rounding explains. ms: forward and backward; dense_ms: of plain
    operations on the same device."""

    name: str
    dtype: str
    shape: str
    error: float = 0.0
    limit: float = 0.0
    ms: float = 0.0
    dense_ms: float = 0.0
    missing: str = ""

    @property
    def passed(self) -> bool:
        """Whether it is right; what is not there is not wrong."""
        return bool(self.missing) or self.error <= self.limit  # NaN is not

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return {**asdict(self), "passed": self.passed}


def kernels_here(device: str) -> str:
    """Which kernels this build has for the device, in a line."""
    if not device.startswith("cuda"):
        return "scaled_dot_product_attention: flash and math on the CPU"
    cuda = torch.backends.cuda
    there = {
        "flash": cuda.is_flash_attention_available(),
        "efficient": cuda.mem_efficient_sdp_enabled(),
        "cudnn": torch.backends.cudnn.is_available() and cuda.cudnn_sdp_enabled(),
        "math": cuda.math_sdp_enabled(),
    }
    names = [f"{name} {'yes' if on else 'no'}" for name, on in there.items()]
    flex = "yes" if has_triton() else "without Triton, so not compiled"
    return f"scaled_dot_product_attention: {', '.join(names)}; flex attention {flex}"


def attention_path(device: str, dtype: str) -> list[str]:
    """What a run takes for a target with heads of 128, and for the training-time test of EAGLE
    heads."""
    kind = getattr(torch, dtype)
    q = torch.empty(1, 2, 1, 128, device=device, dtype=kind)
    kernel = kernels.kernel_for(q[0].transpose(0, 1), q)
    lines = [
        f"a target: transformers' choice (target.attn=auto), sdpa with {_sdpa(q)} in {dtype}",
        f"training-time test: {NAMES.get(id(kernel), BLOCKS)} in {dtype}",
    ]
    if device.startswith("cuda") and kernel is not kernels.FLASH:
        lines.append("training-time test: flash needs float16 or bfloat16 on a GPU from 8.0 on")
    return lines


def _sdpa(q: Tensor) -> str:
    """The kernel that torch takes for a causal pass without a mask."""
    if not q.is_cuda:
        return "flash"
    cuda: Any = torch.backends.cuda
    params = cuda.SDPAParams(q, q, q, None, 0.0, True, False)
    if cuda.can_use_flash_attention(params):
        return "flash"
    return "efficient" if cuda.can_use_efficient_attention(params) else "math"


# Beside plain operations
# -------------------------------------------------------------------------------------------


def compared(device: str, dtype: str, large: bool) -> Iterator[Compared]:
    """Every kernel that a run could take, beside plain operations in float64. large: shapes of
    an 8B model, as a GPU gets them."""
    kind = getattr(torch, dtype)
    length, heads, kv, size = (1024, 32, 8, 128) if large else (40, 4, 2, 16)
    for name, backend in BACKENDS.items():
        yield _backend(name, backend, (length, heads, kv, size), device, kind)
    for steps in (0, 3):
        for packed in (False, True):
            for window in (0, length // 4):
                what = steps, packed, window
                yield _training_time_test(what, (length, heads, kv, size), device, kind)


def _backend(
    name: str,
    backend: SDPBackend,
    shape: tuple[int, int, int, int],
    device: str,
    dtype: torch.dtype,
) -> Compared:
    """One backend of scaled_dot_product_attention, causal, grouped queries."""
    length, heads, kv, size = shape
    torch.manual_seed(0)
    sizes = [(1, heads, length, size), (1, kv, length, size), (1, kv, length, size)]
    exact = [torch.randn(s, dtype=torch.float64) for s in sizes]
    found = Compared(f"sdpa {name}", str(dtype)[6:], f"1x{heads}/{kv}x{length}x{size}")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def only(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return attend(q, k, v)

    with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # why torch takes no kernel: a row says it
        return _beside(found, only, attend, exact, (device, dtype))


def _training_time_test(
    what: tuple[int, bool, int],
    shape: tuple[int, int, int, int],
    device: str,
    dtype: torch.dtype,
) -> Compared:
    """Attention of EAGLE's training-time test, two rows of which some positions go on. what:
    how many steps behind the first; whether there are two documents a row; the sliding window,
    0 = none."""
    (steps, packed, window), (length, heads, kv, size) = what, shape
    torch.manual_seed(1)
    rows = (torch.rand(2 * length) < 0.8).nonzero()[:, 0]
    position = torch.arange(length).repeat(2, 1)
    if packed:
        position = torch.where(position < length // 3, position, position - length // 3)
    where, there = (
        PassLayout.of((2, length), rows.to(d), position.to(d) if packed else None).seen(window)
        for d in (device, "cpu")
    )
    count = rows.numel() if steps else 2 * length
    sizes = [(count, heads, size), *[(2, kv, length, size)] * 2, *[(count, kv, size)] * 2 * steps]
    exact = [torch.randn(s, dtype=torch.float64) for s in sizes]
    named = f"training-time test, {steps} steps" + (", packed" if packed else "")
    named += f", window {window}" if window else ""
    found = Compared(named, str(dtype)[6:], f"2x{heads}/{kv}x{length}x{size}")
    chosen = None if not steps else rows

    def ours(query: Tensor, key: Tensor, value: Tensor, *own: Tensor) -> Tensor:
        kernel = kernels.kernel_for(query, value)
        if not kernel.grouped:
            key, value = (t.repeat_interleave(heads // kv, 1) for t in (key, value))
            own = tuple(t.repeat_interleave(heads // kv, 1) for t in own)
        at = None if chosen is None else where.rows
        return ttt.merged(query, where, at, size**-0.5, (key, value), [*own])

    def plain(query: Tensor, key: Tensor, value: Tensor, *own: Tensor) -> Tensor:
        layout = there if query.device.type == "cpu" else where
        if not steps:
            every = torch.arange(2 * length, device=query.device)
            layout = PassLayout.of(
                (2, length), every, position.to(query.device) if packed else None
            ).seen(window)
        return ttt.dense(query, layout, size**-0.5, (key, value), [*own])

    return _beside(found, ours, plain, exact, (device, dtype))


def _beside(
    found: Compared,
    ours: Callable[..., Tensor],
    plain: Callable[..., Tensor],
    exact: list[Tensor],
    place: tuple[str, torch.dtype],
) -> Compared:
    """Fill in `found`. exact: the inputs in float64; the reference gets them as the kernel
    does, rounded. place: device and dtype."""
    device, dtype = place
    given = [t.to(device, dtype).requires_grad_() for t in exact]
    same = [t.detach().cpu().double().requires_grad_() for t in given]
    found.limit = LIMITS[dtype]
    want = _gradients(plain, same)
    try:
        got = _gradients(ours, given)
        found.error = max(_distance(g, w) for g, w in zip(got, want, strict=True))
        found.ms = _ms(ours, given)
        found.dense_ms = _ms(plain, given)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # no such kernel for these inputs
        found.missing = f"none for these inputs ({(str(error).splitlines() or ['?'])[0][:60]})"
    return found


def _gradients(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """The output and the gradients of a sum of it that tells places apart."""
    out = function(*inputs)
    weight = torch.arange(out.numel(), device=out.device).view_as(out).to(torch.float64)
    weight = weight.cos().to(out.dtype)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), inputs)]


def _distance(got: Tensor, want: Tensor) -> float:
    """Relative, in norm; infinite where a value is not finite."""
    got = got.detach().cpu().double()
    if not bool(got.isfinite().all()):
        return float("inf")
    return float((got - want).norm() / want.norm().clamp(min=1e-30))


def _ms(function: Callable[..., Tensor], inputs: list[Tensor]) -> float:
    """The shortest of three rounds, forward and backward."""
    best = float("inf")
    for _ in range(3):
        _wait(inputs[0])
        start = time.perf_counter()
        _gradients(function, inputs)
        _wait(inputs[0])
        best = min(best, time.perf_counter() - start)
    return round(1000 * best, 3)


def _wait(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
