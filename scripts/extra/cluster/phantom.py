"""An accelerator that is not there, to run training and decoding on: no weights, no
arithmetic, but every shape, every device, every allocation and every read of the host.

torch registers a device whose kernels are Python (experimental, torch 2.13), and its fake tensors
have shapes and devices alone: a tensor left on the CPU raises FakeTensorDeviceMismatchError, as a
GPU would. What decides the course of a pass are small tensors of integers and truth values
(positions, masks, counts); those are computed beside it on the CPU, so that a host read gets its
true answer. Where it cannot be known, because it follows from weights, the answer is scripted:
indices are 0, numbers are finite, comparisons of numbers fail.

Counted are launches, FLOPs and bytes of memory traffic by operation, live storages by what they
are for, with the peak, and host reads by file and line of this project.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils import backend_registration
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry
from transformers import masking_utils

from outrider.conf.errors import UserError
from outrider.heads.eagle import kernels

NAME = "phantom"
ROOT = Path(__file__).resolve().parents[3]
ROOMS = tuple(str(ROOT / room) for room in ("decode", "heads", "train"))
BLOCK = 512  # bytes in which a GPU's allocator rounds
MOST_WHOLE, MOST_REAL = 1 << 21, 1 << 12  # elements that are computed: of integers, of others
WHOLE = (torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64)
aten = torch.ops.aten
# Operations that read, or write, few rows of a large operand.
READS_FEW = (aten.embedding, aten.index_select, aten.index, aten.gather)
WRITES_FEW = (aten.index_copy_, aten.index_put_, aten.scatter_, aten.scatter_add_, aten.index_add_)
FLASH_BACK = (aten._scaled_dot_product_flash_attention_backward, aten._flash_attention_backward)
EMPTY = (aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty)
DEVICE = torch.ops.prim.device.default  # asked half as often as all operations together
DRAWN = torch.Tag.nondeterministic_seeded
RANKS = (aten.topk, aten.sort, aten.argsort)
KNOWN = "_real"  # attribute of a fake tensor: the real one that it stands for
_HAS = "_setup_privateuseone_for_python_backend"


class _Hook(torch._C._acc.PrivateUse1Hooks):  # type: ignore[misc]
    """What torch asks of a device. It is never available, so that nobody takes it for an
    accelerator."""

    def is_available(self) -> bool:
        return False

    def has_primary_context(self, dev_id: int) -> bool:
        return False

    def is_built(self) -> bool:
        return True


class _Module:
    """torch.phantom: nothing is there, so that torch never computes a constant on it."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return False

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]  # asked where a checkpoint recomputes

    def manual_seed_all(self, seed: int) -> None:
        """Nothing is drawn."""


def missing() -> str:
    """Why this torch has no phantom; "" where it has."""
    if hasattr(backend_registration, _HAS):
        return ""
    return f"torch {torch.__version__} cannot register a device of Python kernels; 2.13 can"


def register() -> None:
    """Make the device known to torch, once in a process. Raises UserError where torch cannot."""
    if why := missing():
        raise UserError(f"dry_run: {why}; install torch 2.13")
    if torch._C._get_privateuse1_backend_name() != NAME:
        # At the first backward pass torch starts a thread for every device it knows, and from then
        # on refuses to work in a process that was forked. No thread is wanted for this one.
        torch.ones((), requires_grad=True).backward()  # type: ignore[no-untyped-call]
        getattr(backend_registration, _HAS)(NAME, _Module(), _Hook())


Cost = Callable[[float, float], float]


@contextlib.contextmanager
def phantom(device: str = NAME, cost: Cost = lambda flops, traffic: 0.0) -> Iterator[Phantom]:
    """Within, tensors are fake, and what happens on `device` (phantom, or cpu to count what a
    CPU would do) is counted; cost: seconds of an operation. Raises UserError where torch has
    no phantom."""
    register()
    with FakeTensorMode(allow_non_fake_inputs=True) as fakes, _stand_ins():
        # The backward pass in this thread: an exception in one of torch's own for the
        # device would end the process.
        alone = torch.autograd.set_multithreading_enabled(False)
        with alone, Phantom(torch.device(device), fakes, cost) as ghost:
            try:
                yield ghost
            finally:
                _forget()


def _forget() -> None:
    """Empty the caches of this project's functions: they may hold fakes of a mode that ends."""
    for name, module in list(sys.modules.items()):
        if name.startswith("outrider."):
            for value in list(vars(module).values()):
                if clear := getattr(value, "cache_clear", None):
                    clear()


