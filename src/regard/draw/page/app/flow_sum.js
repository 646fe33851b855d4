// What the heads add up to: their sum, the bias of the output projection, the result; single components; and what the
// layer adds to the residual stream.

const LARGEST_COMPONENTS = 5; // offered as buttons

class FlowSum {
  constructor(view, layer, query, at) {
    Object.assign(this, { view, layer, query, at });
    this.pointed = view.pointed;
    this.adds = range(layer.heads).map((head) => layer.adds(head, query));
    this.vectorOfResult = at >= 0 ? layer.vector("result", at) : null;
    this.bias = layer.vector("bias", 0);
    this.component = this.vectorOfResult ? this.chosenComponent() : -1;
  }

  get node() {
    const result = this.vectorOfResult;
    return [
      this.adds[0] ? this.cancelled() : element("p", {}, "The sum of what the heads add, and a bias."),
      result ? this.total() : null,
      result ? this.components() : null,
    ];
  }

  cancelled() {
    const { adds, layer } = this;
    const total = adds.reduce((sum, one) => sum + (one ? one.norm : 0), 0);
    // The norm of the sum; where its vector is not here, of what each head adds, projected on it.
    const projected = adds.reduce((sum, one) => sum + (one ? one.norm * one.cosine : 0), 0);
    const along = this.vectorOfResult ? normOf(this.sumOfHeads()) : projected;
    const lost = total > 0 ? 100 * clamp(1 - along / total, 0, 1) : 0;
    const against = adds.filter((one) => one && one.cosine < 0).length;
    const opposed = against
      ? `${against} of ${layer.heads} heads point against the sum.`
      : "No head points against the sum.";
    return element(
      "p",
      { id: "cancel" },
      `The heads' parts have norms that add up to ${number(total)}; their sum has the norm ${number(along)}: `,
      `${lost.toFixed(1)}% cancels or spreads out. ${opposed}`,
    );
  }

  sumOfHeads() {
    const { bias, vectorOfResult: result } = this;
    return bias ? result.map((x, i) => x - bias[i]) : result;
  }

  choose(component) {
    this.view.app.state.set({ component: this.carried ? nearestOf(this.carried, component) : component });
  }

  // Sum of the heads + bias = result, each with its norm.
  total() {
    const { bias, vectorOfResult: result } = this;
    const rows = [["=", "result", result]];
    if (bias) rows.unshift(["", "sum of the heads", this.sumOfHeads()], ["+", "bias of the output projection", bias]);
    const line = ([sign, name, values]) =>
      element(
        "tr",
        { "data-name": name, "data-norm": normOf(values) },
        element("th", { scope: "row" }, element("b", {}, sign), ` ${name}`),
        element("td", {}, number(normOf(values))),
        element(
          "td",
          {},
          vectorStrip(this.pointed, values, name, 1, (i) => this.choose(i)),
        ),
      );
    const note = bias
      ? "The vectors add up component by component; their norms do not."
      : "The output projection has no bias: the sum of the heads is the result.";
    return element(
      "div",
      { class: "sum" },
      element(
        "table",
        { class: "plain", id: "flow-total" },
        element(
          "thead",
          {},
          element(
            "tr",
            {},
            ["vector", "norm", `${result.length} components`].map((name) => element("th", { scope: "col" }, name)),
          ),
        ),
        element("tbody", {}, rows.map(line)),
      ),
      element("p", { class: "note" }, note),
    );
  }

  // The components of this token that the page carries for each head; null if there are none.
  get carried() {
    const { parts } = this.layer.flow;
    if (!parts || this.query < parts.first) return null;
    const { components } = parts;
    if (!components) return range(parts.values.shape[2]);
    components.codes = components.codes || integers(this.layer.bytes, components);
    const count = components.shape[1];
    return [...components.codes.subarray((this.query - parts.first) * count, (this.query - parts.first + 1) * count)];
  }

  // The component that was chosen, or the nearest that is carried; by default the largest.
  chosenComponent() {
    const wanted = this.view.app.state.component;
    const carried = this.carried || range(this.vectorOfResult.length);
    return wanted < 0 ? this.largestComponents(carried, 1)[0] : nearestOf(carried, wanted);
  }

  largestComponents(among, count) {
    const size = (i) => Math.abs(this.vectorOfResult[i]);
    return [...among].sort((a, b) => size(b) - size(a)).slice(0, count);
  }

  components() {
    const { layer } = this;
    const carried = this.carried;
    if (!carried) {
      const { parts } = layer.flow;
      const where = parts ? `for tokens ${parts.first} to ${layer.n - 1} alone` : "for shorter texts";
      return element("p", { class: "note" }, `What each head adds to single components is in the page ${where}.`);
    }
    const width = this.vectorOfResult.length;
    const some = carried.length < width ? ` (the page carries the ${carried.length} largest of ${width})` : "";
    return element(
      "div",
      { class: "component" },
      element(
        "div",
        { class: "controls" },
        field(
          "Component",
          element("input", {
            type: "number",
            id: "flow-component",
            min: 0,
            max: width - 1,
            value: this.component,
            onchange: (event) => this.choose(clamp(Math.round(Number(event.target.value)) || 0, 0, width - 1)),
          }),
        ),
        element("span", { class: "note" }, `The largest${some}:`),
        this.largestComponents(carried, LARGEST_COMPONENTS).map((i) => this.componentButton(i)),
      ),
      this.column(carried.indexOf(this.component)),
    );
  }

  componentButton(i) {
    return element(
      "button",
      {
        type: "button",
        id: `flow-component-${i}`,
        "aria-label": `component ${i}`,
        "aria-pressed": String(i === this.component),
        onclick: () => this.choose(i),
      },
      `${i}: ${number(this.vectorOfResult[i], 3)}`,
    );
  }

