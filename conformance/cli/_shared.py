"""TODO: conformance/cli/_shared.py."""

import pytest

from conformance.hosts.ranks_protocol import Ranks

POOL = pytest.StashKey[Ranks]()
