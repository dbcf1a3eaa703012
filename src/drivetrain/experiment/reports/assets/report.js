"use strict";
// The page: table, sections and details, kept in step with what is chosen, and brought up to date while runs go on.

// ------------------------------------------------------------------ header, cards, errors

const badge = word =>
  make("span", { class: `badge ${["running", "finished", "pruned", "failed", "interrupted", "lost"].includes(word) ? word : ""}` }, word);

function showHeader() {
  const one = runs.length === 1 ? runs[0] : null;
  const title = one ? `${one.experiment}/${one.name}` : runs.length ? count(runs.length, "run") : "No runs yet";
  byId("title").replaceChildren(title, one ? " " : "", one ? badge(one.state) : "");
  document.title = `${title} – Drivetrain`;
  if (one) {
    const parts = [`started ${moment(one.started)}`, one.folder];
    if (one.trial !== null) parts.push(`trial ${one.trial}`);
    if (one.resumed) parts.push(`continued ${count(one.resumed, "time")}`);
    if (one.tags.length) parts.push(one.tags.join(", "));
    if (one.note) parts.push(one.note);
    byId("subtitle").textContent = parts.join(" · ");
  } else {
    const states = unique(runs.map(run => run.state)),
      experiments = unique(runs.map(run => run.experiment));
    const parts = states.map(word => `${runs.filter(run => run.state === word).length} ${word}`);
    byId("subtitle").textContent = [
      experiments.length < 4 ? experiments.join(", ") : count(experiments.length, "experiment"),
      ...parts,
    ].join(" · ");
  }
  byId("summary").hidden = !one;
  if (one) showCards(one);
}

function showCards(run) {
  const cards = [],
    tags = unique(
      [usual, "train_loss_epoch", "train/loss", "eval_loss_epoch", "eval/loss"].filter(
        tag => tag !== null && Object.hasOwn(run.metrics, tag),
      ),
    );
  for (const tag of tags.slice(0, 3)) {
    const [value, step] = best(run, tag);
    cards.push([
      short(numberOf(run.metrics[tag][0])),
      step === null ? tag : `${tag}; best ${short(value)} at step ${step.toLocaleString("en")}`,
    ]);
  }
  const known = new Set(Object.values(run.metrics).map(entry => entry[0]));
  for (const [name, value] of Object.entries(run.summary).slice(0, 3)) if (!known.has(value)) cards.push([shown(value), name]);
  if (isNumber(run.steps)) cards.push([run.steps.toLocaleString("en"), "steps"]);
  cards.push([duration(run.seconds), "duration"]);
  const processes = own(run.environment, "processes") ?? 1;
  cards.push([shown(own(run.environment, "devices") ?? "unknown"), processes === 1 ? "one process" : `${processes} processes`]);
  byId("cards").replaceChildren(
    ...cards.map(([value, label]) => make("div", { class: "card" }, make("b", {}, value), make("span", {}, label))),
  );
}

function showErrors() {
  const found = runs.flatMap(run => [run.state === "pruned" ? "" : textOf(run.error), ...run.notes].filter(Boolean).map(text => [run, text]));
  byId("errors").hidden = !found.length;
  const blocks = found.map(([run, text]) =>
    make(
      "pre",
      { class: `block wrapped${text === textOf(run.error) ? " error" : ""}` },
      runs.length > 1 ? `${run.label}: ${text}` : text,
    ),
  );
  byId("error-list").replaceChildren(
    ...(runs.length > 1
      ? [
          folded(
            "errors",
            `${count(found.length, "message")} of ${count(new Set(found.map(([run]) => run)).size, "run")}`,
            blocks,
          ),
        ]
      : blocks),
  );
}

/** Return a part that opens on demand, and stays as it is when the page is brought up to date. */
function folded(key, title, children, isOpen = false) {
  const node = make("details", { open: state.opened.has(key) !== isOpen }, make("summary", {}, title), children);
  node.addEventListener("toggle", () => {
    if (node.open !== isOpen) state.opened.add(key);
    else state.opened.delete(key);
  });
  return node;
}

