"""The slow tier: which tests ran with which code, and which to run next (`make slow`)."""
