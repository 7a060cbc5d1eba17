"""Run one of torch's tests in a process of its own, since the references replace torch's modules.

python -m tests.drop_in.run_one test_average_parameters
"""

import sys
import unittest

from tests.drop_in.references_in_torch import TorchsTest


def main(name: str) -> int:
    """Run torch's test ``name``, print its errors, and return 0 if it has passed."""
    result = unittest.TestResult()
    TorchsTest(name).run(result)
    for _, trace in [*result.errors, *result.failures]:
        print(trace)
    for _, reason in result.skipped:
        print(f"skipped: {reason}")
    return int(bool(result.errors or result.failures or result.skipped))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
