"""The rehearsal of docs/path.md: its commands, what stands for what, and what they left."""