class Phantom(TorchDispatchMode):
    """See the module. device: what is watched. part: what storages made now are for.

    launches, flops, traffic (bytes), seconds: by part; seconds by `cost`, of an
    operation with its FLOPs and bytes. reads: (file:line, operation) -> host reads. waits:
    (file:line) -> copies to the device that wait. races: (file:line) -> copies to the host that
    nobody waits for. live, peak: bytes by part, now and at the moment of the most."""

    def __init__(self, device: torch.device, fakes: FakeTensorMode, cost: Cost) -> None:
        super().__init__()
        self.device, self.fakes, self.cost = device, fakes, cost
        self.part = "other"
        self.script: dict[Any, Any] = {}
        self.launches: Counter[str] = Counter()
        self.flops: dict[str, float] = defaultdict(float)
        self.traffic: Counter[str] = Counter()
        self.seconds: dict[str, float] = defaultdict(float)
        self.reads: Counter[tuple[str, str]] = Counter()
        self.waits: Counter[str] = Counter()
        self.races: Counter[str] = Counter()
        self.live: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self._held = self._most = 0
        self._storages: dict[int, tuple[Any, int, str]] = {}

    # -- what others ask and tell

    @contextlib.contextmanager
    def within(self, part: str) -> Iterator[None]:
        """What is made in the block is for `part`."""
        before, self.part = self.part, part
        try:
            yield
        finally:
            self.part = before

    def restart(self) -> None:
        """Count from here: what lives stays."""
        for amount in self._counters():
            amount.clear()
        self._most, self.peak = self._held, Counter(self.live)

    def amounts(self) -> list[dict[Any, float]]:
        """What was counted so far, for `repeat`."""
        return [dict(amount) for amount in self._counters()]

    def repeat(self, before: list[dict[Any, float]], times: int) -> None:
        """Count what happened since `before` so many times more."""
        counters: Any = self._counters()
        for amount, was in zip(counters, before, strict=True):
            for key, now in list(amount.items()):
                amount[key] += (now - was.get(key, 0)) * times

    def _counters(self) -> tuple[Any, ...]:
        moved = self.waits, self.races
        return self.launches, self.flops, self.traffic, self.seconds, self.reads, *moved

    @property
    def most(self) -> int:
        """Bytes at the peak."""
        return self._most

    def belongs(self, tensor: Tensor, part: str) -> None:
        """From now on this tensor's storage counts as `part`."""
        key = tensor.untyped_storage()._cdata
        if key in self._storages:
            ref, size, before = self._storages[key]
            self._storages[key] = (ref, size, part)
            self.live[before] -= size
            self.live[part] += size

    def own(self, real: Tensor, device: torch.device | str = "cpu") -> Tensor:
        """A fake of a real tensor of the CPU, with its values known, on `device`."""
        fake: Tensor = self._faked(real)
        return fake.to(device)

    def list_reads(self) -> list[str]:
        """Host reads, the most frequent first: "3 x heads/eagle/head.py:191 nonzero"."""
        return [f"{n} x {where} {what}" for (where, what), n in self.reads.most_common()]

    # -- the mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE:
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args)
        kwargs, packet = kwargs or {}, func._overloadpacket
        if packet is not aten.lift_fresh and any(map(_is_real, _leaves((args, kwargs)))):
            args, kwargs = tree_map(self._faked, (args, kwargs))
        here = self._here(args)
        if packet in (aten.index, aten.index_put, aten.index_put_):
            args = self._whole_indices(args, here)
        try:
            out = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            if here:
                self._read(packet)
            return self._answer(func, args, kwargs)
        # In inference mode torch does not take `to` apart before it comes here.
        if packet in (aten._to_copy, aten.to) and isinstance(out, Tensor):
            self._copied(args[0], out, _ahead(func, args, kwargs))
        if packet is aten.copy_ and _ahead(func, args, kwargs):
            self._raced(args[1], args[0])
        self._shadow(func, args, kwargs, out)
        fresh = [t for t in _tensors(out) if self._track(t)]
        if here or fresh:
            self._count(func, args, kwargs, out, bool(fresh))
        return out

    def _faked(self, value: Any) -> Any:
        """A real tensor from outside (a table, a cache) as a fake one that is known."""
        if not _is_real(value):
            return value
        fake = self.fakes.from_tensor(value)
        setattr(fake, KNOWN, value)
        return fake

    def _here(self, args: Any) -> bool:
        return any(a.device.type == self.device.type for a in _tensors(args))

    def _read(self, what: Any) -> None:
        if self.device.type != "cpu":
            self.reads[_where(), str(what).removeprefix("aten.")] += 1

    def _raced(self, source: Any, out: Tensor) -> None:
        """A copy that nobody waits for: towards the host it may be read before it is there."""
        there = isinstance(source, Tensor) and source.device.type == self.device.type
        if there and out.device.type == "cpu" != self.device.type:
            self.races[_where()] += 1

    def _copied(self, source: Any, out: Tensor, ahead: bool) -> None:
        if not isinstance(source, Tensor) or self.device.type == "cpu":
            return
        if source.device.type == self.device.type and out.device.type == "cpu":
            self._read("copy")
            if ahead:
                self._raced(source, out)
        there = source.device.type == "cpu" and out.device.type == self.device.type
        if there and not ahead:
            self.waits[_where()] += 1

    def _whole_indices(self, args: Any, here: bool) -> Any:
        """Truth values as indices are places of what is true: a host read on a device."""
        found: list[Any] = []
        for index in args[1]:
            if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8):
                if here and not _fills(args):
                    self._read("index by bool")
                with no_dispatch():
                    known = self._known(index)
                    known = torch.zeros(index.shape, dtype=torch.bool) if known is None else known
                    places = list(known.nonzero(as_tuple=True))
                found += [self._make(place, index.device) for place in places]
            else:
                found.append(index)
        return (args[0], found, *args[2:])

    # -- values that are known

    def _known(self, value: Tensor) -> Tensor | None:
        """The real tensor behind a fake one; None where nobody knows."""
        if isinstance(value, FakeTensor):
            return getattr(value, KNOWN, None)
        return value

    def _make(self, real: Tensor, device: torch.device) -> Tensor:
        """A fake tensor on `device` with known values."""
        fake = torch.empty(real.shape, dtype=real.dtype, device=device)
        setattr(fake, KNOWN, real)
        self._track(fake)
        return fake

    def _really(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The operation on what is known. Raises LookupError where an operand is not."""

        def known(value: Any) -> Any:
            if isinstance(value, torch.device):
                return torch.device("cpu")
            if not isinstance(value, Tensor):
                return value
            found = self._known(value)
            if found is None:
                raise LookupError
            return found

        args, kwargs = tree_map(known, (args, kwargs))
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        kwargs.pop("pin_memory", None)
        with no_dispatch():
            return func(*args, **kwargs)

    def _answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operation that depends on values."""
        device = _tensors(args)[0].device
        try:
            found = self._really(func, args, kwargs)
        except LookupError:
            if func is aten._local_scalar_dense.default:
                return _scripted(args[0].dtype, self.script.get("item", 1))
            if func is aten.equal.default:
                return True
            with no_dispatch():
                args, kwargs = tree_map(
                    lambda a: torch.zeros(a.shape, dtype=a.dtype) if isinstance(a, Tensor) else a,
                    (args, kwargs),
                )
                found = func(*args, **kwargs)
        return tree_map(lambda t: self._make(t, device) if isinstance(t, Tensor) else t, found)

    def _shadow(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Compute beside it what is small enough to be known."""
        results = [t for t in _leaves(out) if isinstance(t, FakeTensor)]
        for t in results:
            t.constant = None  # torch's own record of values would be computed on the device
        wanted = [t for t in results if _small(t)]
        if not wanted:
            if func._schema.is_mutable:  # an operand that is known no longer
                for t in results:
                    t.__dict__.pop(KNOWN, None)
            return
        try:
            if func is aten.lift_fresh.default and not isinstance(args[0], FakeTensor):
                with no_dispatch():
                    found: Any = args[0].clone()
            elif func._overloadpacket in EMPTY or DRAWN in func.tags:
                raise LookupError
            else:
                found = self._really(func, args, kwargs)
            for fake, real in zip(results, _tensors(found), strict=True):
                if _small(fake) and fake.shape == real.shape:
                    setattr(fake, KNOWN, real)
        except Exception:  # unknown operands, or scripted ones out of range
            for fake in wanted:
                if fake.dtype not in WHOLE:
                    fake.__dict__.pop(KNOWN, None)
                elif getattr(fake, KNOWN, None) is None:
                    value = self.script.get(func._overloadpacket, _usual(func, args))
                    with no_dispatch():
                        real = torch.full(fake.shape, value, dtype=fake.dtype)
                        if func._overloadpacket in RANKS and fake.dim():
                            real += torch.arange(fake.shape[-1])  # all of them different
                    setattr(fake, KNOWN, real)

    # -- memory and work

    def _track(self, tensor: Tensor) -> bool:
        """Follow a storage of the device until it is freed. Returns whether it is new."""
        if tensor.device.type != self.device.type:
            return False
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return False
        size = -(-storage.nbytes() // BLOCK) * BLOCK

        def freed(_: Any, key: int = key) -> None:
            _, size, part = self._storages.pop(key)
            self.live[part] -= size
            self._held -= size

        self._storages[key] = (weakref.ref(storage, freed), size, self.part)
        self.live[self.part] += size
        self._held += size
        self._mark(0)
        return True

    def _mark(self, scratch: int) -> None:
        if self._held + scratch > self._most:
            self._most = self._held + scratch
            self.peak = Counter(self.live)
            self.peak["inside kernels"] += scratch

    def _count(self, func: Any, args: Any, kwargs: Any, out: Any, fresh: bool) -> None:
        if not (fresh or func._schema.is_mutable):
            return  # a view
        packet = func._overloadpacket
        flops = 0.0
        if packet in flop_registry:
            flops = float(flop_registry[packet](*args, **kwargs, out_val=out))
            flops *= _looked_at(packet, args, kwargs)
        elif packet is aten._grouped_mm:  # of experts: rows [n, D], weights [E, D, out]
            flops = 2.0 * args[0].numel() * args[1].shape[-1]
        if packet in FLASH_BACK:
            self._mark(4 * args[1].numel())  # the kernel adds up the queries' gradient in float32
        results, operands = _tensors(out), _tensors((args, kwargs))
        if packet in READS_FEW:
            traffic = 2 * sum(map(_bytes, results))
        elif packet in WRITES_FEW:
            traffic = 3 * _bytes(operands[-1])
        else:
            traffic = sum(map(_bytes, [*operands, *results]))
        self.launches[self.part] += 1
        self.flops[self.part] += flops
        self.traffic[self.part] += traffic
        self.seconds[self.part] += self.cost(flops, traffic)


# -- small things


def _leaves(value: Any) -> list[Any]:
    """What lists, tuples and dicts hold, however deep; torch's own walk takes long."""
    if isinstance(value, (tuple, list)):
        return [leaf for part in value for leaf in _leaves(part)]
    if isinstance(value, dict):
        return [leaf for part in value.values() for leaf in _leaves(part)]
    return [value]


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in _leaves(value) if isinstance(leaf, Tensor)]


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, FakeTensor)


