"""The scheduler for use in process: batches by the rules of ``shmsched.dataplane.queues``, and a future for each step."""

from typing import TYPE_CHECKING

from shmsched.lazy_names import names_from
from shmsched.scheduling.params import SchedulerParams

if TYPE_CHECKING:
    from shmsched.scheduling.batch import Batch
    from shmsched.scheduling.scheduler import Scheduler

__all__ = ["Batch", "Scheduler", "SchedulerParams"]

__getattr__, __dir__ = names_from(
    __name__, {"shmsched.scheduling.batch": ("Batch",), "shmsched.scheduling.scheduler": ("Scheduler",)}
)
