"""The layers of the flat pass, compiled by torch's own compiler (AOTInductor).

Beside the matrix products a layer is some thirty small operations, and the time of a pass over a
few tokens goes into the calls between them. All layers of a model are one function of other
weights, so one layer is compiled, once: a library whose weights are handed in when it is loaded,
packed as they are (decode/models/packed.py), so that nothing is there twice. It takes any number
of rows, tokens and slots. The library lies in the cache folder under a name of all that it depends
on, and later processes only load it.

Every operation rounds where it rounds uncompiled, so the same bits come out; decode/packing.py
asks for them before anything is decoded. Whatever goes wrong, the uncompiled pass runs and one
line says why.

    python -m outrider.decode.models.compiled SHAPE OUT WORK

compiles: in a process of its own, which leaves neither memory nor settings behind, and ends with
this one (conf/bound.py).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from filelock import FileLock
from torch import Tensor, nn

from outrider.conf import bound, disk
from outrider.conf.errors import first_line
from outrider.decode import attention
from outrider.decode.models import flat as flat_module
from outrider.decode.models.flat import FlatLayer, FlatPass
from outrider.decode.models.identity import cache_root, sha256_file
from outrider.decode.models.packed import Product

# Compiling takes some 25 CPU seconds, and a layer of a pass about 0.15 ms less afterwards.
PAYS = 300_000  # layers still to be run
LONGEST_S = 600.0
ROOT = 0  # whose files everybody trusts
PARTS = ("qkv", "out", "up", "down")
# Libraries: those of older code are never taken again. A target has one or three, a drafter one.
KEPT = 16
WIDEST = 8192  # of a norm: beyond, torch adds squares in another order
# What compiling, loading and a library of another torch may raise.
FAILURES = (OSError, RuntimeError, ValueError, AttributeError, KeyError, TypeError)
_SAID: set[str] = set()

Run = Callable[[list[Tensor]], list[Tensor]]


@dataclass(frozen=True)
class CodeShape:
    """What the code of a library depends on. module: compiles it, started as a program."""

    module: ClassVar[str] = __name__


@dataclass(frozen=True)
class LayerShape(CodeShape):
    """Of a layer. heads: H, Hkv, hd. products: of each of PARTS the outputs of its layers, its
    inputs, and whether it has a bias."""

    width: int
    heads: Sequence[int]
    products: Sequence[tuple[Sequence[int], int, bool]]
    eps: float
    scale: float


def shape_of(flat: FlatPass) -> LayerShape | None:
    """The shape that all layers of `flat` have; None where they differ or are not packed."""
    found = set()
    for layer in flat.layers:
        groups = [getattr(layer, part) for part in PARTS]
        if not all(isinstance(group, Product) for group in groups):
            return None
        sizes = [(tuple(g.sizes), g.shape[1], g.bias is not None) for g in groups]
        width, dtype = layer.before.shape[0], layer.before.dtype
        if dtype != torch.bfloat16 or width % 32 or width > WIDEST:
            return None
        found.add(LayerShape(width, flat.heads, tuple(sizes), flat.eps, flat.scale))
    return found.pop() if len(found) == 1 else None


@dataclass(frozen=True)
class CompiledPass(FlatPass):
    """A FlatPass whose layers run from a library. runs: of every layer. What comes without a mask
    and is longer than a token, a prompt, runs uncompiled: its time goes into products."""

    runs: tuple[Run, ...] = ()

    def stack(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        cached: Sequence[tuple[Tensor, Tensor]],
        slots: Tensor,
        mask: Tensor | None,
        taps: Sequence[int],
    ) -> tuple[Tensor, list[Tensor]]:
        """See FlatPass."""
        if mask is not None or x.shape[1] == 1:
            mask = whole_mask(self.heads, x, cached, mask)
            cos, sin = (each.expand(len(x), -1, -1).contiguous() for each in (cos, sin))
        return super().stack(x.contiguous(), cos, sin, cached, slots, mask, taps)

    def layer(
        self,
        number: int,
        x: Tensor,
        turn: tuple[Tensor, Tensor],
        cached: tuple[Tensor, Tensor],
        slots: Tensor,
        mask: Tensor | None,
    ) -> Tensor:
        """See FlatPass."""
        if mask is None or not x.numel():
            return super().layer(number, x, turn, cached, slots, mask)
        return self.runs[number]([x, *turn, *cached, slots, mask])[0]


def whole_mask(
    heads: Sequence[int],
    x: Tensor,
    cached: Sequence[tuple[Tensor, Tensor]],
    mask: Tensor | None,
) -> Tensor:
    """[B, 1, G * T, S]: a row of its own for every query of every row. None: one token, which
    sees all."""
    rows, new = x.shape[:2]
    groups = heads[0] // heads[1]
    if mask is None:
        mask = x.new_zeros(1, 1, groups, cached[0][0].shape[2])
    tiles = groups * new // mask.shape[2]
    mask = mask.repeat(1, 1, tiles, 1) if tiles > 1 else mask
    return mask.expand(rows, -1, -1, -1).contiguous()


def compiled_pass(flat: FlatPass | None, layers_to_come: int) -> CompiledPass | None:
    """`flat` with compiled layers: from the cache folder, or compiled now where so many layers
    will be run that it pays. None where neither is, or something goes wrong, which is said."""
    shape = None if flat is None else shape_of(flat)
    if flat is None or shape is None:
        if layers_to_come >= PAYS:
            refuse("layers like these are not compiled, only packed ones of Llama and Qwen2")
        return None
    try:
        path = library(shape, layers_to_come >= PAYS)
        return None if path is None else load(flat, path)
    except FAILURES as e:
        refuse(first_line(e))
    return None


def library(shape: CodeShape, pays: bool) -> Path | None:
    """The library of `shape` from the cache folder, or compiled now where that pays. Raises what
    `stored` and `compile_layer` raise."""
    path = stored(shape)
    return compile_layer(shape) if path is None and pays else path


def refuse(why: str) -> None:
    """Say once that the uncompiled pass runs."""
    if why not in _SAID:
        _SAID.add(why)
        print(f"target.compile: {why}; the uncompiled pass runs", file=sys.stderr, flush=True)


def folder() -> Path:
    """Where libraries are kept."""
    return cache_root() / "compiled"


def stored(shape: CodeShape) -> Path | None:
    """The library of `shape` for this machine, torch and code. Raises ValueError for one that is
    damaged, or that somebody else could have put there: it is code that runs here."""
    for path in sorted(folder().glob(f"{key(shape)}-*.so")):
        if hasattr(os, "getuid") and path.stat().st_uid not in (ROOT, os.getuid()):
            raise ValueError(f"{path} belongs to another user")
        if path.stem.rpartition("-")[2] == sha256_file(path)[:24]:
            with contextlib.suppress(OSError):  # the folder may be read-only
                os.utime(path)  # see `tidy`
            return path
        path.unlink()
        raise ValueError(f"{path.name} was damaged and is removed")
    return None


def key(shape: CodeShape) -> str:
    """Of all that a library depends on."""
    modules = flat_module, attention, sys.modules[__name__], sys.modules[shape.module]
    code = [Path(str(module.__file__)).read_bytes() for module in modules]
    about = [
        asdict(shape),
        [torch.__version__, torch.version.git_version, torch.backends.cpu.get_cpu_capability()],
        [platform.machine(), processor(), *platform.libc_ver()],
        [hashlib.sha256(text).hexdigest() for text in code],
    ]
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:24]


@functools.cache
def processor() -> str:
    """Name and instructions of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({one for one in lines if one.startswith(("model name", "flags"))}))


