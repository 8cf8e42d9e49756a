"""Strop's node for InvokeAI."""

from .denoise import StropDenoiseInvocation as StropDenoiseInvocation