  // head 0 + head 1 + ... + bias = result, for one component.
  column(index) {
    const { layer, component, bias, query } = this;
    const { parts } = layer.flow;
    const row = (head) => [head, query - parts.first];
    const heads = range(layer.heads).map((head) => layer.signed(parts.values, ...row(head))[index]);
    let step = heads.reduce((sum, _, head) => sum + layer.precision(parts.values, ...row(head)), 0);
    const terms = heads.map((value, head) => [`head ${head}`, value, { "data-head": head }]);
    if (bias) {
      terms.push(["bias", bias[component], { "data-name": "bias" }]);
      step += layer.precision(layer.flow.bias, 0);
    }
    const sum = terms.reduce((total, [, value]) => total + value, 0);
    const result = this.vectorOfResult[component];
    step += layer.precision(layer.flow.result, this.at);
    return this.columnTable(terms, sum, result, step);
  }

  columnTable(terms, sum, result, step) {
    const top = Math.max(...terms.map(([, value]) => Math.abs(value)), Math.abs(result), 1e-30);
    const places = clamp(3 - Math.floor(Math.log10(top)), 0, 8); // the same for all, so that they can be added up
    const line = (sign, name, value, data) =>
      element(
        "tr",
        { "data-value": value, ...data },
        element("th", { scope: "row" }, element("b", {}, sign), ` ${name}`),
        element("td", {}, Number.isFinite(value) ? value.toFixed(places) : "–"),
        element("td", {}, signedBar(value / top)),
      );
    return element(
      "table",
      { class: "plain", id: "flow-column", "data-step": step },
      element("caption", {}, `Component ${this.component} of the result`),
      element(
        "thead",
        {},
        element(
          "tr",
          {},
          ["part", "adds", ""].map((name) => element(name ? "th" : "td", name ? { scope: "col" } : {}, name)),
        ),
      ),
      element(
        "tbody",
        {},
        terms.map(([name, value, data], i) => line(i ? "+" : "", name, value, data)),
      ),
      element(
        "tfoot",
        {},
        line("=", "sum", sum, { "data-name": "sum" }),
        line("", `result, stored (± ${number(step, 1)})`, result, { "data-name": "result" }),
      ),
    );
  }

  // Norm and direction of the result beside the token's input.
  residual() {
    const input = this.at >= 0 ? this.layer.vector("input", this.at) : null;
    const result = this.vectorOfResult;
    if (!input || !result || input.length !== result.length) return null;
    const [x, r, cosine] = [normOf(input), normOf(result), cosineOf(input, result)];
    const sum = normOf(input.map((value, i) => value + result[i]));
    const along = cosine > 0.3 ? "along the input" : cosine < -0.3 ? "against the input" : "mostly across the input";
    return [
      element(
        "p",
        { id: "flow-residual", "data-input": x, "data-result": r, "data-cosine": cosine, "data-sum": sum },
        `The result has the norm ${number(r)}, the input ${number(x)}: a ratio of ${number(r / x, 3)}. `,
        `The cosine between them is ${number(cosine, 3)}: the result points ${along}. `,
        `Input and result together have the norm ${number(sum)}.`,
      ),
      Number.isFinite(cosine) ? triangle(x, r, cosine, sum) : null,
      element(
        "p",
        { class: "note" },
        "Input is what this layer projects q from. In a model that normalizes before attention, it is the residual " +
          "stream after that norm: the stream itself is not recorded.",
      ),
    ];
  }
}

const nearestOf = (numbers, wanted) =>
  numbers.reduce((best, one) => (Math.abs(one - wanted) < Math.abs(best - wanted) ? one : best));

// Input, result and their sum as a triangle, with true lengths and angle.
function triangle(x, r, cosine, sum) {
  const angle = Math.acos(clamp(cosine, -1, 1));
  const points = [
    [0, 0],
    [x, 0],
    [x + r * Math.cos(angle), -r * Math.sin(angle)],
  ];
  const bounds = (axis) => [Math.min(...points.map((p) => p[axis])), Math.max(...points.map((p) => p[axis]))];
  const [[left, right], [high, low]] = [bounds(0), bounds(1)];
  const size = 160 / Math.max(right - left, low - high, 1e-30);
  const [a, b, c] = points.map(([px, py]) => [6 + (px - left) * size, 6 + (py - high) * size]);
  const sides = [
    [a, b, "currentColor", null, `input, norm ${number(x)}`],
    [b, c, "var(--accent)", null, `result, norm ${number(r)}`],
    [a, c, "var(--line)", "5 4", `together, norm ${number(sum)}`],
  ];
  const line = (d, stroke, dashes) =>
    shape("path", { d, stroke, "stroke-width": 2.5, "stroke-dasharray": dashes, fill: "none" });
  const legend = ([, , colour, dashes, words], i) => [
    line(`M184 ${12 + 18 * i}h22`, colour, dashes),
    shape("text", { x: 212, y: 16 + 18 * i, "font-size": 12, fill: "currentColor" }, words),
  ];
  return shape(
    "svg",
    {
      class: "triangle",
      width: 350,
      height: Math.ceil(Math.max((low - high) * size + 12, 56)),
      role: "img",
      "aria-label": `triangle: ${sides.map(([, , , , words]) => words).join("; ")}; cosine ${number(cosine, 3)}`,
    },
    sides.map(([from, to, colour, dashes]) => line(`M${from.join(" ")}L${to.join(" ")}`, colour, dashes)),
    sides.map(legend),
  );
}
