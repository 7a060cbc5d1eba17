"""Records of runs: written by ranks, read by the controller, judged by rules.

files          the names of the files of a run, and the exit statuses of a rank
recorder       writes the record of one rank
rank_record    reads the record of one rank
run            a finished run as rules read it: the scenario, and the records of all ranks

A record is plain data, JSON and tensors. Records that an older version of the kit wrote can still
be judged, so the keys of their events stay as they are.
"""