def compile_layer(shape: CodeShape) -> Path:
    """Compile `shape` and keep it; one process of all does it, the others wait. Raises OSError,
    RuntimeError and ValueError."""
    compiler = os.environ.get("CXX") or "g++"
    if shutil.which(compiler) is None:
        raise OSError(f"no C++ compiler ({compiler}); install one or set CXX to one program")
    folder().mkdir(parents=True, exist_ok=True)
    # Also says that nothing can be written there, before the time is spent.
    with FileLock(folder() / "lock", timeout=LONGEST_S):
        path = stored(shape)
        if path is not None:
            return path
        with tempfile.TemporaryDirectory(
            prefix="outrider-compile-", ignore_cleanup_errors=True
        ) as work:
            out = compile_in(Path(work), shape, compiler)
            path = folder() / f"{key(shape)}-{sha256_file(out)[:24]}.so"
            with disk.whole(path) as stage:
                shutil.copyfile(out, stage)
        tidy()
    return path


def compile_in(work: Path, shape: CodeShape, compiler: str) -> Path:
    """The library of `shape`, in the folder `work`. Raises OSError and RuntimeError."""
    out = work / "layer.so"
    env = {**os.environ, "CXX": compiler, "OMP_NUM_THREADS": "1"}
    env |= {"TORCHINDUCTOR_CACHE_DIR": str(work), "TMPDIR": str(work)}
    # An empty entry is the folder that one works in, whose json.py is nobody's: it comes last.
    env["PYTHONPATH"] = os.pathsep.join(
        [*filter(None, sys.path), *([os.getcwd()] if "" in sys.path else [])]
    )
    command = [sys.executable, "-m", shape.module, json.dumps(asdict(shape)), str(out), str(work)]
    try:
        code, said = bound.run(command, env, work, LONGEST_S)
    except subprocess.TimeoutExpired as e:
        raise RuntimeError(f"compiling took more than {LONGEST_S:.0f} s") from e
    if code or not out.is_file():
        last = said.strip().splitlines()[-1:] or [f"exit code {code}"]
        raise RuntimeError(f"compiling failed ({last[0][:200]})")
    return out


