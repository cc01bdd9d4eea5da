"""Reinforcement learning beside a drafted engine: the gate's power by simulation, and GRPO."""
