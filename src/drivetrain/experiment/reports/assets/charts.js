"use strict";
// Curves: where their points lie, how they are smoothed and aligned, and the charts that uPlot draws.

// ------------------------------------------------------------------ curves

const curves = new WeakMap(),
  knots = new WeakMap();

/** Return a curve as arrays; null is a gap, where a value is not finite. `mean` has one point for each two where values are left out. */
function curveOf(run, tag) {
  const entry = own(run.curves, tag);
  if (!entry) return null;
  if (!curves.has(entry)) {
    const x = Array.from(decode(entry.x)),
      y = Array.from(decode(entry.y)),
      gaps = entry.gaps ?? [];
    const means = entry.m ? Array.from(decode(entry.m)) : null;
    const mean =
      means &&
      withGaps(
        means.map((_, place) => (x[2 * place] + x[2 * place + 1]) / 2),
        means,
        gaps,
      );
    curves.set(entry, { ...withGaps(x, y, gaps), mean });
  }
  return curves.get(entry);
}

function withGaps(x, y, gaps) {
  if (!gaps.length) return { x, y };
  const points = [...x.map((step, place) => [step, y[place]]), ...gaps.map(step => [step, null])].sort((a, b) => a[0] - b[0]);
  return { x: points.map(point => point[0]), y: points.map(point => point[1]) };
}

/** Return steps as positions on the chosen axis, null where the run does not know them. */
function along(run, steps) {
  if (state.axis === "step") return steps;
  const known = state.axis === "time" ? run.clock : run.epochs;
  if (!known) return null;
  if (!knots.has(known)) knots.set(known, { x: decode(known.x), y: decode(known.y) });
  const { x, y } = knots.get(known),
    last = x.length - 1;
  let place = 0;
  return steps.map(step => {
    if (last === 0) return y[0];
    while (place < last - 1 && x[place + 1] < step) place++;
    while (place > 0 && x[place] > step) place--;
    const width = x[place + 1] - x[place];
    return width ? y[place] + ((step - x[place]) / width) * (y[place + 1] - y[place]) : y[place];
  });
}

const SMOOTH_FROM = 30,
  SPAN = 250;
/**
 * Return the exponential moving mean, from both sides so that the curve does not lag. Its reach is a share of the axis: a dense curve and
 * a sparse one look alike, and few points are left as they are.
 */
function smoothed({ x, y }, extent) {
  const pass = (first, step) => {
    const means = new Array(y.length).fill(null);
    let total = 0,
      weight = 0,
      before = x[first];
    for (let place = first; place >= 0 && place < y.length; place += step) {
      if (y[place] === null) continue;
      const decay = state.smoothing ** ((Math.abs(x[place] - before) * SPAN) / (extent || 1));
      total = decay * total + y[place];
      weight = decay * weight + 1;
      before = x[place];
      means[place] = total / weight;
    }
    return means;
  };
  const forward = pass(0, 1),
    backward = pass(y.length - 1, -1);
  return y.map((value, place) => (value === null ? null : (forward[place] + backward[place]) / 2));
}

const MOST_CELLS = 2_000_000,
  GRID = 700;
/** Return lines over one horizontal axis, as uPlot wants them: undefined where a line has no point, null for a gap. */
function aligned(lines, [low, high]) {
  const total = lines.reduce((sum, line) => sum + line.x.length, 0);
  if (total * lines.length > MOST_CELLS) return onGrid(lines, low, high);
  const positions = lines.map(line => apart(line.x, 1e-9 * (high - low || 1)));
  const all = new Float64Array(total);
  let end = 0;
  for (const own of positions) {
    all.set(own, end);
    end += own.length;
  }
  all.sort();
  const x = Array.from(all).filter((value, place, every) => !place || value !== every[place - 1]);
  return [
    x,
    ...lines.map((line, number) => {
      const y = new Array(x.length).fill(undefined);
      let place = 0;
      for (let index = 0; index < line.x.length; index++) {
        while (x[place] < positions[number][index]) place++;
        y[place] = line.y[index];
      }
      return y;
    }),
  ];
}

