"""Who was done with rows that went with a unit: a controller that is not the lead asks the lead, as long as it has any.

Only the lead has losses put again, and it does not when it knows that all tasks were done; an ack of rows in hand may
have reached it alone. Then nobody else would ever hear of these rows.
"""

import logging
import threading
from collections.abc import Callable

from asyncflow.errors import TransportError
from asyncflow.transport.frame import Limits
from asyncflow.transport.handshake import Credentials
from tq.control.events import DoneElsewhere
from tq.messages import CONTROLLER_REPLIES, GetDone
from tq.service_channels import ServiceChannels, await_reply

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 5.0

Lost = tuple[list[int], list[int]]
"""Rows and, by position, their partitions."""


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
        lost: Callable[[], Lost],
        heard: Callable[[DoneElsewhere], None],
    ) -> None:
        """Start.

        Args:
            credentials: store and secret.
            name: of this controller.
            lead: service name.
            interval_s: between two questions.
            timeout_s: deadline of one question.
            lost: returns the rows to ask about; called from the thread.
            heard: called from the thread with what the lead knows.
        """
        self._channels = ServiceChannels(credentials, name, Limits(), lambda *_: None)
        self._lead = lead
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._lost = lost
        self._heard = heard
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ask-lead", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop; idempotent."""
        self._closed.set()
        self._channels.close()
        self._thread.join(timeout=_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        while not self._closed.wait(self._interval_s):
            rows, partitions = self._lost()
            if rows:
                try:
                    self._heard(self._ask(rows, partitions))
                except TransportError as error:
                    logger.info("%s: %s", self._lead, error)

    def _ask(self, rows: list[int], partitions: list[int]) -> DoneElsewhere:
        answer = self._channels.get(self._lead, CONTROLLER_REPLIES).submit(GetDone(rows, partitions))
        reply = await_reply(answer, self._lead, "GetDone", self._timeout_s)[0]
        return DoneElsewhere({task: [rows[k] for k in positions] for task, positions in reply.commits.items()})
