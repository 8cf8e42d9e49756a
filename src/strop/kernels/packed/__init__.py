"""Say where weights are packed on a CPU, and tell when one is another."""
