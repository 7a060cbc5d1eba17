"""The hook keeps the promises of its claims."""

from conformance import certify

from thirdparty import mean_hook


def test_mean_hook() -> None:
    """A refusal raises AssertionError with the report."""
    certify(mean_hook)
