"""The output and the effects of clear_stale_locks and list_locks, and the locks that they leave alone."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connections
from pytest_django import Settings

from django_mongolock import LockNotAcquired, mongo_lock
from django_mongolock.backends import mongo_store
from django_mongolock.contrib.celery import clear_stale_locks
from django_mongolock.inspection import kinds, operations, queries
from django_mongolock.inspection.kinds import Choice
from tests.support.lock_documents import DAMAGE, TOKEN, Locks, entry, now, waiter
from tests.support.lock_fixtures import WITH_MONGO
from tests.support.programs import Start, starting

pytestmark = WITH_MONGO

start = pytest.fixture(starting)


def run(*arguments: str) -> tuple[str, str]:
    """Run a command in this process, and return its stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    call_command(*arguments, stdout=out, stderr=err)
    return out.getvalue(), err.getvalue()


def run_json(*arguments: str) -> Any:
    """Run a command with --json, and return its one object."""
    out, err = run(*arguments, "--json")
    assert err == ""
    return json.loads(out)


def locks_of(*arguments: str) -> Any:
    """Return a command's facts about the named locks, the first kind."""
    (answer,) = (found for found in run_json(*arguments)["kinds"] if found["kind"] == "locks")
    return answer


def clear(*arguments: str) -> Any:
    return locks_of("clear_stale_locks", "--no-input", *arguments)


def keys(listed: Any) -> list[str]:
    return [lock["key"] for lock in listed]


def shell(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "MONGODB_NAME": str(connections["mongo"].settings_dict["NAME"]), **environment}
    argv = [sys.executable, "-m", "django", *arguments]
    return subprocess.run(
        argv, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60, check=False
    )


class TestClear:
    """Stale locks are cleared, and nothing else."""

    def test_clears(self, locks: Locks) -> None:
        """A stale lock is free afterwards, with its end counted as expired. Held and free ones stay as they were."""
        locks.stale("stale:1", "stale:2")
        locks.held("held")
        locks.free("free")
        locks.add("done", [entry(3, left=-5, released=now())])  # it was only kept, so nobody died
        before = [locks.read(key) for key in ("held", "free", "done")]
        answer = clear()
        assert (answer["found"], answer["cleared"]) == (2, 2)
        assert sorted(keys(answer["stale"])) == ["stale:1", "stale:2"]
        assert [locks.read(key) for key in ("held", "free", "done")] == before
        after = locks.read("stale:1")
        assert (after["holders"], after["expires_at"], after["expired"], after["token"]) == ([], None, 2, TOKEN + 50)

    def test_renewed_meanwhile(self, locks: Locks) -> None:
        """F51: A lock that was renewed after it was found stale stays, because the update checks it again."""
        locks.stale("k", "z")
        store = mongo_store()
        locks.collection.update_one({"_id": "k"}, {"$set": {"holders": [entry(1)], "expires_at": entry()["until"]}})
        renewed = locks.read("k")
        assert operations.clear_stale(store, ["k", "z"]) == (1, 0)
        assert locks.read("k") == renewed

    def test_taken_meanwhile(self, locks: Locks, monkeypatch: pytest.MonkeyPatch) -> None:
        """A lock that is acquired between the search and the clearing stays, and is not counted as cleared."""
        locks.stale("k")
        find = queries.snapshots

        def find_then_take(*arguments: Any, **options: Any) -> Any:
            for found in find(*arguments, **options):
                taken.append(mongo_lock("k").acquire())
                yield found

        taken: list[Any] = []
        monkeypatch.setattr(queries, "snapshots", find_then_take)
        out, _ = run("clear_stale_locks", "--no-input")
        assert "Cleared 0 of 1 stale locks. 1 had been renewed, acquired or released by then." in out
        taken[0].ensure_held()
        assert taken[0].release()

    def test_damaged(self, locks: Locks) -> None:
        """Damaged documents stay as they are, are reported, and do not stop the others."""
        locks.stale("good")
        for name, (change, _) in DAMAGE.items():
            locks.add(name, [entry(1, left=-60)], [waiter(2, left=-60)], change=change)
        before = [locks.read(name) for name in DAMAGE]
        answer = clear()
        assert (keys(answer["stale"]), answer["cleared"], len(answer["damaged"])) == (["good"], 1, len(DAMAGE))
        assert [locks.read(name) for name in DAMAGE] == before
        locks.stale("better")
        assert f"{len(DAMAGE)} damaged documents were not changed" in run("clear_stale_locks", "--no-input")[0]

    def test_after_a_failover(self, locks: Locks) -> None:
        """A lock written under another primary gets its lease once more, and is not counted as cleared. Next time it is
        stale."""
        locks.stale("old", change={"clock": "another election"})
        locks.stale("new")
        answer = clear()
        assert (answer["found"], answer["cleared"], answer["postponed"]) == (2, 1, 1)
        assert locks.read("old")["holders"]
        assert clear()["found"] == 0

    def test_what_is_stale_is_named(self, locks: Locks) -> None:
        """The list says where the lock of a killed process is. If none is stale, nothing is."""
        assert run("list_locks")[0] == "No lock is held.\n"
        assert run("clear_stale_locks", "--no-input")[0] == "There are no stale locks.\n"
        locks.stale("k")
        assert run("list_locks")[0] == "No lock is held.\nThere are stale ones: see --stale.\n"
        with mongo_lock("other"):
            assert run("list_locks")[0].endswith("There are stale ones: see --stale.\n")
        for choice in (["--older-than", "1h"], ["--key", "other"]):
            assert run("clear_stale_locks", "--no-input", *choice)[0] == "There are no such locks.\n"
        assert "stale" not in run("list_locks", "--key", "other")[0]

    def test_a_task_is_named_once(self, locks: Locks) -> None:
        """The owner of a task's lock is the id of the task, and an error names the id once."""
        locks.add("k", [entry(9, place="task shop.tasks.bill 7d0f-1", owner="7d0f-1")])
        with pytest.raises(LockNotAcquired) as refusal, mongo_lock("k", wait=0):
            pass
        assert str(refusal.value).count("7d0f-1") == 1


