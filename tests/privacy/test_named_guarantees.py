"""Every guarantee a docstring of this room claims names a test that exists."""

import re
from pathlib import Path

import pipeline.privacy

TESTS = Path(__file__).parents[1]


def test_every_guarantee_has_its_test() -> None:
    source = "".join(p.read_text() for p in Path(pipeline.privacy.__file__).parent.rglob("*.py"))
    claimed = set(re.findall(r"\btest_\w+", source))
    written = set(
        re.findall(r"def (test_\w+)", "".join(p.read_text() for p in TESTS.rglob("*.py")))
    )
    assert len(claimed) > 25
    assert claimed <= written, f"no such tests: {sorted(claimed - written)}"


def test_public_face() -> None:
    for name in pipeline.privacy.__all__:
        assert getattr(pipeline.privacy, name) is not None
