"""A step cache computes a part of a denoise step, and takes the rest from an earlier step.

It is no exact computation, and on by name alone: ``Options(numerics=("step_cache",))``.
``structures`` knows where models can be divided, ``steps`` runs a step in full or in part,
``lanes`` says which steps may be, and ``served`` is the dispatcher that does so.
"""