class TestWhich:
    """Options limit the locks to clear. The server checks each option again in the update."""

    @pytest.fixture(autouse=True)
    def some(self, locks: Locks) -> None:
        locks.stale("order:1", "order:22", "ad:1", over=60)
        locks.stale("order:old", over=7_200)
        locks.add("owned", [entry(1, left=-60, owner="job-1")])

    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [
            ((), ["ad:1", "order:1", "order:22", "order:old", "owned"]),
            (("--key", "order:*"), ["order:1", "order:22", "order:old"]),
            (("--key", "order:?"), ["order:1"]),
            (("--key", "*:1"), ["ad:1", "order:1"]),
            (("--key", "*r*:*d"), ["order:old"]),
            (("--key", ".*"), []),
            (("--key", "$where"), []),
            (("--owner", "job-1"), ["owned"]),
            (("--owner", "*"), []),
            (("--older-than", "1h"), ["order:old"]),
            (("--older-than", "0.5h", "--key", "order:*"), ["order:old"]),
        ],
    )
    def test_options(self, locks: Locks, arguments: tuple[str, ...], expected: list[str]) -> None:
        """Patterns describe whole keys, and are no regular expressions. Owners are compared in full."""
        assert sorted(keys(locks_of("clear_stale_locks", "--dry-run", *arguments)["stale"])) == expected
        assert clear(*arguments)["cleared"] == len(expected)
        left = {document["_id"] for document in locks.collection.find({"holders": {"$ne": []}})}
        assert left == {"ad:1", "order:1", "order:22", "order:old", "owned"} - set(expected)

    def test_update_judges_all_of_it(self) -> None:
        """The update trusts no time, owner or key that was found before."""
        store = mongo_store()
        for choice in (
            Choice("stale", older_than=3_600),
            Choice("stale", owner="other"),
            Choice("stale", key=kinds.glob("x*")),
        ):
            assert operations.clear_stale(store, ["owned"], choice) == (0, 0)

    def test_prefix(self, locks: Locks, settings: Settings) -> None:
        """Only the locks of this project are cleared. The prefix of the project may be left out, and is shown."""
        locks.stale("shop:order:1", "shopper:1", "shop:ad")
        settings.MONGOLOCK = {**settings.MONGOLOCK, "KEY_PREFIX": "shop:"}
        for pattern in ("order:*", "shop:order:*"):
            assert keys(locks_of("clear_stale_locks", "--dry-run", "--key", pattern)["stale"]) == ["shop:order:1"]
        assert sorted(keys(locks_of("list_locks", "--stale")["locks"])) == ["shop:ad", "shop:order:1"]
        assert clear()["cleared"] == 2
        assert locks.read("order:1")["holders"]

    @pytest.mark.parametrize(
        "arguments",
        [
            ["--older-than=-1"],
            ["--older-than=5x"],
            ["--older-than=nan"],
            ["--older-than="],
            ["--older-than=٣s"],
            ["--key="],
            ["--key=a\nb"],
            ["--key=\udcff"],
            ["--key=*", "--kind=ad exports"],
            ["--database=default"],
        ],
    )
    def test_wrong_values(self, locks: Locks, arguments: list[str]) -> None:
        """A wrong value is an error, and nothing is cleared."""
        with pytest.raises(CommandError):
            run("clear_stale_locks", "--no-input", *arguments)
        assert locks.read("owned")["holders"]

    def test_the_task(self) -> None:
        """The task for the beat schedule does the same, and refuses wrong values, too."""
        for wrong in ("5m", -5):
            with pytest.raises((TypeError, ValueError), match="older_than"):
                clear_stale_locks(wrong)  # type: ignore[arg-type]
        assert clear_stale_locks(timedelta(hours=1)) == {"found": 1, "cleared": 1}
        assert clear_stale_locks() == {"found": 4, "cleared": 4}


