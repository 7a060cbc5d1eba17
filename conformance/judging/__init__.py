"""Judge records: rules, verdicts, shared requirements, likely causes and oracles.

Nothing here starts a rank or imports a subject: the functions take records and claims alone.
"""
