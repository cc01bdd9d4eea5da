"""Quantised targets through the libraries that machines have: bitsandbytes or torchao, by
transformers' own loaders.

A quantised model is another distribution than the one in full precision: "lossless" then
means with respect to the quantised one. Heads trained on the original weights fit it (the
weights' hash is that of the files) and accept a little less.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from outrider.conf.errors import UserError, first_line

# name -> (library, bits per weight with scales)
KINDS: dict[str, tuple[str, float]] = {
    "bnb-int8": ("bitsandbytes", 8.1),
    "bnb-nf4": ("bitsandbytes", 4.5),
    "torchao-int8": ("torchao", 8.3),
    "torchao-int4": ("torchao", 4.5),
    "torchao-fp8": ("torchao", 8.1),
}
NONE = "none"
FP8 = (8, 9)  # the compute capability from which a GPU multiplies in 8-bit floats
# What is read as plain numbers: gpt-oss's two weights a byte with a scale for 32, and FP8 with a
# scale a block. The kernels for the packed ones are compiled code that transformers would fetch
# from the hub, and a machine that has them would give other numbers than one that has not.
UNPACKED = ("mxfp4", "fp8")


def _stored(folder: Path) -> dict[str, Any]:
    """Return how a checkpoint keeps its weights, by its config.json; {} for plain numbers."""
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return dict(found["quantization_config"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def stored(folder: Path) -> str:
    """Return the name of how a checkpoint keeps its weights; "" for plain numbers."""
    return str(_stored(folder).get("quant_method", ""))


def unpacked(folder: Path, kind: str) -> Any:
    """transformers' config that reads the weights of a checkpoint of UNPACKED as plain numbers.

    Raises UserError where they shall be quantised by `kind` as well."""
    if kind != NONE:
        raise UserError(
            f"target.quantize: the checkpoint keeps its weights in {stored(folder).upper()} and is "
            f"read as plain numbers; {kind} on top of it is not supported, leave it out"
        )
    from transformers.quantizers.auto import AutoQuantizationConfig

    found = AutoQuantizationConfig.from_dict(_stored(folder))
    found.dequantize = True
    return found


def bits(kind: str) -> float | None:
    """Bits per weight of the matrices, None without quantisation."""
    return None if kind == NONE else KINDS[kind][1]


def config(kind: str, dtype: Any, place: Any) -> Any:
    """transformers' quantisation config for `kind`. place: the torch.device of the target.

    Raises UserError where the library is not installed or too old, and where the device or the
    dtype has no products in FP8 that are asked for.
    """
    library = KINDS[kind][0]
    if kind == "torchao-fp8":
        _check_fp8(dtype, place)
    if importlib.util.find_spec(library) is None:
        raise UserError(
            f"target.quantize: {kind} needs the library {library}, which is not installed; "
            f"pip install {library}, or set target.quantize=none"
        )
    try:
        if library == "bitsandbytes":
            from transformers import BitsAndBytesConfig

            if kind == "bnb-int8":
                # LLM.int8 keeps the columns in 16 bits where any token of a pass exceeds a
                # threshold (6 by default): a token's row would hang on what is drafted behind it.
                return BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
            return BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
            )
        from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig
        from transformers import TorchAoConfig

        if kind == "torchao-fp8":
            from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow

            # With one scale for all tokens of a pass a token's row would hang on the others.
            return TorchAoConfig(Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()))
        fewer = Int8WeightOnlyConfig if kind == "torchao-int8" else Int4WeightOnlyConfig
        return TorchAoConfig(fewer())
    except (ImportError, AttributeError, RuntimeError, ValueError) as error:
        raise UserError(
            f"target.quantize: {kind} does not work with this version of {library} "
            f"({first_line(error)}); update it, or set target.quantize=none"
        ) from error


def _check_fp8(dtype: Any, place: Any) -> None:
    import torch

    if place.type != "cuda" or torch.cuda.get_device_capability(place) < FP8:
        raise UserError(
            f"target.quantize: torchao-fp8 needs a GPU of compute capability {FP8[0]}.{FP8[1]} or "
            f"more (Ada, Hopper), and {place} is none; set target.quantize=none"
        )
    if dtype != torch.bfloat16:
        raise UserError(
            f"target.quantize: torchao-fp8 has a scale a token for bfloat16 alone, not for "
            f"{dtype}; set dtype=bfloat16, or target.quantize=none"
        )
