// The three series under the map, with its cursor.

const SERIES = [
  { title: "KV pool usage", note: "share of the slots that requests hold", unit: "%", top: 100, text: (value) => percent(value),
    at: (film, frame) => film.share("live", frame) + film.share("reserved", frame) + film.share("internal", frame) },
  { title: "Failed block allocations", note: "refused a second", unit: "/s", text: (value) => `${value.toFixed(1)} /s`,
    at: (film, frame) => rate(film.refusals, frame) },
  { title: "Prefix hit rate", note: "prompt tokens found in the cache", unit: "%", top: 100, text: (value) => percent(value),
    at: (film, frame) => hitRate(film, frame) },
];

function rate(totals, frame) {
  const before = frame - WINDOW;
  const time = data.times[frame] - (before < 0 ? 0 : data.times[before]);
  return time > 0 ? (totals[frame] - (before < 0 ? 0 : totals[before])) / time : 0;
}

function hitRate(film, frame) {
  const before = Math.max(0, frame - WINDOW);
  const base = before ? film.queries[before] : 0;
  const asked = film.queries[frame] - base;
  return asked > 0 && !film.ended(frame) ? (100 * (film.hits[frame] - (before ? film.hits[before] : 0))) / asked : null;
}

class Graph {
  constructor(series, panels) {
    this.series = series;
    this.panels = panels;
    this.values = panels.map(({ film }) => data.times.map((_, frame) => (film.ended(frame) ? null : series.at(film, frame))));
    const most = Math.max(...this.values.flat().map((value) => value ?? 0));
    this.top = series.top ?? Math.max(most * 1.05, 1);
    this.svg = svg("svg", { role: "img", "aria-label": `${series.title}, ${series.note}, over time` });
    this.readings = panels.map(() => make("td"));
    const rows = panels.map(({ film }, number) =>
      make("tr", {}, make("th", { scope: "row" }, lineSample(film), ` ${film.label}`), this.readings[number]));
    this.element = make("div", { class: "graph" },
      make("h3", {}, `${series.title} `, make("small", {}, this.note())), this.svg, make("table", {}, make("tbody", {}, ...rows)));
    const jump = (event) => {
      const box = this.svg.getBoundingClientRect();
      const share = Math.min(Math.max((event.clientX - box.left - this.left) / (box.width - this.left), 0), 1);
      show(nearest(share * data.times[last]));
    };
    this.svg.addEventListener("pointerdown", jump);
    this.svg.addEventListener("pointermove", (event) => event.buttons && jump(event));
  }

  note() {
    const over = !data.of_steps && this.series.top !== undefined && this.series.title.startsWith("Prefix");
    const window_ = seconds(data.times[Math.min(WINDOW, last)]);
    return over || this.series.unit === "/s" ? `${this.series.note}, over ${data.of_steps ? "a step" : window_}` : this.series.note;
  }

  fit() {
    const width = this.svg.clientWidth || 300;
    const height = this.svg.clientHeight || 112;
    this.left = 42;
    const bottom = height - 18;
    const x = (time) => this.left + ((width - this.left) * time) / (data.times[last] || 1);
    const y = (value) => 4 + (bottom - 4) * (1 - value / this.top);
    this.x = x;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const parts = [0, this.top / 2, this.top].flatMap((value) => [
      svg("line", { class: "axis", x1: this.left, x2: width, y1: y(value), y2: y(value) }),
      svg("text", { x: this.left - 5, y: y(value) + 4, "text-anchor": "end" }, value >= 10 || !value ? value.toFixed(0) : value.toPrecision(2)),
    ]);
    for (const time of ticks(data.times[last])) {
      parts.push(svg("text", { x: Math.min(x(time), width - 14), y: height - 3, "text-anchor": "middle" }, `${time} s`));
    }
    this.values.forEach((values, number) => {
      const { color, dash } = this.panels[number].film;
      let path = "";
      let pen = "M";
      values.forEach((value, frame) => {
        if (value === null) pen = "M";
        else {
          path += `${pen}${x(data.times[frame]).toFixed(1)} ${y(value).toFixed(1)}`;
          pen = "L";
        }
      });
      parts.push(svg("path", { d: path || "M0 0", fill: "none", stroke: color, "stroke-width": 2, "stroke-dasharray": dash, "stroke-linejoin": "round" }));
    });
    this.cursor = svg("line", { class: "cursor", y1: 0, y2: bottom });
    this.svg.replaceChildren(...parts, this.cursor);
  }

  show(frame) {
    const x = this.x(data.times[frame]);
    this.cursor.setAttribute("x1", x);
    this.cursor.setAttribute("x2", x);
    this.readings.forEach((cell, number) => {
      const value = this.values[number][frame];
      cell.textContent = value === null ? "–" : this.series.text(value);
    });
  }
}

function ticks(end) {
  const rough = Math.max(end, 1e-9) / 8;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((value) => value >= rough);
  return Array.from({ length: Math.floor(end / step) + 1 }, (_, number) => Number((number * step).toPrecision(6)));
}
