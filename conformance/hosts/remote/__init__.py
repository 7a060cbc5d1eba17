"""Hosts that torchrun has started, on one or several machines.

pool          the controller's end: a pool whose ranks are forked by these hosts
run           one run on several hosts
rendezvous    how a controller finds hosts: in the store of torchrun's rendezvous
host          the host that torchrun starts
wire          messages and files on a connection

``pool.py`` is the beginning on the controller's machine, ``host.py`` on the nodes.
"""
