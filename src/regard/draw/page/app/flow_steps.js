// One token and one head, step by step: products, scale, softcap, bias, mask, softmax, values; one key element by
// element.

const KEYS_SHOWN = 256; // rows of the table of keys, at most; of a longer text the strongest

class FlowSteps {
  constructor(view, layer, head, query) {
    Object.assign(this, { view, layer, head, query });
    this.pointed = view.pointed;
    this.scores = new Scores(layer, head, query);
    this.facts = this.scores.facts;
    this.key = this.chosenKey();
    this.one = this.scores.keys[this.key];
  }

  // The key that was chosen; by default the strongest outside the head's resting place.
  chosenKey() {
    const { k } = this.view.app.state;
    if (k >= 0 && k < this.layer.m) return k;
    const aside = this.layer.aside(this.head) || this.layer.keys.special;
    const best = (keys) => keys.reduce((a, b) => (b.weight > a.weight ? b : a)).key;
    const outside = this.scores.keys.filter((one) => one.weight > 0 && !aside.has(one.key));
    return best(outside.length ? outside : this.scores.keys);
  }

  get node() {
    return element(
      "div",
      { class: "opened", id: "flow-steps" },
      element("div", { class: "beside" }, element("div", {}, this.list(), this.rough()), this.table()),
      this.elements(),
      this.layer.flow.v ? this.result() : null,
    );
  }

  rough() {
    const { scores, layer } = this;
    if (!scores.rough) return null;
    const words = `With vectors in ${layer.flow.q.bits} bits, scores of this size are rough: `;
    return element(
      "p",
      { class: "note" },
      words,
      "a weight may be off by a tenth of itself. The stored weights are not.",
    );
  }

  name(key) {
    return isolated(short(this.layer.keys.tokens[key], 16));
  }

  // "1/√32 = 0.1768", or the number alone where the scale is another.
  scaleWords() {
    const { scale } = this.facts;
    const width = this.layer.flow.head_dim;
    const usual = Math.abs(scale * Math.sqrt(width) - 1) < 1e-6;
    return usual ? `1/√${width} = ${number(scale)}` : number(scale);
  }

  // Each step: name, formula, shapes, and the numbers of the chosen key.
  list() {
    const { one, facts, scores, layer } = this;
    const [d, m, e] = [layer.flow.head_dim, layer.m, layer.flow.value_dim];
    const hidden = scores.keys.filter((key) => key.hidden).length;
    const items = [
      [
        "Product",
        "sⱼ = q · kⱼ = Σᵢ qᵢ kⱼᵢ",
        `(${d}) · (${d}, ${m}) → (${m})`,
        `q · k = ${within(one.product, one.step)}`,
      ],
      [
        "Scale",
        `sⱼ × ${this.scaleWords()}`,
        `(${m})`,
        `${number(one.product)} × ${number(facts.scale)} = ${number(one.scaled)}`,
      ],
    ];
    if (facts.softcap)
      items.push([
        "Softcap",
        `${number(facts.softcap)} × tanh(sⱼ / ${number(facts.softcap)})`,
        `(${m})`,
        `${number(facts.softcap)} × tanh(${number(one.scaled / facts.softcap)}) = ${number(one.capped)}`,
      ]);
    if (facts.bias)
      items.push([
        "Bias",
        "sⱼ + bias of query and key",
        `(${m})`,
        `${number(one.capped)} + ${number(one.bias)} = ${number(one.score)}`,
      ]);
    if (scores.incomplete.length) return this.items([...items, this.unknownItem()]);
    items.push([
      "Mask",
      hidden ? "hidden keys get −∞" : "no key is hidden",
      `(${m})`,
      hidden ? `${hidden} of ${m} keys are hidden: crossed out in the table` : "every key may be seen",
    ]);
    return this.items([...items, ...this.softmaxItems(m, e)]);
  }

  unknownItem() {
    const what = this.scores.incomplete.join(" and the ");
    return [
      "Then",
      `the ${what} of this layer`,
      "",
      `which this page has no room for; the stored weights are in the table`,
    ];
  }

  items(items) {
    return element(
      "ol",
      { class: "way" },
      items.map(([name, formula, shapes, numbers], i) =>
        element(
          "li",
          {},
          element("b", {}, `${i + 1}. ${name}`),
          element("code", { class: "formula" }, formula),
          element("code", { class: "dims" }, shapes),
          element("span", { class: "numbers" }, numbers),
        ),
      ),
    );
  }