/** Return positions in which none is the same as the one before, so that of several values at one step all are drawn. */
function apart(x, least) {
  let before = -Infinity;
  return x.map(position => (before = position > before ? position : before + least));
}

/** Return many lines over a grid as fine as the screen, with the smallest and largest value of each cell. */
function onGrid(lines, low, high) {
  const width = (high - low || 1) / GRID,
    x = Array.from({ length: 2 * GRID }, (_, place) => low + (place / (2 * GRID - 1)) * (high - low || 1));
  return [
    x,
    ...lines.map(line => {
      const y = new Array(x.length).fill(undefined);
      line.x.forEach((position, index) => {
        if (position < low || position > high) return;
        const value = line.y[index],
          cell = 2 * Math.min(GRID - 1, Math.floor((position - low) / width));
        if (value === null) {
          y[cell] ??= null;
          return;
        }
        if (y[cell] === undefined || y[cell] === null) y[cell] = value;
        else if (y[cell + 1] === undefined) y[cell + 1] = value;
        else if (value < Math.min(y[cell], y[cell + 1])) y[cell] <= y[cell + 1] ? (y[cell] = value) : (y[cell + 1] = value);
        else if (value > Math.max(y[cell], y[cell + 1])) y[cell] > y[cell + 1] ? (y[cell] = value) : (y[cell + 1] = value);
      });
      return y;
    }),
  ];
}

/** Return the index of the point of a line that is nearest to a position. */
function nearest(x, position) {
  let low = 0,
    high = x.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (x[middle] <= position) low = middle;
    else high = middle;
  }
  return position - x[low] <= x[high] - position ? low : high;
}

const ROBUST_FROM = 20,
  MOST_SORTED = 6000;
/** Return the vertical range of values, and how many are outside of it: the middle 96 % and what is near it, unless all are wanted. */
function rangeOf(values, isLog) {
  const finite = (isLog ? values.filter(value => value > 0).map(Math.log10) : values).filter(Number.isFinite);
  if (!finite.length) return { range: isLog ? [1, 10] : [0, 1], outside: 0 };
  let low = Infinity,
    high = -Infinity;
  for (const value of finite) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (state.robust && finite.length >= ROBUST_FROM) {
    const stride = Math.ceil(finite.length / MOST_SORTED),
      sample = Float64Array.from(finite.filter((_, place) => place % stride === 0)).sort();
    const from = sample[Math.floor(0.02 * (sample.length - 1))],
      to = sample[Math.ceil(0.98 * (sample.length - 1))],
      reach = 0.75 * (to - from);
    if (reach > 0) {
      low = Math.max(low, from - reach);
      high = Math.min(high, to + reach);
    }
  }
  const outside = finite.filter(value => value < low || value > high).length;
  const margin = high > low ? 0.05 * (high - low) : isLog ? 0.3 : Math.abs(low) * 0.1 || 1;
  const range = [low - margin, high + margin];
  return { range: isLog ? range.map(value => 10 ** value) : range, outside };
}

/** Return round numbers between two positive ones: more of each power of ten where there are few of them. */
function logSplits(low, high) {
  const first = Math.floor(Math.log10(low)),
    last = Math.ceil(Math.log10(high)),
    decades = Math.log10(high / low);
  const factors = decades < 0.5 ? null : decades < 1.5 ? [1, 2, 3, 5, 7] : decades < 4 ? [1, 2, 5] : [1];
  if (!factors) return roundTicks(low, high, 5);
  const stride = Math.max(1, Math.ceil((last - first) / 8)),
    found = [];
  for (let power = first; power <= last; power += stride) for (const factor of factors) found.push(Number(`${factor}e${power}`));
  return found.filter(value => value >= low && value <= high);
}

const STEP_INCREMENTS = Array.from({ length: 45 }, (_, place) => [1, 2, 5][place % 3] * 10 ** Math.floor(place / 3));
const TIME_INCREMENTS = [
  0.001, 0.01, 0.1, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800,
  432000, 864000, 8640000,
];

