"""What a drafter would bring, said before it is trained. `scripts/forecast.py` is the command."""
