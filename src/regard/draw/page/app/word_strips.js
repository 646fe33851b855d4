// The weights between one word and the words of a text, as a thin strip.

const STRIP_CELLS = 96; // cells of a strip, at most

class WordStrip {
  // links: [unit, value], a list of all or of those that are kept; step: the precision of a unit's value.
  constructor(units, links, step) {
    this.units = units;
    this.values = new Map(links);
    this.links = links.filter(([, value]) => value > 0).sort((a, b) => b[1] - a[1]);
    this.step = step;
    this.cells = Math.min(units.length, STRIP_CELLS);
  }

  // From links [query, key, weight, step] of tokens: those of a word's tokens are added up as keys, averaged as queries.
  static kept(keys, queries, links, way) {
    const { units, numbers } = way === "to" ? keys : queries;
    const [values, steps] = [new Map(), new Map()];
    for (const [query, key, weight, step] of links) {
      const unit = numbers[way === "to" ? key : query];
      const [first, last] = queries.units[queries.numbers[query]];
      values.set(unit, (values.get(unit) || 0) + weight / (last - first));
      steps.set(unit, (steps.get(unit) || 0) + step / (last - first));
    }
    return new WordStrip(units, [...values], (unit) => steps.get(unit));
  }

  value(unit) {
    return this.values.get(unit) || 0;
  }

  cellOf(unit) {
    return Math.floor((unit * this.cells) / this.units.length);
  }

  paint(canvas, top, scale) {
    const values = new Float32Array(this.cells);
    for (const [unit, value] of this.links) values[this.cellOf(unit)] = Math.max(values[this.cellOf(unit)], value);
    painted(values, 1, this.cells, top, { scale, canvas });
  }

  // The unit at a place from 0 to 1: the strongest of its cell; -1 if none is known there.
  under(place) {
    const cell = clamp(Math.floor(place * this.cells), 0, this.cells - 1);
    if (this.cells === this.units.length) return this.values.has(cell) ? cell : -1;
    const found = this.links.find(([unit]) => this.cellOf(unit) === cell);
    return found ? found[0] : -1;
  }
}

// The unit of each token.
function unitNumbers(units) {
  const numbers = [];
  units.forEach(([first, last], unit) => {
    for (let token = first; token < last; token++) numbers[token] = unit;
  });
  return numbers;
}

// [query, key, weight, step] of the links of a pooled map that begin or end in a word.
function keptLinksOf(layer, head, [first, last], way) {
  const { keys, queries } = layer.links;
  const [, rows, k] = keys.shape;
  const found = [];
  const add = (query, at) => {
    const { value, step } = layer.linked(head, at);
    if (value > 0) found.push([query, keys.codes[at], value, step]);
  };
  if (way === "to")
    for (let query = first; query < last; query++) {
      const [from, to] = layer.linksOf(head, query);
      for (let at = from; at < to; at++) add(query, at);
    }
  else
    for (let at = head * rows * k; at < (head + 1) * rows * k; at++)
      if (keys.codes[at] >= first && keys.codes[at] < last) {
        const row = Math.floor(at / k);
        add(queries ? queries.codes[row] : row - head * rows, at);
      }
  return found;
}
