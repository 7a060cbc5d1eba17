"""Digests of files."""

import hashlib
from os import PathLike

_BLOCK = 1 << 20


def sha256_of_file(path: str | PathLike[str]) -> str:
    """Return the SHA-256 digest of a file's bytes, in hexadecimal.

    ``hashlib.file_digest`` came with Python 3.11.

    Raises:
        OSError: the file cannot be read.
    """
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
