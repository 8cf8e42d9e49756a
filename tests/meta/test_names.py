"""One name means one thing: a reader who meets a class by name finds one class of that name."""

import re
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "strop"
# The benchmarks and the built-in model are programs of their own around the compiler: their rows,
# settings and workers may be called alike.
PROGRAMS = ("bench", "models")


def test_no_two_classes_have_one_name() -> None:
    found = defaultdict[str, list[str]](list)
    for file in sorted(PACKAGE.rglob("*.py")):
        where = file.relative_to(PACKAGE)
        if where.parts[0] not in PROGRAMS:
            for name in re.findall(r"^class ([A-Z]\w+)", file.read_text(), re.MULTILINE):
                found[name].append(str(where))
    twice = {name: files for name, files in found.items() if len(files) > 1}
    assert not twice
