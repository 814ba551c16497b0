"""The rules by which batches form: no clock, no I/O, no shared memory."""

from shmsched.scheduling.batch import Batch
from shmsched.scheduling.ledger import Ledger, LedgerCounts, StepState
from shmsched.scheduling.params import SchedulerParams
from shmsched.scheduling.queues import QueuedStep, StepQueues
from shmsched.scheduling.scheduler import Scheduler

__all__ = ["Batch", "Ledger", "LedgerCounts", "QueuedStep", "Scheduler", "SchedulerParams", "StepQueues", "StepState"]