// ------------------------------------------------------------------ the table

const MOST_METRICS = 12;

function columns() {
  const found = [
    { name: "run", value: run => run.label, title: run => run.folder },
    { name: "state", value: run => run.state, node: run => badge(run.state) },
  ];
  if (new Set(runs.map(run => run.experiment)).size > 1) found.push({ name: "experiment", value: run => run.experiment });
  for (const name of varying())
    found.push({ name, value: run => parameter(run, name), text: run => setting(parameter(run, name)) });
  const tags = measures(),
    first = objective();
  for (const tag of [...tags.filter(tag => tag === first), ...tags.filter(tag => tag !== first)].slice(0, MOST_METRICS)) {
    const good = direction(tag);
    found.push({ name: `${tag} (${good ? "best" : "last"})`, tag, good, stars: bestRuns(tag), value: run => score(run, tag) });
  }
  found.push(
    { name: "steps", value: run => run.steps, text: run => setting(run.steps) },
    { name: "duration", value: run => run.seconds, text: run => duration(run.seconds) },
  );
  if (runs.some(run => run.tags.length)) found.push({ name: "tags", value: run => run.tags.join(", ") });
  if (runs.some(run => run.note)) found.push({ name: "note", value: run => run.note });
  return found;
}

/** Compare two values of a column: numbers before text, missing ones last. */
function order(a, b, sign) {
  const kind = value =>
    isNumber(value) ? 0 : value === null || value === undefined || value === "" || Number.isNaN(value) ? 2 : 1;
  if (kind(a) !== kind(b)) return kind(a) - kind(b);
  return kind(a) === 2 ? 0 : sign * (kind(a) === 0 ? a - b : shown(a).localeCompare(shown(b), "en", { numeric: true }));
}

function showTable() {
  byId("runs").hidden = runs.length < 2;
  if (runs.length < 2) return;
  const all = columns(),
    found = matching(),
    drawnKeys = new Set(drawn().map(run => run.key));
  const sort =
    state.sort ??
    (() => {
      const main = all.find(column => column.tag !== undefined && column.tag === objective() && column.good);
      return main ? { name: main.name, sign: main.good === "max" ? -1 : 1 } : null;
    })();
  const by = sort && all.find(column => column.name === sort.name);
  const sorted = by ? [...found].sort((a, b) => order(by.value(a), by.value(b), sort.sign)) : found;
  const heads = all.map(column => {
    const isNumeric = column.tag !== undefined || runs.some(run => typeof column.value(run) === "number");
    column.isNumeric = isNumeric;
    const sorting = by === column ? (sort.sign > 0 ? "ascending" : "descending") : "none";
    const press = () => {
      const first = column.good === "max" ? -1 : 1;
      state.sort = { name: column.name, sign: by === column ? -sort.sign : first };
      showTable();
      byId("table")
        .querySelector(`thead [data-column="${CSS.escape(column.name)}"]`)
        ?.focus();
    };
    return make(
      "th",
      { scope: "col", "aria-sort": sorting, class: isNumeric ? "number" : "" },
      make("button", { type: "button", "data-column": column.name, onclick: press }, column.name),
    );
  });
  const focused = document.activeElement?.dataset?.run,
    tints = drawnKeys.size > CROWDED ? shades(drawn()) : null;
  byId("table").tHead.replaceChildren(
    make("tr", {}, make("th", { scope: "col" }, make("span", { class: "unseen" }, "draw")), heads),
  );
  byId("table").tBodies[0].replaceChildren(...sorted.map(run => tableRow(run, all, drawnKeys.has(run.key), tints)));
  if (focused !== undefined) [...byId("table").querySelectorAll("input")].find(box => box.dataset.run === focused)?.focus();
  byId("count").textContent =
    found.length === runs.length ? count(found.length, "run") : `${found.length} of ${count(runs.length, "run")}`;
  byId("drawn-count").textContent = `${drawnKeys.size} drawn`;
  const hasDirection = objective() !== null && direction(objective());
  byId("draw-best").textContent = hasDirection ? "the best eight" : "the first eight";
  byId("clear-brushes").hidden = !state.brushes.size;
  fillSelect(byId("objective"), measures(), objective());
  byId("direction").value = (objective() !== null && direction(objective())) || "";
}

