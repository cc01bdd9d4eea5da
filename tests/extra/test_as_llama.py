"""A Qwen2's GGUF file turned into a `llama`: the same numbers, read by what reads llama's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider.conf.errors import UserError
from outrider.heads.interop.gguf_read import read_gguf
from outrider.heads.interop.gguf_write import rounded
from outrider.scripts.extra.llamacpp.as_llama import as_llama
from outrider.scripts.serving.loaders import gguf as served
from tests.helpers.packaged import toy_model, write_gguf


def test_it_answers_as_the_model_does_and_all_else_stays(tmp_path: Path) -> None:
    model, generator = toy_model(), torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        if name.endswith(".bias"):
            weight.data.normal_(generator=generator)
        weight.data = rounded(weight.data, "q8_0")
    old, new = tmp_path / "old.gguf", tmp_path / "new.gguf"
    write_gguf(old, model)
    as_llama(old, new)
    before, after = read_gguf(old), read_gguf(new)
    assert after.types == before.types and after.types["blk.0.attn_q.weight"] == "q8_0"
    for key, value in before.fields.items():
        if key != "general.architecture":
            assert after.fields[key.replace("qwen2.", "llama.")] == value, key
    for name, value in before.tensors.items():
        same = torch.equal(after.tensors[name], value)
        assert same != any(part in name for part in (".attn_q.", ".attn_k.")), name
    ids = torch.tensor([5, 77, 200, 31, 9])
    with torch.inference_mode():
        wanted = model(ids[None]).logits[0, -1]
    assert torch.allclose(served(new, torch.zeros(0)).logits(ids), wanted, atol=1e-3)
    with pytest.raises(UserError, match="its architecture is llama, not qwen2"):
        as_llama(new, tmp_path / "twice.gguf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new.gguf", "old.gguf"]
