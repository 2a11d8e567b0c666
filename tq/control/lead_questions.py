"""Rows that went with a unit: a controller that is not the lead tells the lead, and hears who is done with them.

Only the lead has losses put again. It may not have met the unit, when both died together. And it may know that all
tasks were done, since an ack of rows in hand reached it alone. Otherwise the rows are never put again and no other
controller learns of it.
"""

import logging
import threading
from collections.abc import Callable

from asyncflow.errors import TransportError
from asyncflow.process import ServiceThreads
from asyncflow.transport.frame import Limits
from asyncflow.transport.meeting import Credentials
from tq.control.events import DoneElsewhere
from tq.messages import CONTROLLER_REPLIES, TellLost, UnitLoss
from tq.service_channels import ServiceChannels, await_reply

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 5.0


class LeadQuestions:
    """Asks in a thread of its own, again and again; a lead that is away is asked the next time."""

    def __init__(
        self,
        credentials: Credentials,
        name: str,
        lead: str,
        *,
        interval_s: float,
        timeout_s: float,
        losses: Callable[[], list[UnitLoss]],
        heard: Callable[[DoneElsewhere], None],
        threads: ServiceThreads,
    ) -> None:
        """Start.

        Args:
            credentials: store and secret.
            name: of this controller.
            lead: service name.
            interval_s: between two questions.
            timeout_s: deadline of one question.
            losses: returns the rows to tell of; called from the thread.
            heard: called from the thread with what the lead knows.
            threads: the controller's.
        """
        self._channels = ServiceChannels(credentials, name, Limits(), lambda *_: None)
        self._lead = lead
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._losses = losses
        self._heard = heard
        self._closed = threading.Event()
        self._thread = threads.start(self._run, name="ask-lead")

    def close(self) -> None:
        """Stop; idempotent."""
        self._closed.set()
        self._channels.close()
        self._thread.join(timeout=_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        while not self._closed.wait(self._interval_s):
            losses = self._losses()
            if losses:
                try:
                    answer = self._ask(losses)
                except TransportError as error:
                    logger.info("%s: %s", self._lead, error)
                else:
                    self._heard(answer)

    def _ask(self, losses: list[UnitLoss]) -> DoneElsewhere:
        answer = self._channels.get(self._lead, CONTROLLER_REPLIES).submit(TellLost(losses))
        reply = await_reply(answer, self._lead, "TellLost", self._timeout_s)[0]
        rows = [number for loss in losses for record in loss.records for number in record.rows]
        return DoneElsewhere({task: [rows[k] for k in positions] for task, positions in reply.commits.items()})