  softmaxItems(m, e) {
    const { one, scores } = this;
    const stored = one.stored ? `; stored: ${within(one.stored.value, one.stored.step)}` : "";
    const sink = scores.sink ? ` + exp(sink − ${number(scores.top)})` : "";
    const share = one.hidden
      ? "0, for it is hidden"
      : `${number(one.exp)} / ${number(scores.sum)} = ${within(one.weight, one.weightStep)}${stored}`;
    return [
      [
        "Exponential",
        `exp(sⱼ − ${number(scores.top)}), the largest is taken away`,
        `(${m})`,
        one.hidden ? "exp(−∞) = 0" : `exp(${number(one.score)} − ${number(scores.top)}) = ${number(one.exp)}`,
      ],
      [
        "Softmax",
        `wⱼ = exp(sⱼ − ${number(scores.top)}) / (Σ exp${sink}) = exp / ${number(scores.sum)}`,
        `(${m})`,
        share,
      ],
      [
        "Values",
        "output = Σⱼ wⱼ vⱼ",
        `(${m}) · (${m}, ${e}) → (${e})`,
        this.layer.flow.v
          ? `${number(one.weight)} × v, norm ${number(this.valueNorm(one))}`
          : "of so long a text the page has no v",
      ],
    ];
  }

  valueNorm({ key, weight }) {
    return weight * normOf(this.layer.vector("v", this.scores.kv, key));
  }

  columns() {
    const { facts, scores } = this;
    const complete = !scores.incomplete.length;
    return [
      ["q · k", "product", (one) => one.product],
      [`× ${number(facts.scale)}`, "scaled", (one) => one.scaled],
      facts.softcap ? ["softcap", "capped", (one) => one.capped] : null,
      facts.bias ? ["+ bias", "score", (one) => one.score] : null,
      complete ? [`exp(s − ${number(scores.top, 3)})`, "exp", (one) => one.exp] : null,
      complete ? [`/ ${number(scores.sum, 3)} = weight`, "weight", (one) => one.weight] : null,
      ["stored", "stored", (one) => (one.stored ? one.stored.value : NaN)],
      this.layer.flow.v ? ["norm of w v", "value", (one) => this.valueNorm(one)] : null,
    ].filter(Boolean);
  }

  // Every key, or the strongest of very many: its numbers after each step.
  table() {
    const { scores, layer } = this;
    const shown = [...scores.keys].sort((a, b) => b.weight - a.weight).slice(0, KEYS_SHOWN);
    const keys = scores.keys.filter((one) => shown.includes(one) || one === this.one);
    const left = layer.m - keys.length;
    const columns = this.columns();
    const head = element(
      "tr",
      {},
      element("th", { scope: "col" }, "key"),
      columns.map(([title]) => element("th", { scope: "col" }, title)),
    );
    const caption = `The row of “${isolated(short(layer.queries.tokens[this.query], 16))}” in head ${this.head}, key by key`;
    return element(
      "div",
      { class: "keys-table", tabindex: 0, role: "region", "aria-label": "every key, step by step" },
      element(
        "table",
        { class: "plain", id: "flow-keys" },
        element("caption", {}, caption, left ? ` (the strongest; ${left} more are counted in the sum)` : ""),
        element("thead", {}, head),
        element(
          "tbody",
          {},
          keys.map((one) => this.row(one, columns)),
          this.sinkRow(columns),
        ),
        element("tfoot", {}, this.sumRow(columns)),
      ),
    );
  }

  row(one, columns) {
    const { state } = this.view.app;
    const chosen = one === this.one;
    const token = this.layer.keys.tokens[one.key];
    const button = element(
      "button",
      {
        type: "button",
        id: `flow-key-${one.key}`,
        "aria-pressed": String(chosen),
        "aria-label": `key ${one.key}, ${token}${one.hidden ? ", hidden" : ""}`,
        onclick: () => state.set({ k: one.key }),
      },
      one.hidden ? element("s", {}, this.name(one.key)) : this.name(one.key),
    );
    return element(
      "tr",
      {
        class: [chosen ? "chosen" : "", one.hidden ? "hides" : ""].join(" ").trim() || null,
        ...keyData(one),
      },
      element("th", { scope: "row" }, button),
      columns.map(([, name, value]) => this.cell(one, name, value(one))),
    );
  }

