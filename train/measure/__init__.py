"""What a training step costs: memory and matrix products."""
