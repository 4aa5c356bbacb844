/* Refreshes the dashboard in place: the focus stays, nothing scrolls, and a screen reader hears a change once. */
"use strict";
(() => {
  const control = document.getElementById("mongolock-control");
  const live = document.getElementById("mongolock-live");
  if (!control || !live) return;
  const words = control.dataset;
  const said = document.getElementById("mongolock-said");
  const refreshing = document.getElementById("mongolock-refreshing");
  const pause = document.getElementById("mongolock-pause");
  const LONGEST = 60000;
  let paused = false, timer = 0, delay = words.every * 1000, asking = null;

  // Makes the tree equal to the new one. Nodes are identified by what they are about: so the link that has the focus
  // never becomes the link of another lock.
  const name = (node) => (node.nodeType === 1 ? node.id || node.dataset.key || "" : "");
  const alike = (a, b) => a.nodeType === b.nodeType && a.nodeName === b.nodeName && name(a) === name(b);

  function become(old, fresh) {
    if (old.nodeType !== 1) {
      if (old.nodeValue !== fresh.nodeValue) old.nodeValue = fresh.nodeValue;
      return;
    }
    for (const { name: attribute } of [...old.attributes]) {
      if (!fresh.hasAttribute(attribute) && attribute !== "open") old.removeAttribute(attribute);
    }
    for (const { name: attribute, value } of fresh.attributes) {
      if (old.getAttribute(attribute) !== value) old.setAttribute(attribute, value);
    }
    children(old, fresh);
  }

  function children(old, fresh) {
    const known = new Map();
    for (const node of old.childNodes) if (name(node)) known.set(name(node), node);
    let here = old.firstChild;
    for (const wanted of [...fresh.childNodes]) {
      let node = name(wanted) ? known.get(name(wanted)) : here;
      if (node && !alike(node, wanted)) node = null;
      if (!node) {
        old.insertBefore(wanted, here);
        continue;
      }
      become(node, wanted);
      if (node === here) here = here.nextSibling;
      else old.insertBefore(node, here);
    }
    while (here) {
      const next = here.nextSibling;
      here.remove();
      here = next;
    }
  }

  function replace(html) {
    const fresh = document.createElement("div");
    fresh.append(document.createRange().createContextualFragment(html));
    if (!fresh.querySelector("#mongolock-state")) throw new Error("not the dashboard");
    const before = summary(), had = document.activeElement, section = had.closest("#mongolock-live section");
    children(live, fresh);
    const after = summary();
    if (after !== before) said.textContent = after;
    if (!live.contains(had)) {
      if (section && document.activeElement === document.body) settle(document.getElementById(section.id));
    } else if (had !== document.activeElement) had.focus({ preventScroll: true });
  }

  // The element with the focus is gone: its section gets the focus, not the top of the page.
  function settle(section) {
    if (!section) return;
    section.tabIndex = -1;
    section.focus({ preventScroll: true });
    said.textContent = words.gone;
  }

  const summary = () => {
    const look = document.getElementById("look").cloneNode(true);
    for (const mark of look.querySelectorAll("[aria-hidden]")) mark.remove();
    return look.textContent.replace(/\s+/g, " ").trim();
  };

  function show(state) {
    control.dataset.state = state;
    refreshing.textContent = words[state];
    pause.textContent = paused ? words.resume : words.pause;
  }

  async function refresh() {
    clearTimeout(timer);
    if (asking) return;
    asking = new AbortController();
    const giveUp = setTimeout(() => asking.abort(), LONGEST);
    try {
      const answer = await fetch("?part=live", { redirect: "manual", cache: "no-store", signal: asking.signal });
      if (answer.type === "opaqueredirect" || answer.status === 403) return show("out");
      if (!answer.ok) throw new Error(String(answer.status));
      replace(await answer.text());
      delay = words.every * 1000;
      show(paused ? "paused" : "live");
    } catch {
      delay = Math.min(LONGEST, delay * 2);
      show("away");
    } finally {
      clearTimeout(giveUp);
      asking = null;
      plan();
    }
  }

  function plan() {
    clearTimeout(timer);
    if (!paused && !document.hidden && control.dataset.state !== "out") timer = setTimeout(refresh, delay);
  }

  pause.addEventListener("click", () => {
    paused = !paused;
    show(paused ? "paused" : "live");
    if (paused) plan();
    else refresh();
  });
  document.getElementById("mongolock-now").addEventListener("click", (event) => {
    event.preventDefault();
    refresh();
  });
  document.addEventListener("visibilitychange", () => (document.hidden || paused ? plan() : refresh()));
  pause.hidden = false;
  show("live");
  plan();
})();
