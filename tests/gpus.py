"""Records of GPUs that tests compile for, on machines without one."""

from strop.ir.cards import A100, H100, H200, RTX_5090

__all__ = ["A100", "H100", "H200", "RTX_5090"]
