"""Where the host may ask a tensor for a value.

On a CPU that is free, and loops end as soon as nobody is left. On an accelerator every question
waits for the device, so the code runs on with masks instead. Both ways give the same tokens;
the tests walk the second one on CPUs by patching `free`.
"""

from __future__ import annotations

from torch import Tensor


def free(tensor: Tensor) -> bool:
    """True where reading `tensor` on the host waits for nothing."""
    return tensor.device.type == "cpu"
