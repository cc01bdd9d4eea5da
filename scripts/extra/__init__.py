"""Optional parts of the product: what a user may add to training, scoring and export.
Product looks them up by name (scripts/common/extra.py) and runs without them."""
