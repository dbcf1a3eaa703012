"use strict";
// The runs, what is chosen of them, and the conditions that choose. The files of this folder are one script: runs.js, charts.js, forest.js,
// plots.js, report.js. Texts of runs become text nodes or attributes, never markup.

// ------------------------------------------------------------------ small tools

const byId = id => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

/** Return an element with attributes and children; children that are not nodes become text. */
function make(name, attributes = {}, ...children) {
  return dressed(document.createElement(name), attributes, children);
}

/** Return an SVG element. */
function draw(name, attributes = {}, ...children) {
  return dressed(document.createElementNS(SVG, name), attributes, children);
}

function dressed(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter(child => child !== null && child !== undefined && child !== ""));
  return node;
}

const colours = new Map();
/** Return a colour of the style sheet; they are forgotten when the page becomes light or dark. */
function css(name) {
  if (!colours.has(name)) colours.set(name, getComputedStyle(document.documentElement).getPropertyValue(name).trim());
  return colours.get(name);
}

const isNumber = value => typeof value === "number" && Number.isFinite(value);
const own = (object, name) => (Object.hasOwn(object, name) ? object[name] : undefined);
const SPELLED = { nan: NaN, inf: Infinity, "-inf": -Infinity };
/** Return a number that JSON may have as text. */
const numberOf = value =>
  typeof value === "number" ? value : typeof value === "string" && Object.hasOwn(SPELLED, value) ? SPELLED[value] : null;
const unique = values => [...new Set(values)];
const count = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;

/** Return a number in few characters. */
function short(value) {
  if (typeof value !== "number") return value === null || value === undefined ? "–" : String(value);
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "nan" : value > 0 ? "inf" : "-inf";
  const size = Math.abs(value);
  if (size >= 1e13) return value.toPrecision(3);
  for (const [limit, unit, name] of [
    [1e9, 1e9, "G"],
    [1e6, 1e6, "M"],
    [1e4, 1e3, "k"],
  ])
    if (size >= limit) return `${Number((value / unit).toPrecision(4))}${name}`;
  if (size && size < 1e-4) return value.toExponential(3).replace(/\.?0+e/, "e");
  return String(Number(value.toPrecision(4)));
}

/** Return a value as a table shows it. */
function shown(value) {
  if (value === null || value === undefined) return "–";
  return typeof value === "number" ? short(value) : typeof value === "string" ? value : JSON.stringify(value);
}

/** Return a setting or count as a table shows it: whole numbers in full. */
const setting = value => (Number.isInteger(value) ? String(value) : shown(value));

function duration(seconds) {
  if (!isNumber(seconds)) return "–";
  for (const [size, unit, smaller, name] of [
    [86400, "d", 3600, "h"],
    [3600, "h", 60, "min"],
    [60, "min", 1, "s"],
  ])
    if (seconds >= size) return `${Math.floor(seconds / size)} ${unit} ${Math.floor((seconds % size) / smaller)} ${name}`;
  return `${Number(seconds.toPrecision(3))} s`;
}

const moment = seconds =>
  isNumber(seconds) ? new Date(seconds * 1000).toISOString().slice(0, 19).replace("T", " ") + " UTC" : "unknown";

/** Return numbers from base64 after a letter for their type. */
function decode(text) {
  const binary = atob(text.slice(1)),
    bytes = new Uint8Array(binary.length);
  for (let place = 0; place < binary.length; place++) bytes[place] = binary.charCodeAt(place);
  return new { u: Uint32Array, f: Float32Array, d: Float64Array }[text[0]](bytes.buffer);
}

// ------------------------------------------------------------------ the runs

const source = JSON.parse(byId("data").textContent);
const isLive = source.live;
let runs = [],
  version = source.version,
  usual = null;
const blobs = new Map();

const state = {
  filter: "",
  condition: () => true,
  objective: null,
  directions: new Map(),
  sort: null,
  chosen: null,
  brushes: new Map(),
  axis: "step",
  smoothing: 0.8,
  robust: true,
  together: true,
  find: "",
  scatter: { x: null, y: null },
  steps: new Map(),
  details: null,
  opened: new Set(),
};

/** Take runs that are new or have changed. */
function take(change) {
  const byKey = new Map(runs.map(run => [run.key, run]));
  for (const run of change.runs) byKey.set(run.key, run);
  for (const [name, text] of Object.entries(change.blobs)) blobs.set(name, text);
  runs = (change.order ?? change.runs.map(run => run.key)).map(key => byKey.get(key)).filter(Boolean);
  version = change.version;
  usual = change.objective;
  agreed.clear();
  nameRuns();
}

