// What the page carries: a description in JSON, numbers in compressed binary (docs/page.md).
//
// Weights: value = scale * (code / levels)^2; the next code is scale * (2 code + 1) / levels^2 away.
// Vectors: value = scale * (code - half) / half, a scale for each row.

class Data {
  constructor(meta, encoded) {
    this.meta = meta;
    this.encoded = encoded; // (name) => base64
    this.runs = meta.runs.map((run, number) => new Run(this, run, number));
  }

  async bytes(name) {
    const packed = Uint8Array.from(atob(this.encoded(name)), (letter) => letter.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  }
}

class Run {
  constructor(data, meta, number) {
    this.name = meta.name;
    this.number = number;
    this.texts = meta.texts.map((text) => new Text(text));
    this.layers = meta.layers.map((layer, index) => new Layer(data, this, layer, index));
    this.measures = [...new Set(this.layers.flatMap((layer) => Object.keys(layer.measures)))];
    this.roles = [...new Set(this.layers.flatMap((layer) => layer.roles.map((role) => role && role.role)))]
      .filter(Boolean)
      .sort();
    this.story = meta.story || null;
    this.effects = meta.effects || null;
    this.causal = Boolean(meta.causal);
    this.image = meta.image || null;
  }

  // The layer and head to begin with: the first of the story.
  get best() {
    const card = this.story && this.story.cards[0];
    return card ? [card.layer, card.head] : [0, 0];
  }

  // A measure of all heads that have it.
  all(name) {
    return this.heads()
      .map(({ layer, head }) => layer.measured(name, head))
      .filter((value) => value !== undefined);
  }

  heads() {
    return this.layers.flatMap((layer) => range(layer.heads).map((head) => ({ layer, head })));
  }
}

class Text {
  constructor({ tokens, special, word }) {
    this.tokens = tokens;
    this.special = new Set(special);
    this.word = word;
    this.piecesOfWords = word.length && word[word.length - 1] + 1 < word.length;
  }

  // Tokens, or whole words, as [first, last, label], with or without special tokens.
  groups(words, specials) {
    const groups = [];
    this.tokens.forEach((token, i) => {
      if (!specials && this.special.has(i)) return;
      const last = groups[groups.length - 1];
      if (words && last && last[1] === i && this.word[i] === this.word[i - 1]) {
        last[1] = i + 1;
        last[2] += piece(token);
      } else groups.push([i, i + 1, token]);
    });
    return groups;
  }
}

// A piece of a word without its mark: "ly" for "##ly".
const piece = (token) => (token.startsWith("##") && token.slice(2)) || token;

class Layer {
  constructor(data, run, meta, index) {
    Object.assign(this, meta);
    if (this.map) this.map.scale = this.map.scale.map((scale) => scale ?? NaN); // (a head whose weights are NaN)
    this.data = data;
    this.run = run;
    this.index = index;
    this.queries = run.texts[meta.queries];
    this.keys = run.texts[meta.keys];
    this.crops = (meta.crops || []).map((crop) => ({ ...crop }));
    this.loaded = null;
  }

  // Numbers are unpacked on first use.
  ready() {
    if (!this.loaded)
      this.loaded = this.blob ? this.data.bytes(this.blob).then((bytes) => this.unpack(bytes)) : Promise.resolve(this);
    return this.loaded;
  }

  unpack(bytes) {
    this.bytes = bytes;
    if (this.map) this.map.codes = integers(bytes, this.map);
    for (const crop of this.crops) crop.codes = integers(bytes, crop);
    if (this.links) {
      this.links.keys.codes = integers(bytes, this.links.keys);
      this.links.weights.codes = integers(bytes, this.links.weights);
      if (this.links.queries) this.links.queries.codes = integers(bytes, this.links.queries);
    }
    return this;
  }

  get pooled() {
    return Boolean(this.map) && (this.map.shape[1] < this.n || this.map.shape[2] < this.m);
  }

  label(head) {
    const role = this.role(head);
    return `layer ${this.index} head ${head}${role ? `, ${role.role}` : ""}`;
  }

  role(head) {
    return this.roles[head] || null;
  }

  // The share of a head's mass on its resting place, from 0 to 1; undefined if it is not known.
  rests(head) {
    return (this.rest && this.rest.share[head]) ?? undefined;
  }

  // The keys of a head's resting place; null if they are not known.
  aside(head) {
    if (!this.rest || !this.rest.keys) return null;
    return new Set([...this.rest.keys, ...(this.rest.more[head] || [])]);
  }

  // A measure of a head; undefined if it was not measured in this layer, or is NaN.
  measured(name, head) {
    const values = Object.hasOwn(this.measures, name) ? this.measures[name] : [];
    return values[head] ?? undefined;
  }

  // Cell (i, j) of a head's map, and the distance to the next code.
  cell(head, i, j) {
    const [, rows, cols] = this.map.shape;
    return decode(this.map.codes[(head * rows + i) * cols + j], this.map.scale[head], this.map.bits);
  }

  matrix(head) {
    const [, rows, cols] = this.map.shape;
    return decodeAll(
      this.map.codes.subarray(head * rows * cols, (head + 1) * rows * cols),
      this.map.scale[head],
      this.map.bits,
    );
  }

  // The strongest links of a query, [key, weight], the strongest first: of all weights, or of the links that were kept.
  strongest(head, query, count, matrix = null) {
    let links = [];
    if (!this.pooled) {
      const [, rows, cols] = this.map.shape;
      const row = (j) => (matrix ? matrix[query * cols + j] : this.cell(head, query, j).value);
      links = range(cols).map((j) => [j, row(j)]);
    } else if (this.links) {
      const [first, last] = this.linksOf(head, query);
      links = range(last - first).map((i) => [this.links.keys.codes[first + i], this.linked(head, first + i).value]);
    }
    return links
      .filter(([, weight]) => weight > 0)
      .sort((a, b) => b[1] - a[1])
      .slice(0, count);
  }

