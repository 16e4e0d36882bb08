"""Faults on real processes: which, when, done to whom, and what followed (`make chaos`)."""
