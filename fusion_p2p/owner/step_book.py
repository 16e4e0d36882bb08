"""What the replicas of an epoch say about its steps: reports, losses of validation, and that a fate was applied.

`job.transaction` decides; this checks who may say what.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

from fusion_p2p.errors import RunStopped, WireError
from fusion_p2p.ids import PeerId
from fusion_p2p.job import transaction as transactions
from fusion_p2p.job.flow import Fate
from fusion_p2p.job.transaction import Decide, Terms, Transaction
from fusion_p2p.owner.stage import Stage
from fusion_p2p.wire.job_messages import Applied, EvalReport, StepReport


class StepBook:
    """The open step of an epoch."""

    def __init__(self, stage: Stage, max_norm: float | None, skips: int, complete: Callable[[], None]) -> None:
        """skips: steps in a row before this epoch that were skipped. `complete` is called when all have applied a step."""
        self._stage, self._complete = stage, complete
        self._replicas = stage.plan.replicas
        terms = Terms(tuple(part.answers for part in stage.edges), stage.losses, max_norm)
        self._transaction = Transaction(terms, stage.state_step + 1, skips=skips)
        self._reports: dict[int, dict[int, StepReport]] = defaultdict(dict)
        self._decision: Decide | None = None
        self._validating = 0
        self._validation: dict[int, float] = {}

    @property
    def step(self) -> int:
        """The step that is open, or decided but not applied by all."""
        return self._transaction.step

    @property
    def undecided(self) -> bool:
        return self._transaction.fate is Fate.OPEN

    @property
    def validation(self) -> Mapping[int, float]:
        """The losses of validation that have come in, by micro-batch."""
        return self._validation

    def decision(self) -> Decide | None:
        """What was decided, once."""
        decision, self._decision = self._decision, None
        return decision

    def reports(self, step: int) -> Mapping[int, StepReport]:
        """What the replicas have said of a step; forgotten by this call."""
        return self._reports.pop(step, {})

    def open_validation(self, step: int) -> None:
        """Take losses of a validation before this step."""
        self._validation.clear()
        self._validating = step

    def notes(self, step: int) -> str:
        """The first thing that a replica found odd in a step, for the end of a sentence."""
        for index, report in sorted(self._reports[step].items()):
            if report.note:
                replica = self._replicas[index]
                return f" (slice {replica.slice}, {replica.peer}: {report.note})"
        return ""

    def take(self, peer: PeerId, message: StepReport | Applied | EvalReport) -> None:
        """Take in what a peer says. WireError when it is not its to say, RunStopped when the run has no sense any more."""
        if message.epoch < self._stage.run.epoch:
            return  # said again by a peer whose stream was reset while that epoch ended
        match message:
            case StepReport() as report if self._holds(peer, report.replica, report.epoch):
                if report.step in (self.step, self.step + 1):
                    self._reports[report.step][report.replica] = report
                told = transactions.Report(report.squares, report.losses)
                self._step(transactions.Reported(report.replica, report.step, told))
            case Applied(replica=index, step=step, epoch=epoch) if self._holds(peer, index, epoch):
                self._step(transactions.Applied(index, step))
            case EvalReport() as report if self._validates(peer, report) and report.step == self._validating:
                self._validation[report.micro_batch] = report.loss

    def _holds(self, peer: PeerId, index: int, epoch: int) -> bool:
        """Whether a peer may speak for a replica in this epoch. WireError when it is not its."""
        if index >= len(self._replicas) or self._replicas[index].peer != peer:
            raise WireError(f"spoke for replica {index}, which it does not hold")
        return epoch == self._stage.run.epoch

    def _validates(self, peer: PeerId, report: EvalReport) -> bool:
        """Whether the loss comes from who executes that micro-batch, in this epoch. WireError when not."""
        for index, replica in enumerate(self._replicas):
            if replica.slice == self._stage.loss_slice and report.micro_batch in replica.turns:
                return self._holds(peer, index, report.epoch)
        raise WireError(f"spoke of micro-batch {report.micro_batch}, which is nobody's")

    def _step(self, event: transactions.Event) -> None:
        self._transaction, actions = transactions.step(self._transaction, event)
        for action in actions:
            match action:
                case transactions.Decide():
                    self._decision = action
                case transactions.StopRun(reason):
                    raise RunStopped(f"{reason}{self.notes(self.step)}")
                case transactions.Complete():
                    self._complete()
