"""What becomes of a part of a guide that is not enforced: a refusal, or a warning where the request puts up with it."""

from __future__ import annotations

from dataclasses import dataclass, field

from python_backend.errors import Unsupported


@dataclass(slots=True)
class Refusals:
    """Of one guide.

    Attributes:
        strict: refuse; else warn.
        warnings: what was not enforced.
    """

    strict: bool
    warnings: list[str] = field(default_factory=list)

    def refuse(self, what: str, hint: str = "", instead: str = "not enforced") -> None:
        """Tell that `what` (a keyword and its path) is not enforced; the caller then goes on without it.

        Raises:
            Unsupported: the request is strict.
        """
        if self.strict:
            raise Unsupported(
                f"{what} cannot be enforced.{hint} Remove it, or send guided_decoding_strict=false to do without it."
            )
        self.warnings.append(f"{what} is {instead}.")