function tableRow(run, all, isDrawn, tints) {
  const box = make("input", { type: "checkbox", "data-run": run.key, "aria-label": `draw the curves of ${run.label}` });
  box.checked = isDrawn;
  box.addEventListener("change", () => {
    state.chosen ??= new Set(drawn().map(other => other.key));
    if (box.checked) state.chosen.add(run.key);
    else state.chosen.delete(run.key);
    refresh();
  });
  const swatch = make("span", { class: "swatch", "aria-hidden": "true" });
  if (isDrawn) swatch.style.background = tints?.get(run.key) ?? colour(slots.get(run.key) ?? 0);
  const cells = all.slice(1).map(column => {
    const value = column.value(run),
      isBest = column.stars?.has(run.key);
    const text = column.node ? column.node(run) : column.text ? column.text(run) : shown(value);
    const mark = isBest ? [make("span", { "aria-hidden": "true" }, " ★"), make("span", { class: "unseen" }, " best")] : [];
    return make(
      "td",
      {
        class: `${column.isNumeric ? "number" : ""}${isBest ? " best" : ""}`,
        title: typeof text === "string" && text.length > 30 ? text : null,
      },
      text,
      mark,
    );
  });
  return make("tr", {}, make("td", {}, box, swatch), make("th", { scope: "row", title: run.folder }, run.label), cells);
}

function fillSelect(select, names, chosen) {
  const wanted = JSON.stringify(names);
  if (select.dataset.names !== wanted) {
    select.replaceChildren(...names.map(name => make("option", { value: name }, name)));
    select.dataset.names = wanted;
  }
  select.value = chosen ?? "";
}

// ------------------------------------------------------------------ pictures and histograms over steps

/** Return a slider over steps, or nothing where there is one step only. */
function stepSlider(key, label, steps, show) {
  const last = steps.length - 1,
    wanted = state.steps.get(key);
  const place =
    wanted === undefined
      ? last
      : Math.max(
          0,
          steps.findLastIndex(step => step <= wanted),
        );
  const output = make("output", {}, steps[place] === null ? "" : `step ${steps[place].toLocaleString("en")}`);
  const input = make("input", {
    type: "range",
    min: 0,
    max: last,
    value: place,
    "aria-label": `step of ${label}`,
    "aria-valuetext": output.textContent,
  });
  input.addEventListener("input", () => {
    const step = steps[Number(input.value)];
    if (Number(input.value) === last) state.steps.delete(key);
    else state.steps.set(key, step);
    output.textContent = `step ${step.toLocaleString("en")}`;
    input.setAttribute("aria-valuetext", output.textContent);
    show(step);
  });
  show(steps[place]);
  return last > 0 ? make("label", { class: "slider" }, input, output) : make("p", { class: "slider" }, output);
}

const seen = new Map();
/** Return whether something is not as it was when this was asked last under the same name. */
function changed(name, ...parts) {
  const now = JSON.stringify(parts);
  const differs = seen.get(name) !== now;
  seen.set(name, now);
  return differs;
}

function showPictures() {
  const among = drawn(),
    owned = among.flatMap(run => run.pictures.map(picture => ({ run, ...picture })));
  byId("pictures").hidden = !owned.length;
  if (
    !changed(
      "pictures",
      owned.map(entry => [entry.run.label, entry.tag, entry.step, entry.name]),
    )
  )
    return;
  const family = tag => tag.slice(0, Math.max(0, tag.lastIndexOf("/"))) || tag;
  byId("picture-list").replaceChildren(
    ...unique(owned.map(entry => family(entry.tag))).map(name => {
      const members = owned.filter(entry => family(entry.tag) === name);
      const steps = unique(members.map(entry => entry.step)).sort((a, b) => a - b),
        gallery = make("div", { class: "gallery" });
      const show = step => gallery.replaceChildren(...newest(members, step).map(entry => picture(entry, name, among.length > 1)));
      return make("div", {}, make("h3", {}, name), stepSlider(`picture ${name}`, name, steps, show), gallery);
    }),
  );
}

