"""Processes that contend for one key. One part runs in them, and one part starts them."""

import random
import time
from collections.abc import Sequence
from typing import Any, Final

from bench.measure import Turn, Turns
from bench.workers import State, Worker
from django_mongolock.engine import clock

#: The seconds from the message to the beginning, enough for all processes to receive it.
HEAD_START: Final = 0.15
#: The seconds for which the lock is held when its exclusion is tested.
HOLD: Final = 0.002
#: The seconds within which each process asks once. This is long enough for polling processes to get out of step.
RUSH: Final = 0.25


class Liar(Exception):
    """The error of a lock that let two in at once. The figures of such a lock are worth nothing."""


def loop(state: State, number: int, key: str, when: tuple[float, float], hold: float) -> tuple[list[Turn], float]:
    """Take and release the lock over and over. Return the turns, and the seconds of CPU used."""
    peer, turns = state["peer"], []
    begin, end = when
    time.sleep(max(0.0, begin - clock.now()))
    cpu = time.process_time()
    while (asked := clock.now()) < end:
        turns.append(take(peer, key, asked, number, hold=hold))
    return turns, time.process_time() - cpu


def once(state: State, number: int, key: str, begin: float) -> tuple[list[Turn], float]:
    """Take the lock once. The first holder keeps it until all have asked."""
    time.sleep(max(0.0, begin + random.uniform(0, RUSH) - clock.now()))
    cpu = time.process_time()
    turn = take(state["peer"], key, clock.now(), number, until=begin + RUSH + HEAD_START / 3)
    return [turn], time.process_time() - cpu


def take(peer: Any, key: str, asked: float, number: int, *, hold: float = 0.0, until: float = 0.0) -> Turn:
    """Take the lock for one turn of so many seconds, or until then."""
    peer.acquire(key)
    granted = clock.now()
    if (rest := max(hold, until - granted)) > 0:
        time.sleep(rest)
    leaving = clock.now()
    peer.release(key)
    return Turn(asked, granted, leaving, number)


def in_a_loop(crew: Sequence[Worker], key: str, seconds: float, hold: float = 0.0) -> tuple[Turns, float, float]:
    """Let all workers take the lock over and over. Return their turns, the moment of the beginning, and the seconds of
    CPU.
    """
    begin = clock.now() + HEAD_START
    for number, worker in enumerate(crew):
        worker.begin(loop, number, key, (begin, begin + seconds), hold)
    turns, cpu = gather(crew, seconds)
    return turns, begin, cpu


def at_once(crew: Sequence[Worker], key: str) -> Turns:
    """Let each worker take the lock once, all within a moment."""
    begin = clock.now() + HEAD_START
    for number, worker in enumerate(crew):
        worker.begin(once, number, key, begin)
    return gather(crew, 0.0)[0]


def gather(crew: Sequence[Worker], seconds: float) -> tuple[Turns, float]:
    found = [worker.result(seconds + 45.0) for worker in crew]
    return checked(Turns([turn for turns, _ in found for turn in turns])), sum(cpu for _, cpu in found)


def checked(turns: Turns) -> Turns:
    """Return the turns, or raise Liar if a process was let in while another one held the lock."""
    if twice := turns.held_twice:
        raise Liar(f"it is no lock: {twice} of {len(turns.turns)} were let in while another one held it")
    return turns


def prove(crew: Sequence[Worker], key: str) -> None:
    """Let the workers contend for a moment, with short holds. Raises Liar."""
    in_a_loop(crew, key, seconds=0.2, hold=HOLD)
