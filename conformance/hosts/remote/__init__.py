"""Ranks on several machines, on hosts that torchrun has started. It begins in ``attach.py`` and, on the nodes, in ``slot.py``.

attach      the controller's end: a pool whose ranks are elsewhere
crew        one run on several hosts
announce    how hosts are found: in the store of torchrun's rendezvous
slot        the host that torchrun starts
wire        what goes over a connection
"""
