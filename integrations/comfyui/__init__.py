"""Strop's nodes for ComfyUI. ComfyUI imports this folder from its ``custom_nodes``."""

from .nodes import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS
from .switch import install_if_wanted

install_if_wanted()

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
