"""Build every pipeline of diffusers that can be built from a configuration, at tiny widths."""
