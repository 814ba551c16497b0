"""The rules by which batches form: no clock, no I/O, no shared memory."""

from typing import TYPE_CHECKING

from shmsched.lazy_names import names_from
from shmsched.scheduling.ledger import Ledger, LedgerCounts, StepState
from shmsched.scheduling.params import SchedulerParams
from shmsched.scheduling.queues import QueuedStep, StepQueues

if TYPE_CHECKING:
    from shmsched.scheduling.batch import Batch
    from shmsched.scheduling.scheduler import Scheduler

__all__ = ["Batch", "Ledger", "LedgerCounts", "QueuedStep", "Scheduler", "SchedulerParams", "StepQueues", "StepState"]

__getattr__, __dir__ = names_from(
    __name__, {"shmsched.scheduling.batch": ("Batch",), "shmsched.scheduling.scheduler": ("Scheduler",)}
)
