"""Writes the record of one rank: JSON lines as events happen, tensors at the end of the run."""

import contextlib
import errno
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from conformance.records.files import EVENTS, TENSORS

_DISK_FAILED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class Recorder:
    """Writes one rank's record. Each event is in the file before the rank goes on.

    Attributes:
        step: the current step; -1 before the first one.
        held: the number of bytes in the tensors that are kept.
        failure: the error of a full or broken disk, which is never the subject's fault; None if
            there was none.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(folder / EVENTS, flags, 0o600)
        self._lock = threading.Lock()
        self._tensors: dict[str, torch.Tensor] = {}
        # Kept here, since a subject may replace time.monotonic.
        self._clock = time.monotonic
        self.step = -1
        self.held = 0
        self.failure: str | None = None
        self._is_closed = False
        self._spool: int | None = None

    def spool(self) -> None:
        """Keep tensors in a file from here on, so that the record takes no memory."""
        path = self._folder / "spool"
        self._spool = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        # The file lives as long as its descriptor.
        path.unlink()

    def event(self, name: str, /, **fields: Any) -> None:
        """Append one event with the current step and time; drop it if the record is closed."""
        with self._lock:
            if self._is_closed:
                return
            # Not a context manager: there are a hundred thousand events in a certification.
            try:
                self._write(name, fields)
            except OSError as error:
                self._note_disk_failure(error)
                raise

    def _write(self, name: str, fields: dict[str, Any]) -> None:
        stamped = {"event": name, "step": self.step, "time": self._clock(), **fields}
        os.write(self._file, (json.dumps(stamped) + "\n").encode())

    def tensor(self, name: str, tensor: torch.Tensor) -> None:
        """Keep a dense copy of a tensor under ``name``; complex values as pairs of reals."""
        tensor = tensor.detach()
        if tensor.layout != torch.strided:
            tensor = tensor.to_dense()
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        # A tensor on another device is read on the current stream, as a training script would read
        # it; no other stream is waited for.
        kept = tensor.contiguous().to("cpu", copy=True, memory_format=torch.contiguous_format)
        self.held += kept.numel() * kept.element_size()
        if self._spool is None:
            self._tensors[name] = kept
            return
        dtype = str(kept.dtype).removeprefix("torch.")
        data = kept.reshape(-1).view(torch.uint8).numpy().tobytes()
        header = json.dumps([name, dtype, list(kept.shape), len(data)])
        with self._noting_disk_failure():
            os.write(self._spool, header.encode() + b"\n" + data)

    def _spooled(self) -> dict[str, torch.Tensor]:
        """Return the tensors in the file of :meth:`spool`; none if there is no such file."""
        tensors: dict[str, torch.Tensor] = {}
        if self._spool is None:
            return tensors
        os.lseek(self._spool, 0, os.SEEK_SET)
        with os.fdopen(self._spool, "rb") as file:
            while header := file.readline():
                name, dtype, shape, size = json.loads(header)
                # frombuffer takes no empty buffer.
                data = torch.empty(0, dtype=torch.uint8)
                if size:
                    data = torch.frombuffer(bytearray(file.read(size)), dtype=torch.uint8)
                tensors[name] = data.view(getattr(torch, dtype)).reshape(shape)
        return tensors

    def close(self, *, keeps_tensors: bool = True) -> None:
        """Write the tensors and the last event; without that event a record is incomplete.

        The first call alone has an effect, whichever thread makes it.

        Args:
            keeps_tensors: False if the record is read for its events alone.
        """
        with self._lock, self._noting_disk_failure():
            if self._is_closed:
                return
            tensors = {**self._tensors, **self._spooled()} if keeps_tensors else {}
            try:
                save_file(tensors, self._folder / TENSORS)
            except SafetensorError as error:
                # The library reports errors of the disk without an errno.
                raise OSError(errno.EIO, str(error)) from error
            self._write("end", {"tensors": len(tensors)})
            self._is_closed = True

    @contextlib.contextmanager
    def _noting_disk_failure(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._note_disk_failure(error)
            raise

    def _note_disk_failure(self, error: OSError) -> None:
        if error.errno in _DISK_FAILED:
            self.failure = str(error)
