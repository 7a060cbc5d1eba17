"""The differences between versions of torch: private names, faults, and the tested range.

No other module of the kit uses a private name of torch (``private.py``, ``names.py``), and no
other knows the faults of a version of torch (``faults.py``).
"""
