"""The one error tree. A message says what, which value, the allowed range, and the next step.

    StackError
    ├── RequestError            the request cannot be served; nothing else is harmed
    │   ├── InvalidRequest      a value is malformed or out of range        INVALID_ARG
    │   │   └── LimitExceeded   over a limit of this deployment             INVALID_ARG
    │   ├── Unsupported         known to the contract, not to this target   UNSUPPORTED
    │   ├── NotFound            an adapter or a model nobody registered     NOT_FOUND
    │   ├── Overloaded          queue full or shutting down: try again      UNAVAILABLE
    │   └── EngineFailure       the engine failed while running it          INTERNAL
    ├── BuildError              a spec, checkpoint or repository is wrong   exit code 1
    └── EnvironmentFault        this machine lacks something                exit code 3

Imports nothing of ours.
"""

from __future__ import annotations


class StackError(Exception):
    """Base of every error that a person is meant to read."""

    code = "INTERNAL"


class RequestError(StackError):
    """A single request cannot be served."""


class InvalidRequest(RequestError):
    """A value of the request is malformed or out of range."""

    code = "INVALID_ARG"


class LimitExceeded(InvalidRequest):
    """The request is over a limit of this deployment."""


class Unsupported(RequestError):
    """The contract has it, this target does not."""

    code = "UNSUPPORTED"


class NotFound(RequestError):
    """The request names something nobody registered."""

    code = "NOT_FOUND"


class Overloaded(RequestError):
    """No room now; the same request may succeed later."""

    code = "UNAVAILABLE"


class EngineFailure(RequestError):
    """The engine failed while it ran this request."""


class BuildError(StackError):
    """A spec, source, checkpoint or repository is wrong."""


class EnvironmentFault(StackError):
    """This machine lacks something that the stack needs."""


def out_of_range(name: str, value: object, allowed: str, hint: str = "") -> InvalidRequest:
    """The error for a value outside its range, in the one wording used everywhere."""
    return InvalidRequest(f"{name} is {value}; allowed: {allowed}." + (f" {hint}" if hint else ""))
