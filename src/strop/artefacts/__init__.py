"""Artefacts carry plans and machine code from one process to another, without weights."""