const textOf = value => (typeof value === "string" ? value : (blobs.get(value.blob) ?? ""));

/** Give each run a label: its short id, without the sweep where all are trials of one. */
function nameRuns() {
  const sweeps = new Set(runs.map(run => run.id.slice(0, run.id.lastIndexOf("/") + 1)));
  const names = runs.map(run => (sweeps.size === 1 ? run.id.slice([...sweeps][0].length) : run.id));
  const isUnique = new Set(names).size === names.length;
  runs.forEach((run, place) => {
    run.label = isUnique ? names[place] : `${run.experiment}/${run.id}`;
  });
}

/** Return the parameters that differ between runs. */
function varying(among = runs) {
  const names = unique(among.flatMap(run => run.telling));
  return names.filter(name => new Set(among.map(run => JSON.stringify(own(run.parameters, name)?.[0] ?? null))).size > 1);
}

const parameter = (run, name) => own(run.parameters, name)?.[0] ?? null;
const measures = () =>
  unique([...runs.flatMap(run => Object.keys(run.metrics)), ...runs.flatMap(run => Object.keys(run.results))]);
const objective = () => state.objective ?? usual;

/** Return whether small or large values of a metric are good: as chosen here, else as all runs that have it agree. */
function direction(tag) {
  if (state.directions.has(tag)) return state.directions.get(tag);
  if (!agreed.has(tag)) {
    const found = new Set(
      runs.map(run => own(run.metrics, tag)?.[6] ?? own(run.results, tag)?.[1]).filter(good => good !== undefined),
    );
    agreed.set(tag, found.size === 1 ? [...found][0] : null);
  }
  return agreed.get(tag);
}
const agreed = new Map();

/** Return the best value of a metric in a run and its step; the last one where no direction is known or no value is finite. */
function best(run, tag) {
  const entry = own(run.metrics, tag),
    good = direction(tag);
  if (!entry) return [numberOf(own(run.results, tag)?.[0] ?? null), null];
  const [last, low, lowStep, high, highStep] = entry;
  const [value, step] = good === "min" ? [low, lowStep] : good === "max" ? [high, highStep] : [last, null];
  return step === null ? [numberOf(last), null] : [value, step];
}

const score = (run, tag = objective()) => (tag === null ? null : best(run, tag)[0]);

/** Return the runs whose value is the best of all; none where it is unknown what is good, or all are the same. */
function bestRuns(tag) {
  const good = direction(tag),
    scored = runs.map(run => [run, score(run, tag)]).filter(([, value]) => isNumber(value));
  if (!good || new Set(scored.map(([, value]) => value)).size < 2) return new Set();
  const values = scored.map(([, value]) => value),
    top = good === "min" ? Math.min(...values) : Math.max(...values);
  return new Set(scored.filter(([, value]) => value === top).map(([run]) => run.key));
}

/** Return runs in order of a metric, the best first; those without a value last. */
function ranked(among, tag = objective()) {
  const sign = direction(tag) === "max" ? -1 : 1,
    known = direction(tag) !== null;
  const keyed = among
    .map(run => [run, known ? score(run, tag) : null])
    .map(([run, value]) => [run, isNumber(value) ? sign * value : Infinity]);
  return keyed.sort(([, a], [, b]) => (a === b ? 0 : a - b)).map(([run]) => run);
}

const filtered = () => runs.filter(run => state.condition(run));
const matching = () => filtered().filter(inBrushes);
const MOST_DRAWN = 8;
const drawn = () => {
  const found = matching();
  return state.chosen
    ? runs.filter(run => state.chosen.has(run.key))
    : found.length > MOST_DRAWN
      ? ranked(found).slice(0, MOST_DRAWN)
      : found;
};

// A run keeps its colour as long as it is drawn.
const slots = new Map();
function giveColours(among) {
  const keys = new Set(among.map(run => run.key));
  for (const key of [...slots.keys()]) if (!keys.has(key)) slots.delete(key);
  const taken = new Set(slots.values());
  for (const { key } of among) {
    if (slots.has(key)) continue;
    let free = 0;
    while (taken.has(free)) free++;
    taken.add(free);
    slots.set(key, free);
  }
}
const NUM_COLOURS = 8;
const colour = slot => css(`--c${slot % NUM_COLOURS}`);

// ------------------------------------------------------------------ conditions: the language of `drivetrain ls`

const TOKEN = /\s*(?:(<=|>=|!=|==|=|<|>|~)|([()])|"([^"]*)"|'([^']*)'|([^\s<>=!~()"']+))/y;
const EXPECTED = "Expected comparisons such as lr<0.1 or state=finished, joined by and, or and brackets.";

