"""Charts are plain SVG, without styles, scripts and side effects."""

import re
import sys
from xml.etree import ElementTree

import pytest

from conformance.session.charts import Chart, draw

LABELS = [str(number) for number in range(30)]
FALLING = [10.0 ** -(number / 4) for number in range(30)]


@pytest.mark.parametrize("kind", ["line", "column", "bar"])
def test_a_chart_has_no_colours_and_no_script(kind: str) -> None:
    drawn = draw(Chart(kind, LABELS, {"error": FALLING, "bound": FALLING}, "step", "share", True))
    root = ElementTree.fromstring(drawn)
    tags = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert tags <= {"svg", "g", "path", "text", "rect", "circle", "tspan"}
    assert not re.search(r"style=|fill=|stroke=|<script|<!--|\bid=", drawn)
    assert len(root.findall(".//*[@class]")) > 10
    texts = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert {"step", "share"} <= set(texts)


def test_values_that_cannot_be_drawn_are_gaps() -> None:
    values = [1.0, None, float("nan"), float("inf"), 0.0, 0.5]
    drawn = draw(Chart("line", list("abcdef"), {"error": values}, logarithmic=True))
    assert "nan" not in drawn
    assert "inf" not in drawn
    draw(Chart("line", list("ab"), {"error": [None, float("nan")]}, logarithmic=True))
    draw(Chart("line", list("ab"), {"error": [1.0, 1.0]}, logarithmic=True))


def heights(drawn: str) -> list[float]:
    return [float(height) for height in re.findall(r'<rect[^>]* height="([0-9.]+)"', drawn)]


@pytest.mark.parametrize("values", [[None, 94.0], [100.0, 1000.0], [1.0, 1.0]])
def test_each_column_on_a_logarithmic_axis_has_a_height(values: list[float | None]) -> None:
    drawn = draw(Chart("column", list("ab"), {"elements": values}, logarithmic=True))
    plain = draw(Chart("column", list("ab"), {"elements": [None, None]}))
    columns = sorted(heights(drawn))[: len(heights(drawn)) - len(heights(plain))]
    assert len(columns) == sum(value is not None for value in values)
    assert min(columns) > 10


def test_powers_of_ten_are_short() -> None:
    drawn = draw(Chart("line", LABELS, {"error": FALLING}, logarithmic=True))
    assert [text for text in re.findall(r">([^<>]+)</text>", drawn) if "1" in text][:3] == [
        "1e-8",
        "1e-6",
        "1e-4",
    ]


def test_the_library_leaves_imports_as_they_are() -> None:
    draw(Chart("line", ["0"], {"error": [1.0]}))
    assert not [one for one in sys.meta_path if type(one).__module__.startswith("pygal")]
    with pytest.raises(ModuleNotFoundError):
        __import__("there_is_no_such_module")
