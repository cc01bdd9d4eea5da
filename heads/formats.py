"""The formats of `outrider export`: LAYOUTS (heads/interop) and gguf write and read them."""

from __future__ import annotations

FORMATS = (
    "vllm",
    "speculators",
    "sglang",
    "deepspec",
    "medusa",
    "eagle",
    "transformers",
    "gguf",
)