function timeLabel(seconds) {
  for (const [size, unit] of [
    [86400, "d"],
    [3600, "h"],
    [60, "min"],
  ])
    if (Math.abs(seconds) >= size) return `${Number((seconds / size).toFixed(2))} ${unit}`;
  return `${Number(seconds.toPrecision(3))} s`;
}
const positionLabel = position =>
  state.axis === "time"
    ? timeLabel(position)
    : state.axis === "epoch"
      ? `epoch ${Number(position.toFixed(2))}`
      : `step ${Math.round(position).toLocaleString("en")}`;

const charts = new Map();
const nearby = new IntersectionObserver(
  entries => {
    for (const { target, isIntersecting } of entries) {
      const chart = [...charts.values()].find(one => one.plot === target);
      if (chart) {
        chart.isNear = isIntersecting;
        chart.drawIfNear();
      }
    }
  },
  { rootMargin: "250px" },
);
const sizes = new ResizeObserver(entries => {
  for (const { target } of entries) [...charts.values()].find(one => one.plot === target)?.fit();
});
const HEIGHT = 226;

/** One chart: its figure, what is hidden in it, how far it is zoomed, and the uPlot that draws it once it is near the screen. */
class Chart {
  constructor(title) {
    Object.assign(this, {
      title,
      members: [],
      hidden: new Set(),
      isLog: false,
      zoom: null,
      isNear: false,
      isStale: true,
      plotted: null,
      lines: [],
      form: "",
    });
    this.plot = make("div", {
      class: "plot",
      tabindex: "0",
      role: "group",
      "aria-roledescription": "chart",
      "aria-describedby": "charts-help",
    });
    this.legend = make("ul", { class: "legend", "aria-label": `curves of ${title}` });
    this.outside = make("span", { class: "outside" });
    this.logButton = make(
      "button",
      {
        type: "button",
        "aria-pressed": "false",
        onclick: () => {
          this.isLog = !this.isLog;
          this.change();
        },
      },
      "log",
    );
    this.resetButton = make("button", { type: "button", hidden: true, onclick: () => this.reset() }, "reset zoom");
    const tools = make("span", { class: "tools" }, this.outside, this.resetButton, this.logButton);
    this.figure = make(
      "figure",
      { class: "panel" },
      make("figcaption", {}, make("span", {}, title), tools),
      this.plot,
      this.legend,
    );
    this.plot.addEventListener("keydown", event => this.press(event));
    this.plot.addEventListener("pointerleave", () => {
      this.isPointed = false;
      hideTooltip();
    });
    this.plot.addEventListener("pointerenter", () => {
      this.isPointed = true;
    });
    this.plot.addEventListener("blur", hideTooltip);
    nearby.observe(this.plot);
    sizes.observe(this.plot);
  }

  /** Take the curves to draw. */
  set(members) {
    this.members = members;
    this.isCrowded = members.some(member => member.isCrowded);
    const names = members.map(member => member.label);
    this.plot.setAttribute(
      "aria-label",
      `${this.title}: ${count(names.length, "curve")}${names.length <= MOST_DRAWN ? `, ${names.join(", ")}` : ""}`,
    );
    this.change();
  }

  change() {
    this.isStale = true;
    this.drawIfNear();
  }

  drawIfNear() {
    if (!this.isNear || !this.isStale || !this.plot.clientWidth) return;
    this.isStale = false;
    this.prepare();
    this.showLegend();
    this.paint();
  }

  /** Put the visible curves on the axis, with their means. */
  prepare() {
    const placed = [];
    for (const member of this.members) {
      const curve = curveOf(member.run, member.tag),
        x = curve && !this.hides(member) && along(member.run, curve.x);
      if (x && x.length)
        placed.push({ ...member, x, y: curve.y, mean: curve.mean && { x: along(member.run, curve.mean.x), y: curve.mean.y } });
    }
    const low = Math.min(...placed.map(line => line.x[0])),
      high = Math.max(...placed.map(line => line.x.at(-1)));
    this.extent = placed.length ? [low, high] : [0, 1];
    this.lines = placed.map(line => {
      const source = line.mean ?? line,
        isSmooth = state.smoothing > 0 && source.x.length >= SMOOTH_FROM;
      return { ...line, smooth: isSmooth ? { x: source.x, y: smoothed(source, high - low) } : null };
    });
    const values = this.lines.flatMap(line => line.y).filter(value => value !== null);
    this.logButton.hidden = !(values.length && values.every(value => value > 0)) && !this.isLog;
  }

