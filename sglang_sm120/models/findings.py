"""What ``check-checkpoint`` reports: one line per finding, with the tensor, its value and what to do."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Severity = Literal["error", "warning", "info"]

#: A checkpoint whose every expert is wrong must not fill the memory: further findings of a kind are only counted.
MAX_PER_CODE = 1000


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong (``error``), doubtful (``warning``) or worth knowing (``info``)."""

    code: str
    severity: Severity
    tensor: str
    value: str
    what: str
    fix: str


@dataclass
class Findings:
    """Collects findings and counts those beyond :data:`MAX_PER_CODE`."""

    kept: list[Finding] = field(default_factory=list)
    counts: Counter[tuple[str, Severity]] = field(default_factory=Counter)

    def add(self, code: str, severity: Severity, tensor: str, value: object, what: str, fix: str) -> None:
        """Record one finding. ``what`` and ``fix`` are clauses without a final full stop."""
        self.counts[code, severity] += 1
        if self.counts[code, severity] <= MAX_PER_CODE:
            self.kept.append(Finding(code, severity, tensor, str(value), what, fix))

    def number(self, severity: Severity) -> int:
        """How many findings there were, dropped ones included."""
        return sum(count for (_, found), count in self.counts.items() if found == severity)

    def as_data(self) -> dict[str, Any]:
        """Plain data for a report, errors first."""
        order: dict[Severity, int] = {"error": 0, "warning": 1, "info": 2}
        kept = sorted(self.kept, key=lambda finding: (order[finding.severity], finding.code))
        kinds = sorted(self.counts.items(), key=lambda kind: (order[kind[0][1]], kind[0][0]))
        return {
            "errors": self.number("error"),
            "warnings": self.number("warning"),
            "findings": [asdict(finding) for finding in kept],
            "counts": [{"code": code, "severity": found, "count": count} for (code, found), count in kinds],
        }