def _bytes(tensor: Tensor) -> int:
    whole = tensor.untyped_storage().nbytes()
    return int(min(tensor.numel() * tensor.element_size(), whole))


def _small(fake: FakeTensor) -> bool:
    return fake.numel() <= (MOST_WHOLE if fake.dtype in WHOLE else MOST_REAL)


def _scripted(dtype: torch.dtype, value: float) -> Any:
    return bool(value) if dtype == torch.bool else int(value) if dtype in WHOLE else float(value)


def _usual(func: Any, args: Any) -> int:
    """What an operation over unknown numbers gives: they are finite, above 0, and none is
    larger than another."""
    packet = func._overloadpacket
    orders = packet in (aten.lt, aten.le, aten.gt, aten.ge)
    if orders and not isinstance(args[1], Tensor) and args[1] <= 0:
        return int(packet in (aten.gt, aten.ge))
    if packet is aten.eq:
        return int(args[0] is args[1])
    return int(packet in (aten.ne, aten.le, aten.ge, aten.isfinite))


def _fills(args: Any) -> bool:
    """Whether an index_put is a masked fill, which waits for nothing."""
    value = args[2] if len(args) > 2 else None
    return isinstance(value, Tensor) and value.numel() == 1 and len(args[1]) == 1


def _looked_at(packet: Any, args: Any, kwargs: Mapping[str, Any]) -> float:
    """The share of all scores that an attention kernel computes: half of them where it is
    causal, less inside a window."""
    if not _causal(packet, args):
        return 1.0
    before = kwargs.get("window_size_left")
    if before is None or before < 0:
        return 0.5
    longest = args[8 if packet in FLASH_BACK else 5]
    near = min(int(before) + 1, longest) / longest
    return near - near**2 / 2


