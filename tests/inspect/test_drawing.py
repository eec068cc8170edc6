from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import matplotlib as mpl
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.inspect.hand_made import trained
from tests.inspect.small_figure import small
from ziggurat.inspect.report.drawing import (
    DARK,
    DASHES,
    LIGHT,
    MARKERS,
    draw_panel,
    name_of_run,
    new_canvas,
    save,
    shown,
    to_svg,
)
from ziggurat.inspect.report.drawing import settings as drawing_settings
from ziggurat.inspect.report.figure import Figure, Panel, Series
from ziggurat.inspect.report.figures import figures_of
from ziggurat.system.errors import ConfigError

HOSTILE = '<script>alert(1)</script> & "$x^2$" _a --run-0 #22659c url(#x) \x1b[31m\u202e'


ELEMENTS = ["div", "svg", "title", "desc", "g", "path", "defs", "use", "text", "image", "clipPath", "rect"]


def texts(markup: str) -> list[str]:
    return ["".join(element.itertext()) for element in ElementTree.fromstring(markup).iter() if "text" in element.tag]


def test_inline_svg_is_xml_that_refers_to_nothing_outside() -> None:
    markup = to_svg(small())
    root = ElementTree.fromstring(markup)
    assert root.get("aria-label") == "a"
    for element in root.iter():
        assert element.tag.rpartition("}")[2] in ELEMENTS
        for name, value in element.attrib.items():
            if name.endswith("href"):
                assert value.startswith(("#", "data:image/png;base64,"))
            assert "url(" not in value.replace("url(#", "")
    assert "<!DOCTYPE" not in markup
    assert "<style" not in markup  # it would apply to the whole page
    assert set(re.findall(r"https?://[^\"]*", markup)) == {"http://www.w3.org/2000/svg"}


def test_identifiers_are_unique_in_a_page_and_all_are_used() -> None:
    page = "".join(to_svg(small(key=key)) for key in ("one", "two"))
    identifiers = re.findall(r'\bid="([^"]+)"', page)
    assert len(set(identifiers)) == len(identifiers)
    used = (
        re.findall(r'(?:href="#|url\(#)([^")]+)', page)
        + " ".join(re.findall('aria-labelledby="([^"]+)"', page)).split()
    )
    assert set(identifiers) == set(used)


def test_each_image_has_a_name_and_a_description() -> None:
    root = ElementTree.fromstring(to_svg(small()))
    images = [element for element in root.iter() if element.tag.endswith("svg")]
    assert len(images) == 2 + 2  # entries of the legend, panels
    for image in images:
        assert image.get("role") == "img"
        assert image[0].tag.endswith("title")
    described = ["".join(element.itertext()) for element in root.iter() if element.tag.endswith("desc")]
    assert described[0].startswith("a: norm by layer; a: 0.1 at layer 1, 0.001 at 3")
    assert "heat map" in described[1]


def test_colours_come_from_the_page() -> None:
    markup = to_svg(figures_of([trained("a", 0), trained("b", 7)])[0])
    assert "var(--run-0, #22659c)" in markup
    assert "var(--run-7, #4e0f04)" in markup
    bare = re.sub(r"var\(--[\w-]+, #[0-9a-f]{6}\)", "", markup)
    assert not re.findall(r"#[0-9a-f]{6}\b", bare)
    assert "fill: var(--figure-ink" in markup


def test_text_of_a_run_is_text() -> None:
    markup = to_svg(small(HOSTILE))
    assert "<script" not in markup
    assert "\x1b" not in markup
    label = shown(HOSTILE)
    assert sum(text == label for text in texts(markup)) == 3  # two entries of the legend, one title
    root = ElementTree.fromstring(markup)
    assert root.get("aria-label") == HOSTILE.replace("\x1b", "\\x1b").replace("\u202e", "\\u202e")


@pytest.mark.slow
@settings(max_examples=10)
@given(st.text(max_size=60))
def test_any_name_can_be_drawn(name: str) -> None:
    figure = Figure("key", "", name, "", "", (Panel(name, "x", "y", (Series(name, (1,), (1.0,), 0),)),))
    found = texts(to_svg(figure))
    assert shown(name) == "" or found.count(shown(name)) >= 2


