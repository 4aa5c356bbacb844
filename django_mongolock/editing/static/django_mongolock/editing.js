/* The edit lock of this tab: beats while the tab lives, releases the lock on leaving, and shows what has changed.
   Everything that is shown comes from the server, in the reader's language. Nothing here may lose what was typed. */
"use strict";
(() => {
  const panel = document.querySelector("[data-mongolock-editing]");
  if (!panel || panel.dataset.deleted) { return; }
  const part = (name) => panel.querySelector(`[data-part="${name}"]`);
  const form = document.getElementById(panel.dataset.form) || document.querySelector("form:has([name=edit_lock_tab])");
  const readonly = Boolean(panel.dataset.readonly);
  const field = (name) => (form ? form.querySelector(`input[name="${name}"]`) : null);
  const every = parseFloat(panel.dataset.beat) * 1000;
  const memory = `mongolock:${panel.dataset.key}`;
  const drafts = "mongolock-draft:";
  const mineOnly = `${drafts}${panel.dataset.person}:`;
  const draftName = `${mineOnly}${panel.dataset.key}`;
  const SHAPES = { mine: "●", busy: "◆", free: "○", idle: "○", gone: "▲", away: "▲", refused: "▲" };
  const storage = {
    get(name) { try { return sessionStorage.getItem(name); } catch { return null; } },
    set(name, value) { try { sessionStorage.setItem(name, value); } catch { /* full, or not allowed */ } },
    drop(name) { try { sessionStorage.removeItem(name); } catch { /* not allowed */ } },
  };

  // What another person typed in this tab, before a logout, is not for this one.
  try {
    for (const name of Object.keys(sessionStorage)) {
      if (name.startsWith(drafts) && !name.startsWith(mineOnly)) { storage.drop(name); }
    }
  } catch { /* not allowed */ }

  let state = panel.dataset.mongolockEditing;  // as the server last reported it
  let had = !readonly;                         // this page had the lock, so it may hold what was typed
  let mine = had && Boolean(panel.dataset.held);  // it has it now, as far as is known
  let reached = true;                          // the server has answered the last question
  let sending = false;
  let acting = false;                          // a button was pressed: no beat comes between it and its answer
  let dirty = state === "refused";
  let lastTouch = performance.now();           // by a clock that cannot be set
  let timer = 0;
  let wanted = 0;                              // answers to older questions are dropped

  // A page of this very tab that was left a moment ago has the lock, or is about to give it back: take its place.
  // A duplicate of a living tab does not find this: only a page that is left writes it down.
  const left = storage.get(memory);
  storage.drop(memory);
  if (readonly && left) {
    const address = new URL(panel.dataset.page, location.href);
    address.searchParams.set("edit-tab", left);
    location.replace(address);
    return;
  }
  if (new URLSearchParams(location.search).has("edit-tab")) {
    history.replaceState(history.state, "", panel.dataset.page + location.hash);
  }

  const address = (action) => {
    const url = new URL(panel.dataset.page, location.href);
    url.searchParams.set("edit-lock", action);
    return url;
  };
  const message = (more) => {
    const data = new FormData();
    const token = (form || panel).querySelector("input[name=csrfmiddlewaretoken]")
      || document.querySelector("input[name=csrfmiddlewaretoken]");
    if (token) { data.set("csrfmiddlewaretoken", token.value); }
    for (const name of ["edit_lock_tab", "version_read"]) {
      if (field(name)) { data.set(name, field(name).value); }
    }
    if (had) { data.set("had", "1"); }
    for (const [name, value] of Object.entries(more || {})) { data.set(name, value); }
    return data;
  };

  async function ask(action, more) {
    const number = ++wanted;
    try {
      const response = await fetch(address(action), {
        method: "POST", body: message(more), headers: { Accept: "application/json" },
        credentials: "same-origin", redirect: "manual", signal: AbortSignal.timeout(Math.max(10000, every)),
      });
      const answer = response.ok ? await response.json() : null;
      if (response.status === 403) { await renewToken(); }
      if (number !== wanted) { return null; }
      if (answer !== null) { show(answer, action); }
      reach(answer !== null);
      return answer;
    } catch {
      if (number === wanted) { reach(false); }
      return null;
    }
  }

  // A login, in another tab, gives all forms another token.
  async function renewToken() {
    const response = await fetch(panel.dataset.page, { credentials: "same-origin", redirect: "manual" });
    const page = new DOMParser().parseFromString(await response.text(), "text/html");
    const token = page.querySelector("input[name=csrfmiddlewaretoken]");
    for (const each of token ? document.querySelectorAll("input[name=csrfmiddlewaretoken]") : []) { each.value = token.value; }
  }

  // Without an answer it is not known who is editing: then nothing else is shown, and nothing is sent.
  function reach(now) {
    reached = now;
    part("offline").hidden = now;
    part("text").parentElement.hidden = !now;
    part("detail").hidden = !now || !part("detail").textContent;
    panel.classList.toggle("mongolock-editing-away", !now || state === "away");
    lockForm();
  }

  function say(name, text) {
    // Only what is new is announced again.
    if (part(name).textContent.trim() !== text) { part(name).textContent = text; }
  }

  function show(answer, action) {
    const was = state;
    if (was === "idle" && answer.state === "free") { return; }  // it says more
    state = answer.state;
    if (state === "mine" && answer.tab && field("edit_lock_tab")) { field("edit_lock_tab").value = answer.tab; }
    const kept = mine;
    mine = state === "mine" || (state === "away" && mine);
    if (kept && !mine && dirty) { saveDraft(); }
    // What the page says of a save that was refused stays, for as long as it is true.
    if (!(was === "refused" && state === "mine" && action === "beat")) {
      say("text", answer.text);
      panel.querySelector(".mongolock-editing-shape").textContent = SHAPES[state];
      for (const name of Object.keys(SHAPES)) { panel.classList.toggle(`mongolock-editing-${name}`, name === state); }
    } else { state = "refused"; }
    say("detail", answer.detail || "");
    part("detail").hidden = !answer.detail;
    part("open").hidden = !(state === "free" && readonly);
    part("take").hidden = !(had && (state === "free" || state === "idle"));
    const takeOver = part("take-over");
    if (takeOver) {
      takeOver.hidden = !answer.mayTakeOver;
      takeOver.querySelector("[name=edit_lock_take_over]").value = answer.token || "";
    }
    const takeOverSave = part("take-over-save");
    if (takeOverSave) {
      takeOverSave.hidden = !answer.mayTakeOver;
      takeOverSave.value = answer.token || "";
    }
    if (state === "mine" || state === "free") { forgetLost(); }
    lockForm();
  }

  // The error that someone else is editing is removed from the form when that is over; other errors stay.
  function forgetLost() {
    if (!form || !panel.dataset.lost) { return; }
    for (const item of form.querySelectorAll(".errorlist.nonfield > li")) {
      if (item.textContent.trim() === panel.dataset.lost) { item.remove(); }
    }
    for (const list of form.querySelectorAll(".errorlist:not(:has(li))")) { list.remove(); }
    if (!form.querySelector(".errorlist")) { form.querySelector(".errornote")?.remove(); }
  }

  function lockForm() {
    if (!form || readonly) { return; }
    const stop = !mine || !reached;
    form.classList.toggle("mongolock-editing-locked", stop);
    for (const button of form.querySelectorAll("[type=submit]")) {
      if (stop) { button.setAttribute("aria-disabled", "true"); } else { button.removeAttribute("aria-disabled"); }
    }
  }

  function plan() {
    clearTimeout(timer);
    timer = setTimeout(beat, every);
  }
  async function beat() {
    if (sending || acting || state === "gone") { return; }
    if (mine) {
      await ask("beat", { idle: Math.floor((performance.now() - lastTouch) / 1000) });
    } else {
      await ask("read");
    }
    plan();
  }

  async function act(action, more) {
    acting = true;
    clearTimeout(timer);
    await ask(action, more);
    acting = false;
    plan();
  }

  // What was typed: kept in this tab, so that it survives a reload, a login, a crash of the page.
  const SKIP = /^(csrfmiddlewaretoken|edit_lock_.*|.*-(TOTAL|INITIAL|MIN_NUM|MAX_NUM)_FORMS|version_read|.*-version_read)$/;
  const fields = () => [...form.elements].filter((each) => each.name && !SKIP.test(each.name)
    && !["hidden", "password", "file", "submit", "button", "reset"].includes(each.type));
  function saveDraft() {
    const values = fields().map((each) => [each.name, each.value,
      each.type === "select-multiple" ? [...each.selectedOptions].map((option) => option.value) : each.checked]);
    storage.set(draftName, JSON.stringify({ time: new Date().toISOString(), values }));
  }
  function restoreDraft(values) {
    for (const [name, value, more] of values) {
      for (const each of fields().filter((one) => one.name === name)) {
        if (each.type === "checkbox" || each.type === "radio") {
          if (each.value === value) { each.checked = more; }
        } else if (each.type === "select-multiple") {
          for (const option of each.options) { option.selected = more.includes(option.value); }
        } else { each.value = value; }
      }
    }
    form.dispatchEvent(new Event("input", { bubbles: true }));
  }
  function offerDraft() {
    let draft = null;
    try { draft = JSON.parse(storage.get(draftName)); } catch { /* not ours */ }
    if (!draft || !Array.isArray(draft.values) || readonly || state === "refused") { return; }
    const time = part("draft-time");
    time.dateTime = draft.time;
    time.textContent = new Date(draft.time).toLocaleString(document.documentElement.lang || undefined);
    part("draft").hidden = false;
    part("draft-restore").addEventListener("click", () => { restoreDraft(draft.values); part("draft").hidden = true; });
    part("draft-forget").addEventListener("click", () => { storage.drop(draftName); part("draft").hidden = true; });
  }

  if (form && !readonly) {
    let later = 0;
    form.addEventListener("input", () => {
      dirty = true;
      clearTimeout(later);
      later = setTimeout(saveDraft, 400);
    });
    form.addEventListener("submit", (event) => {
      if (!reached || (!mine && event.submitter && event.submitter.name !== "edit_lock_take_over")) {
        event.preventDefault();
        panel.scrollIntoView({ block: "start" });
        beat();
        return;
      }
      clearTimeout(later);
      // If it is saved, the draft is of no more use: see below.
      saveDraft();
      storage.set(`${memory}:sent`, field("edit_lock_tab") ? field("edit_lock_tab").value : "");
      sending = true;
      clearTimeout(timer);
    });
    // The first page after a save: one that was refused shows what was typed by itself. A login may have come between,
    // or the network failed: only the server knows what was saved.
    const sent = storage.get(`${memory}:sent`);
    storage.drop(`${memory}:sent`);
    if (sent && panel.dataset.saved.split(" ").includes(sent)) { storage.drop(draftName); }
    if (sent && (form.querySelector(".errorlist") || state === "refused")) {
      dirty = true;
      saveDraft();
    } else { offerDraft(); }
  }
  for (const name of ["pointerdown", "keydown", "input", "wheel", "touchstart"]) {
    document.addEventListener(name, () => { lastTouch = performance.now(); }, { passive: true });
  }

  part("take").addEventListener("click", () => { lastTouch = performance.now(); act("take"); });
  const takeOver = part("take-over");
  if (takeOver) {
    takeOver.querySelector("form").addEventListener("submit", async (event) => {
      if (readonly) { return; }  // nothing was typed here: a new page
      event.preventDefault();
      takeOver.open = false;
      await act("take-over", { edit_lock_take_over: takeOver.querySelector("[name=edit_lock_take_over]").value });
    });
  }

  window.addEventListener("pagehide", () => {
    wanted++;
    clearTimeout(timer);
    if (!mine || !field("edit_lock_tab")) { return; }
    storage.set(memory, field("edit_lock_tab").value);
    if (!navigator.sendBeacon(address("leave"), message())) {
      fetch(address("leave"), { method: "POST", body: message(), keepalive: true, credentials: "same-origin" }).catch(() => {});
    }
  });
  window.addEventListener("pageshow", (event) => {
    if (!event.persisted) { return; }  // back from the back/forward cache, as it was left
    storage.drop(memory);
    sending = false;
    lastTouch = performance.now();
    if (readonly) { location.reload(); return; }
    act("take");
  });
  document.addEventListener("visibilitychange", () => { if (!document.hidden) { beat(); } });

  lockForm();
  beat();  // the page has come to life
})();
