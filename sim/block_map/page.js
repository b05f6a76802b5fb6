// The page: panels, series and tip, all of the same frame.

const NAMES = {
  live: "live", shared: "shared prefix", reserved: "reserved, not used yet",
  internal: "wasted tail (internal)", external: "hole too small (external)",
  cached: "cached prefix", free: "free",
};
const FRAMES_A_SECOND = data.of_steps ? 3 : 14;
const WINDOW = data.of_steps ? 1 : 5; // frames that rates are taken over
const last = data.times.length - 1;
const state = { frame: -1, followed: null, pinned: false, playing: false };
const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name in element && typeof value !== "string") element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

function svg(tag, attributes, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const count = (value) => value.toLocaleString("en-US");
const percent = (value) => `${value.toFixed(1)}\u00a0%`;
const amount = (value) => (value >= 0.05 ? percent(value) : value > 0 ? "under 0.1\u00a0%" : "nothing");
const seconds = (value) => `${value < 100 && data.of_steps ? value.toFixed(2) : value.toFixed(1)} s`;

function lineSample(run) {
  return svg("svg", { width: 28, height: 10, "aria-hidden": "true" },
    svg("line", { x1: 0, x2: 28, y1: 5, y2: 5, stroke: run.color, "stroke-width": 3, "stroke-dasharray": run.dash }));
}

// ---- Panels: one an allocator ------------------------------------------------------------------

class Panel {
  constructor(run) {
    this.film = new Film(run);
    this.canvas = make("canvas", { class: "map", role: "img", tabindex: "0" });
    this.map = new PoolMap(this.film, this.canvas);
    this.bar = make("canvas", { class: "bar", "aria-hidden": "true" });
    this.counts = make("p", { class: "counts" });
    this.why = make("p", { class: run.why.some(Boolean) ? "why" : "why never" });
    this.verdict = make("p", { class: "verdict" });
    this.says = make("p", { class: "says" });
    this.cells = {};
    const rows = ["live", "shared", ...SLOT_STATES.slice(1)].map((name) => {
      this.cells[name] = make("td", { "data-state": name });
      const label = name === "shared" ? "of it shared" : NAMES[name];
      return make("tr", {}, make("th", { scope: "row" }, label), this.cells[name]);
    });
    this.element = make("article", { class: "panel", "data-allocator": run.label },
      make("h3", {}, lineSample(run), run.label), this.counts, this.why, this.verdict, this.bar, this.canvas, this.says,
      make("table", { class: "states" }, make("tbody", {}, ...rows)));
    this.canvas.addEventListener("pointermove", (event) => this.onPoint(event, false));
    this.canvas.addEventListener("pointerleave", () => state.pinned || hideTip());
    this.canvas.addEventListener("click", (event) => this.onPoint(event, true));
  }

  onPoint(event, pin) {
    if (state.pinned && !pin) return;
    const square = this.map.squareAt(event);
    if (square === null) return hideTip();
    const owner = this.film.squareOwner[square];
    const request = owner === NOBODY ? null : this.film.tenancies[owner].request;
    follow(request, pin && request !== null);
    showTip(this, this.film.placeIn(square), event, pin);
  }

  show(frame) {
    const { film } = this;
    film.seek(frame);
    for (const name of SLOT_STATES) this.put(name, film[name][frame]);
    this.put("shared", film.shareOf);
    this.counts.replaceChildren(make("b", { "data-count": "running" }, count(film.running[frame])), " running, ",
      make("span", { "data-count": "waiting" }, count(film.waiting[frame])), " waiting");
    this.why.textContent = film.why[frame];
    this.verdict.textContent = film.ended(frame) ? `Finished at ${seconds(film.end)}` : `Wastes ${amount(film.wasted(frame))} now`;
    this.verdict.classList.toggle("bad", !film.ended(frame) && film.wasted(frame) >= 0.05);
    this.says.textContent = this.words(frame);
    this.canvas.setAttribute("aria-label", `Map of ${film.label}: ${this.verdict.textContent}. ${this.says.textContent} ${film.why[frame]}`);
    this.draw();
  }

  put(name, slots) {
    this.cells[name].textContent = percent((100 * slots) / this.film.capacity);
    this.cells[name].dataset.slots = slots;
    this.cells[name].title = `${count(slots)} slots`;
  }

  words(frame) {
    const { film } = this;
    if (film.ended(frame)) {
      return `Nobody holds memory${film.cached[frame] > 0 ? "; prefixes stay cached" : ""}.`;
    }
    return [
      [film.share("internal", frame), "is reserved and never written"],
      [film.share("external", frame), "is in holes that fit nobody"],
      [film.share("reserved", frame), "is kept for tokens to come"],
      [(100 * film.shareOf) / film.capacity, "is prefixes that several share"],
      [film.share("cached", frame), "is cached, free for the taking"],
    ].filter(([share]) => share >= 0.05).map(([share, what]) => `${percent(share)} ${what}.`).join(" ");
  }

  fit() {
    this.map.fit();
    const ratio = this.map.ratio;
    this.bar.width = this.canvas.width;
    this.bar.height = Math.round(14 * ratio);
    this.bar.style.width = this.canvas.style.width;
  }

  draw() {
    this.map.draw(state.followed);
    const context = this.bar.getContext("2d");
    const { film } = this;
    let at = 0;
    const amounts = { ...Object.fromEntries(SLOT_STATES.map((name) => [name, film[name][film.frame]])), shared: film.shareOf };
    amounts.live -= film.shareOf;
    for (const name of ["shared", "live", "reserved", "internal", "external", "cached", "free"]) {
      const width = (this.bar.width * amounts[name]) / film.capacity;
      swatch(context, name, at, width, this.bar.height, this.map.ratio);
      at += width;
    }
  }
}

// Of nobody in particular: live memory has the colours of several.
function swatch(context, name, x, width, height, ratio) {
  const parts = name === "live" ? Math.max(1, Math.round(width / (8 * ratio))) : 1;
  for (let part = 0; part < parts; part++) {
    fillWith(context, name, colorOf(LOOK[name], part), ratio, x + (part * width) / parts, 0, width / parts + 0.5, height);
  }
}

// ---- Tip: whose a block is ---------------------------------------------------------------------

const MAX_IN_TABLE = 48; // blocks that a tip lists

function showTip(panel, place, event, pin) {
  const tip = $("tip");
  const { film } = panel;
  const owner = film.owner[place];
  const what = film.reservations ? `slot ${count(place)}` : `block ${count(place + film.first)}`;
  const parts = [];
  if (pin) {
    const close = make("button", { type: "button", "aria-label": "Close" }, "✕");
    close.addEventListener("click", () => follow(null, false) || hideTip());
    parts.push(close);
  }
  if (owner === NOBODY) {
    parts.push(make("h4", {}, `${film.label}, ${what}`), make("p", {}, emptyWords(film, place)));
  } else {
    parts.push(...ownerWords(film, owner, place, what));
  }
  tip.replaceChildren(...parts);
  tip.classList.toggle("pinned", pin);
  state.pinned = pin;
  tip.hidden = false;
  const { offsetWidth: width, offsetHeight: height } = tip;
  tip.style.left = `${Math.max(8, Math.min(event.clientX + 16, innerWidth - width - 8))}px`;
  tip.style.top = `${event.clientY + 20 + height < innerHeight ? event.clientY + 20 : Math.max(8, event.clientY - height - 16)}px`;
}

function emptyWords(film, place) {
  if (film.isCached[place]) return "Cached: a prefix that nobody uses now. It is found again, or evicted when somebody needs the room.";
  const look = LOOKS[film.squareLook[film.square[place]]];
  if (look === "external") return "Free, but in a hole too small for the request that wants memory.";
  return "Free.";
}

function ownerWords(film, owner, place, what) {
  const tenancy = film.tenancies[owner];
  const computed = film.computed(owner);
  const table = film.table(owner);
  const parts = [make("h4", {}, data.requests[tenancy.request])];
  const prompt = data.prompts[tenancy.request];
  parts.push(make("p", {}, `${count(computed)} of ${count(tenancy.final)} tokens written (prompt ${count(prompt)}).`));
  if (film.reservations) {
    const unused = table.length - tenancy.final;
    parts.push(make("p", {}, `One reservation of ${count(table.length)} slots, ${count(table[0])} to ${count(table[0] + table.length - 1)}` +
      (unused > 0 ? `, of which ${count(unused)} will never be written.` : ".")));
    return parts;
  }
  const holders = film.holdersOf(place);
  if (holders.length > 1) {
    const names = holders.slice(0, 5).flatMap((number, place) => // no name turns the others around
      [place ? ", " : "", make("bdi", {}, data.requests[film.tenancies[number].request])]);
    parts.push(make("p", {}, `${what} is shared by ${holders.length} requests: `, ...names, holders.length > 5 ? " and others." : "."));
  } else {
    const from = film.order[place] * film.unit;
    const here = Math.min(Math.max(computed - from, 0), film.unit);
    parts.push(make("p", {}, `${what} holds tokens ${count(from + 1)} to ${count(from + film.unit)}: ${here} of ${film.unit} written.`));
  }
  parts.push(make("p", {}, `Block table, ${count(table.length)} ${table.length === 1 ? "block" : "blocks"}:`));
  const here = table.indexOf(place);
  const from = Math.max(0, Math.min(here - MAX_IN_TABLE / 2, table.length - MAX_IN_TABLE));
  const shown = table.slice(from, from + MAX_IN_TABLE).map((each, number) =>
    make("span", from + number === here ? { class: "here" } : {}, `${from + number} → ${each + film.first}`));
  parts.push(make("div", { class: "table" }, ...(from ? ["… "] : []), ...shown, ...(from + MAX_IN_TABLE < table.length ? [" …"] : [])));
  return parts;
}

function hideTip() {
  $("tip").hidden = true;
  state.pinned = false;
  if ($("follow").value === "") follow(null, false);
}

function follow(request, inField) {
  if (inField) $("follow").value = data.requests[request];
  else if (request === null) $("follow").value = "";
  if (state.followed === request) return;
  state.followed = request;
  for (const panel of panels) panel.draw();
}

// ---- The frame shown ---------------------------------------------------------------------------

function headline(frame) {
  const running = panels.map(({ film }) => film).filter((film) => !film.ended(frame));
  const time = seconds(data.times[frame]);
  if (!running.length) return [`At ${time} all is done.`];
  const worst = running.reduce((one, other) => (other.wasted(frame) > one.wasted(frame) ? other : one));
  // Of those that waste next to the least, who serves most, and then who wastes less.
  const least = Math.min(...running.map((film) => film.wasted(frame)));
  const best = running.filter((film) => film.wasted(frame) < least + 0.1).reduce((one, other) =>
    (other.running[frame] - one.running[frame] || one.wasted(frame) - other.wasted(frame)) >= 0 ? other : one);
  const serves = (film) => `${count(film.running[frame])} ${film.running[frame] === 1 ? "request" : "requests"}`;
  const words = [`At ${time} ${worst.label} `, make(worst.wasted(frame) >= 0.05 ? "b" : "em", {}, `wastes ${amount(worst.wasted(frame))}`),
    ` of its memory and serves ${serves(worst)}`];
  if (best !== worst) {
    words.push("; with as much, ", make("em", {}, `${best.label} wastes ${amount(best.wasted(frame))}`), ` and serves ${serves(best)}`);
  }
  const done = panels.map(({ film }) => film).filter((film) => film.ended(frame));
  words.push(done.length ? `. ${done.map((film) => film.label).join(", ")} ${done.length > 1 ? "are" : "is"} done already.` : ".");
  return words;
}

function show(frame) {
  state.frame = Math.min(Math.max(frame, 0), last);
  $("time").value = state.frame;
  const step = panels.length === 1 || data.of_steps ? `, step ${panels[0].film.step[state.frame]}` : "";
  $("clock").textContent = seconds(data.times[state.frame]) + step;
  $("time").setAttribute("aria-valuetext", $("clock").textContent);
  for (const panel of panels) panel.show(state.frame);
  for (const graph of graphs) graph.show(state.frame);
  $("headline").replaceChildren(...headline(state.frame));
  if (state.pinned) hideTip();
}

function nearest(time) {
  let best = 0;
  data.times.forEach((each, frame) => {
    if (Math.abs(each - time) < Math.abs(data.times[best] - time)) best = frame;
  });
  return best;
}

function play(playing) {
  state.playing = playing;
  $("play").textContent = playing ? "❚❚" : "▶";
  $("play").setAttribute("aria-label", playing ? "Pause" : "Play");
  $("headline").setAttribute("aria-live", playing ? "off" : "polite");
  if (!playing) return;
  if (state.frame === last) show(0);
  let from = performance.now();
  let at = state.frame;
  const tick = (now) => {
    if (!state.playing) return;
    at += ((now - from) / 1000) * FRAMES_A_SECOND * Number($("speed").value);
    from = now;
    // Somebody may have moved the slider meanwhile.
    if (Math.abs(at - state.frame) > 30) at = state.frame;
    if (Math.floor(at) !== state.frame) show(Math.floor(at));
    if (state.frame === last) play(false);
    else requestAnimationFrame(tick);
  };
  requestAnimationFrame(tick);
}

function step(by) {
  play(false);
  show(state.frame + by);
}

const panels = data.runs.map((run) => new Panel(run));
const graphs = SERIES.map((series) => new Graph(series, panels)).filter((graph) => graph.values.flat().some((value) => value !== null));

function legend() {
  const inUse = LOOKS.filter((name) => name === "free" || name === "shared"
    ? name === "free" || panels.some(({ film }) => film.hits[last] > 0)
    : data.runs.some((run) => run[name].some((value) => value > 0)));
  const order = ["live", "shared", "reserved", "internal", "external", "cached", "free"];
  $("legend").replaceChildren(...order.filter((name) => inUse.includes(name)).map((name) => {
    const ratio = window.devicePixelRatio || 1;
    const canvas = make("canvas", { width: Math.round(28 * ratio), height: Math.round(16 * ratio), "aria-hidden": "true" });
    swatch(canvas.getContext("2d"), name, 0, canvas.width, canvas.height, ratio);
    return make("li", {}, canvas, name === "live" ? "live: a colour a request" : NAMES[name]);
  }));
}

function fit() {
  for (const panel of panels) panel.fit();
  for (const graph of graphs) graph.fit();
  legend();
  if (state.frame >= 0) show(state.frame);
}

function onKey(event) {
  if (event.altKey || event.ctrlKey || event.metaKey) return;
  if (["SELECT", "SUMMARY"].includes(event.target.tagName) || event.target.id === "follow") {
    if (event.key !== "Escape") return;
  }
  const far = event.shiftKey ? 10 : 1;
  const does = {
    ArrowLeft: () => step(-far), ArrowRight: () => step(far), Home: () => step(-last), End: () => step(last),
    Escape: () => { follow(null, false); hideTip(); },
    " ": () => play(!state.playing),
  }[event.key];
  if (!does || (event.key === " " && event.target.tagName === "BUTTON" && event.target.id !== "play")) return;
  event.preventDefault();
  does();
}

$("panels").append(...panels.map((panel) => panel.element));
$("panels").classList.toggle("one", panels.length === 1);
$("series").append(...graphs.map((graph) => graph.element));
$("time").max = last;
const tokens = (number) => `${count(number)} ${number === 1 ? "token" : "tokens"}`;
$("grain").textContent = `One square is ${data.grain === data.block_size ? "one block of " : `${data.grain / data.block_size} blocks of ` +
  `${tokens(data.block_size)}: `}${tokens(data.grain)}, in the order of addresses. ${data.grain > 1 && panels[0].film.numSquares > MAX_IN_DETAIL ? "It has the look of most of its slots. " : ""}` +
  `${data.of_steps ? "Every step has a frame." : `Frames are ${seconds(data.times[1] - data.times[0])} apart.`}`;
$("few").textContent = data.times.length < data.all_frames ? `${data.times.length} of ${data.all_frames} frames: block tables of more would be ` +
  "too large for a page. A larger --block-size, or fewer allocators, make room for more." : "";
$("names").append(...data.requests.slice(0, 2000).map((name) => make("option", { value: name })));
$("play").addEventListener("click", () => play(!state.playing));
$("play").addEventListener("keyup", (event) => event.key === " " && event.preventDefault());
$("back").addEventListener("click", () => step(-1));
$("next").addEventListener("click", () => step(1));
$("time").addEventListener("input", () => { play(false); show(Number($("time").value)); });
$("follow").addEventListener("input", () => {
  const request = data.requests.indexOf($("follow").value);
  if (request >= 0 || $("follow").value === "") {
    state.followed = request >= 0 ? request : null;
    for (const panel of panels) panel.draw();
  }
});
// Entered by hand, a request is told of where it has most to tell.
$("follow").addEventListener("change", () => {
  const panel = panels.findLast(({ film }) => state.followed !== null && film.holding(state.followed) !== undefined);
  if (!panel) return;
  const { left, top } = $("follow").getBoundingClientRect();
  const [place] = panel.film.table(panel.film.holding(state.followed));
  showTip(panel, place, { clientX: left, clientY: top }, true);
});
document.addEventListener("keydown", onKey);
dark.addEventListener("change", () => {
  pixels = null;
  fit();
});
let width = 0;
new ResizeObserver(() => {
  if (width === $("panels").clientWidth) return;
  width = $("panels").clientWidth;
  fit();
}).observe($("panels"));
fit();
// Open where there is most to see: well under way, while all of them run.
// An address that ends in #17 opens at 17 s.
const asked = Number.parseFloat(location.hash.slice(1));
show(nearest(asked >= 0 ? asked : 0.4 * Math.min(...data.runs.map((run) => run.end))));
