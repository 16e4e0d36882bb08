"""Beside the product: reference loops, benchmarks, the demo, examples. Not part of the installed package."""
