"""The subject's source files, compared with the digests in a certificate."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from conformance.certificates.reader import CertificateFile
from conformance.errors import UsageError


def other_sources(certificate: CertificateFile, *folders: Path) -> Iterator[str]:
    """Yield the source files that are missing or different in some folders, one line each.

    Args:
        certificate: its subject's modules are looked up by name.
        folders: the folders that hold their packages, themselves or in ``src``. A set-up and the
            hook that it registers may be in two.

    Raises:
        UsageError: a folder or a file cannot be read.
    """
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"--sources {folder}: there is no such folder")
    module = str(certificate.body["subject"].get("module"))
    if module not in certificate.sources:
        yield f"has no digest of the subject's module {module}, so that --sources cannot compare it"
    for module, expected in certificate.sources.items():
        files = [path for folder in folders for path in _files_of(module, folder)]
        digests = {path: _sha256(path) for path in files}
        if not digests:
            places = ", ".join(map(str, folders))
            yield f"was made for the module {module}, which is not in {places}"
        elif expected not in digests.values():
            names = ", ".join(map(str, digests))
            yield (
                f"was made for another {module}: its digest is {expected[:16]}, but {names} has "
                f"{', '.join(digest[:16] for digest in digests.values())}"
            )


def _files_of(module: str, folder: Path) -> list[Path]:
    """Return the files in a folder that may be a module's source."""
    parts = module.split(".")
    # A name that is no name of a module must not lead out of the folder.
    if not all(part.isidentifier() for part in parts):
        return []
    candidates = []
    for root in (folder, folder / "src"):
        path = root.joinpath(*parts)
        candidates += [path / "__init__.py", path.parent / f"{path.name}.py"]
        # A module of compiled code: mypkg/codec.cpython-311-x86_64-linux-gnu.so.
        candidates += sorted(path.parent.glob(f"{path.name}.*so"))
    return [path for path in candidates if path.is_file()]


def _sha256(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from error