  cell(one, name, value) {
    if (one.hidden && name === "exp") return element("td", {}, "✕ hidden");
    const text = brief(value);
    const struck = one.hidden && ["product", "scaled", "capped", "score"].includes(name);
    const cell = element("td", {}, struck ? element("s", {}, text) : text);
    if (name === "weight") cell.className = "share";
    if (name === "weight") cell.style.setProperty("--share", `${100 * value}%`);
    return cell;
  }

  sinkRow(columns) {
    const { sink } = this.scores;
    if (!sink) return null;
    const values = { scaled: sink.score, exp: sink.exp, weight: sink.weight };
    return element(
      "tr",
      { id: "flow-sink", "data-score": sink.score, "data-weight": sink.weight },
      element("th", { scope: "row" }, "sink, learned"),
      columns.map(([, name]) => element("td", {}, name in values ? brief(values[name]) : "")),
    );
  }

  sumRow(columns) {
    const { scores } = this;
    const values = {
      exp: scores.sum,
      weight: scores.keys.reduce((sum, one) => sum + one.weight, scores.sink ? scores.sink.weight : 0),
    };
    return element(
      "tr",
      {},
      element("th", { scope: "row" }, "sum"),
      columns.map(([, name]) => element("td", {}, name in values ? brief(values[name]) : "")),
    );
  }

  // q, k, their products and the running sum, element by element.
  elements() {
    const { layer, scores, key } = this;
    const elements = scores.elements(key);
    const [query, name] = [isolated(short(layer.queries.tokens[this.query], 16)), this.name(key)];
    const chart = new ElementChart(elements, this.pointed);
    const line = (label, values, what) =>
      element("div", { class: "labelled" }, element("i", {}, label), vectorStrip(this.pointed, values, what));
    return element(
      "figure",
      { class: "elements", id: "flow-elements" },
      element("figcaption", {}, `q · k of “${query}” and “${name}”, element by element (${elements.length})`),
      line("q", scores.q, `q of ${query}`),
      line("k", layer.vector("k", scores.kv, key), `k of ${name}`),
      element("div", { class: "labelled" }, element("i", {}, "qᵢ kᵢ"), chart.node),
      element("p", { class: "note" }, chart.summary()),
      chart.numbers(),
    );
  }

  // The sum of the values by their weights, beside the output that was stored.
  result() {
    const { layer, scores, one, pointed } = this;
    const output = layer.vector("output", this.head, this.query - layer.flow.first);
    const found = scores.output();
    const off = largest(found.map((x, i) => Math.abs(x - output[i])));
    const v = layer.vector("v", scores.kv, one.key);
    return element(
      "div",
      { class: "sum", id: "flow-output", "data-off": off },
      element("p", {}, `${number(one.weight)} × v of “${this.name(one.key)}”:`),
      vectorLine(
        pointed,
        v.map((x) => x * one.weight),
        `weight × v of ${short(layer.keys.tokens[one.key], 16)}`,
      ),
      element("p", {}, `The sum over all keys is the output of head ${this.head}:`),
      vectorLine(pointed, output, `output of head ${this.head}`),
      element("p", { class: "note" }, `The sum of the numbers above differs from it by at most ${number(off, 2)}.`),
    );
  }
}

// The numbers of a key as they stand, for who reads them by program.
function keyData(one) {
  return {
    "data-key": one.key,
    "data-product": one.product,
    "data-step": one.step,
    "data-scaled": one.scaled,
    "data-capped": one.capped,
    "data-bias": one.bias,
    "data-hidden": one.hidden ? 1 : 0,
    "data-exp": one.exp,
    "data-weight": one.weight,
    "data-weight-step": one.weightStep,
    "data-stored": one.stored ? one.stored.value : null,
    "data-stored-step": one.stored ? one.stored.step : null,
  };
}

// A number in few letters.
const brief = (x) => (x !== 0 && Math.abs(x) < 1e-3 ? x.toExponential(1) : number(x, 3));

const within = (value, step) => `${number(value)} ± ${number(step, 1)}`;

