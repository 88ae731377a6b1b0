"""What preflight has to say."""

from dataclasses import asdict, dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        level: "error", which stops the server before it loads, or "warning".
        code: short name that stays the same.
        what: what is so, with the value at fault.
        why: what comes of it.
        fix: what to change.
    """

    level: Literal["error", "warning"]
    code: str
    what: str
    why: str
    fix: str

    def __str__(self) -> str:
        return f"{self.level} [{self.code}] {self.what}\n  why: {self.why}\n  fix: {self.fix}"


def error(code: str, what: str, why: str, fix: str) -> Finding:
    """A finding that stops the server."""
    return Finding("error", code, what, why, fix)


def warning(code: str, what: str, why: str, fix: str) -> Finding:
    """A finding that goes to the log."""
    return Finding("warning", code, what, why, fix)


def as_json(findings: list[Finding]) -> dict[str, object]:
    """Findings and how many errors there are among them."""
    errors = sum(finding.level == "error" for finding in findings)
    return {"errors": errors, "findings": [asdict(finding) for finding in findings]}