  series() {
    const positive = y => (this.isLog ? y.map(value => (value > 0 ? value : null)) : y);
    return this.lines.flatMap(line => {
      const shade = line.colour,
        dash = DASHES[line.dash % DASHES.length];
      const points = { show: line.x.length <= 40, size: line.x.length === 1 ? 8 : 4.5, fill: shade };
      const main = {
        id: line.id,
        stroke: this.isCrowded ? `${shade}99` : shade,
        width: this.isCrowded ? 1 : 1.7,
        dash,
        points: line.smooth ? { show: false } : points,
      };
      if (!line.smooth || this.isCrowded)
        return [{ ...main, layer: 1, x: (line.smooth ?? line).x, y: positive((line.smooth ?? line).y) }];
      return [
        { ...main, layer: 0, stroke: `${shade}33`, width: 1, dash: [], x: line.x, y: positive(line.y) },
        { ...main, layer: 1, x: line.smooth.x, y: positive(line.smooth.y) },
      ];
    });
  }

  paint() {
    const series = this.series().sort((a, b) => a.layer - b.layer),
      window = this.zoom ?? this.extent;
    const data = series.length ? aligned(series, window) : [[], []];
    this.isGrid = series.reduce((sum, line) => sum + line.x.length, 0) * series.length > MOST_CELLS;
    const form = JSON.stringify([
      state.axis,
      this.isLog,
      css("--text"),
      series.map(({ id, stroke, width, dash, points }) => [id, stroke, width, dash, points.show]),
    ]);
    if (this.plotted && form === this.form) {
      this.plotted.setData(data, false);
      this.plotted.setScale("x", { min: window[0], max: window[1] });
      return;
    }
    this.form = form;
    this.plotted?.destroy();
    this.plotted = null;
    if (!series.length) {
      this.plot.replaceChildren(
        make(
          "p",
          { class: "empty" },
          this.members.length
            ? this.hidden.size
              ? "All curves are hidden."
              : `No run has ${state.axis === "step" ? "values" : `an axis of ${state.axis}s`} here.`
            : "No curve is drawn.",
        ),
      );
      return;
    }
    this.plot.replaceChildren();
    const soft = css("--soft"),
      grid = { stroke: css("--grid"), width: 1 },
      font = "12px system-ui, sans-serif",
      ticks = { stroke: css("--edge"), size: 4 };
    const labels = (_, splits) =>
      splits.map(value => (value === null ? "" : state.axis === "time" ? timeLabel(value) : short(value)));
    this.plotted = new uPlot(
      {
        width: this.plot.clientWidth,
        height: HEIGHT,
        padding: [8, 16, 0, 0],
        legend: { show: false },
        cursor: {
          y: false,
          points: { show: false },
          drag: { x: true, y: false, dist: 4 },
          focus: { prox: -1 },
          sync: { key: "charts", setSeries: false },
        },
        scales: {
          x: { time: false, range: (_, low, high) => this.xRange(low, high) },
          y: { distr: this.isLog ? 3 : 1, range: () => this.yRange() },
        },
        axes: [
          {
            stroke: soft,
            font,
            grid,
            ticks,
            values: labels,
            size: 30,
            gap: 3,
            space: state.axis === "time" ? 62 : 54,
            incrs: state.axis === "step" ? STEP_INCREMENTS : state.axis === "time" ? TIME_INCREMENTS : undefined,
          },
          {
            stroke: soft,
            font,
            grid,
            ticks,
            gap: 3,
            incrs: this.isLog ? undefined : (_, axis, low, high) => [Math.max(5, high - low)], // its own end at 1e16
            splits: (_, axis, low, high) => (this.isLog ? logSplits(low, high) : roundTicks(low, high, 6)),
            filter: (_, splits) => splits,
            values: (_, splits) => splits.map(value => (value === null ? "" : short(value))),
            size: (_, values) => Math.max(36, 14 + 7 * Math.max(0, ...(values ?? []).map(value => value.length))),
          },
        ],
        series: [{}, ...series.map(({ stroke, width, dash, points }) => ({ stroke, width, dash, points, spanGaps: false }))],
        hooks: {
          setCursor: [() => this.read()],
          setScale: [
            (_, key) => {
              if (key === "x") this.zoomed();
            },
          ],
        },
      },
      data,
      this.plot,
    );
    this.dot = make("span", { class: "dot", "aria-hidden": "true", hidden: true });
    Object.assign(this.dot.style, { position: "absolute", transform: "translate(-50%, -50%)", pointerEvents: "none" });
    this.plotted.over.append(this.dot);
    this.listenToFingers(this.plotted.over);
    if (this.zoom) this.plotted.setScale("x", { min: this.zoom[0], max: this.zoom[1] });
  }

