"""What every program needs and nobody must read to understand the method."""
