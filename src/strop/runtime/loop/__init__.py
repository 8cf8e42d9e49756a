"""What the steps of a denoise loop share."""
