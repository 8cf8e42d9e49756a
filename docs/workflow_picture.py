"""Draw the picture in the README of the ComfyUI nodes: python docs/workflow_picture.py

The picture is that of an example workflow, with boxes and links where the file has them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

PACK = Path(__file__).resolve().parents[1] / "integrations" / "comfyui"
WORKFLOW = PACK / "example_workflows" / "lora_with_report.json"
PICTURE = PACK / "workflow.svg"
_TITLE, _ROW, _MARGIN, _LEAST = 26, 20, 45, 10
_COLOURS = {
    "MODEL": "#7a5cc0", "CLIP": "#b8860b", "VAE": "#c0392b", "CONDITIONING": "#c06020",
    "LATENT": "#b03090", "IMAGE": "#2060b0", "STRING": "#2e7d4f",
}  # fmt: skip


def picture(workflow: Mapping[str, Any]) -> str:
    """Return a workflow as SVG."""
    nodes = {node["id"]: node for node in workflow["nodes"]}
    right = max(node["pos"][0] + node["size"][0] for node in nodes.values()) + _MARGIN
    below = max(node["pos"][1] + _height(node) for node in nodes.values()) + _MARGIN
    box = f"{-_MARGIN} {-_MARGIN} {right + _MARGIN} {below + _MARGIN}"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" font-family="sans-serif">',
        f'<rect x="{-_MARGIN}" y="{-_MARGIN}" width="100%" height="100%" fill="#f4f4f6"/>',
        *(_link(nodes, *link) for link in workflow["links"]),
    ]
    for node in nodes.values():
        lines += _box(node)
    return "\n".join([*lines, "</svg>", ""])


def _height(node: Mapping[str, Any]) -> int:
    rows = max(len(node["inputs"]), len(node["outputs"]))
    return max(int(node["size"][1]), _TITLE + _ROW * rows + _LEAST)


def _slot(node: Mapping[str, Any], number: int, *, is_output: bool) -> tuple[int, int]:
    """Return where a slot is."""
    x, y = node["pos"]
    return x + (node["size"][0] if is_output else 0), y + _TITLE + _ROW * number + _ROW // 2


def _link(
    nodes: Mapping[int, Any], _: int, source: int, out: int, target: int, slot: int, kind: str
) -> str:
    x, y = _slot(nodes[source], out, is_output=True)
    to_x, to_y = _slot(nodes[target], slot, is_output=False)
    bend = max(40, (to_x - x) // 2)  # 40 where the link goes back
    way = f"M{x} {y} C{x + bend} {y} {to_x - bend} {to_y} {to_x} {to_y}"
    return f'<path d="{way}" fill="none" stroke="{_COLOURS[kind]}" stroke-width="3"/>'


def _box(node: Mapping[str, Any]) -> Iterator[str]:
    (x, y), width = node["pos"], node["size"][0]
    is_ours = node["type"].startswith("Strop")
    fill, edge = ("#dff3e4", "#2e7d4f") if is_ours else ("#ffffff", "#888888")
    yield (
        f'<rect x="{x}" y="{y}" width="{width}" height="{_height(node)}" rx="6" fill="{fill}"'
        f' fill-opacity="0.9" stroke="{edge}" stroke-width="{3 if is_ours else 1}"/>'
    )
    yield f'<text x="{x + 10}" y="{y + 19}" font-size="16" font-weight="bold">{node["type"]}</text>'
    for is_output, slots in ((False, node["inputs"]), (True, node["outputs"])):
        for number, slot in enumerate(slots):
            at, level = _slot(node, number, is_output=is_output)
            anchor, place = ("end", at - 10) if is_output else ("start", at + 10)
            text = f'<text x="{place}" y="{level + 5}" font-size="13" text-anchor="{anchor}">'
            yield f"{text}{slot['name']}</text>"


def main() -> None:
    """Write the picture."""
    workflow = json.loads(WORKFLOW.read_text(encoding="utf-8"))
    PICTURE.write_text(picture(workflow), encoding="utf-8")


if __name__ == "__main__":
    main()