/** Return the entries of each run and tag at the last step up to the given one. */
function newest(members, step) {
  const found = new Map();
  for (const entry of members) {
    if (step !== null && entry.step > step) continue;
    const key = `${entry.run.key} ${entry.tag}`,
      known = found.get(key);
    if (!known || known[0].step < entry.step) found.set(key, [entry]);
    else if (known[0].step === entry.step) known.push(entry);
  }
  return [...found.values()].flat();
}

const LARGE_FROM = 200;
function picture(entry, family, hasSeveral) {
  const words = [
    entry.tag === family ? "" : entry.tag.slice(family.length + 1),
    hasSeveral ? entry.run.label : "",
    entry.step === null ? "" : `step ${entry.step}`,
  ];
  const image = make("img", { alt: `${entry.tag}, ${words.filter(Boolean).join(", ")}`, src: textOf(entry.source) });
  const figure = make("figure", { class: "picture" }, image, make("figcaption", {}, words.filter(Boolean).join(", ")));
  image.addEventListener("load", () => {
    if (image.naturalWidth >= LARGE_FROM) figure.classList.add("large");
  });
  return figure;
}

function showHistograms() {
  const owned = drawn().flatMap(run => Object.entries(run.histograms).map(([tag, entries]) => ({ run, tag, entries })));
  byId("histograms").hidden = !owned.length;
  if (
    !changed(
      "histograms",
      owned.map(one => [one.run.label, one.tag, one.entries.length, one.entries.at(-1)?.step]),
    )
  )
    return;
  const hasSeveral = drawn().length > 1;
  byId("histogram-list").replaceChildren(
    ...owned.map(({ run, tag, entries }) => {
      const title = hasSeveral ? `${tag}, ${run.label}` : tag,
        place = make("div");
      const show = step =>
        place.replaceChildren(histogramDrawing(entries, entries.findLast(entry => entry.step <= step) ?? entries[0], title));
      const slider = stepSlider(
        `histogram ${run.key} ${tag}`,
        title,
        entries.map(entry => entry.step),
        show,
      );
      return make("figure", { class: "panel" }, make("figcaption", {}, title), place, slider);
    }),
  );
}

// ------------------------------------------------------------------ values side by side, and details of one run

const MOST_COLUMNS = 8;

function showCompared() {
  const among = drawn().slice(0, MOST_COLUMNS),
    hasSeveral = among.length > 1;
  byId("compared").hidden = !among.length;
  byId("only-label").hidden = !hasSeveral;
  byId("compared-note").textContent =
    runs.length > among.length && hasSeveral ? `of ${among.map(run => run.label).join(", ")}: the runs that are drawn` : "";
  if (
    !among.length ||
    !changed(
      "compared",
      among.map(run => [run.key, run.state, run.metrics, run.parameters]),
    )
  )
    return;
  const metrics = unique(among.flatMap(run => Object.keys(run.metrics))).flatMap(tag => {
    const entries = among.map(run => own(run.metrics, tag)),
      rows = [[hasSeveral ? `${tag} (last)` : tag, entries.map(entry => (entry ? numberOf(entry[0]) : null))]];
    if (!hasSeveral) {
      const [value, step] = best(among[0], tag);
      rows[0][1].push(direction(tag) ? value : null, direction(tag) ? step : null, entries[0][5]);
    } else if (direction(tag)) rows.push([`${tag} (best)`, among.map(run => (own(run.metrics, tag) ? best(run, tag)[0] : null))]);
    return rows;
  });
  const parameters = unique(among.flatMap(run => Object.keys(run.parameters))).map(name => {
    const isGiven = among.some(run => !["default", "defaults"].includes(own(run.parameters, name)?.[1] ?? "default"));
    return [name, hasSeveral ? among.map(run => parameter(run, name)) : own(among[0].parameters, name), isGiven ? "set" : ""];
  });
  const results = unique(among.flatMap(run => [...Object.keys(run.results), ...Object.keys(run.summary)])).map(name => [
    name,
    among.map(run => own(run.summary, name) ?? own(run.results, name)?.[0] ?? null),
  ]);
  const environment = unique(among.flatMap(run => Object.keys(run.environment))).map(name => [
    name,
    among.map(run => own(run.environment, name) ?? null),
  ]);
  const packages = among.map(run => JSON.parse(textOf(run.packages) || "{}"));
  const names = unique(packages.flatMap(Object.keys)).sort((a, b) => a.localeCompare(b, "en"));
  const heads = among.map(run => run.label);
  byId("compared-tables").replaceChildren(
    sheet(
      "Metrics",
      hasSeveral ? ["metric", ...heads] : ["metric", "last", "best", "at step", "values"],
      metrics,
      hasSeveral,
      true,
    ),
    sheet("Results", ["result", ...(hasSeveral ? heads : ["value"])], results, hasSeveral, true),
    sheet("Parameters", hasSeveral ? ["parameter", ...heads] : ["parameter", "value", "from"], parameters, hasSeveral),
    sheet("Environment", ["", ...(hasSeveral ? heads : [""])], environment, hasSeveral),
    names.length
      ? folded(
          "packages",
          `Packages (${names.length})`,
          sheet(
            "",
            ["package", ...(hasSeveral ? heads : ["version"])],
            names.map(name => [name, packages.map(one => own(one, name) ?? null)]),
            hasSeveral,
          ),
        )
      : "",
  );
}

