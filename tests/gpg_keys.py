"""Keys and signatures of GnuPG for tests, in a home of their own."""

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Signer:
    """A key of GnuPG.

    Attributes:
        home: GnuPG's folder.
        public_key: the file with the public key.
    """

    home: Path
    public_key: Path

    def sign(self, path: Path) -> Path:
        """Write a detached signature beside a file, and return its path."""
        signature = path.with_name(f"{path.name}.asc")
        _gpg(self.home, "--armor", "--output", signature, "--detach-sign", path)
        return signature


@contextmanager
def made_signer(name: str) -> Iterator[Signer]:
    """Make a key, and end GnuPG's agent afterwards. The test is skipped without GnuPG."""
    if shutil.which("gpg") is None:
        pytest.skip("GnuPG is not installed")
    # The path of the agent's socket may have some hundred characters at most.
    home = Path(tempfile.mkdtemp(prefix="gpg-"))
    try:
        owner = f"{name} <{name.lower()}@example.org>"
        _gpg(home, "--passphrase", "", "--quick-gen-key", owner, "ed25519", "sign", "never")
        public_key = home / "public.asc"
        _gpg(home, "--armor", "--output", public_key, "--export")
        yield Signer(home, public_key)
    finally:
        subprocess.run(["gpgconf", "--homedir", str(home), "--kill", "all"], check=False)
        shutil.rmtree(home, ignore_errors=True)


def _gpg(home: Path, *arguments: object) -> None:
    command = ["gpg", "--homedir", str(home), "--batch", "--yes", "--quiet", *map(str, arguments)]
    subprocess.run(command, check=True, capture_output=True)
