"""One certification, from the options to the files that are written.

options        the options, declared once
request        a command line, parsed once
results        the files of a run, and those of an earlier one
session        the run itself: load the subject, judge, conclude
engine         runs each scenario once, and applies the rules
judging_order  which rules are judged before others
plan           which runs a rule reads; scenarios adapted to the claims
blame          which rule a failed run fails
claim_search   ``--claims auto``
rank_source    the source of ranks: this machine, or torchrun's hosts
run_sources    the source of runs: ranks, or kept records
report         texts for people
certify        the same run as one call
"""
