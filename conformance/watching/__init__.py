"""Passive mode: a training run that is watched. It begins in ``watcher.py``.

watcher     the call, which steps are looked at, and what is told
look        one step on one rank
on_model    what stands on the model meanwhile
sampling    what is taken of gradients, and how it travels
exchange    the group on which ranks tell each other
live        rules on what they have told
replicas    the bits of parameters
issued      collectives overheard
"""
