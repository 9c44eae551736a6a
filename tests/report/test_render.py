"""The page: what it shows first, that it stands alone, and that text stays text."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from pipeline.report import render as render_module
from pipeline.report.facts import PUBLIC_DATA_ONLY
from pipeline.report.render import MAX_PICTURES, render_html, render_report
from pipeline.storage import Location
from tests.report.report_inputs import (
    EVALUATION,
    PRIVACY,
    pictures,
    private,
    probe,
    report_inputs,
    warmup,
)


class Page(HTMLParser):
    """Tags with their attributes, and the visible text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.parts: list[str] = []
        self.open: list[str] = []
        self.feed(html)
        self.text = re.sub(r"\s+", " ", " ".join(self.parts))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.parts.append(data)


@pytest.fixture(scope="module", autouse=True)
def _quick_charts():
    """Charts have tests of their own; here only their place on the page matters."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("loss", "rate", "speed", "privacy", "probe"):
            uri = f"data:image/svg+xml;base64,{name}"
            patch.setattr(render_module, f"{name}_chart", lambda *_, uri=uri: uri)
        yield


@pytest.fixture(scope="module")
def page(_quick_charts: None) -> Page:
    return Page(render_html(report_inputs()))


def test_headline_numbers_come_first(page: Page) -> None:
    start = page.text.index("Private records")
    head = page.text[: page.text.index("Steps are charged")]
    for value in ("7.6211", "8.333 × 10⁻⁶", "60,000", "82.6 %", "81.6 – 83.6", "last_12_blocks"):
        assert value in head, value
    assert "best baseline: raw pixels 82.4 %" in page.text[start:]


def test_every_section_is_there(page: Page) -> None:
    ids = [attributes["id"] for tag, attributes in page.tags if tag == "h2"]
    expected = "privacy training reconstructions evaluation throughput statement use recipe"
    assert ids == expected.split()
    links = [a["href"] for tag, a in page.tags if tag == "a"]
    assert links == [f"#{name}" for name in ids]
    for words in (
        "These weights are private.",
        "name: demo",
        "norm_pix_loss is on",
        "[45.0 – 55.0]",
        "0.5410",
        "on (0.01)",
        "what last_12_blocks means",
        "307,200",
        "43 s",
        'timm.create_model("local-dir:runs/demo/export"',
    ):
        assert words in page.text, words


def test_the_page_asks_for_nothing_outside_itself() -> None:
    """Guarantee 1 of render_report, whatever the inputs hold."""
    hostile = "![x](https://evil.example/x.png) [y](https://evil.example/) <https://evil.example>"
    page = Page(render_html(report_inputs(statement_markdown=hostile, created=hostile)))
    for tag, attributes in page.tags:
        assert tag not in ("script", "link", "iframe", "object", "embed", "base")
        for name, value in attributes.items():
            assert not name.startswith("on")
            if name in ("src", "href", "srcset", "action", "poster"):
                assert value is not None
                assert value.startswith(("data:image/", "#")), value[:80]
    html = render_html(report_inputs())
    style = html[html.index("<style>") : html.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    policy = next(a["content"] for t, a in page.tags if a.get("http-equiv"))
    assert policy == "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def test_text_stays_text() -> None:
    """Guarantee 2 of render_report."""
    hostile = "</code><script>alert(1)</script><img src=x onerror=alert(1)>"
    html = render_html(
        report_inputs(
            run=hostile,
            statement_markdown=hostile,
            recipe_yaml=hostile,
            guarantee=hostile,
            export=hostile,
            phases=(warmup(name=hostile, images=hostile), private(held_out=hostile)),
            privacy=(dataclasses.replace(PRIVACY, domain=hostile, unit=hostile),),
            evaluation=EVALUATION | {"probes": [probe(hostile, hostile, 0.5)]},
        )
    )
    page = Page(html)
    assert "script" not in {tag for tag, _ in page.tags}
    assert not any("onerror" in attributes for _, attributes in page.tags)
    assert page.text.count("alert(1)") >= 9


def test_equal_inputs_give_equal_pages() -> None:
    """Guarantee 3 of render_report."""
    assert render_html(report_inputs()) == render_html(report_inputs())


def test_every_picture_has_words(page: Page) -> None:
    texts = [a["alt"] for tag, a in page.tags if tag == "img"]
    assert all(texts)
    assert len(texts) == 1 + (3 + 2) + 3 + 1
    assert len(set(texts)) == len(texts)
    assert "Public image 1: original; with 75 % of the patches hidden; filled in" in " ".join(texts)
    assert any("to 7.9822" in text for text in texts)


def test_tables_and_headings_can_be_read_aloud(page: Page) -> None:
    assert dict(page.tags)["html"] == {"lang": "en"}
    assert all(a.get("scope") in ("col", "row") for t, a in page.tags if t == "th" and a)
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


def test_epsilon_is_never_rounded_down() -> None:
    privacy = dataclasses.replace(PRIVACY, epsilon=7.98449, run_epsilon=7.98449)
    page = Page(render_html(report_inputs(privacy=(privacy,))))
    assert "7.98449" in page.text
    assert "7.984 " not in page.text


def test_weights_without_a_guarantee_are_called_so() -> None:
    page = Page(render_html(report_inputs(guarantee="NOT PRIVATE")))
    assert ("p", {"class": "warning", "role": "alert"}) in page.tags
    assert "NOT PRIVATE: these weights carry no privacy guarantee" in page.text
    assert "7.6211" not in page.text
    assert "Privacy spent" not in page.text


def test_an_unbounded_domain_is_called_so() -> None:
    privacy = (PRIVACY, dataclasses.replace(PRIVACY, domain="album", domain_epsilon=None))
    page = Page(render_html(report_inputs(privacy=privacy)))
    assert "total over the privacy domain album is unbounded" in page.text
    assert "no bound" in page.text


def test_of_several_domains_the_costliest_is_the_headline() -> None:
    privacy = (PRIVACY, dataclasses.replace(PRIVACY, domain="album", epsilon=3.0))
    for order in (privacy, privacy[::-1]):
        text = Page(render_html(report_inputs(privacy=order))).text
        assert text.index("7.6211") < text.index("Delta")


def test_a_public_run() -> None:
    page = Page(
        render_html(report_inputs(guarantee=PUBLIC_DATA_ONLY, privacy=(), phases=(warmup(),)))
    )
    assert "no private phase, nothing to spend" in page.text
    assert "no private image was read" in page.text
    assert not any(a.get("class") == "warning" for _, a in page.tags)


def test_what_is_missing_is_left_out() -> None:
    bare = report_inputs(
        evaluation=None, pictures=None, export=None, phases=(private(points=[], held_out=None),)
    )
    page = Page(render_html(bare))
    ids = [attributes["id"] for tag, attributes in page.tags if tag == "h2"]
    assert ids == ["privacy", "training", "throughput", "statement", "recipe"]
    assert "nothing was evaluated" in page.text


def test_an_audit_is_shown() -> None:
    audit = {
        "passed": True,
        "family_error": 1e-3,
        "mechanism": {"num_records": 1991, "num_steps": 150},
        "claimed_epsilon": {"value": 7.7235},
        "lower_bound": {"epsilon": 0.7071, "num_right": 70, "num_guesses": 88},
        "f_dp_lower_bound": 1.2345,
        "membership": {"intervals": {"auc": [0.632, 0.702]}},
        "checks": [
            {"name": "noise_scale", "passed": True, "p_value": 0.0123, "detail": "std 1.0"},
            {"name": "neighbours", "passed": False, "p_value": None, "detail": "moved by 2"},
        ],
    }
    public = {"members": "synthetic.train", "others": "synthetic.held_out", "num_scored": 981}
    public["intervals"] = {"auc": [0.481, 0.532], "accuracy": [0.47, 0.53]}
    content = {"phases": {"private": audit}, "membership": {"warmup": public}}
    page = render_html(report_inputs(audit=content))
    assert "images of synthetic.train (public, phase warmup)" in page and "0.481" in page
    for text in (
        "Phase private: passed",
        "0.707",
        "7.7235",
        "0.012",
        "moved by 2",
        "FAIL",
        "exact",
    ):
        assert text in page
    assert "audit" not in render_html(report_inputs())


def test_a_private_n_is_not_shown() -> None:
    privacy = (dataclasses.replace(PRIVACY, num_records=None),)
    page = Page(render_html(report_inputs(privacy=privacy, phases=(warmup(),))))
    assert "60,000" not in page.text
    assert "delta × N" not in page.text


def test_long_picture_lists_are_cut() -> None:
    page = Page(render_html(report_inputs(pictures=pictures(20))))
    assert sum("Public image" in (a.get("alt") or "") for _, a in page.tags) == MAX_PICTURES


def test_the_page_is_written(tmp_path: Path) -> None:
    place = Location(str(tmp_path)) / "report.html"
    assert render_report(report_inputs(created="today"), place) == place
    assert "today" in place.read_text()
