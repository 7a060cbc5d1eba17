"""The errors that stop a run, and their exit codes.

ConformanceError
├── CertificateError  1  a certificate is not whole, or not the required one
├── UsageError        4  the command line cannot be run as written
├── TargetError       9  the subject cannot be imported, or is of another kind than the option names
├── ProfileError      8  this machine cannot run the requested profile
│   └── RequiredProfileError  1  --require-profile requires another profile
└── KitError          3  the kit or its machine failed; the subject is not to blame

Exit codes of a whole run:

0  certified: a certificate was written
1  refused: at least one MUST rule failed; or --require-profile names a profile that was not run, so
   that a pipeline that takes 8 for "skipped" fails
2  interrupted
3  kit error
4  usage error
5  no rule was selected
7  not certified: nothing failed, but not every MUST rule ran (a development run)
8  the profile cannot be run here
9  the subject cannot be loaded
"""

CERTIFIED = 0
REFUSED = 1
INTERRUPTED = 2
KIT_ERROR = 3
NO_RULES = 5
NOT_CERTIFIED = 7


class ConformanceError(Exception):
    """A run cannot go on; ``str(error)`` is one line with the reason and a remedy."""

    exit_code = KIT_ERROR


class CertificateError(ConformanceError):
    """A certificate cannot be relied on; the arguments are the reasons, one line each."""

    exit_code = REFUSED

    @property
    def reasons(self) -> tuple[str, ...]:
        return self.args

    def __str__(self) -> str:
        return "; ".join(self.reasons)


class UsageError(ConformanceError):
    """The command line cannot be run as written."""

    exit_code = 4


class TargetError(ConformanceError):
    """The subject cannot be imported, or is of another kind than the option names."""

    exit_code = 9


class ProfileError(ConformanceError):
    """This machine cannot run the requested profile."""

    exit_code = 8


class RequiredProfileError(ProfileError):
    """``--require-profile`` names a profile that this machine cannot run, or did not choose."""

    exit_code = REFUSED


class KitError(ConformanceError):
    """The kit or the machine failed; the subject is not to blame."""

    exit_code = KIT_ERROR
