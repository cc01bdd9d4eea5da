"""What a drafter would bring, said before it is trained. `outrider forecast` is the command."""
