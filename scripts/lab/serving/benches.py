"""An engine's server with any of our drafters or without one, as the certificate of its sampling
and the race need it: exports made where they are missing, one server while a block runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from outrider.heads import load_head
from outrider.heads.interop import exported, gguf_write
from outrider.heads.names import NGRAM, NONE
from outrider.scripts.extra.llamacpp import server as llamacpp_server
from outrider.scripts.lab.serving import llamacpp, llamacpp_cases, shared, vllm, vllm_server
from outrider.scripts.serving import card, gguf_export

PROBABILISTIC, GREEDY = "probabilistic", "greedy"
MODES = (PROBABILISTIC, GREEDY)  # how the draft is drawn
DRAWN = (
    "small_lm",
)  # drafters whose distribution llama.cpp samples; others take their best tokens
LLAMACPP, NATIVE, VLLM = "llamacpp", "llamacpp_native", "vllm"
# by engine: its name for people, its package's name in reports, the Python of its environment,
# and the command that builds that
ENGINES = {
    LLAMACPP: ("llama.cpp", "xllamacpp", ".venv-llamacpp/bin/python", llamacpp.MAKE),
    NATIVE: (
        "llama.cpp built for the CPU",
        "xllamacpp",
        ".venv-llamacpp-native/bin/python",
        "make .venv-llamacpp-native/.installed",
    ),
    VLLM: ("vLLM", "vllm", ".venv-engines/bin/python", "make engines ONLY=vllm"),
}


@dataclass(frozen=True)
class Serving:
    """How a server runs. draft_tokens: of a cycle. slots: requests at a time. context: tokens of
    each. exact: float32 throughout, sums in the order of plain code; else as the engine is
    fast: llama.cpp in `weights` or with the target of the GGUF file that it names, vLLM in
    bfloat16, compiled where it can be."""

    draft_tokens: int
    slots: int = 1
    context: int = 1024
    threads: int = 1
    exact: bool = True
    weights: str = "float16"


class EngineBench(Protocol):
    """An engine. version: of the server that ran last. headless: the drafters that need no
    folder."""

    version: str
    headless: tuple[str, ...]

    def refusal(self, found: shared.Found, mode: str) -> str | None:
        """Why it cannot draft so: what stands behind "modes: " or "drafters: "."""
        ...

    def stamp(self, found: shared.Found) -> str:
        """What drafts, by its hash."""
        ...

    def running(
        self, found: shared.Found, mode: str, name: str
    ) -> contextlib.AbstractContextManager[str]:
        """The server's address while the block runs."""
        ...


def drafters(stage: shared.Stage, headless: Sequence[str]) -> Iterator[shared.Found]:
    """Those that are there, the ones without a folder first."""
    for name in headless:
        if name in stage.cfg.drafters:
            yield shared.Found(name, name, Path(), name, "")
    yield from stage.drafters(without=headless)


class LlamaCppBench:
    """llama.cpp on GGUF files of target and drafts."""

    headless: tuple[str, ...] = (NONE,)

    def __init__(self, stage: shared.Stage, python: Path, how: Serving) -> None:
        self.stage, self.python, self.how = stage, python, how
        self.version = ""
        weights = "float32" if how.exact else how.weights
        self.target = llamacpp.target_file(stage, weights)
        self.dtype = weights if weights in gguf_write.DTYPES else "float16"  # of drafts

    def refusal(self, found: shared.Found, mode: str) -> str | None:
        if found.kind != NONE and found.kind not in llamacpp_cases.METHODS:
            return f"drafters: {found.spec} is {found.kind}, which llama.cpp does not serve"
        if mode != PROBABILISTIC or found.kind in DRAWN:
            return None
        return (
            f"modes: {mode}; llama.cpp draws the tokens of a separate draft alone from its "
            "distribution, "
            f"{found.spec} is {found.kind}: set modes=[{GREEDY}]"
        )

    def export(self, found: shared.Found) -> Path:
        """The folder with the draft's file."""
        name = f"{found.name}-{self.dtype}"
        return self.stage.exported(name, found, "gguf", f"dtype={self.dtype}")

    def stamp(self, found: shared.Found) -> str:
        if found.kind == NONE:
            return found.card_sha256
        manifest = exported(self.export(found)) or {}
        return str(manifest["files"][gguf_export.DRAFT]["sha256"])

    @contextlib.contextmanager
    def running(self, found: shared.Found, mode: str, name: str) -> Iterator[str]:
        how = self.how
        settings = llamacpp_server.LlamaServerSettings(
            str(self.target),
            slots=how.slots,
            context=how.context,
            threads=how.threads,
            talk=1,
            exact=how.exact,
        )
        if found.kind != NONE:
            settings = replace(
                settings,
                draft=str(self.export(found) / gguf_export.DRAFT),
                method=llamacpp_cases.METHODS[found.kind],
                draft_tokens=how.draft_tokens,
                probabilistic=mode == PROBABILISTIC,
            )
        with llamacpp_server.running(self.python, settings, self.stage.work, name) as one:
            self.version = one.version
            yield one.url


class VllmBench:
    """vLLM on the target's folder, with exported heads or its own n-grams."""

    headless: tuple[str, ...] = (NONE, NGRAM)

    def __init__(self, stage: shared.Stage, python: Path, how: Serving) -> None:
        self.stage, self.python, self.how = stage, python, how
        self.version = ""

    def refusal(self, found: shared.Found, mode: str) -> str | None:
        if mode == PROBABILISTIC:
            return f"modes: {mode}; vLLM's drafts take the best tokens: set modes=[{GREEDY}]"
        if found.kind not in (NONE, NGRAM, *vllm.FORMATS):
            return f"drafters: {found.spec} is {found.kind}, which vLLM's CPU build does not serve"
        return None

    def export(self, found: shared.Found) -> Path:
        """The folder of the exported head."""
        format = vllm.FORMATS[found.kind][0]
        return self.stage.exported(f"{found.name}-{format}", found, format)

    def stamp(self, found: shared.Found) -> str:
        return found.card_sha256

    @contextlib.contextmanager
    def running(self, found: shared.Found, mode: str, name: str) -> Iterator[str]:
        how, identity = self.how, self.stage.target.identity
        speculative = None
        if found.kind == NGRAM:
            speculative = vllm_server.ngram(how.draft_tokens)
        elif found.kind != NONE:
            head = load_head(found.folder, self.stage.target)
            speculative = card.vllm(head, self.export(found), how.draft_tokens)
        settings = vllm_server.VllmServerSettings(
            identity.path if identity else "",
            speculative,
            how.slots,
            how.context,
            how.threads,
            how.exact,
        )
        with vllm_server.running(self.python, settings, self.stage.work, name) as one:
            self.version = one.version
            yield one.url


BENCHES: dict[str, Callable[[shared.Stage, Path, Serving], EngineBench]] = {
    LLAMACPP: LlamaCppBench,
    NATIVE: LlamaCppBench,
    VLLM: VllmBench,
}
