"use strict";
// Drawings of our own, as SVG: parallel coordinates, importance, scatter and histograms; and the tooltip.

// ------------------------------------------------------------------ the tooltip

function showTooltip(x, y, ...parts) {
  const tooltip = byId("tooltip");
  tooltip.replaceChildren(...parts.flat());
  tooltip.hidden = false;
  const { width, height } = tooltip.getBoundingClientRect();
  tooltip.style.left = `${Math.max(6, x + 16 + width > innerWidth ? x - 16 - width : x + 16)}px`;
  tooltip.style.top = `${Math.max(6, Math.min(y + 12, innerHeight - height - 6))}px`;
}
const hideTooltip = () => {
  byId("tooltip").hidden = true;
};

// ------------------------------------------------------------------ parameters against the objective

/** Return a scale from values to 0..1: of numbers, logarithmic where they span decades, or of names. */
function scaleOf(values) {
  const present = values.filter(value => value !== null && value !== undefined && value !== "");
  if (present.length && present.every(isNumber)) {
    const low = Math.min(...present),
      high = Math.max(...present),
      isLog = low > 0 && high / low > 20,
      bent = value => (isLog ? Math.log10(value) : value);
    const span = bent(high) - bent(low);
    const place = value => (isNumber(value) ? (span ? (bent(value) - bent(low)) / span : 0.5) : null);
    const back = share => (isLog ? 10 ** (bent(low) + share * span) : low + share * span);
    const distinct = unique(present).sort((a, b) => a - b);
    return {
      isLog,
      place,
      back,
      low,
      high,
      ticks: distinct.length <= 6 ? distinct : isLog ? logTicks(low, high) : span ? roundTicks(low, high, 5) : [low],
    };
  }
  const names = unique(present.map(shown)).sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
  const place = value =>
    value === null || value === undefined || value === ""
      ? null
      : names.length > 1
        ? names.indexOf(shown(value)) / (names.length - 1)
        : 0.5;
  return { names, place, ticks: names.length <= 12 ? names : names.filter((_, at) => at % Math.ceil(names.length / 12) === 0) };
}

function roundTicks(low, high, wanted) {
  const rough = (high - low) / wanted,
    power = 10 ** Math.floor(Math.log10(rough)),
    step = [1, 2, 5, 10].map(factor => factor * power).find(size => size >= rough * 0.999);
  const first = Math.ceil(low / step - 1e-9),
    last = Math.floor(high / step + 1e-9);
  return Array.from({ length: Math.max(0, last - first + 1) }, (_, place) => Number(((first + place) * step).toPrecision(12)));
}

function logTicks(low, high) {
  const first = Math.ceil(Math.log10(low) - 1e-9),
    last = Math.floor(Math.log10(high) + 1e-9),
    powers = Array.from({ length: Math.max(0, last - first + 1) }, (_, place) => 10 ** (first + place));
  return powers.length >= 2 ? powers : unique([low, ...powers, high]);
}

/** Return the ranks of values, equal ones with their mean rank. */
function ranksOf(values) {
  const sorted = values.map((value, place) => [value, place]).sort((a, b) => a[0] - b[0]),
    ranks = new Array(values.length);
  for (let first = 0; first < sorted.length;) {
    let last = first;
    while (last + 1 < sorted.length && sorted[last + 1][0] === sorted[first][0]) last++;
    for (let place = first; place <= last; place++) ranks[sorted[place][1]] = (first + last) / 2 + 1;
    first = last + 1;
  }
  return ranks;
}

function correlation(a, b) {
  const mean = values => values.reduce((sum, value) => sum + value, 0) / values.length,
    x = mean(a),
    y = mean(b);
  const sum = f => a.reduce((total, _, place) => total + f(a[place] - x, b[place] - y), 0),
    size = Math.sqrt(sum(p => p * p) * sum((_, q) => q * q));
  return size ? sum((p, q) => p * q) / size : 0;
}

const POOR_FIT = 0.3;

function showInfluence() {
  const { among, found, fit } = importances(),
    isShown = objective() !== null && among.length >= 3 && found.length > 0;
  byId("influence").hidden = !isShown;
  if (!isShown) return;
  showParallel();
  showScatter();
  const rows = found
    .filter(one => one.share !== null)
    .slice(0, 15)
    .map(({ name, share, trend }) => {
      const fill = make("div", { class: "fill" });
      fill.style.width = `${100 * share}%`;
      const bar = make(
        "td",
        {},
        make("div", { class: "track", "aria-hidden": "true" }, fill),
        make("span", { class: "unseen" }, `${Math.round(100 * share)} %`),
      );
      return make(
        "tr",
        {},
        make("th", { scope: "row" }, name),
        bar,
        make("td", { class: "number" }, trend === null ? "–" : `${trend < 0 ? "−" : "+"}${Math.abs(trend).toFixed(2)}`),
      );
    });
  byId("importance").hidden = !rows.length;
  byId("importance").tBodies[0].replaceChildren(...rows);
  byId("importance-text").textContent = rows.length
    ? `How much worse a forest of random trees orders ${count(among.length, "run")} by ${objective()} when one parameter is shuffled: alone and together with others, 0 to 100 %. The forest explains ${Math.round(100 * fit)} % of the order of runs it has not seen${fit < POOR_FIT ? ", so read this with care" : ""}. Next to it Spearman's rank correlation.`
    : `Importance needs at least ${IMPORTANT_FROM} runs, and different values of ${objective()}.`;
}

