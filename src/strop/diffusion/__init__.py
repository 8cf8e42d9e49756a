"""Thin diffusers integration: which components, at which sizes, and how to undo it."""
