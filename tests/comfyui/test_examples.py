"""The example workflows are whole: what they name is there, and their links meet."""

from __future__ import annotations

import importlib.util
import json
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.comfyui.conftest import PACK

EXAMPLES = sorted((PACK / "example_workflows").glob("*.json"))


def test_there_are_examples() -> None:
    assert [file.stem for file in EXAMPLES] == ["lora_with_report", "text_to_picture"]


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_links_meet(file: Path) -> None:
    graph = json.loads(file.read_text())
    nodes = {node["id"]: node for node in graph["nodes"]}
    assert len(nodes) == len(graph["nodes"]) == graph["last_node_id"]
    assert len(graph["links"]) == graph["last_link_id"]
    for number, source, out, target, slot, kind in graph["links"]:
        output, given = nodes[source]["outputs"][out], nodes[target]["inputs"][slot]
        assert number in output["links"]
        assert given["link"] == number
        assert output["type"] == kind
        assert given["type"] in (kind, "*")
        assert nodes[source]["order"] < nodes[target]["order"]
    open_inputs = [
        given for node in nodes.values() for given in node["inputs"] if not given["link"]
    ]
    assert not open_inputs


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_our_nodes_are_as_the_pack_has_them(file: Path, pack: ModuleType) -> None:
    ours = [n for n in json.loads(file.read_text())["nodes"] if n["type"].startswith("Strop")]
    assert ours
    for node in ours:
        kind: Any = pack.NODE_CLASS_MAPPINGS[node["type"]]
        inputs = {name: of for part in kind.INPUT_TYPES().values() for name, of in part.items()}
        widgets = [name for name, of in inputs.items() if of[0] == "BOOLEAN"]
        assert len(node["widgets_values"]) == len(widgets)
        assert [given["name"] for given in node["inputs"]] == [
            n for n in inputs if n not in widgets
        ]
        assert tuple(out["type"] for out in node["outputs"]) == kind.RETURN_TYPES


def test_every_node_has_a_name_and_says_what_it_does(pack: ModuleType) -> None:
    assert pack.NODE_CLASS_MAPPINGS.keys() == pack.NODE_DISPLAY_NAME_MAPPINGS.keys()
    readme = (PACK / "README.md").read_text()
    for key, kind in pack.NODE_CLASS_MAPPINGS.items():
        assert pack.NODE_DISPLAY_NAME_MAPPINGS[key] in readme
        assert hasattr(kind, kind.FUNCTION)
        assert kind.DESCRIPTION


def test_the_picture_of_the_readme_is_that_of_the_workflow() -> None:
    place = PACK.parents[1] / "docs" / "workflow_picture.py"
    spec = importlib.util.spec_from_file_location("workflow_picture", place)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    workflow = json.loads(script.WORKFLOW.read_text(encoding="utf-8"))
    written = script.PICTURE.read_text(encoding="utf-8")
    assert written == script.picture(workflow), "run python docs/workflow_picture.py"
    assert f"({script.PICTURE.name})" in (PACK / "README.md").read_text()
    drawn = ElementTree.fromstring(written)
    texts = [each.text for each in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert {node["type"] for node in workflow["nodes"]} <= {*texts}
    paths = [*drawn.iter("{http://www.w3.org/2000/svg}path")]
    assert len(paths) == len(workflow["links"])


def test_the_registry_can_read_the_project() -> None:
    project = tomllib.loads((PACK / "pyproject.toml").read_text())
    assert {"PublisherId", "DisplayName", "Icon"} <= project["tool"]["comfy"].keys()
    assert project["project"]["dependencies"] == (PACK / "requirements.txt").read_text().split()