/** Return a colour between the best and the worst. */
function shade(share) {
  const [from, to, at] =
    share < 0.5 ? [css("--best"), css("--middle"), share * 2] : [css("--middle"), css("--worst"), share * 2 - 1];
  const channel = (text, place) => parseInt(text.slice(1 + 2 * place, 3 + 2 * place), 16);
  return `#${[0, 1, 2]
    .map(place =>
      Math.round(channel(from, place) * (1 - at) + channel(to, place) * at)
        .toString(16)
        .padStart(2, "0"),
    )
    .join("")}`;
}

/** Return the colour of each run by the rank of its objective; equal values have equal colours. */
function shades(among) {
  const known = among.filter(run => isNumber(score(run)));
  const good = direction(objective());
  const ranks = ranksOf(known.map(run => (good === "max" ? -score(run) : score(run))));
  const share = place => (known.length > 1 ? (ranks[place] - 1) / (known.length - 1) : 0);
  return new Map(known.map((run, place) => [run.key, good ? shade(share(place)) : css("--c0")]));
}

const MOST_AXES = 12;
const OBJECTIVE_AXIS = "\0objective";
let walked = { parallel: [], scatter: [] };

function inBrushes(run) {
  for (const [name, wanted] of state.brushes) {
    const value = name === OBJECTIVE_AXIS ? score(run) : parameter(run, name);
    if (wanted.names ? !wanted.names.has(shown(value)) : !(isNumber(value) && value >= wanted.low && value <= wanted.high))
      return false;
  }
  return true;
}

function showParallel() {
  if (byId("influence").hidden) return;
  const { among, found } = importances(),
    place = byId("parallel");
  const names = [...found.slice(0, MOST_AXES - 1).map(one => one.name), OBJECTIVE_AXIS];
  const value = (run, name) => (name === OBJECTIVE_AXIS ? score(run) : parameter(run, name));
  const width = Math.max(place.parentElement.clientWidth - 2, 110 * names.length),
    height = 300,
    top = 34,
    bottom = height - 14,
    left = 62,
    right = width - 92;
  const axes = names.map((name, at) => {
    const scale = scaleOf(among.map(run => value(run, name)));
    return {
      name,
      scale,
      x: names.length > 1 ? left + ((right - left) * at) / (names.length - 1) : (left + right) / 2,
      y: share => bottom - share * (bottom - top),
    };
  });
  const tints = shades(among),
    byKey = new Map();
  for (const run of [...ranked(among)].reverse()) {
    const points = axes
      .map(axis => [axis.x, axis.scale.place(value(run, axis.name))])
      .filter(([, share]) => share !== null)
      .map(([x, share]) => `${x.toFixed(1)} ${axes[0].y(share).toFixed(1)}`);
    const path = draw("path", {
      class: `run${inBrushes(run) ? "" : " faded"}`,
      d: `M${points.join("L")}`,
      stroke: tints.get(run.key),
    });
    path.addEventListener("pointermove", event => point(run, "parallel", event.clientX, event.clientY));
    path.addEventListener("pointerleave", () => {
      path.classList.remove("strong");
      hideTooltip();
    });
    byKey.set(run.key, path);
  }
  const rules = axes.map(axis => {
    const isLast = axis.name === OBJECTIVE_AXIS,
      title = isLast ? objective() : axis.name;
    const ticks = axis.scale.ticks.map(tick => {
      const text = shown(tick),
        y = axis.y(axis.scale.place(tick));
      return draw(
        "text",
        { x: axis.x + (isLast ? 8 : -7), y: y + 4, "text-anchor": isLast ? "start" : "end" },
        text.length > 13 ? text.slice(0, 12) + "…" : text,
      );
    });
    const head = draw(
      "text",
      { x: axis.x, y: 16, "text-anchor": "middle", class: isLast ? "strong" : "" },
      title.length > 20 ? title.slice(0, 19) + "…" : title,
      draw("title", {}, title),
    );
    return draw(
      "g",
      {},
      draw("line", { class: "axis", x1: axis.x, x2: axis.x, y1: top, y2: bottom }),
      ticks,
      head,
      brushOf(axis, top, bottom),
    );
  });
  const drawing = draw(
    "svg",
    { class: "drawing", viewBox: `0 0 ${width} ${height}`, height, "aria-hidden": "true" },
    [...byKey.values()],
    rules,
  );
  drawing.style.width = `${width}px`;
  place.replaceChildren(drawing);
  const left_out =
    found.length > MOST_AXES - 1 ? ` The ${found.length - MOST_AXES + 1} least important parameters are left out.` : "";
  place.setAttribute(
    "aria-label",
    `Parallel coordinates of ${count(among.length, "run")} over ${names.slice(0, -1).join(", ")} and ${objective()}.${left_out} Arrow keys go from run to run; the filter above does what dragging does.`,
  );
  walked.parallel = ranked(among).map(run => ({ run, node: byKey.get(run.key) }));
}