/** Return a table of rows [name, values, kind]; where runs are compared, rows are marked that differ. */
function sheet(title, heads, rows, isCompared, isNumeric = false) {
  if (!rows.length) return "";
  const body = rows.map(([name, values, kind = ""]) => {
    const differs = isCompared ? (new Set(values.map(value => JSON.stringify(value ?? null))).size > 1 ? "differs" : "same") : "";
    return make(
      "tr",
      { class: `${kind} ${differs}` },
      make("th", { scope: "row" }, name),
      values.map(value => {
        const text = isNumeric ? shown(value) : setting(value);
        return make("td", { class: isNumeric ? "number" : `value${text.length <= 24 ? " short" : ""}` }, text);
      }),
    );
  });
  const head = make(
    "thead",
    {},
    make(
      "tr",
      {},
      heads.map((name, place) => make("th", { scope: "col", class: isNumeric && place ? "number" : "" }, name)),
    ),
  );
  return make(
    "div",
    {},
    title ? make("h3", {}, title) : "",
    make(
      "div",
      { class: "sheet" },
      make("table", {}, make("caption", { class: "unseen" }, title || heads[0]), head, make("tbody", {}, body)),
    ),
  );
}

function showDetails() {
  const run = runs.find(one => one.key === state.details) ?? drawn()[0] ?? runs[0];
  byId("details").hidden = !run;
  if (!run) return;
  byId("details-bar").hidden = runs.length < 2;
  if (
    changed(
      "details names",
      runs.map(one => [one.key, one.label]),
    )
  )
    byId("details-run").replaceChildren(...runs.map(one => make("option", { value: one.key }, one.label)));
  byId("details-run").value = run.key;
  if (!changed("details", run.key, run.state, run.checkpoints, run.log, run.texts, run.plan, run.diff)) return;
  const checkpoints = run.checkpoints.map(one => [
    one.name,
    [
      one.epoch,
      one.step,
      one.samples,
      one.size,
      one.marks.join(", "),
      one.problem === null ? "valid" : `damaged: ${one.problem}`,
    ],
  ]);
  const text = (title, value, kind = "", isOpen = false) =>
    value ? folded(title, title, make("pre", { class: `block ${kind}` }, value), isOpen) : "";
  const diff = textOf(run.diff)
    .split("\n")
    .map(line => make("span", { class: { "+": "added", "-": "removed" }[line[0]] ?? "" }, line + "\n"));
  const parts = [
    sheet("Checkpoints", ["checkpoint", "epoch", "step", "samples", "size", "", "state"], checkpoints, false),
    text("Plan", textOf(run.plan)),
    run.diff ? folded("diff", "Uncommitted changes", make("pre", { class: "block" }, diff)) : "",
    ...Object.entries(run.texts).map(([tag, value]) => text(tag, textOf(value), "wrapped")),
    text("Last lines of the log", textOf(run.log), "", true),
  ];
  byId("details-body").replaceChildren(...parts.filter(Boolean));
  byId("details").hidden = runs.length < 2 && !byId("details-body").childElementCount;
}

