"""Compiled layers give every bit of the flat pass; whatever goes wrong, that one runs and a line says why."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.conf import disk
from outrider.decode.drafters import NoDraft
from outrider.decode.engine import Request, generate
from outrider.decode.models import compiled, packed
from outrider.decode.models.flat import FlatPass
from outrider.decode.models.load import TargetConfig, load_target
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from tests.decode.test_flat import SHAPES, passes
from tests.helpers.archs import build

pytestmark = pytest.mark.skipif(
    not packed.available(), reason="this processor has no bfloat16 kernels in oneDNN"
)
needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler"
)


def target_of(name: str = "llama", **keys: Any) -> Target:
    arch, shape = SHAPES[name]
    target = Target(build(arch, dtype=torch.bfloat16, **(shape | {"hidden_size": 64} | keys)))
    target.compiles, target.expected_passes = True, compiled.PAYS
    return target


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setattr(compiled, "_SAID", set())
    yield tmp_path


def answers(target: Target) -> list[list[int]]:
    requests = [Request([5, 6, 7], 12), Request([9], 12, id=1)]
    run = generate(target, NoDraft(), requests, Sampling(0.0), batch_size=2)
    return [one.token_ids for one in run.generations]


def falls_back(capsys: pytest.CaptureFixture[str], *parts: str, target: Target) -> None:
    """One line on stderr with all `parts`, nothing compiled, and the tokens of target.compile=none."""
    found = answers(target)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and said[0].startswith("target.compile: ")
    assert said[0].endswith("; the uncompiled pass runs") and all(part in said[0] for part in parts)
    assert not target.compiled and not isinstance(target.packing.flat, compiled.CompiledPass)
    with pytest.MonkeyPatch.context() as later:
        later.setattr(compiled, "_SAID", set())
        target.unpack_weights()  # packed again, it is not compiled again
        assert answers(target) == found and not capsys.readouterr().err
    target.unpack_weights()
    target.compiles = False
    assert answers(target) == found


def pretend(monkeypatch: pytest.MonkeyPatch, content: bytes, code: int = 0, text: str = "") -> None:
    """A compiler that leaves `content` at once, or ends with `code`."""

    def run(command: list[str], env: Any, work: Path, longest: float) -> tuple[int, str]:
        if not code:
            (work / "layer.so").write_bytes(content)
        return code, text

    monkeypatch.setattr(compiled.bound, "run", run)
    monkeypatch.setenv("CXX", "sh")


def flat_of(target: Target) -> FlatPass:
    target.compiles = False
    target.pack_weights()
    assert target.packing.flat is not None
    target.packing.ready, target.compiles = False, True
    return target.packing.flat


@pytest.mark.parametrize("width", [32, 64, 512, 544, 1024, 1600])
def test_the_norm_adds_in_torch_s_order(width: int) -> None:
    flat = flat_of(target_of(hidden_size=64))
    parts = {name: getattr(flat, name) for name in FlatPass.__dataclass_fields__}
    x = torch.randn(700, width, generator=torch.Generator().manual_seed(width)).bfloat16()
    weight = torch.randn(width, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert torch.equal(compiled._TracedPass(**parts)._norm(x, weight), flat._norm(x, weight))


def test_nothing_is_compiled_for_a_short_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cache: Path
) -> None:
    pretend(monkeypatch, b"", code=1)
    target = target_of()
    target.expected_passes = compiled.PAYS // target.num_layers - 1
    answers(target)
    assert not target.compiled and not capsys.readouterr().err and not list(cache.iterdir())


def test_the_key_of_the_target(tmp_path: Path) -> None:
    assert not load_target(TargetConfig(kind="tiny", compile="none"), "bfloat16").compiles
    assert load_target(TargetConfig(kind="tiny"), "bfloat16").compiles


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    falls_back(capsys, "no C++ compiler (no-such-compiler)", target=target_of())


def test_a_compiler_that_fails_is_killed_or_hangs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cache: Path
) -> None:
    pretend(monkeypatch, b"", code=1, text="Traceback ..\nRuntimeError: another torch")
    falls_back(capsys, "compiling failed", "RuntimeError: another torch", target=target_of())
    pretend(monkeypatch, b"", code=-9)
    falls_back(capsys, "compiling failed (exit code -9)", target=target_of())

    def hangs(command: list[str], env: Any, work: Path, longest: float) -> Any:
        raise subprocess.TimeoutExpired(command, longest)

    monkeypatch.setattr(compiled.bound, "run", hangs)
    falls_back(capsys, "more than 600 s", target=target_of())
    assert not list(cache.rglob("*.so"))


def test_a_full_disk(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cache: Path
) -> None:
    pretend(monkeypatch, b"library")

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(compiled.shutil, "copyfile", full)
    falls_back(capsys, "No space left on device", target=target_of())
    assert {path.name for path in cache.rglob("*") if path.is_file()} <= {"lock"}


def test_a_folder_that_takes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cache: Path
) -> None:
    """Said before the time is spent, not behind it."""
    monkeypatch.setattr(compiled.bound, "run", lambda *_: pytest.fail("compiled for nothing"))
    monkeypatch.setenv("CXX", "sh")
    (cache / "compiled").write_text("a file")
    falls_back(capsys, "compiled", target=target_of())


def test_one_of_many_processes_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    shape, runs = compiled.shape_of(flat_of(target_of())), []
    assert shape is not None
    pretend(monkeypatch, b"library")
    leave = compiled.bound.run
    monkeypatch.setattr(compiled.bound, "run", lambda *given: runs.append(1) or leave(*given))
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(compiled.compile_layer, [shape] * 4))
    assert len(paths) == len(runs) == 1 and paths.pop().read_bytes() == b"library"


def test_libraries_of_older_code_go(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = compiled.shape_of(flat_of(target_of()))
    assert shape is not None
    pretend(monkeypatch, b"library")
    mine = compiled.compile_layer(shape)
    old = [compiled.folder() / f"{number:024}-{'0' * 24}.so" for number in range(20)]
    for number, path in enumerate([mine, *old]):
        path.write_bytes(path.read_bytes() if path == mine else b"x")
        os.utime(path, (number, number))
    half = compiled.folder() / ".tmp-of-a-killed-process"
    half.write_bytes(b"x")
    assert compiled.stored(shape) == mine  # used now: the newest
    other = compiled.compile_layer(replace(shape, eps=2e-5))
    left = {mine, other, *old[-compiled.KEPT + 2 :]}
    assert set(compiled.folder().glob("*.so")) == left and not half.exists()


def test_the_compiling_process_finds_what_this_one_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shape, given = compiled.shape_of(flat_of(target_of())), []
    assert shape is not None
    pretend(monkeypatch, b"library")
    leave = compiled.bound.run
    monkeypatch.setattr(compiled.bound, "run", lambda *run: given.append(run[1]) or leave(*run))
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setenv("CXX", "")
    monkeypatch.setattr(compiled.shutil, "which", lambda name: name)
    monkeypatch.chdir(tmp_path)
    compiled.compile_layer(shape)
    places = given[0]["PYTHONPATH"].split(os.pathsep)
    assert places == [*filter(None, sys.path), str(tmp_path)]  # whose json.py is not Python's
    assert given[0]["CXX"] == "g++"


def test_what_lies_in_the_cache_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch, b"no library at all")
    falls_back(capsys, ".so", target=target_of())  # whole, and torch cannot load it
    shape = compiled.shape_of(flat_of(target_of()))
    assert shape is not None
    path = compiled.stored(shape)
    assert path is not None
    path.write_bytes(b"cut")
    falls_back(capsys, path.name, "was damaged and is removed", target=target_of())
    assert not path.exists() and compiled.stored(shape) is None


def test_code_of_another_user_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = compiled.shape_of(flat_of(target_of()))
    assert shape is not None
    disk.write_bytes(compiled.folder() / f"{compiled.key(shape)}-{'0' * 24}.so", b"x")
    monkeypatch.setattr(compiled.os, "getuid", lambda: os.geteuid() + 4711)
    monkeypatch.setattr(compiled, "ROOT", -1)
    with pytest.raises(ValueError, match="another user"):
        compiled.stored(shape)


def test_names_of_libraries_tell_machines_and_layers_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = compiled.shape_of(flat_of(target_of()))
    assert shape is not None
    names = {compiled.key(shape), compiled.key(replace(shape, eps=2e-5))}
    other = compiled.shape_of(flat_of(target_of("biases")))
    assert other is not None
    names.add(compiled.key(other))
    monkeypatch.setattr(compiled, "processor", lambda: "model name: another")
    names.add(compiled.key(shape))
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    names.add(compiled.key(shape))
    assert len(names) == 5


def test_layers_that_give_other_bits_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(flat: FlatPass, layers: int) -> compiled.CompiledPass:
        def run(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
            return [inputs[0] * 1.5]

        parts = {name: getattr(flat, name) for name in FlatPass.__dataclass_fields__}
        return compiled.CompiledPass(**parts, runs=(run,) * len(flat.layers))

    monkeypatch.setattr(compiled, "compiled_pass", wrong)
    falls_back(capsys, "round otherwise", target=target_of())


def uncompiled(flat: FlatPass) -> compiled.CompiledPass:
    """A CompiledPass that runs the flat pass's layers on what a library is given."""

    def library(number: int) -> compiled.Run:
        def run(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
            x, cos, sin, keys, values, slots, mask = inputs
            assert all(one.is_contiguous() for one in (x, cos, sin, mask))
            assert cos.shape[0] == mask.shape[0] == x.shape[0]
            return [FlatPass.layer(flat, number, x, (cos, sin), (keys, values), slots, mask)]

        return run

    parts = {name: getattr(flat, name) for name in FlatPass.__dataclass_fields__}
    return compiled.CompiledPass(**parts, runs=tuple(map(library, range(len(flat.layers)))))


@pytest.mark.parametrize("name", SHAPES)
def test_what_a_library_is_given(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "compiled_pass", lambda flat, layers: uncompiled(flat))
    target = target_of(name)
    target.pack_weights()
    fast = target.packing.flat
    assert target.compiled and isinstance(fast, compiled.CompiledPass)
    for seed, guidance in ((0, None), (2, 1.5)):
        target.packing.flat = fast
        found = passes(target, seed, guidance)
        target.packing.flat = flat_of(target)
        assert all(map(torch.equal, found, passes(target, seed, guidance)))


def test_a_library_that_went_is_not_called_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of()
    target.expected_passes = 0
    for there in (True, False, True):
        monkeypatch.setattr(
            compiled,
            "compiled_pass",
            lambda flat, _, there=there: uncompiled(flat) if there else None,
        )
        target.unpack_weights()
        target.pack_weights()
        assert target.compiled == there == isinstance(target.packing.flat, compiled.CompiledPass)


def test_other_models_are_not_compiled(capsys: pytest.CaptureFixture[str]) -> None:
    target = Target(build("gemma2", dtype=torch.bfloat16))
    target.compiles, target.expected_passes = True, compiled.PAYS
    falls_back(capsys, "only packed ones of Llama and Qwen2", target=target)
    plain = target_of()
    plain.packs_weights = False
    answers(plain)
    assert not plain.compiled and not capsys.readouterr().err


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("name", ["biases", "no groups", "qwen2"])
def test_every_bit_is_that_of_the_flat_pass(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = target_of(name)
    target.pack_weights()
    assert target.compiled and not capsys.readouterr().err
    fast = target.packing.flat
    assert isinstance(fast, compiled.CompiledPass)
    for seed, guidance in ((0, None), (1, None), (2, 1.5)):
        target.packing.flat = fast
        found = passes(target, seed, guidance)
        target.packing.flat = flat_of(target)
        assert all(map(torch.equal, found, passes(target, seed, guidance)))
    # A later process finds the library; this target's weights are packed again.
    monkeypatch.setattr(compiled, "compile_layer", lambda shape: pytest.fail("compiled again"))
    later = target_of(name)
    later.expected_passes = 0
    said = answers(later)
    assert isinstance(later.packing.flat, compiled.CompiledPass)
    later.unpack_weights()
    assert answers(later) == said and isinstance(later.packing.flat, compiled.CompiledPass)
    later.unpack_weights()
    later.compiles = False
    assert answers(later) == said
