"""What ``python -m conformance`` can do beside certifying; a module each, which reads arguments and prints. Imports no torch."""
