"""Publishing a head on the Hugging Face hub: the keys of `push` and the card of the
repository."""
