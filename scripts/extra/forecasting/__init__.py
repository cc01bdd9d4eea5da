"""What a drafter would bring, said before it is trained. `scripts/extra/forecast.py` is the command."""