def test_long_names_keep_both_ends() -> None:
    label = shown("runs/" + "x" * 100 + "/admin, update 200")
    assert len(label) == 45
    assert label.startswith("runs/xxx")
    assert label.endswith("/admin, update 200")
    assert shown("x" * 45) == "x" * 45


@pytest.mark.slow
def test_the_same_figure_gives_the_same_markup_in_another_process() -> None:
    code = (
        "import sys; from tests.inspect.small_figure import small; from ziggurat.inspect.report.drawing import to_svg;"
        "sys.stdout.write(to_svg(small()));"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    command = [sys.executable, "-c", code]
    root, environment = Path(__file__).parents[2], {**os.environ, "PYTHONHASHSEED": "5", "PYTHONUTF8": "1"}
    other = subprocess.run(command, capture_output=True, encoding="utf-8", check=True, cwd=root, env=environment)
    assert other.stdout == to_svg(small())


def test_matplotlibs_settings_stay_as_they_are() -> None:
    with mpl.rc_context({"font.size": 33.0, "text.usetex": False, "lines.linewidth": 9.0}):
        before = dict(mpl.rcParams)
        styled = to_svg(small())
        assert dict(mpl.rcParams) == before
    assert styled == to_svg(small())


@pytest.mark.slow
def test_three_formats_are_written_reproducibly(tmp_path: Path) -> None:
    first = [path.read_bytes() for path in save(small(), tmp_path)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small.pdf", "small.png", "small.svg"]
    png, svg, pdf = first
    assert png.startswith(b"\x89PNG")
    assert pdf.startswith(b"%PDF")
    assert b"/CreationDate" not in pdf
    assert b"<dc:date>" not in svg
    assert [path.read_bytes() for path in save(small(), tmp_path)] == first
    root = ElementTree.fromstring(svg)
    assert {"layer", "norm", "map", "a"} <= {"".join(e.itertext()) for e in root.iter() if e.tag.endswith("}text")}


@pytest.mark.slow
def test_files_hold_hostile_names_as_text(tmp_path: Path) -> None:
    svg, _ = save(small(HOSTILE), tmp_path, ["svg", "pdf"])
    assert "<script" not in svg.read_text("utf-8")
    assert shown(HOSTILE) in ["".join(e.itertext()) for e in ElementTree.parse(svg).iter()]


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (old,) = save(small(), tmp_path, ["svg"])
    before = old.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space"):
        save(small("b"), tmp_path, ["svg"])
    assert old.read_bytes() == before
    assert list(tmp_path.iterdir()) == [old]


def test_unknown_formats_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'jpg'; use png, svg, pdf"):
        save(small(), tmp_path, ["png", "jpg"])
    assert not list(tmp_path.iterdir())


def test_values_without_a_logarithm_are_gaps() -> None:
    lines = (Series("a", (1, 2, 3), (0.0, -1.0, None), 0),)
    figure = Figure("key", "", "t", "", "", (Panel("p", "x", "y", lines, log_x=True, log_y=True),))
    assert "<path" in to_svg(figure)


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ((1e-5, 1.0), {"10⁻⁵", "0.001", "0.1"}),
        ((0.02, 1.0), {"0.02", "0.05", "0.1", "0.2", "0.5", "1"}),
        ((1.0, 1.2), {"1.04", "1.12", "1.2"}),
        ((1e4, 1e8), {"10⁴", "10⁶", "10⁸"}),
    ],
)
def test_ticks_of_logarithmic_axes(values: tuple[float, float], ticks: set[str]) -> None:
    panel = Panel("p", "x", "y", (Series("a", (1, 2), values, 0),), log_y=True)
    assert ticks <= set(texts(to_svg(Figure("key", "", "t", "", "", (panel,)))))


def test_ticks_of_linear_axes() -> None:
    panel = Panel("p", "x", "y", (Series("a", (1, 2), (-1.0, 40_000.0), 0),))
    found = set(texts(to_svg(Figure("key", "", "t", "", "", (panel,)))))
    assert {"10k", "40k"} <= found