/** Return what a condition can name, a parameter before anything else of its name. */
function valueOf(run, name) {
  if (Object.hasOwn(run.parameters, name)) return run.parameters[name][0];
  if (Object.hasOwn(run.metrics, name)) return numberOf(run.metrics[name][0]);
  if (Object.hasOwn(run.results, name)) return numberOf(run.results[name][0]);
  switch (name) {
    case "status":
      return run.state;
    case "age":
      return isNumber(run.started) ? Math.max(0, Date.now() / 1000 - run.started) : null;
    case "tag":
      return run.tags;
    case "last":
      return objective() === null
        ? null
        : numberOf(own(run.metrics, objective())?.[0] ?? own(run.results, objective())?.[0] ?? null);
    case "best":
      return objective() !== null && direction(objective()) ? score(run) : null;
    case "id":
    case "name":
    case "folder":
    case "state":
    case "experiment":
    case "started":
    case "steps":
    case "seconds":
    case "note":
    case "seed":
      return run[name];
  }
  return undefined;
}

/** Return a function of a run; a text without comparisons means words that must all occur. */
function readCondition(text) {
  const tokens = [];
  TOKEN.lastIndex = 0;
  while (TOKEN.lastIndex < text.trimEnd().length) {
    const at = TOKEN.lastIndex,
      found = TOKEN.exec(text);
    if (!found) throw new Error(`Not understood from “${text.slice(at)}” on. ${EXPECTED}`);
    const [, sign, bracket, double, single, word] = found;
    tokens.push(
      sign ? ["sign", sign] : bracket ? ["bracket", bracket] : word !== undefined ? ["word", word] : ["text", double ?? single],
    );
  }
  if (!tokens.some(([kind]) => kind === "sign")) {
    const words = tokens.map(([, word]) => word.toLowerCase()).filter(word => word !== "and");
    return run => words.every(word => words.length === 0 || plainText(run).includes(word));
  }
  let place = 0;
  const problem = () =>
    new Error(
      `Not understood from “${
        tokens
          .slice(place)
          .map(([, word]) => word)
          .join(" ") || "its end"
      }” on. ${EXPECTED}`,
    );
  const next = (kind, word) =>
    place < tokens.length && tokens[place][0] === kind && (word === undefined || tokens[place][1] === word)
      ? tokens[place++][1]
      : null;
  const joined = (part, word, method) => {
    const parts = [part()];
    while (next("word", word) !== null) parts.push(part());
    return run => parts[method](own => own(run));
  };
  const either = () => joined(both, "or", "some");
  const both = () => joined(one, "and", "every");
  const one = () => {
    if (next("bracket", "(") !== null) {
      const inner = either();
      if (next("bracket", ")") === null) throw problem();
      return inner;
    }
    const name = next("word") ?? next("text"),
      sign = name === null ? null : next("sign");
    if (sign === null) throw problem();
    const wanted = next("text") ?? next("word");
    if (wanted === null) throw problem();
    if (runs.length && runs.every(run => valueOf(run, name) === undefined)) throw new Error(`No run has a value “${name}”.`);
    return run => compare(valueOf(run, name) ?? null, sign, wanted);
  };
  const condition = either();
  if (place < tokens.length) throw problem();
  return condition;
}

const plainText = run =>
  [run.id, run.name, run.experiment, run.state, run.note, ...run.tags, ...run.telling.map(name => shown(parameter(run, name)))]
    .join(" ")
    .toLowerCase();
const NUMBER = /^[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?$/i;

function compare(value, sign, wanted) {
  if (Array.isArray(value)) {
    const found = value.map(item => compare(item, sign === "!=" ? "=" : sign, wanted));
    return sign === "!=" ? !found.some(Boolean) : found.some(Boolean);
  }
  const text =
    value === null || typeof value === "boolean"
      ? value === null
        ? "none"
        : String(value)
      : typeof value === "object"
        ? JSON.stringify(value)
        : String(value);
  if (sign === "~") return value !== null && text.toLowerCase().includes(wanted.toLowerCase());
  const number = NUMBER.test(wanted) ? Number(wanted) : numberOf(wanted.toLowerCase());
  if (typeof value === "number" && number !== null) {
    switch (sign) {
      case "!=":
        return value !== number;
      case "<":
        return value < number;
      case "<=":
        return value <= number;
      case ">":
        return value > number;
      case ">=":
        return value >= number;
      default:
        return value === number;
    }
  }
  const same = text === (value === null || typeof value === "boolean" ? wanted.toLowerCase() : wanted);
  return sign === "=" || sign === "==" ? same : sign === "!=" ? !same : false;
}
