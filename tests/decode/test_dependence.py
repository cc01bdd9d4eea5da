"""A target whose rows hang on one another is refused: the output distribution would hang on what
was drafted. LLM.int8 is such a one, as its authors publish it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from outrider.conf.errors import UserError
from outrider.decode.models.load import TargetConfig, load_target
from outrider.decode.models.quantize import config
from outrider.decode.target import Target

SHAPE = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "vocab": 260, "context": 256}


class Int8(nn.Module):
    """A matrix in 8 bits (Dettmers et al. 2022): columns of the input in which any row of the pass
    exceeds `threshold` stay as they are, the others are rounded row by row."""

    def __init__(self, linear: nn.Linear, threshold: float):
        super().__init__()
        self.weight, self.threshold = linear.weight, threshold

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).float()
        outlier = (rows.abs() > self.threshold).any(0)
        plain = rows.masked_fill(outlier, 0.0)
        scale = plain.abs().amax(1, keepdim=True).clamp(min=1e-8) / 127
        rounded = (plain / scale).round() * scale + rows.masked_fill(~outlier, 0.0)
        found = rounded @ self.weight.float().T
        return found.to(x.dtype).view(*x.shape[:-1], -1)


def quantized(dtype: str, threshold: float) -> Target:
    """A tiny target with a few large features, its MLPs' second matrices in 8 bits."""
    target = load_target(TargetConfig(kind="tiny", **SHAPE), dtype, "cpu")
    with torch.no_grad():
        for layer in target.model.model.layers:
            layer.mlp.up_proj.weight.mul_(6)
            layer.mlp.up_proj.weight[:4].mul_(20)
            layer.mlp.down_proj = Int8(layer.mlp.down_proj, threshold)
    return Target(target.model, target.tokenizer)


def between(target: Target) -> float:
    """Mean total variation of a text's distributions with and without tokens behind it, at a
    temperature at which a tiny model is as sure as a trained one."""
    ids = torch.arange(5, 19).mul(31).remainder(256)[None]
    with torch.no_grad():
        short, long = (
            torch.softmax(target.model(input_ids=some).logits[0, :8].double() * 3, -1)
            for some in (ids[:, :8], ids)
        )
    return float((short - long).abs().sum(-1).mean() / 2)


@pytest.mark.parametrize("dtype, threshold", [("float32", 6), ("bfloat16", 20)])
def test_rows_that_hang_on_one_another_are_refused(dtype: str, threshold: float) -> None:
    target = quantized(dtype, threshold)
    assert 0 < between(target) < 0.0144  # less than LLM.int8 was measured to do
    with pytest.raises(UserError, match="what is drafted behind a token changes its logits"):
        target.probe()


def test_rows_in_8_bits_of_their_own_are_taken() -> None:
    target = quantized("bfloat16", float("inf"))
    target.probe()
    assert between(target) < 1e-3


def test_bitsandbytes_is_requested_for_rows_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr(transformers, "BitsAndBytesConfig", lambda **keys: keys)
    keys = config("bnb-int8", torch.bfloat16, torch.device("cpu"))
    assert keys == {"load_in_8bit": True, "llm_int8_threshold": 0.0}


@pytest.mark.parametrize(
    "place, have, dtype, why",
    [
        ("cpu", (9, 0), torch.bfloat16, "needs a GPU of compute capability 8.9"),
        ("cuda", (8, 6), torch.bfloat16, "needs a GPU of compute capability 8.9"),
        ("cuda", (8, 9), torch.float16, "set dtype=bfloat16"),
        ("cuda", (9, 0), torch.bfloat16, "needs the library torchao"),
    ],
)
def test_products_in_fp8_are_refused_where_there_are_none(
    place: str,
    have: tuple[int, int],
    dtype: torch.dtype,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: have)
    with pytest.raises(UserError, match=f"^target.quantize: torchao-fp8 .*{why}"):
        config("torchao-fp8", dtype, torch.device(place))
