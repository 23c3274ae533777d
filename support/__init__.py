"""What every program needs. To understand the method nobody must read it, but for ours/:
what is not in the paper."""
