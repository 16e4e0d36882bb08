"""Measurements of the real product; each prints the baseline of the same run beside its result."""
