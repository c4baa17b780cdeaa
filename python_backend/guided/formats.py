"""Patterns for formats that a regular expression can hold and that the backend takes too loosely.

Seconds stop at 59: when a leap second is allowed is no matter of form.
"""

from __future__ import annotations

_DAY_OF_MONTH = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = f"(?:[0-9]{{4}}-{_DAY_OF_MONTH}|{_LEAP_YEAR}-02-29)"
_CLOCK = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](?:\.[0-9]+)?(?:[Zz]|[+-]{_CLOCK})"

DATE = f"^{_DATE}$"
TIME = f"^{_TIME}$"
DATE_TIME = f"^{_DATE}[Tt]{_TIME}$"
