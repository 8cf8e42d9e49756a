"""Integrate diffusers: say which components are compiled, at which sizes, and how to undo it."""
