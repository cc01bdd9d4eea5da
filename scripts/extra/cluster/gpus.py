"""What the makers say of their GPUs, and what work like this reaches of it.

Memory is the name's figure in decimal bytes, which is below what the card shows. FLOP/s are
those of dense bfloat16 products, bytes/s those of the card's memory and, one way, of its
link to the other GPUs of a node. `cpu-..` stands for two cores of a laptop. A device that
was measured is a JSON file with the same figures, all of which are taken as reached
(scripts/lab/dry_run_pair.py writes one).
"""

from __future__ import annotations

import difflib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from outrider.conf.errors import UserError
from outrider.conf.rules import AboveZero, NotEmpty
from outrider.conf.typed import from_json
from outrider.train.measure.speed import peak_flops

RESERVE = 2.5e9  # bytes: CUDA's context, cuBLAS's workspace, NCCL's buffers
FRAGMENTS = 0.05  # of what a pass allocates: gaps between blocks of the allocator


SHARE_OF_FLOPS, SHARE_OF_BANDWIDTH = 0.55, 0.8


@dataclass(frozen=True)
class Gpu:
    """memory in bytes; flops, bandwidth and link per second; launch: seconds of the host
    for one operation, below which none is shorter; shares of flops and of the two others
    that are reached.
    """

    name: NotEmpty
    memory: AboveZero
    flops: AboveZero
    bandwidth: AboveZero
    link: AboveZero
    launch: AboveZero = 6e-6
    share_of_flops: AboveZero = SHARE_OF_FLOPS
    share_of_bandwidth: AboveZero = SHARE_OF_BANDWIDTH

    @property
    def is_cpu(self) -> bool:
        return self.name.startswith("cpu")

    @property
    def reserve(self) -> float:
        """Bytes that no tensor gets. A process on a CPU: Python and the libraries."""
        return 1e9 if self.is_cpu else RESERVE

    @property
    def assumed(self) -> dict[str, float]:
        """Shares of the makers' figures that are reached, and what else was assumed."""
        return {
            **{k: v for k, v in asdict(self).items() if k != "name"},
            "reserve": self.reserve,
            "fragments": FRAGMENTS,
        }

    @property
    def stream(self) -> float:
        """Bytes/s of memory that are reached."""
        return self.bandwidth * self.share_of_bandwidth

    def seconds(self, flops: float, traffic: float) -> float:
        """Of one operation: the slowest of arithmetic, memory and launch."""
        done = flops / (self.flops * self.share_of_flops)
        return max(done, traffic / self.stream, self.launch)


def _flops(name: str) -> float:
    """Of a device that train/measure/speed.py knows."""
    found = peak_flops(name, "bfloat16")
    assert found is not None, name
    return found


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("h100-80gb", 80e9, _flops("H100"), 3.35e12, 450e9),
        Gpu("h200-141gb", 141e9, _flops("H200"), 4.8e12, 450e9),
        Gpu("b200-180gb", 180e9, _flops("B200"), 8e12, 900e9),
        Gpu("a100-80gb", 80e9, _flops("A100"), 2.04e12, 300e9),
        Gpu("a100-40gb", 40e9, _flops("A100"), 1.55e12, 300e9),
        Gpu("l40s-48gb", 47e9, _flops("L40S"), 0.86e12, 32e9),
        Gpu("rtx4090-24gb", 24e9, _flops("RTX 4090"), 1.0e12, 32e9),
        Gpu("cpu-16gb", 16e9, 2e12, 2e11, 1e10, 2e-6),
    )
}


def gpu_of(name: str) -> Gpu:
    """A GPU by name, or a measured device by its file. Raises UserError for one that is not
    in the table, and a file that holds none."""
    if name.endswith(".json"):
        return _measured(Path(name).expanduser())
    found = GPUS.get(name.lower())
    if found is None:
        near = difflib.get_close_matches(name.lower(), GPUS, 1, 0.4)
        meant = f"did you mean {near[0]}? " if near else ""
        raise UserError(f"gpu: {name!r} is not known; {meant}choose {', '.join(GPUS)}")
    return found


def _measured(path: Path) -> Gpu:
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"gpu: {path} is no JSON file ({type(error).__name__})") from None
    found, problems = from_json(facts, Gpu)
    if problems:
        raise UserError(f"gpu: {path}: {problems[0]}")
    given = {key: facts.get(key, 1.0) for key in ("share_of_flops", "share_of_bandwidth")}
    return replace(found, **given)
