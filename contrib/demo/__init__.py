"""The whole thing on one machine."""
