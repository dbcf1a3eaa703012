"use strict";
// Importance of parameters: a small forest learns the order of the runs, and each parameter is shuffled in turn.

const IMPORTANT_FROM = 6,
  LEAST_TREES = 50,
  MOST_TREES = 300,
  ALL_VALUES = 8000,
  MOST_LEARNED = 256,
  MOST_TESTED = 128,
  SMALL_NODE = 4,
  DEEPEST = 12;

/** Return a function that gives the same numbers from 0 to 1 on every call of this one (mulberry32), so that a page does not change. */
function randomNumbers(seed) {
  return () => {
    seed = (seed + 0x6d2b79f5) | 0;
    let mixed = Math.imul(seed ^ (seed >>> 15), seed | 1);
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61);
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}

/** Return a parameter as numbers to split: ranks, with missing values far below all others, or the numbers of categories. */
function splittable(values) {
  const present = values.filter(value => value !== null);
  if (present.every(isNumber)) {
    const sorted = unique(present).sort((a, b) => a - b),
      rank = new Map(sorted.map((value, place) => [value, place]));
    return { codes: Float64Array.from(values, value => rank.get(value) ?? -1 - sorted.length / 2), num: 0 };
  }
  const names = unique(values.map(shown));
  return { codes: Float64Array.from(values, value => names.indexOf(shown(value))), num: names.length };
}

/**
 * Return a tree over rows (indices), as nested nodes. Each node tries one random split of every column and takes the one that leaves the least
 * variance (extremely randomized trees: Geurts et al., 2006): at an edge between numbers, or into two sides of categories.
 */
function growTree(columns, target, rows, random, depth = 0) {
  let total = 0;
  for (const row of rows) total += target[row];
  if (rows.length < SMALL_NODE || depth === DEEPEST) return { mean: total / rows.length };
  let best = null;
  for (let place = 0; place < columns.length; place++) {
    const { codes, num } = columns[place];
    let low = Infinity,
      high = -Infinity;
    for (const row of rows) {
      const code = codes[row];
      if (code < low) low = code;
      if (code > high) high = code;
    }
    if (low === high) continue;
    const edge = low + random() * (high - low),
      sides = num ? Uint8Array.from({ length: num }, () => (random() < 0.5 ? 1 : 0)) : null;
    let size = 0,
      sum = 0;
    for (const row of rows)
      if (sides ? sides[codes[row]] : codes[row] <= edge) {
        size++;
        sum += target[row];
      }
    if (!size || size === rows.length) continue;
    const rest = total - sum,
      gain = (sum * sum) / size + (rest * rest) / (rows.length - size) + 1e-9 * random(); // ties are broken by chance
    if (!best || gain > best.gain) best = { gain, place, edge, sides };
  }
  if (!best) return { mean: total / rows.length };
  const { place, edge, sides } = best,
    { codes } = columns[place],
    yes = [],
    no = [];
  for (const row of rows) ((sides ? sides[codes[row]] : codes[row] <= edge) ? yes : no).push(row);
  const grow = part => growTree(columns, target, part, random, depth + 1);
  return { place, edge, sides, yes: grow(yes), no: grow(no) };
}

/** Return what a tree predicts for a row; of the column `shuffled` it sees the value of another row. */
function predicted(node, columns, row, shuffled, other) {
  while (node.yes) {
    const code = columns[node.place].codes[node.place === shuffled ? other : row];
    node = (node.sides ? node.sides[code] : code <= node.edge) ? node.yes : node.no;
  }
  return node.mean;
}

/** Return rows in a random order. */
function shuffledRows(rows, random) {
  for (let last = rows.length - 1; last > 0; last--) {
    const place = Math.floor(random() * (last + 1));
    [rows[last], rows[place]] = [rows[place], rows[last]];
  }
  return rows;
}

/**
 * Return how much of the order of runs hangs on each parameter, alone and together with others: each tree learns from a random sample of the
 * runs; on the others its error grows when the values of one parameter are shuffled (Breiman, 2001). Half of that growth over the variance
 * estimates the total effect of the parameter: 0 is none, 1 everything. `fit` is the share of the order that the forest explains.
 */
function forestImportance(parameters, scores) {
  const columns = parameters.map(splittable),
    target = Float64Array.from(ranksOf(scores)),
    n = scores.length,
    random = randomNumbers(7);
  const variance = target.reduce((sum, rank) => sum + (rank - (n + 1) / 2) ** 2, 0) / n,
    growth = new Array(columns.length).fill(0),
    sums = new Float64Array(n),
    votes = new Uint32Array(n);
  let tested = 0;
  for (let tree = Math.max(LEAST_TREES, Math.min(MOST_TREES, Math.round(ALL_VALUES / n))); tree > 0; tree--) {
    const rows = Array.from({ length: Math.min(n, MOST_LEARNED) }, () => Math.floor(random() * n)),
      seen = new Set(rows),
      unseen = [];
    for (let row = 0; row < n; row++) if (!seen.has(row)) unseen.push(row);
    if (unseen.length < 2) continue;
    const root = growTree(columns, target, rows, random),
      order = shuffledRows(unseen, random).slice(0, MOST_TESTED);
    tested += order.length;
    order.forEach((row, at) => {
      const other = order[(at + 1) % order.length], // in a random order, so that the next row is any other
        plain = predicted(root, columns, row, -1, row),
        error = (plain - target[row]) ** 2;
      sums[row] += plain;
      votes[row]++;
      for (let place = 0; place < columns.length; place++)
        growth[place] += (predicted(root, columns, row, place, other) - target[row]) ** 2 - error;
    });
  }
  const voted = Array.from(target, (value, row) => [value, row]).filter(([, row]) => votes[row]),
    missed = voted.reduce((sum, [value, row]) => sum + (sums[row] / votes[row] - value) ** 2, 0);
  return {
    shares: growth.map(sum => Math.max(0, Math.min(1, sum / tested / 2 / variance))),
    fit: Math.max(0, 1 - missed / voted.length / variance),
  };
}

const latest = { key: "", found: [], fit: 0 };
/** Return the varying parameters with their importance, the most important first, and how well the forest explains the order. */
function importances() {
  const among = filtered().filter(run => isNumber(score(run))),
    names = varying(among),
    scores = among.map(run => score(run)),
    columns = names.map(name => among.map(run => parameter(run, name)));
  const key = JSON.stringify([names, scores, columns]);
  if (key !== latest.key) {
    const isEnough = among.length >= IMPORTANT_FROM && new Set(scores).size > 1,
      forest = isEnough && names.length ? forestImportance(columns, scores) : { shares: names.map(() => null), fit: 0 };
    const found = names.map((name, place) => ({ name, share: forest.shares[place], trend: trendOf(columns[place], scores) }));
    Object.assign(latest, { key, fit: forest.fit, found: found.sort((a, b) => (b.share ?? -1) - (a.share ?? -1)) });
  }
  return { among, found: latest.found, fit: latest.fit };
}

/** Return Spearman's rank correlation with the objective; null for what is not a number. */
function trendOf(values, scores) {
  const places = values.map((_, place) => place).filter(place => values[place] !== null);
  if (places.length < 3 || !places.every(place => isNumber(values[place]))) return null;
  return correlation(ranksOf(places.map(place => values[place])), ranksOf(places.map(place => scores[place])));
}
