"""The passive mode: rules of the book on the steps of a training run.

watcher        ``watch()``: counts and samples steps, reports findings
attach         the hooks on a watched model
step           one step on one rank, from the end of its forward to the end of its backward
sampling       the elements that are sampled, and how they are sent
exchange       the process group on which the ranks exchange samples
judge          the rules, applied to the samples of all ranks
replicas       checksums of parameters, and the search for elements that differ
collectives    records the collectives that Python code starts
stalls         the log line of a run in which all ranks stand still

``watcher.py`` is the beginning; it describes a sampled step from its begin to its end.
"""
