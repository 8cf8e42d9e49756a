"""Settings from what a user gives: a command line or a YAML file."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from strop.errors import OptionError, UnsupportedError
from strop.train.settings import Settings, default_of, flags
from strop.train.unbuilt_flags import NEEDLESS, UNBUILT, UNBUILT_VALUES

# Settings that change nothing -> without which other.
IDLE = {
    "class_data_dir": "with_prior_preservation",
    "class_prompt": "with_prior_preservation",
    "validation_image": "validation_prompt",
    "validation_steps": "validation_prompt",
}


def make(task: str, given: Mapping[str, Any]) -> Settings:
    """Make settings from names and values as YAML or a command line has them.

    Raises OptionError for an unknown name or a value of the wrong kind, and UnsupportedError for
    a flag of diffusers that is not built.
    """
    knobs = {knob.name: knob for knob in flags(task)}
    names = {knob.metadata["alias"]: name for name, knob in knobs.items() if knob.metadata["alias"]}
    values = {name: default_of(knob, task) for name, knob in knobs.items()}
    for key, value in given.items():
        name = key.replace("-", "_")
        name = names.get(name, name)
        if name in NEEDLESS or (name in UNBUILT and _is_off(value)):
            continue
        if name in UNBUILT:
            raise UnsupportedError(f"--{name}: {UNBUILT[name]}")
        if isinstance(value, str) and (name, value) in UNBUILT_VALUES:
            raise UnsupportedError(f"--{name} {value}: {UNBUILT_VALUES[name, value]}")
        if name not in knobs:
            close = difflib.get_close_matches(name, knobs, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else f"; 'strop train {task} -h' lists"
            raise OptionError(f"{task} has no setting {key!r}{hint}")
        if value is not None:
            values[name] = _convert(name, value, knobs[name].metadata)
    return Settings(task=task, **values)


def needless(given: Mapping[str, Any]) -> list[str]:
    """Return what to tell of the flags among these that change nothing."""
    found = {key.replace("-", "_"): value for key, value in given.items()}
    return [
        f"--{name} changes nothing: {reason}"
        for name, reason in NEEDLESS.items()
        if not _is_off(found.get(name))
    ]


def idle(settings: Settings) -> list[str]:
    """Return what to tell of settings that would need another one."""
    return [
        f"--{name} changes nothing without --{needed}"
        for name, needed in IDLE.items()
        if getattr(settings, name) and not getattr(settings, needed)
    ]


def _is_off(value: object) -> bool:
    """Tell whether a flag is off, as in a file that lists a script's defaults."""
    return value is None or value is False


def read_yaml(path: Path) -> dict[str, Any]:
    """Read names and values of a YAML file."""
    try:
        import yaml
    except ImportError as error:
        raise OptionError("--config needs pyyaml: pip install 'strop[train]'") from error
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"--config {path}: {error}; give a YAML file") from error
    except yaml.YAMLError as error:
        raise OptionError(f"--config {path} is no YAML: {error}") from error
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise OptionError(f"--config {path}: write one 'name: value' a line, as in rank: 8")
    return content


def _convert(name: str, value: Any, metadata: Mapping[str, Any]) -> Any:
    """Convert a value: YAML reads 1e-4 as text, 1 as an integer where a float is meant, and no as
    false."""
    kind = metadata["kind"]
    if value is False and "no" in metadata["choices"]:
        return "no"
    wrong = OptionError(f"{name} is {value!r}: it must be {_KINDS[kind]}")
    if kind is bool or isinstance(value, bool):
        if kind is bool and isinstance(value, bool):
            return value
        raise wrong
    if kind is tuple:
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list | tuple) or not all(isinstance(i, str) for i in items):
            raise wrong
        return tuple(items)
    if kind is str:
        if isinstance(value, str | int | float | Path):
            same = (choice for choice in metadata["choices"] if choice == str(value).lower())
            return next(same, str(value))
        raise wrong
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise wrong from None
    if not math.isfinite(number) or (kind is int and number != int(number)):
        raise wrong
    return kind(number)


_KINDS = {
    bool: "true or false",
    tuple: "a text or a list of texts",
    str: "a text",
    int: "a whole number",
    float: "a number",
}
