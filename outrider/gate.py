"""Is a rollout from the policy? Under a short name, numpy alone: see scripts/extra/rl_gate/gate.py.

from outrider.gate import Gate
"""

from outrider.scripts.extra.rl_gate.gate import Gate, GateVerdict, from_policy, mismatch

__all__ = ["Gate", "GateVerdict", "from_policy", "mismatch"]
