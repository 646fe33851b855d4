// How the scores of one query become weights in one head, step by step, from the vectors that the page carries.
//
// Each number has a precision: the vectors are codes, so a product is off by what its factors may be off.

const ROUNDING = 1e-6; // of the sum of the sizes of the terms: sums in single precision

class Scores {
  constructor(layer, head, query) {
    const { flow } = layer;
    Object.assign(this, { layer, head, query, facts: flow.scores });
    this.kv = Math.floor(head / (layer.heads / flow.kv_heads));
    this.at = query - (layer.n - flow.q.shape[1]); // (of a long text the page has the last tokens)
    this.q = layer.vector("q", head, this.at);
    this.keys = range(layer.m).map((key) => this.score(key));
    this.softmax();
  }

  // Why the steps of a query cannot be shown, in words; "" if they can.
  static missing(layer, query) {
    const { flow } = layer;
    if (!flow) return "The steps need q, k and v, which were not kept.";
    if (!flow.q) return "The steps need the vectors of this token, which are not in this page.";
    if (!flow.k) return `The steps need q and k of every token, and the page has room for the last ${flow.q.shape[1]}.`;
    if (!flow.scores || !flow.scores.scale) return "The steps are not known: parts of the text had different scales.";
    return "";
  }

  // q_i, k_i, their products and the running sum.
  elements(key) {
    const k = this.layer.vector("k", this.kv, key);
    let sum = 0;
    return range(this.q.length).map((i) => {
      const product = this.q[i] * k[i];
      sum += product;
      return { q: this.q[i], k: k[i], product, sum };
    });
  }

  score(key) {
    const { layer, head, facts } = this;
    const k = layer.vector("k", this.kv, key);
    const [dq, dk] = [layer.precision(layer.flow.q, head, this.at), layer.precision(layer.flow.k, this.kv, key)];
    let [product, step] = [0, 0];
    for (let i = 0; i < k.length; i++) {
      const term = this.q[i] * k[i];
      product += term;
      step += Math.abs(this.q[i]) * dk + Math.abs(k[i]) * dq + dq * dk + ROUNDING * Math.abs(term);
    }
    const scaled = product * facts.scale;
    const capped = facts.softcap ? facts.softcap * Math.tanh(scaled / facts.softcap) : scaled;
    const bias = this.bias(key);
    const off = step * Math.abs(facts.scale) + bias.step + ROUNDING * (Math.abs(scaled) + Math.abs(bias.value));
    return {
      key,
      product,
      step,
      scaled,
      capped,
      bias: bias.value,
      score: capped + bias.value,
      off,
      hidden: this.hides(key),
    };
  }

  // exp(score - top), their sum, and the weights: exp / sum.
  softmax() {
    const { facts, head } = this;
    this.incomplete = facts.missing || []; // what the page has no room for: "mask", "bias"
    const seen = this.keys.filter((one) => !one.hidden);
    const sink = facts.sinks ? facts.sinks[head] : null;
    this.top = Math.max(...seen.map((one) => one.score), sink ?? -Infinity);
    this.sink = sink === null ? null : { score: sink, exp: Math.exp(sink - this.top) };
    for (const one of this.keys) one.exp = one.hidden ? 0 : Math.exp(one.score - this.top);
    this.sum = this.keys.reduce((sum, one) => sum + one.exp, this.sink ? this.sink.exp : 0);
    if (this.sink) this.sink.weight = this.sink.exp / this.sum;
    const off = Math.max(...seen.map((one) => one.off), 0);
    for (const one of this.keys) {
      one.stored = this.stored(one.key);
      one.weight = this.sum > 0 ? one.exp / this.sum : 0;
      one.weightStep = Math.min(one.weight * Math.expm1(one.off + off) + 1e-9, 1);
      if (this.incomplete.length) one.weight = one.stored ? one.stored.value : 0;
    }
  }

  // The weight that the page carries; null if it does not.
  stored(key) {
    const { layer, head, query } = this;
    return layer.pooled ? layer.exactly(head, query, key) : layer.cell(head, query, key);
  }

  // A piece of the mask or of the bias may be one for all heads.
  headOf(piece) {
    return piece.shape[0] === 1 ? 0 : this.head;
  }

  hides(key) {
    const { layer, facts, query } = this;
    const code = (piece, ...where) => {
      piece.codes = piece.codes || integers(layer.bytes, piece);
      return piece.codes[[this.headOf(piece), ...where].reduce((at, i, axis) => at * piece.shape[axis] + i, 0)];
    };
    if (facts.first) {
      const first = code(facts.first, query);
      return key < first || key >= first + code(facts.count, query);
    }
    return Boolean(facts.visible) && !((code(facts.visible, query, key >> 3) >> (key & 7)) & 1);
  }

  bias(key) {
    const { layer, facts, query } = this;
    if (!facts.bias) return { value: 0, step: 0 };
    const { distances, values } = facts.bias;
    const piece = distances || values;
    const where = distances ? [this.headOf(piece)] : [this.headOf(piece), query];
    const row = layer.signed(piece, ...where);
    return { value: row[distances ? key - query + layer.n - 1 : key], step: layer.precision(piece, ...where) };
  }

  // Whether a weight may be off by a tenth of itself and more.
  get rough() {
    return this.keys.some((one) => one.weight > 0.01 && one.weightStep > 0.1 * one.weight);
  }

  // The sum of the values by their weights: what the head's output is, from these numbers.
  output() {
    const { layer, kv } = this;
    const total = new Float64Array(layer.flow.value_dim);
    for (const { key, weight } of this.keys) {
      if (!weight) continue;
      layer.vector("v", kv, key).forEach((value, i) => (total[i] += weight * value));
    }
    return total;
  }
}
