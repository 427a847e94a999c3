"""Every error that Apportion raises on purpose.

ApportionError                 exit code
├── TargetError      1   no such file or function, a model() that raises, bad data, a bad loss
├── OptionError      1   an option or config value that cannot be used
├── PlanError        3   nothing fits, or the asked layout is impossible for this model
│   └── RefusedError 3   the plan cannot keep the one-device answer for this model
├── ParityError      4   a run differs from the one-device answer
├── RankError        5   a rank hung, died or raised
└── StoppedError     6   stopped on request, after saving

Each carries three lines: what was wrong, what was found, what to do.
"""

from __future__ import annotations


class ApportionError(Exception):
    """Base of every error that is the user's to mend; `exit_code` is what the command line returns."""

    exit_code = 1

    def __init__(self, what: str, *, found: str = "", try_: str = "") -> None:
        super().__init__(what, found, try_)
        self.what = what
        self.found = found
        self.try_ = try_

    def __str__(self) -> str:
        lines = [self.what]
        if self.found:
            lines.append(f"  found: {self.found}")
        if self.try_:
            lines.append(f"  try:   {self.try_}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.what, self.found, self.try_))


def _rebuild(cls: type[ApportionError], what: str, found: str, try_: str) -> ApportionError:
    return cls(what, found=found, try_=try_)


class TargetError(ApportionError):
    """The target, its functions or its data cannot be used."""


class OptionError(ApportionError):
    """An option or a config value cannot be used."""


class PlanError(ApportionError):
    """Nothing fits, or the asked layout is impossible for this model."""

    exit_code = 3


class RefusedError(PlanError):
    """The plan cannot keep the one-device answer for this model."""


class ParityError(ApportionError):
    """A run differs from the one-device answer."""

    exit_code = 4


class RankError(ApportionError):
    """A rank hung, died or raised."""

    exit_code = 5


class StoppedError(ApportionError):
    """The run stopped on request after saving."""

    exit_code = 6