  xRange(low, high) {
    this.window =
      low === null || low === undefined
        ? this.extent
        : low === high
          ? [low - (Math.abs(low) * 0.1 || 1), high + (Math.abs(low) * 0.1 || 1)]
          : [low, high];
    return this.window;
  }

  yRange() {
    const [low, high] = this.window ?? this.extent,
      values = [];
    for (const line of this.lines) {
      for (let place = 0; place < line.x.length; place++)
        if (line.x[place] >= low && line.x[place] <= high && line.y[place] !== null) values.push(line.y[place]);
    }
    const { range, outside } = rangeOf(values, this.isLog);
    this.outside.textContent = outside ? `${count(outside, "point")} outside` : "";
    return range;
  }

  /** One finger reads values, two fingers zoom and move all charts; scrolling the page up and down is left to the browser. */
  listenToFingers(over) {
    const fingers = new Map(),
      position = event => event.clientX - over.getBoundingClientRect().left;
    let held = null;
    const grip = () => {
      held = fingers.size === 2 ? [...fingers.values()].map(left => this.plotted.posToVal(left, "x")) : null;
      if (held) hideTooltip();
    };
    const move = event => {
      if (!fingers.has(event.pointerId)) return;
      fingers.set(event.pointerId, position(event));
      if (fingers.size === 1) {
        this.isPointed = true;
        this.plotted.setCursor({ left: position(event), top: event.clientY - over.getBoundingClientRect().top });
      } else if (held) {
        const [first, second] = fingers.values(),
          scale = (held[1] - held[0]) / (second - first), // what is under a finger stays under it
          low = held[0] - first * scale,
          [from, to] = this.extent;
        if (scale > 0 && Number.isFinite(scale)) {
          const range = [Math.max(from, low), Math.min(to, low + over.clientWidth * scale)];
          if (range[1] - range[0] > 1e-6 * (to - from)) showEverywhere(range[0] <= from && range[1] >= to ? null : range);
        }
      }
    };
    const leave = event => {
      if (fingers.delete(event.pointerId)) grip();
    };
    over.addEventListener("pointerdown", event => {
      if (event.pointerType !== "touch") return;
      fingers.set(event.pointerId, position(event));
      grip();
      move(event);
    });
    over.addEventListener("pointermove", move);
    for (const name of ["pointerup", "pointercancel"]) over.addEventListener(name, leave);
  }

  /** Keep the zoom that was dragged. */
  zoomed() {
    const { min, max } = this.plotted?.scales.x ?? {};
    if (!isNumber(min)) return;
    const [low, high] = this.extent,
      slack = 1e-6 * (high - low),
      before = this.zoom;
    this.zoom = min > low + slack || max < high - slack ? [min, max] : null;
    this.resetButton.hidden = !this.zoom;
    if (String(before) === String(this.zoom)) return;
    if (this.isPointed) for (const chart of charts.values()) if (!chart.plotted) chart.show(this.zoom); // uPlot moves the others
    if (this.isGrid) queueMicrotask(() => this.paint());
  }