/** Return the part of an axis that can be dragged over, and the range that is chosen there. */
function brushOf(axis, top, bottom) {
  const wanted = state.brushes.get(axis.name),
    share = y => Math.min(1, Math.max(0, (bottom - y) / (bottom - top)));
  const rect = draw("rect", { class: "brush", x: axis.x - 7, width: 14, visibility: "hidden" });
  if (wanted) {
    const [low, high] = wanted.shares;
    dressed(rect, { y: axis.y(high), height: Math.max(2, axis.y(low) - axis.y(high)), visibility: "visible" }, []);
  }
  const handle = draw("rect", { class: "handle", x: axis.x - 14, width: 28, y: top - 6, height: bottom - top + 12 });
  handle.addEventListener("pointerdown", event => {
    const svg = handle.ownerSVGElement,
      at = one =>
        ((one.clientY - svg.getBoundingClientRect().top) * svg.viewBox.baseVal.height) / svg.getBoundingClientRect().height;
    const first = at(event);
    let last = first;
    handle.setPointerCapture(event.pointerId);
    event.preventDefault();
    handle.onpointermove = one => {
      last = at(one);
      dressed(rect, { y: Math.min(first, last), height: Math.abs(last - first), visibility: "visible" }, []);
    };
    handle.onpointerup = () => {
      handle.onpointermove = handle.onpointerup = null;
      if (Math.abs(last - first) < 4) state.brushes.delete(axis.name);
      else {
        const [low, high] = [share(Math.max(first, last)), share(Math.min(first, last))],
          { scale } = axis;
        state.brushes.set(
          axis.name,
          scale.names
            ? {
                shares: [low, high],
                names: new Set(scale.names.filter(name => scale.place(name) >= low && scale.place(name) <= high)),
              }
            : {
                shares: [low, high],
                low: low === 0 ? scale.low : scale.back(low),
                high: high === 1 ? scale.high : scale.back(high),
              },
        );
      }
      refresh();
    };
  });
  return draw("g", {}, rect, handle);
}

function showScatter() {
  if (byId("influence").hidden) return;
  const { among, found } = importances(),
    parameters = found.map(one => one.name),
    tags = measures();
  const x =
    parameters.includes(state.scatter.x) || tags.includes(state.scatter.x) ? state.scatter.x : (parameters[0] ?? objective());
  const y = parameters.includes(state.scatter.y) || tags.includes(state.scatter.y) ? state.scatter.y : objective();
  const choices = unique([...parameters, ...tags]);
  fillSelect(byId("scatter-x"), choices, x);
  fillSelect(byId("scatter-y"), choices, y);
  const value = (run, name) => (parameters.includes(name) ? parameter(run, name) : score(run, name));
  const place = byId("scatter"),
    width = Math.max(260, place.clientWidth),
    height = 270,
    left = 64,
    right = width - 14,
    top = 10,
    bottom = height - 34;
  const known = among.filter(inBrushes),
    across = scaleOf(known.map(run => value(run, x))),
    up = scaleOf(known.map(run => value(run, y)));
  const toX = share => left + 8 + share * (right - left - 16),
    toY = share => bottom - 8 - share * (bottom - top - 16);
  const tints = shades(among),
    stars = bestRuns(objective());
  const points = known
    .filter(run => across.place(value(run, x)) !== null && up.place(value(run, y)) !== null)
    .map(run => {
      const at = { cx: toX(across.place(value(run, x))).toFixed(1), cy: toY(up.place(value(run, y))).toFixed(1) },
        isBest = stars.has(run.key);
      const node = draw("circle", { class: "point", ...at, r: isBest ? 7 : 5, fill: tints.get(run.key) ?? css("--middle") });
      node.addEventListener("pointermove", event => point(run, "scatter", event.clientX, event.clientY));
      node.addEventListener("pointerleave", () => {
        node.classList.remove("strong");
        hideTooltip();
      });
      const star = isBest
        ? draw("text", { x: Number(at.cx), y: Number(at.cy) - 10, "text-anchor": "middle", class: "strong" }, "★")
        : null;
      return { run, node, star };
    });
  const rules = [
    ...up.ticks
      .map(tick => [toY(up.place(tick)), tick])
      .flatMap(([at, tick]) => [
        draw("line", { class: "rule", x1: left, x2: right, y1: at, y2: at }),
        draw("text", { x: left - 7, y: at + 4, "text-anchor": "end" }, cutTo(shown(tick), 9)),
      ]),
    ...across.ticks
      .map(tick => [toX(across.place(tick)), tick])
      .flatMap(([at, tick]) => [
        draw("line", { class: "rule", x1: at, x2: at, y1: top, y2: bottom }),
        draw("text", { x: at, y: bottom + 16, "text-anchor": "middle" }, cutTo(shown(tick), 12)),
      ]),
    draw("path", { class: "axis", fill: "none", d: `M${left} ${top}V${bottom}H${right}` }),
  ];
  place.replaceChildren(
    draw(
      "svg",
      { class: "drawing", viewBox: `0 0 ${width} ${height}`, height, "aria-hidden": "true" },
      rules,
      points.map(one => one.node),
      points.map(one => one.star),
    ),
  );
  place.setAttribute("aria-label", `${y} against ${x} of ${count(points.length, "run")}. Arrow keys go from run to run.`);
  walked.scatter = points.sort((a, b) => order(value(a.run, x), value(b.run, x), 1));
}

