"""The code that runs inside ranks, beside the subject.

    rank             one rank of one scenario, from the fork to its end
    process          prepares a forked process to hold unknown code
    new_memory       the values in memory that is not written yet
    placement        the backend's module, settings and device of a profile
    process_groups   the process groups of a scenario, and barriers through its store
    resolve          from the strings that name a subject to its objects
    enum_arguments   names of enum members among the arguments of a target
    drivers/         one driver for each kind of subject
    instruments/     watch, disturb and record a run
    models/          the models that train

A host imports these modules before it forks, so that ranks need not. They write records and know
no rules: nothing here imports the judging code.
"""
