"use strict";
// Draws the figures of the page with plotly.js: in the colours of the page, light or dark, and for paper.
(() => {
  const PAPER_WIDTH = 690; // pixels between the margins of a sheet of A4 or Letter
  const FONT = "system-ui, -apple-system, sans-serif";
  const CONFIG = {
    responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
    showSendToCloud: false, plotlyServerURL: "", // a plan stays where it is
  };
  const AXIS = {
    gridcolor: "var(--soft)", linecolor: "var(--line)", zerolinecolor: "var(--line)", tickcolor: "var(--line)",
    showspikes: false,
  };
  const BASE = {
    font: { family: FONT, size: 12, color: "var(--text)" },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", dragmode: "zoom",
    hoverlabel: { bgcolor: "var(--surface)", bordercolor: "var(--line)", font: { color: "var(--text)" }, align: "left" },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: "var(--muted)", activecolor: "var(--accent)" },
    hovermode: "closest",
    legend: { bgcolor: "rgba(0,0,0,0)", orientation: "h", x: 0, y: 1, yanchor: "bottom", traceorder: "normal" },
  };
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const paper = matchMedia("print");
  const figures = [];

  // A copy of a value, in which names of colours are the colours that the page has now.
  function resolve(value, style) {
    if (typeof value === "string") {
      const name = /^var\((--[\w-]+)\)$/.exec(value);
      return name ? style.getPropertyValue(name[1]).trim() : value;
    }
    if (Array.isArray(value)) return value.map((item) => resolve(item, style));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, resolve(item, style)]));
  }

  class Chart {
    constructor(element) {
      Object.assign(this, JSON.parse(element.querySelector("script").textContent));
      this.element = element;
      this.plot = element.querySelector(".plot");
      this.tools = element.querySelector(".tools");
      this.view = 0;
      this.drawn = null; // the view that is drawn
      this.whole = this.ranges.length ? this.ranges[0][1] : null;
      this.isTree = this.views.some((view) => view.data[0].type === "icicle");
      this.addTools();
      this.plot.addEventListener("keydown", (event) => this.press(event));
    }

    addTools() {
      if (this.views.length > 1)
        this.viewButtons = this.views.map((view, index) => this.addButton(view.label, () => this.show(index)));
      this.ranges.forEach(([label, range]) => this.addButton(label, () => this.zoom(range)));
      const keys = document.createElement("span");
      keys.className = "keys";
      if (this.group) keys.textContent = "keys: ← → move, + − zoom, 0 whole step";
      if (this.isTree) keys.textContent = "keys: → into a module, ← out, ↑ ↓ its neighbours";
      this.tools.append(keys);
      this.mark();
    }

    addButton(text, action) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = text;
      button.addEventListener("click", action);
      this.tools.append(button);
      return button;
    }

    mark() {
      (this.viewButtons || []).forEach((button, index) => button.setAttribute("aria-pressed", index === this.view));
    }

    show(index) {
      this.view = index;
      this.mark();
      this.draw();
    }

    async draw() {
      const style = getComputedStyle(root);
      const { data, layout } = this.views[this.view];
      const full = { ...BASE, ...layout, legend: { ...BASE.legend, ...layout.legend } };
      for (const name of Object.keys(layout).filter((key) => /^[xy]axis\d*$/.test(key)))
        full[name] = { ...AXIS, ...layout[name] };
      Object.assign(full, root.dataset.printing ? { width: PAPER_WIDTH, autosize: false } : { autosize: true });
      const first = !this.drawn;
      const traces = resolve(data, style);
      if (this.drawn === this.views[this.view]) {
        // Another theme, or paper, shows the same part of the picture.
        if (this.group) full.xaxis.range = this.plot.layout.xaxis.range;
        if (this.isTree) traces[0].level = this.plot.data[0].level;
      }
      this.drawn = this.views[this.view];
      await Plotly.react(this.plot, traces, resolve(full, style), CONFIG);
      if (first) this.listen();
    }

    listen() {
      if (this.group)
        this.plot.on("plotly_relayout", (change) => {
          if (change["xaxis.autorange"]) this.share(this.extent());
          else if ("xaxis.range[0]" in change) this.share([change["xaxis.range[0]"], change["xaxis.range[1]"]]);
        });
      // A point that stands for a part of the page opens it.
      this.plot.on("plotly_click", (event) => {
        const target = document.getElementById(event.points[0].customdata?.anchor ?? "");
        if (target) {
          target.open = true;
          target.scrollIntoView();
        }
      });
    }

    // The whole x axis, which one figure of a group knows.
    extent() {
      const owner = figures.find((figure) => figure.group === this.group && figure.whole);
      return owner ? owner.whole : this.plot.layout.xaxis.range;
    }

    zoom(range) {
      Plotly.relayout(this.plot, { "xaxis.range": range });
      this.share(range);
    }

    share(range) {
      for (const other of figures)
        if (other.group === this.group && other.drawn) {
          const [left, right] = other.plot.layout.xaxis.range;
          if (left !== range[0] || right !== range[1]) Plotly.relayout(other.plot, { "xaxis.range": range });
        }
    }

    press(event) {
      if (event.ctrlKey || event.metaKey || event.altKey || event.target !== this.plot) return;
      const handled = this.isTree ? this.climb(event.key) : this.group ? this.move(event.key) : false;
      if (handled) event.preventDefault();
    }

    move(key) {
      const [first, last] = this.extent();
      const [left, right] = this.plot.layout.xaxis.range;
      const width = right - left;
      const middle = (left + right) / 2;
      const spans = {
        ArrowLeft: [left - width / 5, right - width / 5], ArrowRight: [left + width / 5, right + width / 5],
        "+": [middle - width / 4, middle + width / 4], "=": [middle - width / 4, middle + width / 4],
        "-": [middle - width, middle + width], 0: [first, last], Home: [first, last],
      };
      if (!(key in spans)) return false;
      let [start, end] = spans[key];
      const kept = Math.min(end - start, last - first);
      start = Math.min(Math.max(start, first), last - kept);
      this.zoom([start, start + kept]);
      return true;
    }

    climb(key) {
      const tree = this.plot.data[0];
      const here = this.plot.data[0].level || tree.ids[0];
      const parent = tree.parents[tree.ids.indexOf(here)];
      const children = (id) => tree.ids.filter((_, index) => tree.parents[index] === id);
      const siblings = parent ? children(parent) : [here];
      const place = siblings.indexOf(here);
      const next = {
        ArrowRight: children(here)[0], ArrowLeft: parent, Home: tree.ids[0],
        ArrowDown: siblings[place + 1], ArrowUp: siblings[place - 1],
      };
      if (!(key in next)) return false;
      if (next[key]) Plotly.restyle(this.plot, { level: next[key] }, [0]);
      return true;
    }
  }

  const visible = (figure) => figure.element.checkVisibility();

  function draw() {
    return Promise.all(figures.filter(visible).map((figure) => figure.draw()));
  }

  function print(begins) {
    if (begins === "printing" in root.dataset) return;
    if (begins) root.dataset.printing = "yes";
    else delete root.dataset.printing;
    draw();
  }

  document.querySelectorAll("figure.chart").forEach((element) => figures.push(new Chart(element)));
  document.querySelectorAll("details").forEach((fold) =>
    fold.addEventListener("toggle", () => figures.filter((figure) => !figure.drawn && visible(figure)).forEach((figure) => figure.draw())));
  dark.addEventListener("change", draw);
  paper.addEventListener("change", (event) => print(event.matches));
  addEventListener("beforeprint", () => print(true));
  addEventListener("afterprint", () => print(false));
  draw().then(() => { root.dataset.charts = "drawn"; });
})();
