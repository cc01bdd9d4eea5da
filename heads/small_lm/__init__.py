"""A separate small language model as the drafter, trained here or taken as it is."""
