"use strict";
// Makes the pages live, asks before what cannot be undone, and knows the keyboard. Without it, the pages work all the same.
(() => {
  const body = document.body;
  const prefix = body.dataset.prefix;
  const watch = body.dataset.watch;

  // --- times ---
  const units = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  const ago = (moment) => {
    const seconds = (Date.now() + offset - moment) / 1000;
    const size = Math.abs(seconds);
    if (size < 1.5) return "now";
    const at = Math.max(0, units.findIndex(([, length]) => size >= length));
    const [unit, length] = units[at];
    const whole = Math.floor(size / length);
    // "1 h 59 min", as "1 h" would be an hour off.
    const rest = at < 2 && whole < 10 ? Math.floor((size % length) / units[at + 1][1]) : 0;
    const text = `${whole} ${unit}${rest ? ` ${rest} ${units[at + 1][0]}` : ""}`;
    return seconds > 0 ? `${text} ago` : `in ${text}`;
  };
  let offset = 0; // this machine's clock may be off: the server's is in every answer
  const showTimes = () => {
    for (const element of document.querySelectorAll("time[datetime]:not(.exact)")) element.textContent = ago(Date.parse(element.dateTime));
  };

  // --- dark and light ---
  const theme = document.getElementById("theme");
  const setTheme = (name) => { if (name) document.documentElement.dataset.theme = name; };
  try { setTheme(localStorage.getItem("taskmesh-theme")); } catch { /* no storage: the system's choice */ }
  theme.hidden = false;
  theme.addEventListener("click", () => {
    const dark = matchMedia("(prefers-color-scheme: dark)").matches;
    const now = document.documentElement.dataset.theme || (dark ? "dark" : "light");
    const next = now === "dark" ? "light" : "dark";
    setTheme(next);
    try { localStorage.setItem("taskmesh-theme", next); } catch { /* as above */ }
  });

  // --- ask before what cannot be undone ---
  document.addEventListener("submit", (event) => {
    const question = (event.submitter && event.submitter.dataset.confirm) || event.target.dataset.confirm;
    if (question && !confirm(question)) event.preventDefault();
  });

  // --- boxes ---
  const boxes = () => [...document.querySelectorAll('input[name="task"]')];
  const showAll = () => {
    const all = document.getElementById("all");
    if (all) all.hidden = false;
  };
  document.addEventListener("change", (event) => {
    if (event.target.id === "all") for (const box of boxes()) box.checked = event.target.checked;
  });

  // --- the params of the task that somebody is about to publish ---
  const asksParams = document.getElementById("publish-fields");
  if (asksParams) {
    asksParams.hidden = true;
    asksParams.form.elements.name.addEventListener("change", async (event) => {
      const place = document.getElementById("publish-params");
      const name = event.target.value;
      const answer = await fetch(`${prefix}/tasks?publish=${encodeURIComponent(name)}`, { credentials: "same-origin" }).catch(() => null);
      if (!answer || !answer.ok || name !== event.target.value) return; // the fields stay as they are: JSON does as well
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
      place.replaceChildren(...fresh.getElementById("publish-params").children);
    });
  }

  // --- show what was fetched again, without disturbing who reads, types or clicks ---
  // Elements stay the same elements, so that focus, what is typed, ticked and opened, and a click on its way stay theirs.
  const keyed = (region) => { // idiomorph knows elements again by their id
    for (const each of region.querySelectorAll("[data-key]")) each.id = `${region.id} ${each.dataset.key}`;
    return region;
  };
  const isChanged = (field) => field.matches("input, textarea") && (field.value !== field.defaultValue || field.checked !== field.defaultChecked);
  const callbacks = {
    beforeNodeMorphed: (old, fresh) => old.nodeType !== Node.ELEMENT_NODE
      || !(isChanged(old) || (old.matches("time") && old.dateTime === fresh.dateTime)), // shown as "3 min ago"
    beforeAttributeUpdated: (name, element) => !(name === "open" && element.matches("details")), // somebody has opened or shut it
  };
  const morph = (old, fresh) => Idiomorph.morph(keyed(old), keyed(fresh), { ignoreActiveValue: true, callbacks });
  let held = null; // what was fetched, but could not be shown without disturbing
  let pressed = false;
  const isSelected = (element) => {
    const selection = getSelection();
    return !selection.isCollapsed && selection.containsNode(element, true);
  };
  const show = (fresh) => {
    held = pressed ? fresh : null; // between press and release of a button nothing moves
    if (pressed) return;
    const active = document.activeElement;
    const at = { row: document.querySelector("tr.at"), place: row() };
    for (const old of document.querySelectorAll("[data-live]")) {
      const found = fresh.getElementById(old.id);
      if (!found) continue;
      if (isSelected(old)) held = fresh; // somebody is about to copy it
      else morph(old, found);
    }
    if (active.isConnected && active !== document.activeElement) active.focus({ preventScroll: true }); // its row has moved
    if (at.row && at.row.isConnected) at.row.classList.add("at");
    else if (at.row) mark(at.place, false);
    const freshCurves = fresh.getElementById("curves");
    if (curves && freshCurves && !curves.querySelector(".curve:hover")) { // else somebody reads a value
      points = JSON.parse(freshCurves.dataset.points);
      draw();
    }
    showAll();
    showTimes();
  };
  const showHeld = () => { if (held) show(held); };
  const released = () => { pressed = false; setTimeout(showHeld); }; // behind the click
  document.addEventListener("pointerdown", (event) => { pressed = event.button === 0; });
  for (const event of ["pointerup", "pointercancel", "blur"]) addEventListener(event, released);
  addEventListener("pointermove", (event) => { if (pressed && !event.buttons) released(); }); // a scrollbar keeps the release to itself
  document.addEventListener("selectionchange", () => { if (getSelection().isCollapsed) setTimeout(showHeld); });

  // --- fetch again what is shown ---
  const tellIn = (id) => (text) => {
    const place = document.getElementById(id);
    if (place.textContent === text) return;
    place.textContent = text;
    place.hidden = !text;
  };
  const tell = tellIn("notice");
  const tellSilence = tellIn("silence");
  let refreshing = false;
  let again = false;
  let rest = 0; // until then: what takes the database long is asked for the more seldom
  const refresh = async () => {
    if (document.hidden) return; // as soon as it is seen again
    if (refreshing) { again = true; return; }
    refreshing = true;
    again = false;
    try {
      await new Promise((done) => setTimeout(done, Math.max(0, rest - performance.now())));
      const asked = performance.now();
      const answer = await fetch(location.href, { headers: { Accept: "text/html" }, credentials: "same-origin" });
      const answered = performance.now();
      rest = answered + Math.max(1000, 4 * (answered - asked));
      const date = Date.parse(answer.headers.get("date") || "");
      if (Math.abs(date - Date.now()) > 2000) offset = date - Date.now();
      if (answer.redirected) { location.assign(answer.url); return; }
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
      const problem = answer.ok ? "" : fresh.querySelector("#problem")?.textContent || `The dashboard answers ${answer.status}.`;
      if (problem !== document.getElementById("problem")?.textContent) tell(problem); // else the page says so already
      if (answer.ok) show(fresh);
    } catch { /* the server is away: the stream tells, and comes back */ } finally {
      refreshing = false;
      if (again) refresh();
    }
  };

  // --- charts ---
  const curves = document.getElementById("curves");
  let points = []; // each: its time in ms, and the values behind it
  const svg = (name, attributes) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    return element;
  };
  const shown = (value) => (value == null ? "–" : Number(value.toPrecision(3)).toLocaleString("en").replaceAll(",", "\u2009"));
  const clock = (ms, seconds) => new Date(ms).toLocaleString(undefined, seconds > 86400
    ? { weekday: "short", hour: "2-digit", minute: "2-digit" } : { hour: "2-digit", minute: "2-digit", second: seconds > 3600 ? undefined : "2-digit" });
  const roundUp = (value) => { // the end of an axis: 1, 2 or 5 times a power of ten
    const size = 10 ** Math.floor(Math.log10(value));
    return [1, 2, 5, 10].find((times) => times * size >= value * 0.999999) * size;
  };
  const width = 300, height = 90;
  const draw = () => {
    if (!curves || !points.length) return;
    curves.hidden = false;
    document.getElementById("no-curves").hidden = true;
    const seconds = Number(curves.dataset.seconds);
    const end = points.at(-1)[0], begin = end - seconds * 1000;
    for (const figure of curves.querySelectorAll("figure")) {
      const chart = figure.querySelector("svg.curve");
      const lines = [...Array(Number(chart.dataset.lines)).keys()].map((line) => Number(chart.dataset.at) + line);
      const values = points.flatMap((point) => lines.map((line) => point[line])).filter((value) => value != null);
      const top = roundUp(Math.max(values.length ? Math.max(...values) : 0, 1e-9) < 1e-6 ? 1 : Math.max(...values));
      chart.replaceChildren();
      chart.setAttribute("viewBox", `0 0 ${width} ${height}`);
      chart.setAttribute("preserveAspectRatio", "none");
      for (const share of [0, 0.5, 1]) chart.append(svg("path", { class: "grid", d: `M0 ${height * share}H${width}` }));
      lines.forEach((line, which) => {
        const drawn = points.filter((point) => point[line] != null)
          .map((point) => `${Math.max(0, ((point[0] - begin) / (seconds * 1000)) * width)},${height - (point[line] / top) * height}`);
        // One point alone would be no line, and not be seen.
        if (drawn.length === 1) drawn.unshift(drawn[0].replace(/^[^,]*/, (x) => Math.max(0, x - 4)));
        chart.append(svg("polyline", { points: drawn.join(" "), class: which ? "second" : "first" }));
      });
      chart.append(svg("path", { class: "at", d: "" }));
      figure.querySelector(".scale").replaceChildren(...[top, top / 2, 0].map((value) => Object.assign(document.createElement("li"), { textContent: shown(value) })));
      figure.querySelector(".when").replaceChildren(...[begin, (begin + end) / 2, end].map((ms) => Object.assign(document.createElement("span"), { textContent: clock(ms, seconds) })));
      tellPoint(figure, values.length ? points.at(-1) : null, lines);
    }
  };
  const tellPoint = (figure, point, lines, at = null) => {
    figure.querySelectorAll("[data-now]").forEach((place, which) => { place.textContent = shown(point && point[lines[which]]); });
    figure.querySelector("[data-said]").textContent = point ? (at === null ? "" : `at ${clock(point[0], Number(curves.dataset.seconds))}`) : "nothing yet";
  };
  const point_at = (event) => {
    const figure = event.target.closest("figure");
    const chart = figure && figure.querySelector("svg.curve");
    if (!chart || !points.length) return;
    const lines = [...Array(Number(chart.dataset.lines)).keys()].map((line) => Number(chart.dataset.at) + line);
    const mark = chart.querySelector(".at");
    const box = chart.getBoundingClientRect();
    const share = (event.clientX - box.left) / box.width;
    const length = Number(curves.dataset.seconds) * 1000, begin = points.at(-1)[0] - length;
    if (event.type === "pointerleave" || share < 0 || share > 1) { mark.setAttribute("d", ""); tellPoint(figure, points.at(-1), lines); return; }
    const wanted = begin + share * length;
    const near = points.reduce((best, point) => (Math.abs(point[0] - wanted) < Math.abs(best[0] - wanted) ? point : best));
    mark.setAttribute("d", `M${((near[0] - begin) / length) * width} 0V${height}`);
    tellPoint(figure, near, lines, share);
  };
  if (curves) {
    points = JSON.parse(curves.dataset.points);
    draw();
    for (const chart of curves.querySelectorAll("svg.curve")) for (const type of ["pointermove", "pointerleave"]) chart.addEventListener(type, point_at);
  }

  // --- the live stream ---
  const chip = document.getElementById("live");
  const say = (text, off) => { chip.hidden = false; chip.textContent = text; chip.classList.toggle("off", off); };
  // How old is what is shown: every second the dashboard says for how long the database has not answered.
  const OLD_MS = 1900, SILENT_MS = 3000;
  let heardAt = null; // when the database answered last, on this page's own clock
  let reading = false;
  const showAge = () => {
    if (heardAt === null || document.hidden) return;
    const age = performance.now() - heardAt;
    if (age > OLD_MS) say(reading ? `${Math.floor(age / 1000)} s old` : "reconnecting …", true);
    else if (reading) say("live", false);
    if (age < SILENT_MS) tellSilence("");
    else if (silence.hidden) {
      const who = reading ? "database" : "dashboard";
      const since = new Date(Date.now() - age).toLocaleTimeString();
      tellSilence(`The ${who} does not answer: what this page shows is of ${since}. It goes on by itself.`);
    }
  };
  const silence = document.getElementById("silence");
  const heardSilence = (event) => {
    const ms = JSON.parse(event.data).ms;
    const back = !silence.hidden && ms < OLD_MS;
    heardAt = performance.now() - ms;
    showAge();
    if (back) refresh(); // what has happened meanwhile
  };
  const changed = (event) => {
    const { tasks, more } = JSON.parse(event.data);
    const { name, key } = body.dataset;
    if (watch !== "task" || more || tasks.some(([taskName, taskKey]) => taskName === name && taskKey === key)) refresh();
  };
  const sampled = () => {
    if (["overview", "workers", "worker", "queues", "schedules"].includes(watch)) refresh();
  };
  // Only a page that is seen listens: a browser has six connections to a host, for all its tabs together.
  let stream = null;
  let listenAgain = 0;
  const stop = () => {
    clearTimeout(listenAgain);
    if (stream) stream.close();
    stream = null;
  };
  const listen = () => {
    stop();
    if (document.hidden) return;
    stream = new EventSource(`${prefix}/live`);
    // Its first event lets us fetch what happened meanwhile. A moment ago the page was made, or is fetched again.
    stream.addEventListener("open", () => { reading = true; heardAt ??= performance.now(); if (silence.hidden) say("live", false); });
    stream.addEventListener("silence", heardSilence);
    stream.addEventListener("error", () => {
      reading = false;
      say("reconnecting …", true);
      // A refused connection is tried again by the browser. After an answer that is no stream (a proxy's 502, a
      // session that has ended) it gives up: then we try, and the refresh leads to the login if that is what is missing.
      if (stream && stream.readyState === EventSource.CLOSED) listenAgain = setTimeout(() => { refresh(); listen(); }, 3000);
    });
    stream.addEventListener("full", () => { stop(); heardAt = null; say("too many watch", true); });
    stream.addEventListener("changed", changed);
    stream.addEventListener("overview", sampled);
  };
  if (watch === "away") { // a page that could not be made: as soon as it can, it is
    setInterval(async () => {
      const answer = document.hidden ? null : await fetch(location.href, { credentials: "same-origin" }).catch(() => null);
      if (answer && answer.status !== 503) location.reload();
    }, 3000);
  } else if (watch && "EventSource" in window) {
    listen();
    setInterval(showAge, 500);
    addEventListener("pagehide", stop);
    addEventListener("pageshow", (event) => { if (event.persisted) { heardAt = null; listen(); } });
    document.addEventListener("visibilitychange", () => {
      heardAt = null; // what was heard before it was hidden says nothing now
      if (document.hidden) { stop(); return; }
      listen();
      refresh();
    });
  }

  // --- the keyboard ---
  const rows = () => [...document.querySelectorAll("table.rows tbody tr")];
  const row = () => rows().findIndex((candidate) => candidate.classList.contains("at"));
  const mark = (place, focus = true) => {
    const all = rows();
    all.forEach((candidate) => candidate.classList.remove("at"));
    const found = all[Math.max(0, Math.min(place, all.length - 1))];
    if (!found) return;
    found.classList.add("at");
    const link = found.querySelector("a[href]");
    if (focus && link) link.focus();
  };
  const help = document.getElementById("help");
  const keys = document.getElementById("keys");
  help.hidden = false;
  help.addEventListener("click", () => keys.showModal());
  let going = false;
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input:not([type=checkbox]), textarea, select")) return;
    if (keys.open) return;
    if (going) {
      going = false;
      const link = document.querySelector(`nav a[data-go="${CSS.escape(event.key)}"]`);
      if (link) { event.preventDefault(); link.click(); }
      return;
    }
    if (event.key === "g") going = true;
    else if (event.key === "?") keys.showModal();
    else if (event.key === "/") {
      event.preventDefault();
      const field = document.getElementById("where");
      if (field) field.focus(); else location.assign(`${prefix}/tasks`);
    } else if (event.key === "j") mark(row() + 1);
    else if (event.key === "k") mark(row() - 1);
    else if (event.key === "x") {
      const box = rows()[row()] && rows()[row()].querySelector('input[type="checkbox"]');
      if (box) box.checked = !box.checked;
    }
  });

  document.querySelector("nav a[aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" }); // on a phone
  showAll();
  showTimes();
  setInterval(showTimes, 1000);
})();
