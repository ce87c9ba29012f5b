"""Diagnosis while a run is under way: the checks that cost nothing, when it evaluates.

It reads gradients that are there anyway, copies the matrices of one step, and keeps the figures. No
random number is drawn and no weight touched: the run is the same run with it or without.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from clearhead.training.checks_curves import check_fit, check_spikes
from clearhead.training.checks_weights import check_gradients, check_updates, weights_to_watch
from clearhead.training.events import Evaluated, Event, Found, Skipped, Step
from clearhead.training.finding import Finding

REMEMBERED = 1000  # steps


class LiveDiagnosis:
    """What a `Trainer` asks around its updates; it tells each thing once, until it changes."""

    def __init__(self, every: int, smoothing: float = 0.0) -> None:
        self.every, self.smoothing = every, smoothing
        self.steps: deque[Mapping[str, Any]] = deque(maxlen=REMEMBERED)
        self.valid: list[Mapping[str, Any]] = []
        self.told: set[tuple[str, str]] = set()
        self.findings: list[Finding] = []
        self.before: dict[str, Tensor] = {}

    def remember(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Take up the figures of a run that goes on."""
        for line in lines:
            (self.valid if "valid" in line else self.steps).append(line)

    def before_update(self, net: nn.Module, number: int) -> None:
        """Look at the gradients of a step that will be followed by an evaluation."""
        if number % self.every == 0:
            self.findings += check_gradients(net)
            self.before = weights_to_watch(net)

    def after_update(self, net: nn.Module) -> None:
        """See how far that step went."""
        if self.before:
            self.findings += check_updates(self.before, net, slow=False)
            self.before = {}

    def report(self, step: Step, events: list[Event]) -> list[Event]:
        """What is new and worrying, at steps that were evaluated."""
        line: dict[str, Any] = {"step": step.number, "loss": step.loss}
        skipped = [event.why for event in events if isinstance(event, Skipped)]
        self.steps.append({**line, "skipped": skipped[0]} if skipped else line)
        scores = [event.scores for event in events if isinstance(event, Evaluated)]
        if not scores:
            return []
        self.valid.append({"step": step.number, "valid": scores[0]})
        lines = [*self.steps, *self.valid]
        found = [*self.findings, *check_spikes(lines), *check_fit(lines, self.smoothing)]
        self.findings = []
        worrying = [finding for finding in found if finding.worrying]
        new = [finding for finding in worrying if (finding.check, finding.level) not in self.told]
        # What is well again may be told again when it goes wrong.
        self.told = {(finding.check, finding.level) for finding in worrying}
        return [Found(finding) for finding in new]
