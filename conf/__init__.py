"""Configuration: YAML groups for Hydra (conf/*.yaml, conf/GROUP/*.yaml), the typed reader and
the errors.

The contract: every key is a field of a dataclass with a comment above it, which `--help`
prints. A YAML file sets keys, it never adds one. Every problem of a command line is reported at
once, as "key: value; rule; fix", before anything is loaded. No file here imports torch, so
that a mistake costs no seconds.

Where things go: a key goes into the dataclass of the code that reads it, its rule into its
type (rules.py), one about several keys into that class's `validate`; a set of keys that belong
together is a file in a group (`target/`, `head/`, `data/`, `optim/`, `decode/`, `launch/`,
`debug/`), a whole run one in `experiment/`.
What a user can mend is a UserError (errors.py); what finds code or results wrong is a
CheckFailed.
"""
