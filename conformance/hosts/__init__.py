"""Processes that run scenarios on ranks: the host, its lanes, and the pools of a controller.

pool              a controller's pool: starts a host on this machine and gives runs to its lanes
ranks_protocol    the methods that every pool has
local_host        the host's loop: forks lanes and reports how they ended
operations        commands to a lane
supervisor        forks the ranks of a run, watches them and collects evidence
profile_check     probes the backend and the devices of this machine for a profile
preload           the modules that a host imports before it forks
memory            the layout of a host's memory, so that forks are cheap
environment       facts about this machine
remote            hosts that torchrun has started, on one or several machines

The program that a pool executes is ``conformance/host.py``, which also explains why there are
hosts and lanes.
"""
