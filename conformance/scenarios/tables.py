"""Large gradients that repeat a table, so that they are made, and judged, in a few milliseconds.

To hash every element of 2**24 takes seconds. A scenario with a ``period`` P draws P values for each
rank and step, and every parameter repeats them:

    element j of parameter p  =  sign(p, row) * table[column],   row, column = divmod(o(p) + j, P)

The offset o(p) in the table and the signs of the rows are hashes of the parameter's number alone.
They are the same on all ranks and at all steps. A mean of such gradients therefore repeats a table
too, with the same signs, and so does every result that is computed element by element with odd
functions: a rounded mean, a sum, a weighted mean, a parameter that an optimizer has stepped from 0.

P is a prime that is drawn. A hook that takes an element for its neighbour in another row, some
multiple of P away, gets half of the signs wrong.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

BEYOND = 1 << 24
"""From here on not every integer is a float32."""
ROWS = 1024
"""No parameter has as many rows: a place is ``parameter * ROWS + row``."""


@dataclass(frozen=True)
class Row:
    """The part of a flat parameter that one row of the table covers.

    Attributes:
        number: the row.
        sign: 1.0 or -1.0, or a power of two times that; the elements are the table's values times
            it.
        column: the place in the table of the part's first element.
        begin, end: the part's elements.
    """

    number: int
    sign: float
    column: int
    begin: int
    end: int


_WINDOWS = 32
_LENGTHS_OF_WINDOWS = (64, 4096)


def windows(numel: int, seed: int) -> dict[int, list[int]]:
    """Return where windows on a vast parameter begin, by their length: the first one has the last
    elements, the others are drawn between element 2**24 and these.
    """
    draw = random.Random(f"{numel}/{seed}/windows")
    return {
        length: [
            numel - length,
            *(draw.randrange(BEYOND, numel - 2 * length) for _ in range(_WINDOWS)),
        ]
        for length in _LENGTHS_OF_WINDOWS
    }


def rows(numel: int, period: int, param: int, exponent: int = 0) -> Iterator[Row]:
    """Yield the rows of a parameter with ``numel`` elements, in order.

    If it has an exponent (``Param.exponent``), one row is divided at element 2**24.
    """
    draw = random.Random(f"{param} of {period}")
    column = draw.randrange(period)
    begin = 0
    number = 0
    while begin < numel:
        end = min(numel, begin + period - column)
        sign = draw.choice((1.0, -1.0))
        if exponent and begin < BEYOND < end:
            yield Row(number, sign, column, begin, BEYOND)
            column += BEYOND - begin
            begin = BEYOND
        if exponent and begin >= BEYOND:
            sign *= 2.0**exponent
        yield Row(number, sign, column, begin, end)
        begin = end
        column = 0
        number += 1


def prime_from(start: int) -> int:
    """Return the first prime that is not below ``start``."""
    candidate = max(start, 2)
    while any(candidate % divisor == 0 for divisor in range(2, int(candidate**0.5) + 1)):
        candidate += 1
    return candidate


@lru_cache(maxsize=4096)
def row_at(numel: int, period: int, param: int, number: int) -> Row:
    """Return one row of a parameter."""
    return next(row for row in rows(numel, period, param) if row.number == number)
