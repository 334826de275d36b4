"use strict";
// Draws a report: the tree of facts, tables and charts that the page holds as JSON.
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const LETTER = 6.4; // pixels of a letter in a chart, about
  const UNITS = {
    "": [["", 1]],
    seconds: [["s", 1], ["ms", 1e-3], ["µs", 1e-6]],
    bytes: [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10], ["B", 1]],
  };
  const charts = [];
  const groups = new Map(); // group of charts -> the part of the x axis that they show, and the whole

  function make(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made[name] = value;
    made.append(...children);
    return made;
  }

  function draw(tag, attributes = {}, ...children) {
    const made = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }

  const colour = (name) => `var(--${name})`;
  const anchor = (title) => title.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "");
  const unitOf = (unit, amount) => UNITS[unit].find(([, size]) => Math.abs(amount) >= size) || UNITS[unit].at(-1);

  function amountText(unit, amount) {
    const [name, size] = unitOf(unit, amount);
    const number = unit === "bytes" ? (amount / size).toFixed(1) : Number((amount / size).toPrecision(3));
    return `${number} ${name}`.trim();
  }

  function shortened(text, width) {
    const letters = Math.floor(width / LETTER);
    return text.length <= letters ? text : letters < 3 ? "" : `${text.slice(0, letters - 1)}…`;
  }

  // Parts

  const drawers = { Facts: facts, Table: table, Note: note, Bar: bar, Chart: chart, Section: section };
  const parts = (listed, level) => listed.map((part) => drawers[part.type](part, level));

  function facts({ rows }) {
    return make("div", {}, cards(rows), lines(rows));
  }

  function cards(rows) {
    const drawn = rows.filter((row) => row.is_key).map((row) =>
      make("div", { className: row.is_alarm ? "alarm" : "" },
        make("dt", {}, row.label), make("dd", {}, row.value), make("dd", { className: "note" }, row.note || "")));
    return drawn.length ? make("dl", { className: "cards" }, ...drawn) : "";
  }

  function lines(rows) {
    const drawn = rows.filter((row) => !row.is_key).map((row) =>
      make("tr", {}, make("th", {}, row.label), make("td", {}, row.note ? `${row.value} (${row.note})` : row.value)));
    return drawn.length ? make("div", { className: "wide" }, make("table", { className: "facts" }, ...drawn)) : "";
  }

  function table({ columns, rows, most = 30 }) {
    const head = columns.map((column) => make("th", { className: column.kind || "text" }, column.label));
    const body = rows.map((row) => make("tr", {}, ...row.map((text, place) => cell(text, columns[place].kind))));
    const drawn = make("div", { className: "wide" },
      make("table", {}, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...body)));
    return rows.length <= most ? drawn : make("details", {}, make("summary", {}, `${rows.length} rows`), drawn);
  }

  function cell(text, kind = "text") {
    if (kind === "text" || kind === "number") return make("td", { className: kind }, text);
    const placed = kind === "placement" ? { S: "sharded", P: "partial" }[text[0]] : "";
    return make("td", { className: kind }, make("code", { className: placed || "" }, text));
  }

  function note({ text, style, link }) {
    if (style === "code") return make("pre", {}, text);
    const drawn = make("p", { className: `line ${style || ""}` }, text);
    if (link) drawn.append(" (", make("a", { href: link }, link.replace(/^https:\/\//, "")), ")");
    return drawn;
  }

  function bar({ shares }) {
    const whole = shares.reduce((sum, share) => sum + share.amount, 0);
    const spans = shares.map((share) => {
      const span = make("span", { title: `${share.name} ${share.text}` });
      span.style.cssText = `flex: ${(1000 * share.amount) / whole}; background: ${colour(share.colour)}`;
      return span;
    });
    return make("div", {}, make("div", { className: "bar" }, ...spans),
      legend(shares.map((share) => [`${share.name} ${share.text}`, share.colour])));
  }

  function legend(entries) {
    const keys = entries.map(([text, name, pattern]) => {
      const swatch = make("i", { className: pattern ? `pattern-${pattern}` : "" });
      swatch.style.backgroundColor = colour(name);
      return make("span", {}, swatch, text);
    });
    return make("p", { className: "legend" }, ...keys);
  }

  function section(part, level = 2) {
    if (!part.parts.length) return "";
    const inner = parts(part.parts, level + 1);
    // Stages of a pipeline have sections of the same titles, to which no link leads.
    const id = part.anchor || (level === 2 ? anchor(part.title) : "");
    if (part.is_folded)
      return make("details", { id }, make("summary", {}, part.title), ...inner);
    return make(level === 2 ? "section" : "div", { id }, make(`h${Math.min(level, 4)}`, {}, part.title), ...inner);
  }

  function chart(part) {
    const made = new Chart(part);
    charts.push(made);
    return made.element;
  }

  // Charts

  class Chart {
    constructor(part) {
      Object.assign(this, { caption: "", ranges: [], group: "", ...part, view: 0, drawn: false });
      this.isTree = this.views[0].type === "Tree";
      this.level = 0; // of a tree, the box that is shown as its root
      this.tools = make("div", { className: "tools" });
      this.legend = make("div");
      this.plot = make("div", { className: "plot", tabIndex: 0 });
      this.plot.setAttribute("role", "group");
      this.plot.setAttribute("aria-label", this.label);
      this.plot.style.height = `${this.height}px`;
      this.element = make("figure", { className: "chart", id: `chart-${this.name}` }, this.tools, this.legend, this.plot,
        make("figcaption", {}, this.caption));
      const ends = this.views[0].x?.ends;
      if (this.group && ends) groups.set(this.group, { whole: ends, shown: ends });
      this.addTools();
      this.listen();
    }

    addTools() {
      const views = this.views.length > 1 ? this.views : [];
      this.buttons = views.map((view, index) => this.addButton(view.label, () => this.show(index)));
      for (const [label, start, end] of this.ranges) this.addButton(label, () => this.zoom([start, end]));
      const keys = this.group ? "keys: ← → move, + − zoom, 0 whole step; drag selects a part" : "";
      const climb = this.isTree ? "keys: → into a module, ← out, ↑ ↓ its neighbours" : "";
      this.tools.append(make("span", { className: "keys" }, keys || climb));
    }

    addButton(text, action) {
      const button = make("button", { type: "button", onclick: action }, text);
      this.tools.append(button);
      return button;
    }

    show(index) {
      this.view = index;
      this.level = 0;
      this.redraw();
    }

    redraw() {
      const width = this.plot.clientWidth;
      if (!width) return;
      this.drawn = true;
      this.buttons.forEach((button, index) => button.setAttribute("aria-pressed", index === this.view));
      const view = this.views[this.view];
      const drawn = view.type === "Tree" ? new TreeView(this, view, width) : new PlotView(this, view, width);
      this.current = drawn;
      this.legend.replaceChildren(drawn.legend());
      this.plot.replaceChildren(drawn.svg);
      drawn.finish?.();
    }

    zoom(range) {
      const state = groups.get(this.group);
      if (!state) return;
      state.shown = range;
      for (const other of charts) if (other.group === this.group && other.drawn) other.redraw();
    }

    listen() {
      this.plot.addEventListener("keydown", (event) => {
        if (event.ctrlKey || event.metaKey || event.altKey) return;
        if (this.isTree ? this.current.press(event.key) : this.group && this.move(event.key)) event.preventDefault();
      });
      this.plot.addEventListener("pointermove", (event) => this.point(event));
      this.plot.addEventListener("pointerleave", () => tip.hide());
      this.plot.addEventListener("click", (event) => event.target.action?.());
      if (this.group) this.select();
    }

    // Dragging selects a part of the x axis; a double click shows the whole again.
    select() {
      let start = null;
      const place = (event) => this.current.valueAt(event.clientX - this.plot.getBoundingClientRect().left);
      this.plot.addEventListener("pointerdown", (event) => { start = event.clientX; });
      this.plot.addEventListener("pointerup", (event) => {
        if (start !== null && Math.abs(event.clientX - start) > 8)
          this.zoom([place({ clientX: start }), place(event)].sort((a, b) => a - b));
        start = null;
      });
      this.plot.addEventListener("dblclick", () => this.zoom(groups.get(this.group).whole));
    }

    point(event) {
      const text = event.target.note ?? this.current.noteAt?.(event.clientX - this.plot.getBoundingClientRect().left);
      if (text) tip.show(text, event);
      else tip.hide();
    }

    move(key) {
      const { whole: [first, last], shown: [left, right] } = groups.get(this.group);
      const width = right - left;
      const middle = (left + right) / 2;
      const spans = {
        ArrowLeft: [left - width / 5, right - width / 5], ArrowRight: [left + width / 5, right + width / 5],
        "+": [middle - width / 4, middle + width / 4], "=": [middle - width / 4, middle + width / 4],
        "-": [middle - width, middle + width], 0: [first, last], Home: [first, last],
      };
      if (!(key in spans)) return false;
      const [start, end] = spans[key];
      const kept = Math.min(end - start, last - first);
      const begin = Math.min(Math.max(start, first), last - kept);
      this.zoom([begin, begin + kept]);
      return true;
    }
  }

  // An axis in pixels: `at` places an amount or a category.
  class Scale {
    constructor(axis, values, pixels, ends) {
      Object.assign(this, { title: "", unit: "", categories: [], is_log: false, ...axis, pixels });
      if (this.categories.length) {
        this.step = (pixels[1] - pixels[0]) / this.categories.length;
        return;
      }
      const [least, largest] = values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, 0]);
      this.ends = ends || axis.ends || (this.is_log ? [least / 1.15, largest * 1.15] : [0, largest * 1.07 || 1]);
      [this.unitName, this.size] = unitOf(this.unit, largest);
      const scaled = (value) => (this.is_log ? Math.log(value) : value);
      const [first, last] = this.ends.map(scaled);
      this.at = (value) => pixels[0] + ((scaled(value) - first) / (last - first || 1)) * (pixels[1] - pixels[0]);
      this.ticks = this.is_log ? [...new Set(values)].filter((value) => value > 0) : this.niceTicks();
    }

    // The middle of a category.
    middle(name) {
      return this.pixels[0] + (this.categories.indexOf(name) + 0.5) * this.step;
    }

    niceTicks() {
      const [first, last] = this.ends.map((end) => end / this.size);
      const rough = (last - first) / Math.max(2, Math.abs(this.pixels[1] - this.pixels[0]) / 90);
      const power = 10 ** Math.floor(Math.log10(rough || 1));
      const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
      const ticks = [];
      for (let tick = Math.ceil(first / step) * step; tick <= last + step * 1e-6; tick += step) ticks.push(tick * this.size);
      return ticks;
    }

    tickText(value) {
      return String(Number((value / this.size).toPrecision(6)));
    }

    get label() {
      return this.title && this.unitName ? `${this.title} [${this.unitName}]` : this.title;
    }
  }

  class PlotView {
    constructor(chart, plot, width) {
      Object.assign(this, { chart, plot: { marks: [], is_stacked: false, ...plot }, width, height: chart.height });
      const rows = plot.y.categories || [];
      const longest = Math.max(0, ...rows.map((row) => row.length)) * LETTER + 12;
      this.left = rows.length ? Math.max(chart.group ? 92 : 0, Math.min(longest, width * 0.42)) : chart.group ? 92 : 70;
      this.right = 22;
      this.top = (plot.marks || []).some((mark) => mark.axis === "x") ? 24 : 10;
      this.bottom = 42;
      this.stacks = new Map();
      const shown = groups.get(chart.group)?.shown;
      this.x = new Scale(plot.x, this.extent("x"), [this.left, width - this.right], shown);
      const yPixels = rows.length ? [this.top, this.height - this.bottom] : [this.height - this.bottom, this.top];
      this.y = new Scale(plot.y, this.extent("y"), yPixels);
      this.svg = draw("svg", { viewBox: `0 0 ${width} ${this.height}`, width: "100%", height: "100%" });
      const clip = `clip-${chart.name}`;
      const area = { x: this.left, y: 0, width: width - this.left - this.right, height: this.height - this.bottom };
      this.svg.append(patterns(), draw("clipPath", { id: clip }, draw("rect", area)));
      this.drawAxes();
      this.body = draw("g", { "clip-path": `url(#${clip})` });
      this.svg.append(this.body);
      this.base = null; // of stacked areas
      for (const series of plot.series) this[series.kind](series);
      this.drawMarks();
    }

    // The numbers on an axis, for its ends.
    extent(name) {
      const isBarAxis = !(this.plot[name].categories || []).length;
      const values = [];
      const sums = [];
      for (const series of this.plot.series) {
        const own = series[name].map((value, place) => value + (isBarAxis && series.starts?.[place] || 0));
        if (series.kind === "area" && name === "y") own.forEach((value, place) => { sums[place] = (sums[place] || 0) + value; });
        values.push(...own.filter((value) => typeof value === "number"));
      }
      if (this.plot.is_stacked && isBarAxis) values.push(...this.stackEnds(name));
      for (const mark of this.plot.marks) if (mark.axis === name) values.push(mark.place);
      return values.length || sums.length ? values.concat(sums) : [1];
    }

    stackEnds(name) {
      const other = name === "x" ? "y" : "x";
      const ends = {};
      for (const series of this.plot.series)
        series[other].forEach((row, place) => { ends[row] = (ends[row] || 0) + series[name][place]; });
      return Object.values(ends);
    }

    legend() {
      const named = this.plot.series.filter((series) => series.name);
      return legend(named.map((series) => [series.name, series.colour, series.pattern]));
    }

    drawAxes() {
      const { left, top, x, y } = this;
      const [right, bottom] = [this.width - this.right, this.height - this.bottom];
      for (const tick of x.ticks || []) {
        const at = x.at(tick);
        if (at < left - 1 || at > right + 1) continue;
        this.svg.append(draw("line", { class: "grid", x1: at, x2: at, y1: top, y2: bottom }),
          draw("text", { x: at, y: bottom + 15, "text-anchor": "middle" }, x.tickText(tick)));
      }
      for (const tick of y.ticks || []) {
        const at = y.at(tick);
        if (at < top - 1 || at > bottom + 1) continue;
        this.svg.append(draw("line", { class: "grid", x1: left, x2: right, y1: at, y2: at }),
          draw("text", { x: left - 6, y: at + 4, "text-anchor": "end" }, y.tickText(tick)));
      }
      for (const row of y.categories) {
        const text = draw("text", { x: left - 6, y: y.middle(row) + 4, "text-anchor": "end" }, shortened(row, left - 8));
        this.svg.append(text);
      }
      const few = Math.ceil((x.categories.length * 50) / (right - left));
      x.categories.forEach((row, place) => {
        if (place % few === 0)
          this.svg.append(draw("text", { x: x.middle(row), y: bottom + 15, "text-anchor": "middle" }, row));
      });
      this.svg.append(draw("text", { class: "x title", x: (left + right) / 2, y: this.height - 8, "text-anchor": "middle" }, x.label));
      const turned = `rotate(-90) translate(${-(top + bottom) / 2} 13)`;
      if (!y.categories.length)
        this.svg.append(draw("text", { class: "y title", transform: turned, "text-anchor": "middle" }, y.label));
    }

    drawMarks() {
      const [right, bottom] = [this.width - this.right, this.height - this.bottom];
      for (const { axis, place, text, is_alarm } of this.plot.marks) {
        const kind = is_alarm ? "mark alarm" : "mark";
        const at = this[axis].at(place);
        if (axis === "y") {
          this.svg.append(draw("line", { class: kind, x1: this.left, x2: right, y1: at, y2: at }),
            draw("text", { class: kind, x: this.left + 4, y: at - 4 }, text));
        } else if (at >= this.left - 1 && at <= right + 1) {
          const late = at > this.left + 0.85 * (right - this.left);
          this.svg.append(draw("line", { class: kind, x1: at, x2: at, y1: this.top, y2: bottom }),
            draw("text", { class: kind, x: at + (late ? -3 : 3), y: this.top - 7, "text-anchor": late ? "end" : "start" }, text));
        }
      }
    }

    path(series, isStep) {
      const points = series.x.map((value, place) => [this.x.at(value), this.y.at(series.y[place])]);
      return points.map(([x, y], place) => (place === 0 ? `M${x} ${y}` : isStep ? `H${x}V${y}` : `L${x} ${y}`)).join("");
    }

    line(series, isStep = false) {
      const drawn = draw("path", { class: "curve", d: this.path(series, isStep), style: `stroke: ${colour(series.colour)}` });
      if (series.is_dashed) drawn.setAttribute("stroke-dasharray", "5 4");
      this.body.append(drawn);
      if (series.notes || series.labels) this.points(series);
    }

    steps(series) {
      this.line(series, true);
    }

    area(series) {
      const below = this.base || series.y.map(() => 0);
      const above = series.y.map((value, place) => value + below[place]);
      this.base = above;
      const top = this.path({ ...series, y: above }, true);
      const places = series.x.map((_, place) => place).reverse();
      const bottom = places.map((place, index) => {
        const [x, y] = [this.x.at(series.x[place]), this.y.at(below[place])];
        return index === 0 ? `V${y}` : `V${y}H${x}`;
      });
      this.body.append(draw("path", { class: "area", d: `${top}${bottom.join("")}Z`, style: `fill: ${colour(series.colour)}` }));
    }

    points(series) {
      series.x.forEach((value, place) => {
        const [x, y] = [this.x.at(value), this.y.at(series.y[place])];
        const dot = draw("circle", { class: "point", cx: x, cy: y, r: series.kind === "points" ? 6 : 4, style: `fill: ${colour(series.colour)}` });
        dot.note = series.notes?.[place];
        const link = series.links?.[place];
        if (link) {
          dot.action = () => open(link);
          dot.setAttribute("class", "point linked");
        }
        this.body.append(dot);
        const text = series.labels?.[place];
        const isLate = x + 12 + LETTER * (text || "").length > this.width - this.right;
        if (text)
          this.body.append(draw("text", { class: "label", x: x + (isLate ? -9 : 9), y: Math.max(y - 7, 12), "text-anchor": isLate ? "end" : "start" }, text));
      });
    }

    bars(series) {
      const isFlat = this.y.categories.length > 0;
      const [along, across] = isFlat ? [this.x, this.y] : [this.y, this.x];
      const [amounts, rows] = isFlat ? [series.x, series.y] : [series.y, series.x];
      const fill = `fill: ${colour(series.colour)}`;
      const [low, high] = along.ends;
      amounts.forEach((amount, place) => {
        const row = rows[place];
        const start = series.starts?.[place] ?? (this.plot.is_stacked ? this.stacks.get(row) || 0 : 0);
        if (this.plot.is_stacked) this.stacks.set(row, start + amount);
        if (start + amount < low || start > high) return;
        this.bar(series, place, fill, isFlat, along.at(start), along.at(start + amount), across.middle(row), Math.min(Math.abs(across.step) * 0.8, 64));
      });
    }

    bar(series, place, fill, isFlat, from, to, middle, thick) {
      const [least, length] = [Math.min(from, to), Math.abs(to - from)];
      const box = isFlat
        ? { x: least, y: middle - thick / 2, width: length, height: thick }
        : { x: middle - thick / 2, y: least, width: thick, height: length };
      // An outline would hide a narrow bar.
      const shape = draw("rect", { class: "bar-shape", ...box, style: length < 4 ? `${fill}; stroke: none` : fill });
      shape.note = series.notes?.[place] ?? `${series.name}: ${amountText(isFlat ? this.x.unit : this.y.unit, isFlat ? series.x[place] : series.y[place])}`;
      this.body.append(shape);
      if (series.pattern) {
        const hatched = draw("rect", { ...box, fill: `url(#hatching-${1 + ((series.pattern - 1) % 3)})`, "pointer-events": "none" });
        this.body.append(hatched);
      }
      const text = series.labels?.[place];
      if (!text) return;
      const fits = length > LETTER * text.length + 4;
      const label = draw("text", { class: "inside", x: fits ? least + length / 2 : least + length + 4, y: middle + 4, "text-anchor": fits ? "middle" : "start" }, text);
      // A label beside its bar would run into the next one of a timeline.
      if (fits || !series.starts) this.body.append(label);
      if (fits) label.over = shape;
    }

    // Labels are written in black or white, whichever the colour of their bar leaves legible.
    finish() {
      for (const label of this.body.querySelectorAll("text.inside")) if (label.over) label.style.fill = ink(label.over);
    }

    valueAt(pixel) {
      const [first, last] = this.x.ends;
      const share = (pixel - this.left) / (this.width - this.left - this.right);
      return first + Math.min(Math.max(share, 0), 1) * (last - first);
    }

    // All lines and areas at a moment, where the x axis is time.
    noteAt(pixel) {
      const curves = this.plot.series.filter((series) => ["area", "steps"].includes(series.kind) && series.name);
      if (this.x.unit !== "seconds" || !curves.length || pixel < this.left) return "";
      const moment = this.valueAt(pixel);
      const lines = curves.map((series) => {
        const next = series.x.findIndex((value) => value > moment);
        const value = series.y[(next < 0 ? series.y.length : Math.max(next, 1)) - 1];
        return value ? `${series.name} ${amountText(this.y.unit, value)}` : "";
      });
      return [amountText("seconds", moment), ...lines.filter(Boolean)].join("\n");
    }
  }

  // Boxes within boxes, from left to right, from the box that is shown as the root on.
  class TreeView {
    constructor(chart, tree, width) {
      Object.assign(this, { chart, tree, width, boxes: tree.boxes });
      this.children = this.boxes.map(() => []);
      this.boxes.forEach((box, place) => { if (box.parent >= 0) this.children[box.parent].push(place); });
      this.totals = this.boxes.map((box) => box.amount);
      for (let place = this.boxes.length - 1; place > 0; place--) this.addToParents(place);
      this.svg = draw("svg", { viewBox: `0 0 ${width} ${chart.height}`, width: "100%", height: "100%" });
      this.column = width / Math.max(2, this.depth(chart.level));
      this.drawBox(chart.level, 0, 0, chart.height);
    }

    addToParents(place) {
      const amount = this.boxes[place].amount;
      for (let above = this.boxes[place].parent; above >= 0; above = this.boxes[above].parent) this.totals[above] += amount;
    }

    depth(place) {
      return 1 + Math.max(0, ...this.children[place].map((child) => this.depth(child)));
    }

    legend() {
      const path = [];
      for (let place = this.chart.level; place >= 0; place = this.boxes[place].parent) path.unshift(place);
      const links = path.map((place) => make("button", { type: "button", onclick: () => this.enter(place) }, this.boxes[place].label));
      const isShare = this.tree.legend.length === 1 && !this.tree.legend[0][1];
      const keys = isShare ? make("p", { className: "legend" }, "0 % ", make("i", { className: "shares" }), ` 100 % ${this.tree.legend[0][0]}`) : legend(this.tree.legend);
      return make("div", {}, keys, make("div", { className: "tools path" }, ...links));
    }

    drawBox(place, column, top, height) {
      if (height < 0.5) return;
      const box = this.boxes[place];
      const fill = typeof box.colour === "number" ? shareColour(box.colour) : colour(box.colour);
      // What holds nothing is as wide as the picture.
      const width = this.children[place].length ? this.column : this.width - column * this.column;
      const at = { x: column * this.column, y: top, width, height };
      const shape = draw("rect", { class: "box", ...at, style: `fill: ${fill}` });
      shape.note = box.note;
      shape.action = () => this.enter(place === this.chart.level ? Math.max(box.parent, 0) : place);
      this.svg.append(shape);
      if (height > 13) this.write(box, shape, at);
      let below = top;
      for (const child of this.children[place]) {
        const share = (this.totals[child] / (this.totals[place] || 1)) * height;
        this.drawBox(child, column + 1, below, share);
        below += share;
      }
    }

    write(box, shape, { x, y, width, height }) {
      const lines = [[box.label, "box-name"], ...(height > 30 && box.text ? [[box.text, ""]] : [])];
      lines.forEach(([text, kind], place) => {
        const written = draw("text", { class: `inside ${kind}`, x: x + 5, y: y + Math.min(14, height / 2 + 4) + 15 * place }, shortened(text, width - 8));
        written.over = shape;
        this.svg.append(written);
      });
    }

    finish() {
      for (const label of this.svg.querySelectorAll("text")) label.style.fill = ink(label.over);
    }

    enter(place) {
      this.chart.level = place;
      this.chart.redraw();
    }

    press(key) {
      const here = this.chart.level;
      const { parent } = this.boxes[here];
      const siblings = parent >= 0 ? this.children[parent] : [here];
      const place = siblings.indexOf(here);
      const next = {
        ArrowRight: this.children[here][0], ArrowLeft: parent, Home: 0,
        ArrowDown: siblings[place + 1], ArrowUp: siblings[place - 1],
      };
      if (!(key in next)) return false;
      if (next[key] >= 0) this.enter(next[key]);
      return true;
    }
  }

  function patterns() {
    const lines = ["M0 6L6 0", "M0 0L6 6M0 6L6 0", "M0 3H6"];
    return draw("defs", {}, ...lines.map((d, place) =>
      draw("pattern", { id: `hatching-${place + 1}`, width: 6, height: 6, patternUnits: "userSpaceOnUse" },
        draw("path", { d, style: "stroke: var(--surface); stroke-width: 1.2" }))));
  }

  function shareColour(share) {
    const [from, to, part] = share < 0.5 ? ["share-0", "share-1", share * 2] : ["share-1", "share-2", share * 2 - 1];
    return `color-mix(in srgb, ${colour(to)} ${100 * part}%, ${colour(from)})`;
  }

  function ink(shape) {
    const text = getComputedStyle(shape).fill;
    const numbers = text.match(/[\d.]+/g).slice(0, 3).map(Number);
    const [red, green, blue] = text.startsWith("color") ? numbers : numbers.map((number) => number / 255);
    return 0.3 * red + 0.59 * green + 0.11 * blue > 0.55 ? "#10151d" : "#ffffff";
  }

  const tip = {
    element: make("div", { className: "tip", hidden: true }),
    show(text, event) {
      const [title, ...lines] = text.split("\n");
      this.element.replaceChildren(make("b", {}, title), ...lines.map((line) => make("div", {}, line)));
      this.element.hidden = false;
      const { offsetWidth: width, offsetHeight: height } = this.element;
      this.element.style.left = `${Math.min(event.clientX + 14, innerWidth - width - 8)}px`;
      this.element.style.top = `${Math.max(8, Math.min(event.clientY + 14, innerHeight - height - 8))}px`;
    },
    hide() {
      this.element.hidden = true;
    },
  };

  function open(id) {
    const target = document.getElementById(id);
    if (!target) return;
    target.open = true;
    target.scrollIntoView();
  }

  // The page

  const report = JSON.parse(document.getElementById("report").textContent);
  const sections = report.parts.filter((part) => part.type === "Section");
  const outside = report.parts.filter((part) => part.type !== "Section");
  const figures = sections.length ? outside.filter((part) => part.type === "Facts").flatMap((part) => part.rows) : [];
  const head = sections.length ? outside.filter((part) => part.type !== "Facts") : outside;
  const body = sections.map((part) => (part.is_folded ? make("section", {}, section(part)) : section(part)));
  const links = sections.map((part) => make("a", { href: `#${part.anchor || anchor(part.title)}` }, part.title));
  // Key figures are at the head of a page with sections; the other facts are a section behind the first one.
  const others = lines(figures);
  if (others) {
    body.splice(1, 0, make("section", { id: "summary" }, make("h2", {}, "Summary"), others));
    links.splice(1, 0, make("a", { href: "#summary" }, "Summary"));
  }
  document.body.append(
    make("header", {}, make("h1", {}, report.title), cards(figures), ...parts(head)),
    make("nav", { ariaLabel: "Sections" }, ...links), make("main", {}, ...body), tip.element);

  const waiting = () => charts.filter((one) => !one.drawn && one.element.checkVisibility());
  const redrawAll = () => charts.filter((one) => one.drawn).forEach((one) => one.redraw());
  document.querySelectorAll("details").forEach((fold) =>
    fold.addEventListener("toggle", () => waiting().forEach((one) => one.redraw())));
  for (const query of ["(prefers-color-scheme: dark)", "print"]) matchMedia(query).addEventListener("change", redrawAll);
  addEventListener("resize", redrawAll);
  waiting().forEach((one) => one.redraw());
  document.documentElement.dataset.charts = "drawn";
})();
