"""The key under which pytest's stash holds the pool, for the plugin and the kit's own tests."""

import pytest

from conformance.hosts.ranks_protocol import Ranks

POOL = pytest.StashKey[Ranks]()