def _ahead(func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a copy is asked for that nobody waits for, by its place or by its name."""
    names = [argument.name for argument in func._schema.arguments]
    place = names.index("non_blocking") if "non_blocking" in names else len(args)
    return bool(args[place] if place < len(args) else kwargs.get("non_blocking"))


def _causal(packet: Any, args: Any) -> bool:
    """Whether an attention kernel skips what lies above the diagonal."""
    if packet in (aten._scaled_dot_product_flash_attention, aten._flash_attention_forward):
        spot = 4 if packet is aten._scaled_dot_product_flash_attention else 8
        return len(args) > spot and args[spot] is True
    if packet in FLASH_BACK:
        return len(args) > 11 and args[11] is True
    return False


@functools.cache
def _place(file: str) -> str | None:
    """A file of this project below its root, whichever way it was imported; None for others."""
    real = Path(file).resolve()
    return str(real.relative_to(ROOT)) if str(real).startswith(ROOMS) else None


def _where() -> str:
    """file:line of the innermost frame of this project, "autograd" where there is none."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if place := _place(frame.f_code.co_filename):
            return f"{place}:{frame.f_lineno}"
        frame = frame.f_back
    return "autograd"


# What would not come to an operation of its own
# -------------------------------------------------------------------------------------------

_attention: Any = torch.nn.functional.scaled_dot_product_attention
_numpy: Any = Tensor.numpy
_Generator: Any = torch.Generator


@contextlib.contextmanager
def _stand_ins() -> Iterator[None]:
    """Replace what does not: the choice of an attention kernel, generators of the device,
    lists and arrays of fake tensors, and what torch does to the insides of parameters."""
    functional: Any = torch.nn.functional
    replaced = (
        (functional, "scaled_dot_product_attention", _attend),
        (torch, "Generator", _HostGenerator),
        (FakeTensor, "tolist", _listed),
        (FakeTensor, "__deepcopy__", _copied),
        (Tensor, "numpy", _array),
        (nn.Module, "_apply", _applying()),
        # ask the values, as where nothing is traced
        (masking_utils, "is_tracing", lambda *_: False),
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(kernels.KERNELS, {NAME: kernels.KERNELS["cuda"]}))
        for owner, name, instead in replaced:
            stack.enter_context(mock.patch.object(owner, name, instead, create=True))
        yield


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """As a GPU chooses; the device's own would be the one that keeps all scores."""
    if query.device.type == "cpu" or query.dtype == torch.float64:
        how = {"scale": scale, "enable_gqa": enable_gqa}
        return _attention(query, key, value, attn_mask, dropout_p, is_causal, **how)  # type: ignore[no-any-return]
    if attn_mask is None and query.dtype in (torch.bfloat16, torch.float16):
        return aten._scaled_dot_product_flash_attention(  # type: ignore[no-any-return]
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (t.repeat_interleave(groups, -3) for t in (key, value))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(
            ~attn_mask, -torch.inf
        )
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    keep = torch.is_grad_enabled() and query.requires_grad
    return aten._scaled_dot_product_efficient_attention(  # type: ignore[no-any-return]
        query, key, value, attn_mask, keep, dropout_p, is_causal, scale=scale
    )[0]


def _stood_for(fake: Tensor) -> Tensor:
    """The real tensor behind a fake one; zeros where none is known. Without dispatch."""
    real: Tensor | None = getattr(fake, KNOWN, None)
    return torch.zeros(fake.shape, dtype=fake.dtype) if real is None else real


def _listed(self: Tensor) -> Any:
    here = self if self.device.type == "cpu" else self.to("cpu")
    with no_dispatch():
        return Tensor.tolist(_stood_for(here))


def _array(self: Tensor, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(self, FakeTensor):
        return _numpy(self, *args, **kwargs)
    with no_dispatch():
        return _numpy(_stood_for(self))


def _copied(self: Tensor, memo: dict[int, Any]) -> Tensor:
    new = self.detach().clone()
    new = nn.Parameter(new, self.requires_grad) if isinstance(self, nn.Parameter) else new
    memo[id(self)] = new
    return new


class _HostGenerator(_Generator):  # type: ignore[misc, valid-type]
    """Generators of the device are the host's."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return _Generator("cpu" if torch.device(device).type == NAME else device)


def _applying() -> Callable[..., nn.Module]:
    """nn.Module._apply with new parameters: torch exchanges the contents of the old ones,
    which fakes do not allow."""
    moved: dict[Any, dict[int, tuple[Any, Any]]] = {}

    def applied(self: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
        known = moved.setdefault(fn, {})
        for child in self.children() if recurse else ():
            child._apply(fn)
        for name, value in [*self._parameters.items(), *self._buffers.items()]:
            if value is None:
                continue
            if id(value) not in known:
                with torch.no_grad():
                    new = fn(value)
                if isinstance(value, nn.Parameter) and new is not value:
                    new = nn.Parameter(new, value.requires_grad)
                known[id(value)] = (value, new)
            where: Any = self._parameters if name in self._parameters else self._buffers
            where[name] = known[id(value)][1]
        return self

    return applied
