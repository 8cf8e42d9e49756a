"""Replace subgraphs by a user's own kernels: ``strop.pattern``."""
