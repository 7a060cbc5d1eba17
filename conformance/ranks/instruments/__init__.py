"""The instruments of a rank: each watches or disturbs one thing, and writes its own events.

    subject_calls        the calls into the subject, shared by the other instruments
    hook_observer        stands between DDP and a hook; records buckets, futures and results
    collective_recorder  records collectives and their sizes; can make one raise
    schedule             forces the order in which ranks enter calls and callbacks run
    step_recorder        records gradients, parameters, generators and memory of each step
    process_state        reads the generators and the resources that a process shares
    process_settings     reads the settings that a process shares
    patches              finds functions of torch and Python that were replaced
    faults               causes failures: a rank dies, stays silent, a collective raises
    failing_collective   lets one collective of other kinds than hooks fail
    injected             the error of these failures, and its event
    peer_death           ends a rank at the last collective of a step
    stream_delays        puts slow kernels on CUDA streams
    digest               digests of tensors

An instrument writes to the recorder that it is given; a driver installs it and starts and ends
its steps.
"""
