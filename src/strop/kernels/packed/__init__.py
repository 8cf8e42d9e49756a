"""Pack weights on a CPU: where products of packed weights are faster, and how a weight is watched."""
