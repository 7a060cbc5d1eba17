"""Markdown for foreign text, which is shown literally and never interpreted.

The words, failures and names of a subject appear in a job's summary. A code span or a fenced block
is literal in every renderer of Markdown: no HTML, links, images, mentions or references arise,
provided that its fence is longer than any in the text. Every text that is not a constant of the
kit therefore passes through :func:`span` or :func:`block`.
"""

import re

# The limits of a block in a summary. The report has all of the text.
LINES = 40
LENGTH = 4000

_TICKS = re.compile(r"`+")


def span(text: object) -> str:
    """Return a code span: one line, which can stand in a table."""
    line = " ".join(printable(str(text)).split())
    if not line:
        return ""
    ticks = "`" * (_longest_fence(line) + 1)
    # A backtick at either end would join the fence. Renderers strip one space at each end.
    pad = " " if line.startswith("`") or line.endswith("`") else ""
    # A pipe would end a table's cell, even inside a code span.
    return f"{ticks}{pad}{line}{pad}{ticks}".replace("|", "\\|")


def block(text: str) -> str:
    """Return a fenced code block, cut to LINES and LENGTH."""
    lines = printable(text).splitlines()
    kept = "\n".join(lines[:LINES])[:LENGTH]
    cut = "\n[...]" if len(kept) < len("\n".join(lines)) else ""
    fence = "`" * max(3, _longest_fence(kept) + 1)
    return f"{fence}text\n{kept}{cut}\n{fence}"


def printable(text: str) -> str:
    """Return a text with its control characters escaped; newlines and tabs stay.

    Control characters can steer a terminal, or reverse the direction in which text is read.
    """
    return "".join(
        char if char.isprintable() or char in "\n\t" else char.encode("unicode_escape").decode()
        for char in text
    )


def _longest_fence(text: str) -> int:
    return max((len(run) for run in _TICKS.findall(text)), default=0)
