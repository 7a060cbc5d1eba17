"""Everything that can stop a run, and the exit code that says so.

ConformanceError
├── CertificateError  1  a certificate is not whole, or not what was asked for
├── UsageError        4  the command line cannot be run as written
├── TargetError       9  the subject cannot be imported, or is not what it was said to be
├── ProfileError      8  this machine cannot run the profile that was asked for
│   └── RequiredProfileError  1  --require-profile says that it must
└── KitError          3  the kit or its machine failed; says nothing about the subject

Exit codes of a whole run:

0  certified: a certificate was written
1  refused: at least one MUST rule failed; or --require-profile names a profile that was not run, so that a
   pipeline which takes 8 for "skipped" fails
2  interrupted
3  kit error
4  usage error
5  no rule was selected
7  not certified: nothing failed, but not every MUST rule ran (a development run)
8  the profile cannot be run here
9  the subject cannot be loaded
"""


class ConformanceError(Exception):
    """A run that cannot go on; ``str(error)`` is one line that says what is wrong and what to do."""

    exit_code = 3


class CertificateError(ConformanceError):
    """A certificate that nothing can be built on; its arguments are the reasons, one line each."""

    exit_code = 1

    @property
    def reasons(self) -> tuple[str, ...]:
        return self.args

    def __str__(self) -> str:
        return "; ".join(self.reasons)


class UsageError(ConformanceError):
    """The command line cannot be run as written."""

    exit_code = 4


class TargetError(ConformanceError):
    """The subject cannot be imported, or is not what it was said to be."""

    exit_code = 9


class ProfileError(ConformanceError):
    """This machine cannot run the profile that was asked for."""

    exit_code = 8


class RequiredProfileError(ProfileError):
    """``--require-profile`` names a profile that this machine cannot run, or another one was chosen."""

    exit_code = 1


class KitError(ConformanceError):
    """The kit or the machine failed; the subject is not to blame."""

    exit_code = 3


CERTIFIED, REFUSED, INTERRUPTED, KIT_ERROR, NO_RULES, NOT_CERTIFIED = 0, 1, 2, 3, 5, 7