  /** Show a part of the horizontal axis, or all of it: at once, or when the chart comes near the screen. */
  show(range) {
    this.zoom = range;
    this.resetButton.hidden = !range;
    const [min, max] = range ?? this.extent ?? [0, 0];
    if (!this.isNear || !this.plotted) this.isStale = true;
    else if (this.isGrid) this.paint();
    else if (max > min) this.plotted.setScale("x", { min, max });
  }

  reset() {
    showEverywhere(null);
    this.plot.focus({ preventScroll: true });
  }

  fit() {
    if (this.plotted && this.plot.clientWidth && this.plotted.width !== this.plot.clientWidth)
      this.plotted.setSize({ width: this.plot.clientWidth, height: HEIGHT });
    else this.drawIfNear();
  }

  showLegend() {
    this.logButton.setAttribute("aria-pressed", String(this.isLog));
    const focused = document.activeElement?.dataset?.curve,
      inside = this.legend.contains(document.activeElement);
    const tags = unique(this.members.map(member => member.tag)),
      owners = unique(this.members.map(member => member.run));
    const first = (name, value) => this.members.find(member => member[name] === value);
    const byRun = owners.map(run => [
      `run ${run.key}`,
      run.label,
      first("run", run).colour,
      owners.length > 1 && tags.length > 1 ? 0 : first("run", run).dash,
      run.folder,
    ]);
    const byTag = tags.map(tag => [
      `tag ${tag}`,
      tag,
      runs.length === 1 ? first("tag", tag).colour : css("--soft"),
      first("tag", tag).dash,
      tag,
    ]);
    const entries = runs.length === 1 || this.isCrowded ? byTag : tags.length > 1 ? [...byRun, ...byTag] : byRun;
    this.legend.hidden = entries.length < 2 && !this.hidden.size;
    this.legend.replaceChildren(
      ...entries.map(([id, label, stroke, dash, title]) => {
        const line = draw("line", {
          x1: 0,
          x2: 20,
          y1: 4,
          y2: 4,
          stroke,
          "stroke-width": 2.5,
          "stroke-dasharray": DASHES[dash % DASHES.length].join(" ") || null,
        });
        const press = () => {
          if (!this.hidden.delete(id)) this.hidden.add(id);
          this.change();
        };
        const attributes = {
          type: "button",
          "aria-pressed": String(!this.hidden.has(id)),
          "data-curve": id,
          title,
          onclick: press,
        };
        const isApart = runs.length > 1 && !this.isCrowded && id === byTag[0][0];
        return make(
          "li",
          { class: isApart ? "apart" : "" },
          make("button", attributes, draw("svg", { viewBox: "0 0 20 8", "aria-hidden": "true" }, line), make("span", {}, label)),
        );
      }),
    );
    if (inside) [...this.legend.querySelectorAll("button")].find(button => button.dataset.curve === focused)?.focus();
  }

  hides({ run, tag }) {
    return this.hidden.has(`run ${run.key}`) || this.hidden.has(`tag ${tag}`);
  }

  /** Return what is at the cursor: each curve with the value next to it. */
  atCursor() {
    const { left } = this.plotted.cursor,
      position = this.plotted.posToVal(left, "x");
    const found = this.lines.map(line => {
      const place = nearest(line.x, position),
        smooth = line.smooth && line.smooth.y[nearest(line.smooth.x, position)];
      return { line, x: line.x[place], raw: line.y[place], value: smooth ?? line.y[place] };
    });
    return { position, found };
  }

