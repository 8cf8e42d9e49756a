"""Share work between the steps of a denoise loop."""
