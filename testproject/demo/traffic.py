"""The users of the demo. Sellers change their minds, and buyers click twice.

The users are a process of their own, ``python -m testproject.demo.traffic BASE SELLER…``. The sellers' password comes
from the environment. The process ends on SIGTERM, and prints its deeds as one line of JSON.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from testproject.demo.browser import Answer, Browser

PASSWORD_VARIABLE = "DEMO_TRAFFIC_PASSWORD"
ADS_PER_SELLER = 4
THINGS = ("bicycle", "piano", "lamp", "canoe", "typewriter", "armchair", "telescope", "tent", "globe")


class Person:
    """One seller in a browser who is sometimes a buyer too."""

    def __init__(self, base: str, username: str, password: str, stop: threading.Event) -> None:
        self.did: Counter[str] = Counter()
        self._browser, self._stop = Browser(base), stop
        self._login = (username, password)
        self._ads: list[str] = []
        self._moods: list[Callable[[], object]] = [self.haggle, self.haggle_and_delete, self.haggle_and_opt]
        self._moods += [self.switch_all, self.buy, self.change_mind]

    def run(self) -> None:
        """Do one thing after the other until *stop* is set."""
        self._browser.login("/login/", *self._login)
        while not self._stop.wait(random.uniform(0.1, 0.4)):
            while len(self._ads) < ADS_PER_SELLER:
                self.create()
            random.choices(self._moods, weights=(4, 4, 3, 1, 2, 3))[0]()
        self._send("POST", "/api/seller/", {"exports": True})

    def create(self) -> None:
        """Put up a new ad."""
        thing = random.choice(THINGS)
        body = {
            "title": f"{thing.capitalize()}, hardly used",
            "body": "Collect it yourself.",
            "price": random.randint(5, 400),
        }
        self._ads.append(self._send("POST", "/api/ads/", body).json()["ad"])

    def haggle(self) -> str:
        """Lower the price again and again. Each export is still under way when the next begins."""
        ad = random.choice(self._ads)
        for _ in range(random.randint(2, 4)):
            self._edit(ad)
            self._hesitate()
        return ad

    def haggle_and_delete(self) -> None:
        """Lower the price until a buyer is found, then delete the ad."""
        ad = self.haggle()
        self._send("DELETE", f"/api/ads/{ad}/", {})
        self._ads.remove(ad)

    def haggle_and_opt(self) -> None:
        """Lower the price, then take the ad out of the external service. Later put it back."""
        ad = self.haggle()
        self._send("POST", f"/api/ads/{ad}/opt/", {"opted_in": False})
        if random.random() < 0.5:
            self._hesitate()
            self._send("POST", f"/api/ads/{ad}/opt/", {"opted_in": True})

    def change_mind(self) -> None:
        """Put an ad into the external service and take it out, faster than the site answers, and leave it in at the
        end."""
        path = f"/api/ads/{random.choice(self._ads)}/opt/"
        with ThreadPoolExecutor(4) as clicks:
            for opted_in in (True, False, True, False):
                clicks.submit(self._send, "POST", path, {"opted_in": opted_in})
        self._send("POST", path, {"opted_in": True})

    def switch_all(self) -> None:
        """Take all ads out of the external service, edit one, and put all back."""
        self._send("POST", "/api/seller/", {"exports": False})
        self._edit(random.choice(self._ads))
        self._stop.wait(random.uniform(0.2, 1.0))
        self._send("POST", "/api/seller/", {"exports": True})

    def buy(self) -> None:
        """Order something, click on "pay" twice, have it shipped."""
        body = {"item": random.choice(THINGS), "price": random.randint(5, 400)}
        order = self._send("POST", "/api/orders/", body).json()["order"]
        with ThreadPoolExecutor(2) as clicks:
            for _ in range(2):
                clicks.submit(self._send, "POST", f"/api/orders/{order}/pay/", {})
        self._send("POST", f"/api/orders/{order}/ship/", {})

    def _edit(self, ad: str) -> None:
        self._send("PATCH", f"/api/ads/{ad}/", {"price": random.randint(5, 400)})

    def _hesitate(self) -> None:
        self._stop.wait(random.uniform(0.0, 0.12))

    def _send(self, method: str, path: str, body: dict[str, Any]) -> Answer:
        answer = self._browser.send(method, path, body)
        self.did["requests"] += 1
        self.did["met a lock"] += answer.status == 423
        self.did["errors"] += answer.status >= 500
        return answer


def main(base: str, usernames: list[str]) -> None:
    """Run one person per user name on the site at *base*, until SIGTERM."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    people = [Person(base, name, os.environ[PASSWORD_VARIABLE], stop) for name in usernames]
    with ThreadPoolExecutor(len(people)) as pool:
        runs = [pool.submit(person.run) for person in people]
        for run in runs:
            run.add_done_callback(lambda _: stop.set())  # one person's trouble ends the traffic
    for run in runs:
        run.result()
    print(json.dumps(sum((person.did for person in people), Counter[str]())))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
