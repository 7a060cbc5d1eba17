"""torch's own distributed tests, which its wheel contains, run with the references in the place of
torch's modules, on Gloo and CPU.

    pytest tests/drop_in -m drop_in
"""