const cutTo = (text, length) => (text.length > length ? text.slice(0, length - 1) + "…" : text);

/** Mark a run and show its values next to it. */
function point(run, where, x, y) {
  for (const entry of walked[where]) entry.node.classList.toggle("strong", entry.run === run);
  const rows = [
    [objective(), score(run)],
    ...varying(filtered())
      .slice(0, 12)
      .map(name => [name, parameter(run, name)]),
  ];
  showTooltip(
    x,
    y,
    make("div", { class: "near" }, run.label),
    rows.map(([name, value]) =>
      make("div", {}, make("span", { class: "name" }, name), make("span", { class: "number" }, shown(value))),
    ),
  );
  return `${run.label}: ${rows.map(([name, value]) => `${name} ${shown(value)}`).join(", ")}`;
}

/** Go from run to run with arrow keys. */
function walk(event, where) {
  const entries = walked[where],
    step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  if (event.key === "Escape") hideTooltip();
  if (!step || !entries.length) return;
  event.preventDefault();
  const at = entries.findIndex(entry => entry.node.classList.contains("strong")),
    next = entries[(at < 0 ? (step > 0 ? 0 : entries.length - 1) : at + step + entries.length) % entries.length];
  const box = next.node.getBoundingClientRect();
  byId("status").textContent = point(next.run, where, box.right, box.top);
}

// ------------------------------------------------------------------ histograms

/** Return a histogram as SVG; the range is that of all steps, so that columns move and not the axis. */
function histogramDrawing(entries, entry, title) {
  const width = 440,
    height = 190,
    left = 50,
    right = width - 8,
    top = 8,
    bottom = height - 24;
  const low = Math.min(...entries.map(one => one.low)),
    high = Math.max(...entries.map(one => one.high)),
    most = Math.max(1, ...entry.counts);
  const toX = value => left + ((value - low) / (high - low || 1)) * (right - left),
    toY = number => bottom - (number / most) * (bottom - top),
    size = (entry.high - entry.low) / entry.counts.length;
  const bars = entry.counts.map((number, place) => {
    const x = toX(entry.low + place * size),
      end = toX(entry.low + (place + 1) * size);
    return number
      ? draw("rect", {
          class: "column",
          x: x.toFixed(1),
          y: toY(number).toFixed(1),
          width: Math.max(0.6, end - x - 0.8).toFixed(1),
          height: (bottom - toY(number)).toFixed(1),
        })
      : null;
  });
  const ticks = [
    ...roundTicks(0, most, 4).flatMap(tick => [
      draw("line", { class: "rule", x1: left, x2: right, y1: toY(tick), y2: toY(tick) }),
      draw("text", { x: left - 6, y: toY(tick) + 4, "text-anchor": "end" }, short(tick)),
    ]),
    ...roundTicks(low, high, 6).map(tick => draw("text", { x: toX(tick), y: bottom + 15, "text-anchor": "middle" }, short(tick))),
  ];
  const total = entry.counts.reduce((sum, number) => sum + number, 0),
    label = `${title} at step ${entry.step}: ${count(total, "value")} from ${short(entry.low)} to ${short(entry.high)}`;
  return draw(
    "svg",
    { class: "drawing", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label },
    ticks,
    bars,
    draw("path", { class: "axis", fill: "none", d: `M${left} ${bottom}H${right}` }),
  );
}
