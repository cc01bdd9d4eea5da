"""Configuration: Hydra's YAML files, the schema they are checked against, and the errors a
user may see.

A leaf of the import order (scripts, train -> heads -> decode -> conf): nothing here imports
torch.
"""
