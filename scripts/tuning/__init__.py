"""Tuning: which shape of draft is the fastest on this machine."""
