"""EAGLE-1, EAGLE-3, HASS and P-EAGLE: a small decoder layer that goes on from the target's
features, level by level."""