def tidy() -> None:
    """Remove all but the `KEPT` libraries that were used last, and what a killed process left."""
    with contextlib.suppress(OSError):  # somebody else's
        used = [(path.stat().st_mtime, path) for path in folder().glob("*.so")]
        for path in [path for _, path in sorted(used)[:-KEPT]] + [*folder().glob(".tmp-*")]:
            path.unlink(missing_ok=True)


def load(flat: FlatPass, path: Path) -> CompiledPass:
    """`flat` with its layers from the library `path`, which takes their weights as they lie.
    Raises what torch raises for a file that is none, or another torch's."""
    parts = {name: getattr(flat, name) for name in FlatPass.__dataclass_fields__}
    return CompiledPass(**parts, runs=tuple(loaded(path, weights(one)) for one in flat.layers))


def weights(layer: FlatLayer) -> dict[str, Tensor]:
    """What a library calls the weights of a packed layer."""
    found = {"before": layer.before, "between": layer.between}
    for part in PARTS:
        product = getattr(layer, part)
        found[f"{part}.weight"] = product.weight
        if product.bias is not None:
            found[f"{part}.bias"] = product.bias
    return found


def loaded(path: Path, weights: Mapping[str, Tensor]) -> Run:
    """The library `path` over these weights, which stay the caller's. Raises as `load`."""
    runner = torch._C._aoti.AOTIModelContainerRunnerCpu(str(path), 1)
    if not weights:
        return runner.run  # type: ignore[no-any-return]
    names = runner.get_constant_names_to_original_fqns()
    given = {name: weights[of] for name, of in names.items()}
    runner.update_constant_buffer(given, False, True, True)
    return runner.run  # type: ignore[no-any-return]


class GraphProduct(nn.Module):
    """A Product in a graph: its weights are constants, which the compiler wants them to be."""

    def __init__(self, sizes: Sequence[int], inputs: int, bias: bool) -> None:
        super().__init__()
        self.sizes, total = list(sizes), sum(sizes)
        self.register_buffer("weight", torch.zeros(total, inputs, dtype=torch.bfloat16))
        self.register_buffer("bias", torch.zeros(total, dtype=torch.bfloat16) if bias else None)

    def forward(self, x: Tensor) -> Any:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")

    def split(self, x: Tensor) -> Any:
        return self(x).split(self.sizes, -1)


