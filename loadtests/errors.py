"""What can go wrong with a load test itself, and with which exit code it then ends.

    LoadTestError
    ├── UsageFault       2: the options, a trace or an SLO file ask for something that cannot be done
    └── EnvironmentFault 3: no server answers, or this machine lacks something

Failures of requests are no errors of the test: they are what it measures.
"""

from __future__ import annotations


class LoadTestError(Exception):
    """Base of the errors that end a load test; the message says what, which value and what to do."""

    exit_code = 1


class UsageFault(LoadTestError):
    """Something was asked for that cannot be done."""

    exit_code = 2


class EnvironmentFault(LoadTestError):
    """No server answers, or this machine lacks something."""

    exit_code = 3
