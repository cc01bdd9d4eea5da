"""What every head keeps to, whatever it is: the contract of heads/base.py as tests."""