class TestAsking:
    """Nothing is cleared without a yes."""

    @pytest.fixture
    def answer(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
        def answer(text: str) -> list[str]:
            asked: list[str] = []
            monkeypatch.setattr("sys.stdin", type("Terminal", (), {"isatty": lambda self: True})())

            def reply(prompt: str) -> str:
                asked.append(prompt)
                return text

            monkeypatch.setattr("builtins.input", reply)
            return asked

        return answer

    def test_no_terminal(self, locks: Locks) -> None:
        """Without a terminal the command names the option to use, and does nothing. With --json it asks nobody,
        either."""
        locks.stale("k")
        for arguments in ((), ("--json",)):
            with pytest.raises(CommandError, match="--no-input"):
                run("clear_stale_locks", *arguments)
        assert locks.read("k")["holders"]

    @pytest.mark.parametrize(
        ("text", "cleared"), [("y", True), ("Yes ", True), ("", False), ("n", False), ("yy", False)]
    )
    def test_answers(self, locks: Locks, answer: Callable[[str], list[str]], text: str, cleared: bool) -> None:
        """The command shows the number and the first of the stale locks, and then asks."""
        locks.stale(*(f"k{number:02d}" for number in range(15)))
        asked = answer(text)
        out, _ = run("clear_stale_locks")
        assert asked == ["\nClear them? [y/N] "]
        assert "Stale locks: 15." in out
        assert out.count("stale  ") == 10
        assert ("Cleared 15 of 15" in out) is cleared
        assert ("Nothing was cleared." in out) is not cleared
        assert bool(locks.read("k00")["holders"]) is not cleared


class TestOutput:
    """The output is a table for people, one object for programs, and exit codes for scripts."""

    def test_dry_run(self, locks: Locks) -> None:
        """A dry run names the processes that left the locks, and changes nothing."""
        locks.add("k", [entry(1, left=-65, place="task export", user="anna", host="web-9")])
        before = locks.read("k")
        out, _ = run("clear_stale_locks", "--dry-run")
        assert "task export, web-9 · pid 4001 · MainThread · user anna" in out
        assert re.search(r"ended 1 min \d s ago", out)
        assert "Stale locks: 1. Nothing was cleared." in out
        assert locks.read("k") == before

    def test_json(self, locks: Locks) -> None:
        """JSON has the facts of the holders, the seconds since the end, and the counts, but no grant."""
        locks.add("k", [entry(1, left=-65, owner="o", label="l")], [waiter(5, left=-1)])
        answer = run_json("clear_stale_locks", "--dry-run")
        named, documents = answer.pop("kinds")
        assert answer == {"dry_run": True}
        [lock] = named.pop("stale")
        assert (documents["kind"], documents["stale"]) == ("ad exports", [])
        counted = {"found": 1, "cleared": 0, "postponed": 0, "dated": 0, "damaged": []}
        assert named == {"kind": "locks", **counted, "error": None}
        assert 65 <= lock["over_seconds"] < 75
        assert {"owner": "o", "label": "l", "host": "web-1", "pid": 4001, "token": TOKEN + 1}.items() <= lock[
            "holders"
        ][0].items()
        assert "secret" not in json.dumps(lock)
        assert clear("--key", "none")["stale"] == []

    @pytest.mark.long
    def test_exit_codes(self, locks: Locks) -> None:
        """The exit codes are 0, 1, 2 and 3, as in the help. Errors go to stderr without a traceback or a password."""
        assert shell("clear_stale_locks", "--no-input").returncode == 0
        locks.stale("k")
        found = shell("clear_stale_locks", "--dry-run", "--json")
        assert (found.returncode, json.loads(found.stdout)["kinds"][0]["found"], found.stderr) == (3, 1, "")
        refused = shell("clear_stale_locks")
        assert (refused.returncode, refused.stdout) == (1, "")
        assert refused.stderr.startswith("CommandError: there is no terminal for the confirmation")
        assert shell("clear_stale_locks", "--older-than", "x").returncode == 2
        assert shell("list_locks", "--key", "").returncode == 2
        cleared = shell("clear_stale_locks", "--no-input")
        assert (cleared.returncode, cleared.stdout) == (0, "Cleared 1 of 1 stale locks.\n")
        usage = shell("clear_stale_locks", "--help").stdout
        assert all(f"\n  {code}  " in usage for code in (0, 1, 2, 3))

    @pytest.mark.long
    @pytest.mark.parametrize(
        "arguments", [("clear_stale_locks", "--no-input"), ("clear_stale_locks", "--dry-run"), ("list_locks",)]
    )
    def test_away(self, away: None, arguments: tuple[str, ...]) -> None:
        """If MongoDB is away, the error is in our words."""
        with pytest.raises(CommandError, match="MongoDB did not answer") as caught:
            run(*arguments)
        assert "hunter2" not in f"{caught.value} {caught.value.__cause__}"


class TestList:
    @pytest.fixture(autouse=True)
    def some(self, locks: Locks) -> None:
        locks.add("kept", [entry(6, left=900, released=now())])
        locks.add("b:held", [entry(1, owner="o"), entry(2)], [waiter(3), waiter(4, left=-1)])
        locks.held("a:held", left=60)
        locks.stale("stale")
        locks.free("free")
        locks.add("z:bad", [entry(5)], change={"token": 1.5})

    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [
            ((), ["a:held", "b:held", "z:bad"]),
            (("--stale",), ["stale"]),
            (("--waiting",), ["b:held"]),
            (("--kept",), ["kept"]),
            (("--all",), ["a:held", "b:held", "free", "kept", "stale", "z:bad"]),
            (("--key", "?:held"), ["a:held", "b:held"]),
            (("--all", "--owner", "o"), ["b:held"]),
            (("--limit", "1"), ["a:held"]),
        ],
    )
    def test_which(self, arguments: tuple[str, ...], expected: list[str]) -> None:
        """Held locks are listed by default, in the order of their ends."""
        listed = locks_of("list_locks", *arguments)
        assert keys(listed["locks"]) == expected
        assert listed["more"] is ("--limit" in arguments)

    def test_table(self) -> None:
        """The table has key, state, holder, held for, left, waiting and token. Damage is in words."""
        assert re.split(" {2,}", run("list_locks")[0].splitlines()[0])[-2:] == ["LEFT", "WAITING"]
        lines = run("list_locks", "--wide")[0].splitlines()
        assert re.split(" {2,}", lines[0]) == ["KEY", "STATE", "HOLDER", "HELD FOR", "LEFT", "WAITING", "TOKEN"]
        assert lines[2].startswith("b:held")
        for word in (
            "held",
            "owner o and 1 more, web-1 · pid 4001 · MainThread",
            "1 min 1",
            "min",
            f"1        {TOKEN + 2}",
        ):
            assert word in lines[2]
        assert "its field 'token' is float" in lines[3]
        assert "and more: see --limit" in run("list_locks", "--limit", "2")[0]
        assert "and more" not in run("list_locks", "--limit", "3")[0]
        assert "and more" not in run("list_locks", "--limit", "0")[0].replace("and 1 more", "")

    def test_a_hundred_columns(self, locks: Locks) -> None:
        """F221: A line has no more than a hundred columns if its key has room. The label is cut, and no host or pid."""
        key, place = "long:" + "k" * 200, "task shop.tasks.import_catalog 0d7f4b6e-8a0f-4f5e-9f6a-3a1a3c1f2b11"
        locks.add(key, [entry(6, label="the nightly import of all books", place=place, user="u" * 80, left=-5_000_000)])
        locks.add("short", [entry(7, place=place, host="worker-3")])
        assert key in run("list_locks", "--all")[0]
        assert re.search(r"task shop.+….+_catalog, worker-3 · pid 4007 · …", run("list_locks", "--key", "short")[0])
        locks.collection.delete_one({"_id": key})
        locks.add("key", [entry(6, label="the nightly import " + "x" * 80, place=place, user="anna")])
        out, _ = run("list_locks", "--all")
        assert max(map(len, out.splitlines())) <= 100
        assert re.search(r"the night.*…x+, web-1 · pid 4006 · …", out)
        locks.collection.delete_one({"_id": "key"})
        locks.add(key, [entry(6, label="the nightly import of all books", place=place, user="u" * 80)])
        wide, _ = run("list_locks", "--all", "--wide")
        assert all(text in wide for text in (key, "u" * 80, "0d7f4b6e-8a0f-4f5e-9f6a-3a1a3c1f2b11"))

    @pytest.mark.parametrize("key", ["long:" + "k" * 200, "a\u202eb", "b\U000e0041c", r"c\u202ed", "d e  f"])
    def test_what_is_printed_is_taken(self, locks: Locks, key: str) -> None:
        """F221: `release_lock` takes a key as `list_locks` prints it, in a pipe too, and with its codes."""
        locks.collection.delete_many({})
        locks.held(key)
        line = run("list_locks")[0].splitlines()[1]
        printed = line.split("  works  ")[0].rstrip()
        assert "was taken" in run("release_lock", printed, "--no-input")[0]
        assert locks.read(key)["holders"] == []

    def test_no_such_key(self, locks: Locks) -> None:
        """F221: A key without a lock is told apart from a key without a holder."""
        locks.free("a:free")
        for key, said in (("nowhere", "no lock has the key 'nowhere': see list_locks"), ("a:free", "is not held now")):
            with pytest.raises(CommandError, match=said) as refusal:
                run("release_lock", key, "--no-input")
            assert refusal.value.returncode == 3

    def test_encoding(self, locks: Locks) -> None:
        """Characters that the output's encoding lacks are shown by their codes."""
        locks.held("ключ:5")
        stream = io.TextIOWrapper(io.BytesIO(), "ascii")
        call_command("list_locks", "--key", "ключ:*", stdout=stream)
        stream.seek(0)
        assert r"\u043a\u043b\u044e\u0447:5  works  unknown, web-1 \xb7 pid 4001" in stream.read()

    @pytest.mark.long
    def test_whoever_reads_has_enough(self, locks: Locks, start: Start) -> None:
        """A command ends without a traceback if only the beginning of its output is read, as by `head`."""
        locks.many(free=0, held=2_000)
        running = start("list_locks", "--limit", "0")
        assert running.stdout
        assert running.stderr
        assert running.stdout.readline().startswith("KEY")
        running.stdout.close()
        assert (running.stderr.read(), running.wait()) == ("", 141)


class TestPatterns:
    """The meaning of patterns, compared with a slow and simple judge."""

    @pytest.mark.parametrize(
        ("prefix", "end"),
        [
            ("a", "b"),
            ("az", "a{"),
            ("", ""),
            ("\ud7ff", "\ue000"),
            ("a\U0010ffff", "b"),
            ("\U0010ffff", ""),
            ("é", "ê"),
        ],
    )
    def test_range(self, prefix: str, end: str) -> None:
        """The end of a range is the first text after all that start with the prefix."""
        assert kinds.starting(prefix) == kinds.KeyMatch(prefix, end)

    @pytest.mark.long
    @pytest.mark.parametrize("pattern", ["*a" * 100 + "*b", "*a?" * 20 + "*b", "*aa?" * 10 + "*bb*a"])
    def test_not_slow(self, locks: Locks, pattern: str) -> None:
        """F56: Keys on which a backtracking search takes 1.5 ms each, until the server gives it up, take some 10 us."""
        locks.collection.insert_many({"_id": f"b{number:05d}" + "a" * 500} for number in range(20_000))
        start = time.monotonic()
        assert locks.collection.count_documents(kinds.glob(pattern).query()) == 0
        assert time.monotonic() - start < 10
