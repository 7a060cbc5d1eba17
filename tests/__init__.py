"""The kit's own tests. Each package mirrors one of ``conformance``."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
