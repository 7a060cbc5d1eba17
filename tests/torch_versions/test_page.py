"""docs/torch-versions.md is made of the results on file."""

import expecttest

from tests.versions import PAGE
from tests.versions_page import page


def test_the_page_is_as_published() -> None:
    """EXPECTTEST_ACCEPT=1 writes it."""
    if expecttest.ACCEPT:
        PAGE.write_text(page())
    assert PAGE.read_text() == page()