// Bars of the products and a line of their running sum. The arrow keys go from element to element.
class ElementChart {
  constructor(elements, pointed) {
    this.elements = elements;
    this.pointed = pointed;
    this.at = 0;
    this.mark = shape("rect", { y: 0, width: 1, height: 100, fill: "currentColor", "fill-opacity": 0.18 });
    this.node = element(
      "div",
      {
        class: "chart",
        id: "flow-elements-chart",
        tabindex: 0,
        role: "slider",
        "aria-label": "element of q · k",
        "aria-valuemin": 0,
        "aria-valuemax": elements.length - 1,
        onpointermove: (event) => this.go(partAt(event, elements.length)),
        onkeydown: (event) => this.press(event),
      },
      this.drawing(),
    );
    this.node.setAttribute("aria-valuenow", 0);
    this.node.setAttribute("aria-valuetext", this.words(0));
  }

  drawing() {
    const { elements } = this;
    const products = elements.map(({ product }) => finite(product));
    const top = Math.max(...products.map(Math.abs), 1e-30);
    const bars = products.map((product, i) =>
      shape("rect", {
        x: i + 0.1,
        width: 0.8,
        y: product < 0 ? 30 : 30 - (28 * product) / top,
        height: Math.max((28 * Math.abs(product)) / top, 0.3),
        fill: product < 0 ? "var(--against)" : "var(--line)",
      }),
    );
    const sums = elements.map(({ sum }) => finite(sum));
    const [low, high] = [Math.min(0, ...sums), Math.max(0, ...sums)];
    const y = (sum) => 98 - (32 * (sum - low)) / Math.max(high - low, 1e-30);
    const steps = sums.map((sum, i) => `M${i} ${y(sum)}h1`).join("");
    const svg = shape(
      "svg",
      { viewBox: `0 0 ${elements.length} 100`, preserveAspectRatio: "none", "aria-hidden": "true" },
      this.mark,
      bars,
      shape("path", {
        d: `M0 30h${elements.length}M0 ${y(0)}h${elements.length}`,
        stroke: "currentColor",
        "stroke-opacity": 0.4,
        "stroke-width": 1,
        "vector-effect": "non-scaling-stroke",
      }),
      shape("path", {
        d: steps,
        stroke: "currentColor",
        "stroke-width": 2,
        "vector-effect": "non-scaling-stroke",
        fill: "none",
      }),
    );
    return svg;
  }

  words(i) {
    const { q, k, product, sum } = this.elements[i];
    return `${i}: ${number(q)} × ${number(k)} = ${number(product)}, sum so far ${number(sum)}`;
  }

  go(i) {
    this.at = clamp(i, 0, this.elements.length - 1);
    this.mark.setAttribute("x", this.at);
    this.node.setAttribute("aria-valuenow", this.at);
    this.node.setAttribute("aria-valuetext", this.words(this.at));
    this.pointed.say(this.words(this.at));
  }

  press(event) {
    const moves = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, Home: -Infinity, End: Infinity };
    if (!Object.hasOwn(moves, event.key)) return;
    event.preventDefault();
    event.stopPropagation(); // (else it would go to the next head)
    this.go(this.at + moves[event.key]);
  }

  // The elements that decide the product.
  summary() {
    const { elements } = this;
    const total = elements[elements.length - 1].sum;
    const first = range(elements.length)
      .sort((a, b) => Math.abs(elements[b].product) - Math.abs(elements[a].product))
      .slice(0, 3);
    const said = first.map((i) => `element ${i} with ${number(elements[i].product, 3)}`).join(", ");
    return `Above the products, below their running sum, which ends at ${number(total)}. The largest: ${said}.`;
  }

  numbers() {
    const titles = ["element", "q", "k", "q × k", "sum so far"];
    return element(
      "details",
      {},
      element("summary", { tabindex: 0 }, `All ${this.elements.length} numbers`),
      element(
        "div",
        { class: "keys-table" },
        element(
          "table",
          { class: "plain", id: "flow-numbers" },
          element("caption", {}, "q · k, element by element"),
          element(
            "thead",
            {},
            element(
              "tr",
              {},
              titles.map((title) => element("th", { scope: "col" }, title)),
            ),
          ),
          element(
            "tbody",
            {},
            this.elements.map((one, i) => this.numberRow(one, i)),
          ),
        ),
      ),
    );
  }

  numberRow({ q, k, product, sum }, i) {
    return element(
      "tr",
      { "data-q": q, "data-k": k, "data-product": product, "data-sum": sum },
      element("th", { scope: "row" }, String(i)),
      [q, k, product, sum].map((x) => element("td", {}, number(x))),
    );
  }
}