@pytest.mark.parametrize(
    ("nats", "ticks"),
    [((2.0, 7.0), {"10", "100", "1000"}), ((5.0, 5.1), {"152", "156", "160"}), ((1.0, 2.2), {"3", "5", "8"})],
)
def test_perplexity_has_ticks_at_round_values(nats: tuple[float, float], ticks: set[str]) -> None:
    panel = Panel("p", "x", "nats", (Series("a", (1, 2), nats, 0),), perplexity=True)
    found = texts(to_svg(Figure("key", "", "t", "", "", (panel,))))
    assert "perplexity" in found
    assert ticks <= set(found)


def test_panels_of_one_quantity_have_one_range() -> None:
    panels = [
        Panel("a", "layer", "norm", (Series("r", (1, 2), (1.0, 2.0), 0),)),
        Panel("b", "layer", "norm", (Series("r", (1, 2), (5.0, 9.0), 0),)),
        Panel("c", "layer", "other", (Series("r", (1, 2), (0.5, 0.6), 0),)),
    ]
    with drawing_settings("salt"):
        canvas = new_canvas(300, 100)
        axes = [canvas.add_subplot(1, 3, i + 1) for i in range(3)]
        for each, panel in zip(axes, panels, strict=True):
            draw_panel(each, panel, panels)
    assert axes[0].get_ylim() == axes[1].get_ylim() == pytest.approx((0.6, 9.4))
    assert axes[2].get_ylim() == pytest.approx((0.495, 0.605))


def test_lines_of_one_run_look_alike_and_differ_from_other_runs() -> None:
    marks = {(run, variant) for run in range(8) for variant in range(len(DASHES))}
    looks = {(MARKERS[run], LIGHT[name_of_run(run)], DASHES[variant]) for run, variant in marks}
    assert len(looks) == len(marks)
    assert len(set(MARKERS)) == len(MARKERS) == 8


# Linear RGB as people with a colour-vision deficiency see it: Machado, Oliveira and Fernandes 2009, severity 1.
VISIONS = {
    "normal": np.eye(3),
    "protanopia": np.array([[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]]),
    "deuteranopia": np.array([[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]]),
}


def linear(colour: str) -> np.ndarray:
    c = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def oklab(rgb: np.ndarray) -> np.ndarray:
    """Return perceptually uniform coordinates (Ottosson 2020)."""
    to_cones = np.array([[0.41222, 0.53633, 0.05145], [0.21190, 0.68070, 0.10740], [0.08830, 0.28172, 0.62998]])
    to_lab = np.array([[0.21045, 0.79362, -0.00407], [1.97800, -2.42859, 0.45059], [0.02590, 0.78277, -0.80868]])
    return to_lab @ np.cbrt(to_cones @ np.clip(rgb, 0, 1))


@pytest.mark.parametrize(("colours", "background"), [(LIGHT, "#ffffff"), (DARK, "#16181d")], ids=["light", "dark"])
def test_runs_can_be_distinguished_by_everybody(colours: dict[str, str], background: str) -> None:
    def luminance(colour: str) -> float:
        return float(linear(colour) @ [0.2126, 0.7152, 0.0722])

    runs = [colours[name_of_run(i)] for i in range(8)]
    assert len(set(runs)) == 8
    for colour in [*runs, colours["--figure-ink"], colours["--figure-muted"]]:
        low, high = sorted((luminance(colour), luminance(background)))
        assert (high + 0.05) / (low + 0.05) >= 3  # WCAG 2.2, 1.4.11
    for name, vision in VISIONS.items():
        for one, other in itertools.combinations(runs, 2):
            assert np.linalg.norm(oklab(vision @ linear(one)) - oklab(vision @ linear(other))) > 0.085, (
                name,
                one,
                other,
            )


def test_both_palettes_have_the_same_variables() -> None:
    assert set(LIGHT) == set(DARK)
    assert len(set(LIGHT.values())) == len(LIGHT)  # a colour is found by its value when SVG is written
