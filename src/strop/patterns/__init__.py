"""Subgraphs that a user's own kernels compute: ``strop.pattern``."""
