"""Plain single-process PyTorch: what a distributed run must equal."""
