"""The values that the plugin's two modules share through pytest's stash."""

import pytest

from conformance.errors import ConformanceError
from conformance.hosts.ranks_protocol import Ranks
from conformance.session.request import Request

POOL = pytest.StashKey[Ranks]()
# The parsed command line, or the error that forbids to run it.
REQUEST = pytest.StashKey[Request | ConformanceError]()
