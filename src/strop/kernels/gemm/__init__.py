"""Matrix products: linears, gated linears, and convolutions as implicit GEMMs."""
