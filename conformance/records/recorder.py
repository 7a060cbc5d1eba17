"""TODO: conformance/records/recorder.py."""

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


class Recorder:
    """Writes one rank's record. Each event is on disk before the next thing happens."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = os.open(folder / EVENTS, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._lock = threading.Lock()
        self._tensors: dict[str, torch.Tensor] = {}
        self._clock = time.monotonic
        self.step = -1
        self.held = 0  # bytes in the tensors kept so far
        self.failure = ""  # why the disk took no more, which is never the subject's fault

    def event(self, name: str, /, **fields: Any) -> None:
        """Append one event, stamped with the current step."""
        line = json.dumps({"event": name, "step": self.step, "time": self._clock(), **fields}) + "\n"
        with self._lock, self._noting_a_full_disk():
            os.write(self._file, line.encode())

    def tensor(self, name: str, tensor: torch.Tensor) -> None:
        """Keep a copy of a dense tensor under ``name``; complex ones as pairs of reals."""
        tensor = tensor.detach()
        tensor = tensor.to_dense() if tensor.layout != torch.strided else tensor
        tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        # One on another device is read on the current stream, as a training script would read it; no other stream is waited for.
        self._tensors[name] = kept = tensor.contiguous().to("cpu", copy=True, memory_format=torch.contiguous_format)
        self.held += kept.numel() * kept.element_size()

    def close(self) -> None:
        """Write the tensors and the closing event, without which a record is incomplete."""
        with self._noting_a_full_disk():
            try:
                save_file(self._tensors, self._folder / TENSORS)
            except SafetensorError as error:  # safetensors has no errno
                raise OSError(errno.EIO, str(error)) from error
        self.event("end", tensors=len(self._tensors))

    @contextlib.contextmanager
    def _noting_a_full_disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
                self.failure = str(error)
            raise
