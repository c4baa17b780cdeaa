"""Patterns for formats that a regular expression can hold and that the backend takes too loosely.

Seconds stop at 59: when a leap second is allowed is no matter of form.
"""

from __future__ import annotations

_LABEL = "[A-Za-z0-9]{1,20}(?:-[A-Za-z0-9]{1,20}){0,2}"  # never --: that would be an encoded name
_DOMAIN = r"[A-Za-z0-9]+(?:-[A-Za-z0-9]+)*(?:\.[A-Za-z0-9]+(?:-[A-Za-z0-9]+)*)*"
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~\\-]+"
_DAY_OF_MONTH = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = f"(?:[0-9]{{4}}-{_DAY_OF_MONTH}|{_LEAP_YEAR}-02-29)"
_CLOCK = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](?:\.[0-9]+){{0,1}}(?:[Zz]|[+-]{_CLOCK})"

DATE = f"^{_DATE}$"
TIME = f"^{_TIME}$"
DATE_TIME = f"^{_DATE}[Tt]{_TIME}$"
IPV4 = r"^(?:(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]{0,1}[0-9])\.){3}(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]{0,1}[0-9])$"
UUID = "^[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}$"
HOSTNAME = rf"^{_LABEL}(?:\.{_LABEL}){{0,3}}$"  # 251 characters at most
EMAIL = rf"^{_ATOM}(?:\.{_ATOM})*@{_DOMAIN}$"  # masks are quick without counting
_CLOCK_PARTS = "(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S){0,1}){0,1}|[0-9]+M(?:[0-9]+S){0,1}|[0-9]+S)"
_DATE_PARTS = "(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D){0,1}){0,1}|[0-9]+M(?:[0-9]+D){0,1}|[0-9]+D)"
DURATION = f"^P(?:{_DATE_PARTS}(?:T{_CLOCK_PARTS}){{0,1}}|T{_CLOCK_PARTS}|[0-9]+W)$"
