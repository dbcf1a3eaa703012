"""One line per check: whether it is well, what was found, and what to do if not."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from drivetrain.experiment.cli.output import print_json, print_lines

MARKS = {True: ("✓", "green"), False: ("✗", "red"), None: ("·", "dim")}


@dataclass(frozen=True, kw_only=True)
class Check:
    """The outcome of one check."""

    is_good: bool | None
    """None: worth knowing, and neither good nor bad."""
    name: str
    found: str
    remedy: str = ""

    def as_data(self) -> dict[str, Any]:
        """Return plain values."""
        return {"good": self.is_good, "check": self.name, "found": self.found, "remedy": self.remedy}


def print_checks(checks: Iterable[Check], *, as_json: bool) -> int:
    """Print checks as they come in; 1 when any of them failed, else 0."""
    done = []
    for check in checks:
        done.append(check)
        if not as_json:
            mark, style = MARKS[check.is_good]
            remedy = f"  → {check.remedy}" if check.remedy else ""
            print_lines(f"{mark} {check.name}: {check.found}{remedy}", style=style if check.is_good is not True else "")
    if as_json:
        print_json([check.as_data() for check in done])
    return int(any(check.is_good is False for check in done))