// ------------------------------------------------------------------ all together

const SECTIONS = {
  errors: "Errors",
  runs: "Runs",
  influence: "What matters",
  charts: "Charts",
  pictures: "Pictures",
  histograms: "Histograms",
  compared: "Values",
  details: "Details",
};

function refresh() {
  giveColours(drawn());
  showTable();
  showInfluence();
  showCharts();
  showPictures();
  showHistograms();
  showCompared();
  showDetails();
  const present = Object.entries(SECTIONS).filter(([id]) => !byId(id).hidden);
  if (changed("sections", present))
    byId("sections").replaceChildren(...present.map(([id, name]) => make("li", {}, make("a", { href: `#${id}` }, name))));
}

function refreshAll() {
  showHeader();
  showErrors();
  try {
    state.condition = readCondition(state.filter);
  } catch {
    /* shown when it was typed */
  }
  refresh();
}

function soon(action, milliseconds = 120) {
  let timer = 0;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(action, milliseconds);
  };
}

function listen() {
  const filter = byId("filter");
  filter.addEventListener(
    "input",
    soon(() => {
      state.filter = filter.value;
      try {
        state.condition = readCondition(state.filter);
        byId("filter-error").textContent = "";
      } catch (problem) {
        state.condition = () => true;
        byId("filter-error").textContent = problem.message;
      }
      refresh();
    }),
  );
  byId("objective").addEventListener("change", event => {
    state.objective = event.target.value;
    state.sort = null;
    refresh();
  });
  byId("direction").addEventListener("change", event => {
    if (objective() !== null) state.directions.set(objective(), event.target.value || null);
    state.sort = null;
    seen.clear();
    refresh();
  });
  byId("draw-best").addEventListener("click", () => {
    state.chosen = null;
    refresh();
  });
  byId("draw-all").addEventListener("click", () => {
    state.chosen = new Set(matching().map(run => run.key));
    refresh();
  });
  byId("draw-none").addEventListener("click", () => {
    state.chosen = new Set();
    refresh();
  });
  byId("clear-brushes").addEventListener("click", () => {
    state.brushes.clear();
    refresh();
  });
  byId("only-differing").addEventListener("change", event =>
    byId("compared-tables").classList.toggle("only-differing", event.target.checked),
  );
  byId("details-run").addEventListener("change", event => {
    state.details = event.target.value;
    showDetails();
  });
  listenToCharts();
}

// ------------------------------------------------------------------ live

const POLL_SECONDS = 2,
  IDLE_SECONDS = 10;
let nextPoll = 0;

/** Ask for what has changed, show it, and ask again later; at once where the server has not read all runs yet. */
async function poll() {
  const change = await fetch(`data?since=${version}`, { cache: "no-store" })
    .then(response => (response.ok ? response.json() : null))
    .catch(() => null);
  const pause = change?.unread ? 0.05 : document.hidden ? IDLE_SECONDS : POLL_SECONDS;
  clearTimeout(nextPoll);
  nextPoll = setTimeout(poll, 1000 * pause);
  byId("live").classList.toggle("lost", change === null);
  byId("live-text").textContent = !change
    ? "not connected: drivetrain has ended"
    : change.unread
      ? `reading ${count(change.unread, "more run")}`
      : `live, ${new Date().toLocaleTimeString()}`;
  if (change && change.version !== version) {
    take(change);
    refreshAll();
  }
}

take(source);
listen();
refreshAll();
if (isLive) {
  byId("live").hidden = false;
  byId("live-text").textContent = "live";
  nextPoll = setTimeout(poll, source.unread ? 0 : 1000 * POLL_SECONDS);
}
document.documentElement.dataset.ready = "yes";