def unit(x: Tensor, eps: float) -> Tensor:
    """x [.., D] by its root mean square, in float32. As torch adds the squares: four sums of eight
    lanes, in blocks of sixteen."""
    wide = x.float()
    steps = x.shape[-1] // 32
    squares = wide.pow(2).reshape(*x.shape[:-1], steps, 32)
    begun, total = 16 * (steps // 16), squares.new_zeros(())
    if begun:
        blocks = squares[..., :begun, :].reshape(*x.shape[:-1], begun // 16, 16, 32)
        total = blocks.sum(-2).sum(-2)
    if begun < steps:
        total = squares[..., begun:, :].sum(-2) + total
    one, two, three, four = total.split(8, -1)
    lanes = one + two + three + four
    found = lanes[..., 0]
    for lane in range(1, 8):
        found = found + lanes[..., lane]
    return wide * torch.rsqrt(found[..., None] / x.shape[-1] + eps)


@dataclass(frozen=True)
class _TracedPass(FlatPass):
    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return unit(x, self.eps).to(x.dtype) * weight


class _Layer(nn.Module):
    """The layer that is compiled: `FlatPass.layer` over weights of its own."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.shape = shape
        for norm in ("before", "between"):
            self.register_buffer(norm, torch.ones(shape.width, dtype=torch.bfloat16))
        for part, product in zip(PARTS, shape.products, strict=True):
            self.add_module(part, GraphProduct(*product))

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        keys: Tensor,
        values: Tensor,
        slots: Tensor,
        mask: Tensor,
    ) -> Tensor:
        own: Any = self
        one = FlatLayer(self, own.before, own.qkv, own.out, own.between, own.up, own.down)
        query_heads, kv_heads, size = self.shape.heads
        heads = query_heads, kv_heads, size
        # The modules that embed and rotate are not called here.
        eps, scale = self.shape.eps, self.shape.scale
        run = _TracedPass((one,), own.before, eps, scale, heads, self, self)
        return run.layer(0, x, (cos, sin), (keys, values), slots, mask)


@torch.no_grad()
def build(shape: LayerShape, out: Path) -> None:
    """Compile a layer of `shape` into the library `out`."""
    heads, kv_heads, size = shape.heads
    # Sizes that no other size equals: the compiler would take the two for one.
    rows, new, seen, slots = 5, 7, 211, 1021

    def some(*sizes: int) -> Tensor:
        return torch.zeros(sizes, dtype=torch.bfloat16)

    keys, values = (some(rows, kv_heads, slots, size)[:, :, :seen] for _ in range(2))
    turn = [some(rows, 1, new, size) for _ in range(2)]
    mask = some(rows, 1, heads // kv_heads * new, seen)
    inputs = (some(rows, new, shape.width), *turn, keys, values, torch.arange(new), mask)
    varying = [(0, 1), (0, 2), (0, 2), (0, 2), (0, 2), (0,), (0, 2, 3)]
    export(_Layer(shape), inputs, varying, out)


def export(layer: nn.Module, inputs: tuple[Any, ...], varying: Sequence[Any], out: Path) -> None:
    """Compile `layer` into the library `out`. inputs: such as it is called with, tensors and
    tuples of them. varying: which dimensions of each tensor may have another size."""
    import torch._inductor

    def sizes(varying: Sequence[Any]) -> Any:
        if not varying or isinstance(varying[0], int):
            return dict.fromkeys(varying, torch.export.Dim.AUTO)
        return tuple(map(sizes, varying))

    traced = torch.export.export(layer.eval(), inputs, dynamic_shapes=sizes(varying))
    options = {
        "aot_inductor.output_path": str(out),
        "aot_inductor.package_constants_in_so": False,
        "compile_threads": 1,
        "cpp.threads": 1,  # small kernels: a barrier costs more than they do
        "emulate_precision_casts": True,
        "pattern_matcher": False,  # which would add a residual before it rounds
    }
    torch._inductor.aot_compile(traced.module(), inputs, options=options)  # type: ignore[arg-type]


if __name__ == "__main__":
    bound.end_with_parent(Path(sys.argv[3]))
    build(LayerShape(**json.loads(sys.argv[1])), Path(sys.argv[2]))
