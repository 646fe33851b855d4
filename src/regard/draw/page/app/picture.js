// A map ready to be shown: values (rows, cols), and which tokens each row and each column stands for.
//
// Rows and columns are counted in units: a token, a word, or, of a pooled map, a cell of several tokens.

class Picture {
  constructor(layer, head, rows, cols, values, top, signed = false) {
    Object.assign(this, { layer, head, rows, cols, values, top, signed });
  }

  // One head's map; if it is not pooled, with words instead of pieces, without special tokens, or with its resting place
  // set aside.
  static of(layer, head, { words = false, specials = true, aside = false } = {}) {
    const weights = layer.matrix(head);
    const [, rows, cols] = layer.map.shape;
    const [r, c] = layer.pooled
      ? [spans(layer.n, rows, layer.queries), spans(layer.m, cols, layer.keys)]
      : [unitsOf(layer.queries, words, specials), unitsOf(layer.keys, words, specials)];
    const keys = aside && !layer.pooled ? layer.aside(head) : null;
    const growth = keys && keys.size ? growths(weights, cols, keys) : null;
    const values = growth ? withoutKeys(weights, cols, keys, growth) : weights;
    const unchanged = r.length === rows && c.length === cols;
    const shown = unchanged ? values : gathered(values, cols, r, c);
    const picture = new Picture(layer, head, r, c, shown, colourTop(shown, c.length));
    if (growth) picture.aside = { keys, growth, slack: [] };
    return picture;
  }

  // a - b, where both have the same units.
  static difference(a, b) {
    if (a.rows.length !== b.rows.length || a.cols.length !== b.cols.length) return null;
    const values = a.values.map((value, i) => value - b.values[i]);
    const picture = new Picture(a.layer, a.head, a.rows, a.cols, values, largest(values.map(Math.abs)), true);
    picture.parts = [a, b];
    return picture;
  }

  value(i, j) {
    return this.values[i * this.cols.length + j];
  }

  // The precision of a value: the sum of the code steps of all its weights.
  step(i, j) {
    if (this.parts) return this.parts[0].step(i, j) + this.parts[1].step(i, j);
    if (this.layer.pooled) return this.layer.cell(this.head, i, j).step;
    let total = 0;
    const [[r0, r1], [c0, c1]] = [this.rows[i], this.cols[j]];
    for (let r = r0; r < r1; r++) for (let c = c0; c < c1; c++) total += this.stepOf(r, c);
    return total / (r1 - r0);
  }

  // The precision of a single weight. What is left of a row after some keys were set aside is not known exactly either.
  stepOf(r, c) {
    const { value, step } = this.layer.cell(this.head, r, c);
    if (!this.aside) return step;
    const { keys, growth, slack } = this.aside;
    if (keys.has(c)) return 0;
    if (slack[r] === undefined)
      slack[r] = range(this.layer.m)
        .filter((j) => !keys.has(j))
        .reduce((total, j) => total + this.layer.cell(this.head, r, j).step, 0);
    return growth[r] * (step + value * growth[r] * slack[r]);
  }

  // The tokens at a position (in units): single ones if their weight was kept, else those of the cell.
  at(r, c, exact) {
    const [i, j] = [clamp(Math.floor(r), 0, this.rows.length - 1), clamp(Math.floor(c), 0, this.cols.length - 1)];
    const { layer, head } = this;
    const cell = {
      i,
      j,
      query: this.rows[i].slice(0, 2),
      key: this.cols[j].slice(0, 2),
      tokens: [this.rows[i][0], this.cols[j][0]],
    };
    if (layer.pooled && exact && !this.parts) {
      const [q, k] = [tokenAt(r, this.rows.length, layer.n), tokenAt(c, this.cols.length, layer.m)];
      const found = layer.exactly(head, q, k);
      cell.tokens = [q, k];
      if (found) return { ...cell, query: [q, q + 1], key: [k, k + 1], ...found, pooled: false };
    }
    return { ...cell, value: this.value(i, j), step: this.step(i, j), pooled: layer.pooled };
  }

  // [[row, column, value]], the largest first, up to `count`.
  largest(count) {
    const found = largestOf(this.values, count, this.signed ? Math.abs : undefined);
    return found.map((i) => [Math.floor(i / this.cols.length), i % this.cols.length, this.values[i]]);
  }
}

// By how much the weights of each row grow when some keys are set aside: 1 over what is left; 0 if nothing is.
function growths(values, width, keys) {
  const kept = keptKeys(width, keys);
  return Float64Array.from({ length: values.length / width }, (_, i) => {
    let left = 0;
    for (let j = 0; j < width; j++) if (kept[j]) left += values[i * width + j];
    return left > 0 ? 1 / left : 0;
  });
}

// Weights (rows, width) without some keys, renormalised.
function withoutKeys(values, width, keys, growth) {
  const kept = keptKeys(width, keys);
  const result = new Float32Array(values.length);
  for (let i = 0; i < growth.length; i++)
    for (let j = 0; j < width; j++) if (kept[j]) result[i * width + j] = values[i * width + j] * growth[i];
  return result;
}

const keptKeys = (width, keys) => Uint8Array.from({ length: width }, (_, j) => !keys.has(j));

// Tokens or words as [first, last, label]; special tokens stay where there is nothing else.
function unitsOf(text, words, specials) {
  const units = text.groups(words, specials);
  return units.length ? units : text.groups(words, true);
}

// The weight of the strongest colour: the largest, but at least EVEN times the uniform weight, so that a head that looks
// at everything alike stays pale.
const EVEN = 8;
const colourTop = (values, keys) => Math.max(largest(values), Math.min(1, EVEN / Math.max(keys, 1)));

const tokenAt = (place, cells, count) => clamp(Math.floor((place * count) / cells), 0, count - 1);

// The largest of many numbers; 0 if none is larger.
function largest(values) {
  let most = 0;
  for (let i = 0; i < values.length; i++) if (values[i] > most) most = values[i];
  return most;
}

// The tokens of each cell of a pooled map: token t falls into cell floor(t * cells / count).
function spans(count, cells, text) {
  return range(cells).map((i) => {
    const [first, last] = [Math.ceil((i * count) / cells), Math.ceil(((i + 1) * count) / cells)];
    return [first, last, last - first > 1 ? `${first}–${last - 1}` : text.tokens[first]];
  });
}

// Words of several tokens: rows are averaged, columns summed (Clark et al. 2019).
function gathered(values, width, rows, cols) {
  const result = new Float32Array(rows.length * cols.length);
  rows.forEach(([r0, r1], i) => {
    cols.forEach(([c0, c1], j) => {
      let total = 0;
      for (let r = r0; r < r1; r++) for (let c = c0; c < c1; c++) total += values[r * width + c];
      result[i * cols.length + j] = total / (r1 - r0);
    });
  });
  return result;
}

// A large map pooled for a small picture: cells of equal size, except the last.
function reduced(values, rows, cols, most) {
  const groups = (count) => {
    const size = Math.ceil(count / most);
    return range(Math.ceil(count / size)).map((i) => [i * size, Math.min((i + 1) * size, count)]);
  };
  const [r, c] = [groups(rows), groups(cols)];
  return {
    values: r.length < rows || c.length < cols ? gathered(values, cols, r, c) : values,
    rows: r.length,
    cols: c.length,
  };
}

function spoken(text, [first, last]) {
  if (last - first > 1 && text.word[first] !== text.word[last - 1]) return `tokens ${first}–${last - 1}`;
  const pieces = text.tokens.slice(first, last);
  return short(pieces.map((token, i) => (i ? piece(token) : token)).join(""), 24);
}
