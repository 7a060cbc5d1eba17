"""Charts as inline SVG, drawn by pygal.

The SVG has classes and no styles of its own: the style sheet of ``report.html`` gives it the
colours of the page, so that it follows light and dark. The legend is text of the page, too.
pygal's style, script and comments are removed.

pygal is imported when the first chart is drawn: a session needs it only once, at its end.
"""

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

Values = Sequence[float | None]

_WIDTH = 640
_HEIGHT = 300
_ROW_HEIGHT = 18
# Guides of a logarithmic axis: every decade, or fewer if there are many.
_MOST_DECADES = 7
_MOST_LABELS = 8
_REMOVED_TAGS = ("defs", "title", "desc", "script")
# pygal sizes its margins by these fonts.
_FONT_SIZES = {"label_font_size": 13, "major_label_font_size": 13}


@dataclass(frozen=True)
class Chart:
    """A chart of one or several series.

    Attributes:
        kind: ``line``, ``column`` or ``bar``; bars lie, with a row for each label.
        labels: the labels of the axis, in order.
        series: the values by name; None is a gap.
        label_title: the title of the axis of labels.
        value_title: the title of the axis of values.
        logarithmic: whether values have a logarithmic axis; values that are not positive are gaps.
    """

    kind: str
    labels: Sequence[str]
    series: Mapping[str, Values]
    label_title: str = ""
    value_title: str = ""
    logarithmic: bool = False


def draw(chart: Chart) -> str:
    """Return a chart as an SVG element."""
    pygal = _import_pygal()
    kinds = {"line": pygal.Line, "column": pygal.Bar, "bar": pygal.HorizontalBar}
    is_bar = chart.kind == "bar"
    height = _HEIGHT
    if is_bar:
        height = 90 + _ROW_HEIGHT * max(4, len(chart.labels) * len(chart.series))
    values = {name: _drawn_values(chart, series) for name, series in chart.series.items()}
    # A column that ends at the foot of its axis has no height.
    below = 1 if chart.kind == "column" else 0
    decades = _decades(values.values(), below) if chart.logarithmic else []
    drawn = kinds[chart.kind](
        style=pygal.style.Style(**_FONT_SIZES, font_family="sans-serif"),
        css=[],
        js=[],
        width=_WIDTH,
        height=height,
        margin=6,
        no_prefix=True,
        disable_xml_declaration=True,
        # pygal cannot draw an empty logarithmic axis.
        logarithmic=bool(decades),
        dots_size=2,
        show_dots=len(chart.labels) <= 40,
        show_legend=False,
        truncate_label=-1,
        x_title=(chart.value_title if is_bar else chart.label_title) or None,
        y_title=(chart.label_title if is_bar else chart.value_title) or None,
        show_minor_x_labels=is_bar,
    )
    if is_bar:
        # The rows are drawn from the bottom up.
        drawn.x_labels = list(reversed(chart.labels))
    else:
        drawn.x_labels = list(chart.labels)
        every = math.ceil(len(chart.labels) / _MOST_LABELS)
        drawn.x_labels_major = list(chart.labels)[::every]
    if decades:
        drawn.value_formatter = _power
        drawn.y_labels = decades
        # A single value has no range of its own.
        drawn.range = (decades[0], decades[-1])
        # Columns stand on the foot of the axis; by default on the smallest value.
        drawn.zero = decades[0]
    for name, series in values.items():
        drawn.add(name, list(reversed(series)) if is_bar else series)
    return _bare_svg(drawn.render_tree())


def _import_pygal() -> Any:
    """Import pygal, without the import hook that it installs.

    The hook is of a form that Python 3.11 warns of at each import of a missing module. In a test
    suite that turns warnings into errors, such an import would raise the warning.
    """
    finders = list(sys.meta_path)
    import pygal.style

    sys.meta_path[:] = [
        finder for finder in sys.meta_path if finder in finders or not _is_of_pygal(finder)
    ]
    return pygal


def _is_of_pygal(finder: object) -> bool:
    return type(finder).__module__.partition(".")[0] == "pygal"


def _drawn_values(chart: Chart, series: Values) -> list[float | None]:
    """Return values that can be drawn: infinity has no place on an axis, and neither has NaN."""
    return [
        value
        if value is not None and math.isfinite(value) and (value > 0 or not chart.logarithmic)
        else None
        for value in series
    ]


def _decades(series: Iterable[list[float | None]], below: int = 0) -> list[float]:
    """Return powers of ten around all values, and as many below them as ``below``."""
    numbers = [value for values in series for value in values if value]
    if not numbers:
        return []
    low = math.floor(math.log10(min(numbers))) - below
    high = max(low + 1, math.ceil(math.log10(max(numbers))))
    stride = math.ceil((high - low) / _MOST_DECADES)
    return [10.0**power for power in range(low, high + stride, stride)]


def _power(value: float) -> str:
    """Return a power of ten in a few characters."""
    return f"{value:g}" if 0.01 <= value < 1e5 else f"1e{round(math.log10(value))}"


def _bare_svg(root: ElementTree.Element) -> str:
    """Return the SVG without style, script, tooltips and identities."""
    for parent in root.iter():
        for child in list(parent):
            tag = child.tag if isinstance(child.tag, str) else "comment"
            if tag in _REMOVED_TAGS or tag == "comment" or _is_overlay(child):
                parent.remove(child)
    root.attrib.pop("id", None)
    root.set("aria-hidden", "true")
    root.set("focusable", "false")
    return ElementTree.tostring(root, encoding="unicode")


def _is_overlay(element: ElementTree.Element) -> bool:
    """Whether an element only serves the mouse, by pygal's script."""
    classes = element.get("class", "").split()
    return "tooltip-overlay" in classes or "text-overlay" in classes
