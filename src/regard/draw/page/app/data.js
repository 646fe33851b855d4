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
    this.roles = [...new Set(this.layers.flatMap((layer) => layer.roles.map((role) => role && role.role)))].filter(Boolean).sort();
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

  // Tokens, or words of several, as [first, last, label], with or without the special ones.
  groups(words, specials) {
    const found = [];
    this.tokens.forEach((token, i) => {
      if (!specials && this.special.has(i)) return;
      const last = found[found.length - 1];
      if (words && last && last[1] === i && this.word[i] === this.word[i - 1]) {
        last[1] = i + 1;
        last[2] += token.startsWith("##") ? token.slice(2) : token;
      } else found.push([i, i + 1, token]);
    });
    return found;
  }
}

class Layer {
  constructor(data, run, meta, index) {
    Object.assign(this, meta);
    this.data = data;
    this.run = run;
    this.index = index;
    this.queries = run.texts[meta.queries];
    this.keys = run.texts[meta.keys];
    this.crops = (meta.crops || []).map((crop) => ({ ...crop }));
    this.loaded = null;
  }

  // Numbers are unpacked when they are first looked at.
  ready() {
    if (!this.loaded) this.loaded = this.blob ? this.data.bytes(this.blob).then((bytes) => this.unpack(bytes)) : Promise.resolve(this);
    return this.loaded;
  }

  unpack(bytes) {
    this.bytes = bytes;
    if (this.map) this.map.codes = whole(bytes, this.map);
    for (const crop of this.crops) crop.codes = whole(bytes, crop);
    if (this.links) {
      this.links.keys.codes = whole(bytes, this.links.keys);
      this.links.weights.codes = whole(bytes, this.links.weights);
    }
    return this;
  }

  get pooled() {
    return Boolean(this.map) && (this.map.shape[1] < this.n || this.map.shape[2] < this.m);
  }

  label(head) {
    return `layer ${this.index} head ${head}`;
  }

  role(head) {
    return this.roles[head] || null;
  }

  // Cell (i, j) of a head's map, and how far the next code is away.
  cell(head, i, j) {
    const [, rows, cols] = this.map.shape;
    return decode(this.map.codes[(head * rows + i) * cols + j], this.map.scale[head], this.map.bits);
  }

  matrix(head) {
    const [, rows, cols] = this.map.shape;
    return decodeAll(this.map.codes.subarray(head * rows * cols, (head + 1) * rows * cols), this.map.scale[head], this.map.bits);
  }

  // The strongest links of a query, [key, weight] with the strongest first: of all weights, or those that were kept.
  strongest(head, query, count, matrix = null) {
    let found = [];
    if (!this.pooled) {
      const [, rows, cols] = this.map.shape;
      const row = (j) => (matrix ? matrix[query * cols + j] : this.cell(head, query, j).value);
      found = range(cols).map((j) => [j, row(j)]);
    } else if (this.links) {
      const [, n, k] = this.links.keys.shape;
      const at = (head * n + query) * k;
      found = range(k).map((i) => [this.links.keys.codes[at + i], decode(this.links.weights.codes[at + i], this.links.weights.scale[head], this.links.weights.bits).value]);
    }
    return found.filter(([, weight]) => weight > 0).sort((a, b) => b[1] - a[1]).slice(0, count);
  }

  // A row of a signed piece of `flow`, such as the query vector of a head and token.
  vector(name, ...where) {
    const piece = this.flow && this.flow[name];
    if (!piece) return null;
    const width = piece.shape[piece.shape.length - 1];
    let row = 0;
    piece.shape.slice(0, -1).forEach((size, axis) => (row = row * size + where[axis]));
    if (!piece.codes) {
      piece.codes = whole(this.bytes, piece);
      const count = piece.codes.length / width;
      piece.scale = new Float32Array(this.bytes.slice(piece.scales, piece.scales + 4 * count).buffer);
    }
    const half = 2 ** (piece.bits - 1) - 1;
    return Float32Array.from(piece.codes.subarray(row * width, (row + 1) * width), (code) => (piece.scale[row] * (code - half)) / half);
  }

  // How much a head adds to a token: the norm of its slice after the projection, and its cosine with the sum of all.
  adds(head, query) {
    if (!this.flow || !this.flow.norms) return null;
    const norms = this.flow.norms;
    norms.codes = norms.codes || whole(this.bytes, norms);
    const norm = decode(norms.codes[head * norms.shape[1] + query], norms.scale[head], norms.bits).value;
    return { norm, cosine: this.vector("cosines", head)[query] };
  }
}

// Whole numbers, stored low bytes first: those of all, then the next bytes of all.
function whole(bytes, { at, shape, bits }) {
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