  // The range of a query's links among all that were kept. In a long text only some queries have one; their positions
  // are in rising order.
  linksOf(head, query) {
    const { keys, queries } = this.links;
    const [, rows, k] = keys.shape;
    let row = query;
    if (queries) {
      let [low, high] = [head * rows, (head + 1) * rows];
      while (low < high) {
        const middle = (low + high) >> 1;
        if (queries.codes[middle] < query) low = middle + 1;
        else high = middle;
      }
      if (low === (head + 1) * rows || queries.codes[low] !== query) return [0, 0];
      row = low - head * rows;
    }
    return [(head * rows + row) * k, (head * rows + row + 1) * k];
  }

  // One of the links that were kept, by its index.
  linked(head, at) {
    const { codes, scale, bits } = this.links.weights;
    return decode(codes[at], scale[head], bits);
  }

  // A single weight of a pooled map, where it was kept: in a crop, or as one of the strongest links.
  exactly(head, query, key) {
    for (const crop of this.crops) {
      const [, tall, wide] = crop.shape;
      const [r, c] = [query - crop.row, key - crop.col];
      if (crop.head === head && r >= 0 && c >= 0 && r < tall && c < wide)
        return decode(crop.codes[r * wide + c], crop.scale[0], crop.bits);
    }
    if (!this.links) return null;
    const [first, last] = this.linksOf(head, query);
    for (let at = first; at < last; at++)
      if (this.links.keys.codes[at] === key && this.links.weights.codes[at]) return this.linked(head, at);
    return null;
  }

  // [query, key, weight] of the strongest links of all queries that were kept.
  strongestOfAll(head, count) {
    const { keys, weights, queries } = this.links;
    const [, rows, k] = keys.shape;
    const first = head * rows * k;
    const query = (row) => (queries ? queries.codes[head * rows + row] : row);
    return largestOf(weights.codes.subarray(first, first + rows * k), count).map((i) => [
      query(Math.floor(i / k)),
      keys.codes[first + i],
      this.linked(head, first + i).value,
    ]);
  }

  // A row of a signed piece of `flow`, such as the query vector of a head and token.
  vector(name, ...where) {
    return this.signed(this.flow && this.flow[name], ...where);
  }

  // A row of a piece that is signed; null without the piece.
  signed(piece, ...where) {
    if (!piece) return null;
    const [row, width] = [this.rowOf(piece, where), piece.shape[piece.shape.length - 1]];
    const half = 2 ** (piece.bits - 1) - 1;
    return Float32Array.from(
      piece.codes.subarray(row * width, (row + 1) * width),
      (code) => (piece.scale[row] * (code - half)) / half,
    );
  }

  // By how much a number of such a row is off, at most.
  precision(piece, ...where) {
    return piece ? piece.scale[this.rowOf(piece, where)] / (2 ** piece.bits - 2) : 0;
  }

  // Which row of a piece it is. A piece is unpacked on first use.
  rowOf(piece, where) {
    if (!piece.codes) {
      piece.codes = integers(this.bytes, piece);
      const count = piece.codes.length / piece.shape[piece.shape.length - 1];
      piece.scale = new Float32Array(this.bytes.slice(piece.scales, piece.scales + 4 * count).buffer);
    }
    return piece.shape.slice(0, -1).reduce((row, size, axis) => row * size + where[axis], 0);
  }

  // What a head adds to a token: the norm of its slice after the projection, and its cosine with the sum of all heads.
  adds(head, query) {
    if (!this.flow || !this.flow.norms) return null;
    const { norms, added = 0 } = this.flow; // (of a long text only the last tokens have them)
    if (query < added) return null;
    norms.codes = norms.codes || integers(this.bytes, norms);
    const norm = decode(norms.codes[head * norms.shape[1] + query - added], norms.scale[head], norms.bits).value;
    const cosine = this.vector("cosines", head)[query - added];
    return Number.isFinite(norm) && Number.isFinite(cosine) ? { norm, cosine } : null;
  }
}

// The indices of the largest numbers, the largest first, in one pass: there may be millions.
function largestOf(values, count, size = (x) => x) {
  const best = [];
  let least = 0;
  for (let i = 0; i < values.length; i++) {
    const now = size(values[i]);
    if (!(now > least)) continue;
    let at = best.length;
    while (at && size(values[best[at - 1]]) < now) at--;
    best.splice(at, 0, i);
    if (best.length > count) best.pop();
    if (best.length === count) least = size(values[best[count - 1]]);
  }
  return best;
}

// Integers, stored as the low bytes of all, then the next bytes of all.
function integers(bytes, { at, shape, bits }) {
  const count = shape.reduce((a, b) => a * b, 1);
  if (bits === 8) return bytes.subarray(at, at + count);
  const codes = new (bits === 16 ? Uint16Array : Uint32Array)(count);
  for (let part = 0; part < bits / 8; part++) {
    const from = at + part * count;
    for (let i = 0; i < count; i++) codes[i] |= bytes[from + i] << (8 * part);
  }
  return codes;
}

function decode(code, scale, bits) {
  const levels = 2 ** bits - 1;
  return { value: scale * (code / levels) ** 2, step: (scale * (2 * code + 1)) / levels ** 2 };
}

function decodeAll(codes, scale, bits) {
  const levels = 2 ** bits - 1;
  const values = new Float32Array(codes.length);
  for (let i = 0; i < codes.length; i++) values[i] = scale * (codes[i] / levels) ** 2;
  return values;
}