  read() {
    if (!this.plotted || !this.isPointed || !(this.plotted.cursor.left >= 0)) {
      if (this.dot) this.dot.hidden = true;
      return;
    }
    const { position, found } = this.atCursor(),
      { left, top } = this.plotted.cursor;
    const distance = one => (one.value === null ? Infinity : Math.abs(this.plotted.valToPos(one.value, "y") - top));
    const near = found.reduce((one, other) => (distance(other) < distance(one) ? other : one), found[0]);
    if (near && near.value !== null) {
      this.dot.hidden = false;
      Object.assign(this.dot.style, {
        left: `${this.plotted.valToPos(near.x, "x")}px`,
        top: `${this.plotted.valToPos(near.value, "y")}px`,
        background: near.line.colour,
      });
    }
    const listed = found.length <= 10 ? found : [...found].sort((a, b) => distance(a) - distance(b)).slice(0, 10);
    const rows = listed.map(one => {
      const swatch = make("span", { class: "swatch" });
      swatch.style.background = one.line.colour;
      const smooth = one.value !== one.raw ? ` (smooth ${short(one.value)})` : "";
      return make(
        "div",
        { class: one === near && found.length > 1 ? "near" : "" },
        swatch,
        make("span", { class: "name" }, one.line.label),
        make("span", { class: "number" }, one.raw === null ? "not finite" : short(one.raw) + smooth),
      );
    });
    const box = this.plotted.over.getBoundingClientRect();
    showTooltip(
      box.left + left,
      box.top + top,
      make("div", { class: "soft" }, positionLabel(near && found.length === 1 ? near.x : position)),
      rows,
    );
  }

  /** Move the cursor and zoom with the keyboard; values are read out. */
  press(event) {
    if (!this.plotted) return;
    const width = this.plotted.over.clientWidth,
      step = width / (event.shiftKey ? 10 : 50),
      [low, high] = this.window ?? this.extent;
    let left = this.plotted.cursor.left >= 0 ? this.plotted.cursor.left : width / 2;
    const centre = this.plotted.posToVal(left, "x"),
      zoom = factor =>
        showEverywhere(
          [centre - (centre - low) * factor, centre + (high - centre) * factor].map(value =>
            Math.min(Math.max(value, this.extent[0]), this.extent[1]),
          ),
        );
    switch (event.key) {
      case "ArrowLeft":
        left = Math.max(0, left - step);
        break;
      case "ArrowRight":
        left = Math.min(width - 1, left + step);
        break;
      case "Home":
        left = 0;
        break;
      case "End":
        left = width - 1;
        break;
      case "+":
      case "=":
        zoom(0.5);
        break;
      case "-":
      case "−":
        zoom(2);
        break;
      case "0":
      case "Escape":
        showEverywhere(null);
        break;
      default:
        return;
    }
    event.preventDefault();
    this.isPointed = true;
    this.plotted.setCursor({ left, top: this.plotted.over.clientHeight / 2 });
    const { position, found } = this.atCursor();
    byId("status").textContent = `${positionLabel(position)}: ${found
      .slice(0, MOST_DRAWN)
      .map(one => `${one.line.label} ${one.value === null ? "not finite" : short(one.value)}`)
      .join(", ")}`;
  }

  remove() {
    nearby.unobserve(this.plot);
    sizes.unobserve(this.plot);
    this.plotted?.destroy();
    this.figure.remove();
  }
}

/** Show a part of the horizontal axis, or all of it, in every chart. */
function showEverywhere(range) {
  for (const chart of charts.values()) chart.show(range);
}

const DASHES = [[], [6, 4], [2, 3], [9, 3, 2, 3]];
const SPLIT = /^(training|train|evaluation|eval|validation|valid|val|test)[/_.]/;
const MOST_OPEN = 12,
  CROWDED = 16;

/** Return the charts to draw, by group: training and evaluation of one quantity share one if wanted, and so do all runs. */
function chartPlan() {
  const among = drawn(),
    titles = new Map(),
    isCrowded = among.length > CROWDED,
    byRank = isCrowded ? shades(among) : null;
  for (const run of among) {
    for (const tag of Object.keys(run.curves)) {
      if (state.find && !tag.toLowerCase().includes(state.find.toLowerCase())) continue;
      const quantity = state.together ? tag.replace(SPLIT, "") : tag;
      if (!titles.has(quantity)) titles.set(quantity, []);
      titles.get(quantity).push({ run, tag });
    }
  }
  const groups = new Map(),
    main = objective()?.replace(state.together ? SPLIT : /^$/, "");
  for (const [quantity, pairs] of [...titles].sort(
    ([a], [b]) => (b === main) - (a === main) || (a === "epoch") - (b === "epoch"),
  )) {
    const group = quantity.includes("/") ? quantity.slice(0, quantity.indexOf("/")) : "";
    const tags = unique(pairs.map(pair => pair.tag)),
      isAlone = runs.length === 1;
    const members = pairs.map(({ run, tag }) => {
      const slot = isAlone ? tags.indexOf(tag) : slots.get(run.key),
        more = isAlone ? 0 : Math.floor(slot / NUM_COLOURS);
      const label = isAlone ? tag : tags.length === 1 ? run.label : `${run.label}: ${tag}`;
      return {
        run,
        tag,
        id: `${run.key} ${tag}`,
        label,
        isCrowded,
        colour: byRank?.get(run.key) ?? colour(slot),
        dash: isCrowded ? tags.indexOf(tag) : isAlone ? Math.floor(slot / NUM_COLOURS) : tags.indexOf(tag) + more,
      };
    });
    if (!groups.has(group)) groups.set(group, []);
    groups.get(group).push({ key: `${state.together} ${quantity}`, title: tags.length === 1 ? tags[0] : quantity, members });
  }
  return new Map([...groups].sort(([a], [b]) => (b === "") - (a === "")));
}

