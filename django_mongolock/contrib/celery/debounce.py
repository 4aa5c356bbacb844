"""`enqueue_once` with a delay: the task starts when no equal one has been enqueued for a while.

The end of a parked lock says when: it is the start of the task and *kept* seconds. The first call parks the lock and
sends one message, that of `_start`; each later call moves the end, in one command and without a message. `_start` comes
back until it is time, removes the lock, and only then sends the task. So a call either moves the end before that, and
the task starts after it; or it finds the key free, and is a first call itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from celery import shared_task
from celery.exceptions import Reject

from ...backends.base import get_backend
from ...engine.detached import Parked
from ...engine.document import Terms
from ...engine.logs import WARNING, log
from ...engine.options import Seconds, check_seconds
from ...engine.replies import Reply
from ...engine.store import Store
from ...exceptions import LockError
from .retry_task import half_of_visibility

NAME: Final = "django_mongolock.start_delayed"
#: How long to wait for a MongoDB that does not answer, in seconds.
AWAY: Final = 5.0


@dataclass(frozen=True, slots=True)
class Pause:
    """How long a task waits for the next call, and for all of them, in seconds."""

    delay: float
    longest: float

    @classmethod
    def check(cls, delay: Seconds | None, longest: Seconds | None, options: Mapping[str, Any]) -> Self | None:
        """The pause that `enqueue_once` was asked for, if any. Raises TypeError, ValueError."""
        if delay is None and longest is None:
            return None
        if delay is None or longest is None:
            raise TypeError("delay= and longest= belong together: delay=10, longest=60")
        if not {"countdown", "eta"}.isdisjoint(options):
            raise TypeError("with delay=, the task starts by that: leave out countdown= and eta=")
        pause = cls(check_seconds("delay", delay), check_seconds("longest", longest))
        if pause.longest < pause.delay:
            raise ValueError(f"longest={longest!r} is shorter than delay={delay!r}")
        return pause

    def prolong(self, store: Store, key: str, found: Reply, kept: float) -> bool:
        """Move the start of the task that was found parked; return whether it was still there."""
        theirs: Any = found.theirs
        left = self.longest - found.held_for
        # Once its time has come, nothing moves, so that the key of a message that is lost becomes free.
        if left <= 0:
            return True
        return Parked(store, key, theirs["grant"], Terms(margin=0, clock_margin=0)).keep(kept + min(self.delay, left))


def send_later(signature: Any, parked: Parked, pause: Pause, kept: float, using: str | None) -> None:
    """Send the message that starts a task, to where the task itself goes."""
    task = signature.type
    where = {name: getattr(task, name, None) for name in ("queue", "exchange", "routing_key")} | signature.options
    route = task.app.amqp.router.route(
        {name: value for name, value in where.items() if value is not None},
        task.name, signature.args, signature.kwargs, task,
    )  # fmt: skip
    place = {name: route[name] for name in ("queue", "exchange", "routing_key") if name in route}
    arguments = (signature, (parked.key, parked.grant, kept, pause.longest, using))
    countdown = min(pause.delay, half_of_visibility(task))
    task.app.tasks[NAME].apply_async(arguments, countdown=countdown, **place)


@shared_task(bind=True, name=NAME, acks_late=True, reject_on_worker_lost=True, ignore_result=True)
def _start(task: Any, signature: Any, lock: tuple[str, str, float, float, str | None]) -> None:
    """Send the task of *signature* if its time has come; if not, this one again."""
    key, grant, kept, longest, using = lock
    parked = Parked(get_backend(using).session().store, key, grant, Terms())
    try:
        lasts, has_lasted = parked.times()
        # No renewal makes a lease shorter than its first one: so its end may be later than the longest pause.
        left = 0.0 if task.request.is_eager else min(lasts - kept, longest - has_lasted)
        if left <= 0:
            parked.give_up()
    except LockError as error:
        log(WARNING, "a delayed task waits for MongoDB", key=key, error=error)
        left = AWAY
    request, again = task.request, signature
    if left > 0:
        countdown = min(left, half_of_visibility(task))
        again = task.signature_from_request(request, countdown=countdown, retries=request.retries)
    try:
        task.app.signature(again).apply_async()
    except Exception as failure:
        raise Reject(failure, requeue=True) from failure
