"""Tuning: what a pass costs on this machine, and which shape of draft pays there."""
