"""`check`: a running server keeps the contract of an export, or is told where it does not; also
llama.cpp itself, where its environment is there."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.decode.draft_model import DraftModel
from outrider.decode.engine import Cycle
from outrider.decode.models.load import TargetConfig, load_target
from outrider.heads.interop import gguf_write
from outrider.heads.names import DraftSpec
from outrider.scripts.common.files import ROOT
from outrider.scripts.serving import contract, contract_check, gguf_export
from outrider.scripts.serving.asking import Address
from tests.helpers.interop import DEEP, deep_target, random_head
from tests.helpers.speculating_server import serving

PYTHON = ROOT / ".venv-llamacpp/bin/python"
LIMIT, DEPTH = 24, 3
PROMPTS = [[5, 77, 200, 31], [9, 8, 7], [100, 101, 102, 103, 104, 105], [40]]


@pytest.fixture(scope="module")
def target() -> Any:
    return deep_target()


@pytest.fixture(scope="module")
def draft() -> Any:
    return load_target(TargetConfig(kind="tiny", **{**DEEP, "layers": 2}), "float32", "cpu")


def test_a_server_keeps_or_breaks_the_contract(target, draft) -> None:
    wanted = contract.expected(target, DraftModel(draft, 3), PROMPTS, 3, LIMIT)
    with serving(target, draft) as url:
        found = contract_check.checked(wanted, Address(url))
        assert found["served"] and found["equal"] == len(PROMPTS), found
        broken = json.loads(json.dumps(wanted))
        broken["prompts"][1]["tokens"][4] += 1
        found = contract_check.checked(broken, Address(url))
        assert not found["served"] and "prompt 2: token 5 is" in found["parts"][0]
        for rate in broken["acceptance_by_position"][1:]:
            rate["low"] = rate["high"] = 0.99
        found = contract_check.checked(broken, Address(url))
        assert found["acceptance"]["position"] == 2


def test_a_server_that_speculates_with_something_else_breaks_it(target, draft) -> None:
    wanted = contract.expected(target, DraftModel(target, 3), PROMPTS, 3, LIMIT)
    with serving(target, draft) as url:
        found = contract_check.checked(wanted, Address(url))
    assert found["equal"] == len(PROMPTS) and not found["served"]
    assert found["acceptance"]["position"] == 1


def test_a_stop_token_is_no_accepted_one() -> None:
    tokens, stop = [5, 6, 7, 8, 9, 1], (1, 2)
    cycles = [Cycle(3, 2, (), False, 1), Cycle(2, 2, (), True, 4)]
    counted = contract.until_stop(cycles, tokens, stop)
    assert [(c.proposed, c.accepted, c.start) for c in counted] == [(3, 2, 1), (2, 1, 4)]
    assert contract.until_stop(cycles, [5, 6, 7, 8, 9, 4], stop) == cycles
    row = {"ids": [3], "tokens": tokens, "text": "", "proposed": [3, 2], "accepted": [2, 2]}
    wanted = {"stop": stop, "prompts": [row], **contract.rates([cycles])}
    answer = {"tokens": tokens[:-1], "text": "", "draft_tokens": 5, "accepted": 3}
    assert contract.verdict(wanted, [answer])["served"]


@pytest.mark.parametrize("text", ["", "[]", '{"format": 9, "prompts": [{}]}', None])
def test_a_file_that_is_no_contract(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "expected.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(contract.UserError, match="expected.json"):
        contract.load(tmp_path if text is not None else path)


@contextmanager
def llamacpp(folder: Path, **settings: Any) -> Iterator[str]:
    """The address of a llama.cpp server, which ends with the block."""
    job = folder / "server.json"
    job.write_text(json.dumps(settings))
    run = ROOT / "tests/helpers/llamacpp_run.py"
    with open(folder / "server.log", "w") as log:
        process = subprocess.Popen(
            [str(PYTHON), str(run), str(job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        assert process.stdin is not None and process.stdout is not None
        try:
            said = next((line for line in process.stdout if '"url"' in line), "")
            assert said, (folder / "server.log").read_text()[-2000:]
            yield json.loads(said)["url"]
        finally:
            process.stdin.close()
            process.wait(30)


@pytest.mark.needs_llamacpp
def test_llamacpp_serves_an_exported_head(
    target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = gguf_write.tokenizer_fields

    def in_letters(*args: Any) -> dict[str, Any]:
        """Words that spell UTF-8 in any order: the server answers no others."""
        fields = whole(*args)
        kind, words = fields["tokenizer.ggml.tokens"]
        words = [*words[:3], *(f"w{i}" for i in range(3, len(words)))]
        return {**fields, "tokenizer.ggml.tokens": (kind, words)}

    monkeypatch.setattr(gguf_write, "tokenizer_fields", in_letters)
    head = random_head(target, "eagle3")
    kind, prompts = gguf_export.Kind("float32"), [torch.tensor(p) for p in PROMPTS[:2]]
    gguf_export.write_model(tmp_path / "target.gguf", target.model, target, prompts, kind)
    gguf_export.write_head(tmp_path, head, target, prompts, kind)
    chain = head.drafter(target, DraftSpec(shape="chain"))
    wanted = contract.expected(target, chain, PROMPTS, DEPTH, LIMIT)
    files = {"model": str(tmp_path / "target.gguf"), "draft": str(tmp_path / "draft.gguf")}
    with llamacpp(tmp_path, **files, method="EAGLE3", draft_tokens=DEPTH) as url:
        found = contract_check.checked(wanted, Address(url))
    assert found["kind"] == "llama.cpp" and found["served"], found
    assert found["equal"] == len(PROMPTS)
