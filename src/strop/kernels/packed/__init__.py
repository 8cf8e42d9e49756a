"""Pack weights on a CPU: say where that is faster, and tell when a weight is another."""
