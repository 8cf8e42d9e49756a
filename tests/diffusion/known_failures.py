"""Cases of the sweep that fail today: a pattern of the case's name, and why.

The list is strict: a case named here that passes fails its test, so that its row is taken out.
"""

from __future__ import annotations

_LATE = "a change within the denoise loop is seen with the next picture"
_PATCHED = "the program of the class or function before it was patched runs on"

KNOWN: dict[str, str] = {
    r"-(load_state_dict_assign|new_parameter|parametrized|pruned|swap_block)-inside": _LATE,
    r"-(swap_activation|plain_attribute|hook_on_a_part|scaled_processors|free_u)-inside": _LATE,
    r"-forward_of_a_part_replaced-inside": _LATE,
    r"-data_copy-inside": "what was kept of the prompt is of the weights before: torch does not"
    " count writes through .data",
    r"-(class_assigned|class_patched|function_patched)-": _PATCHED,
    r"-counting_processors-": "the state of an attention processor is traced away",
    r"-pickled-": "an optimised pipeline cannot be pickled",
}