function showCharts() {
  const plan = chartPlan(),
    wanted = new Set([...plan.values()].flat().map(chart => chart.key));
  byId("charts").hidden = !runs.some(run => Object.keys(run.curves).length);
  for (const [value, name] of [
    ["epoch", "epochs"],
    ["time", "clock"],
  ])
    byId("axis").querySelector(`[value=${value}]`).disabled = !runs.some(run => run[name]);
  for (const [key, chart] of charts)
    if (!wanted.has(key)) {
      chart.remove();
      charts.delete(key);
    }
  const isNew = changed(
    "charts",
    [...plan].map(([name, group]) => [name, group.map(chart => chart.key)]),
  );
  const parts = [...plan].map(([name, group]) => {
    const figures = group.map(({ key, title }) => {
      if (!charts.has(key)) charts.set(key, new Chart(title));
      return charts.get(key).figure;
    });
    if (!isNew) return null;
    const grid = make("div", { class: "grid" }, figures);
    return name === "" || plan.size === 1
      ? grid
      : folded(
          `group ${name}`,
          [name, make("span", { class: "soft" }, ` ${count(group.length, "chart")}`)],
          grid,
          group.length <= MOST_OPEN,
        );
  });
  if (isNew)
    byId("groups").replaceChildren(
      ...(parts.length ? parts : [make("p", { class: "empty" }, state.find ? "No metric has this name." : "No run is drawn.")]),
    );
  for (const { key, members } of [...plan.values()].flat()) charts.get(key).set(members);
  byId("smoothing-value").textContent = state.smoothing.toFixed(2);
  byId("crowded").hidden = drawn().length <= CROWDED;
}

function listenToCharts() {
  const redraw = soon(() => {
    for (const chart of charts.values()) chart.change();
  }, 30);
  byId("axis").addEventListener("change", event => {
    state.axis = event.target.value;
    for (const chart of charts.values()) {
      chart.zoom = null;
      chart.resetButton.hidden = true;
    }
    redraw();
  });
  byId("smoothing").addEventListener("input", event => {
    state.smoothing = Number(event.target.value);
    byId("smoothing-value").textContent = state.smoothing.toFixed(2);
    redraw();
  });
  byId("robust").addEventListener("change", event => {
    state.robust = event.target.checked;
    redraw();
  });
  byId("together").addEventListener("change", event => {
    state.together = event.target.checked;
    showCharts();
  });
  byId("find-chart").addEventListener(
    "input",
    soon(() => {
      state.find = byId("find-chart").value.trim();
      showCharts();
    }),
  );
  for (const name of ["x", "y"])
    byId(`scatter-${name}`).addEventListener("change", event => {
      state.scatter[name] = event.target.value;
      showScatter();
    });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    seen.clear();
    colours.clear();
    refresh();
  });
  addEventListener(
    "resize",
    soon(() => {
      showParallel();
      showScatter();
    }),
  );
  byId("parallel").addEventListener("keydown", event => walk(event, "parallel"));
  byId("scatter").addEventListener("keydown", event => walk(event, "scatter"));
}
