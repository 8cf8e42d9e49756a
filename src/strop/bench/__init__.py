"""Measure Strop and its peers in one run, on models with random weights at full size."""
