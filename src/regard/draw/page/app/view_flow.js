// Flow: one token through one layer, with real shapes and numbers: what each head reads, and what it adds.

class FlowView {
  constructor(app) {
    this.app = app;
    this.node = element("section", { class: "view flow", "aria-label": "Flow" });
    this.readout = element("output", { class: "readout", id: "flow-readout", "aria-live": "polite" });
  }

  async show() {
    const {
      app,
      app: { state },
    } = this;
    const layer = await app.layer.ready();
    if (app.view !== this || app.layer !== layer) return;
    const query = clamp(state.q < 0 ? this.usual(layer) : state.q, 0, layer.n - 1);
    const flow = layer.flow;
    const known = Boolean(flow && flow.q) && query >= flow.first;
    const at = known ? query - flow.first : -1;
    const tokens = layer.queries.tokens.map((token, i) => [i, `${i} ${isolated(short(token, 20))}`]);
    const controls = element(
      "div",
      { class: "controls" },
      field(
        "Layer",
        select(
          app.run.layers.map((one) => [one.index, `${one.index} · ${one.name}`]),
          layer.index,
          (value) => app.go(Number(value), app.head),
          { id: "flow-layer" },
        ),
      ),
      field(
        "Token",
        select(tokens, query, (value) => state.set({ q: Number(value) }), { id: "flow-token" }),
      ),
      this.readout,
    );
    fill(this.readout, element("span", { class: "note" }, "Point at a strip to read its numbers."));
    const notes = [];
    if (!layer.map)
      notes.push(
        'Of this layer neither weights nor vectors were kept: watch(model, keep="qkv") keeps what they need. ' +
          "This is the way that its numbers went.",
      );
    else if (!flow) notes.push('Vectors were not kept: watch(model, keep="qkv") keeps them. Weights are shown.');
    else if (!flow.q) notes.push("Vectors of so long a text do not fit into one page; shapes and weights are here.");
    else if (!known)
      notes.push(`Vectors are here for tokens ${flow.first} to ${layer.n - 1}; of this one, its weights.`);
    if (flow && flow.width && query < (flow.added || 0))
      notes.push(`What each head adds is here for tokens ${flow.added} to ${layer.n - 1}.`);
    if (flow && !flow.width)
      notes.push("The output projection of this layer is not known by its name, so what each head adds is not known.");
    fill(
      this.node,
      controls,
      ...notes.map((note) => element("p", { class: "note" }, note)),
      this.diagram(layer, query, at),
    );
  }

  // A word in the middle, not a mark.
  usual(layer) {
    const words = range(layer.n).filter((i) => !layer.queries.special.has(i));
    return words.length ? words[Math.floor(words.length / 2)] : 0;
  }

  diagram(layer, query, at) {
    const { flow } = layer;
    const token = short(layer.queries.tokens[query], 20);
    const heads = layer.heads;
    const shared = flow ? heads / flow.kv_heads : 1;
    const width = flow && flow.width;
    const input = at >= 0 ? layer.vector("input", at) : null;
    const result = at >= 0 ? layer.vector("result", at) : null;
    const adds = range(heads).map((head) => layer.adds(head, query));
    const most = Math.max(...adds.map((one) => (one ? one.norm : 0)), 1e-9);
    const rows = range(heads).map((head) => this.head(layer, head, query, at, adds[head], most, shared));
    const total = adds.reduce((sum, one) => sum + (one ? one.norm : 0), 0);
    // The norm of the sum: what each head adds, projected on it.
    const along = adds.reduce((sum, one) => sum + (one ? one.norm * one.cosine : 0), 0);
    const lost = total > 0 ? 100 * clamp(1 - along / total, 0, 1) : 0;
    const against = adds.filter((one) => one && one.cosine < 0).length;
    const groups = flow ? flow.kv_heads : "G";
    const d = flow ? flow.head_dim : "D";
    const e = flow ? flow.value_dim : "E";
    const every = layer.kind === "cross" ? "every token y of the other text" : "every token y";
    const sharing = shared > 1 ? `; ${shared} heads share each` : "";
    const opposed = against ? `${against} of ${heads} heads point against the sum.` : "No head points against the sum.";
    return element(
      "div",
      { class: "diagram" },
      this.stage("1", "Input", `x (${input ? input.length : width || "W"})`, [
        element("p", {}, "The token ", element("b", {}, isolated(token)), ` (number ${query}) as it enters the layer.`),
        this.vector(input, "x"),
      ]),
      this.arrow(
        `q = x W_q (${heads} × ${d}); k = y W_k (${groups} × ${d}) and v = y W_v (${groups} × ${e}) of ${every}${sharing}`,
      ),
      this.stage("2", "Heads", `${heads} heads: softmax(q kᵀ · scale) v`, [
        element(
          "div",
          { class: "rows", role: "table", "aria-label": "heads" },
          element(
            "div",
            { class: "row top", role: "row" },
            ["head", `q (${d})`, `weights (${layer.m})`, `output (${e})`, "adds, norm", "cosine with the sum"].map(
              (name) => element("span", { role: "columnheader" }, name),
            ),
          ),
          rows,
        ),
      ]),
      this.arrow(`concatenation (${heads} × ${e} = ${flow ? heads * e : "H·E"})`),
      this.stage("3", "Concatenation", flow ? `(${heads * e})` : "", [
        element("p", {}, "The heads' outputs, one after another."),
        at >= 0
          ? this.vector(joined(range(heads).map((head) => layer.vector("output", head, at))), "concatenation", heads)
          : null,
      ]),
      this.arrow(width ? `output projection W_o (${heads * e} → ${width})` : "output projection W_o (H·E → W)"),
      this.stage("4", "Result", width ? `(${width})` : "", [
        adds[0]
          ? element(
              "p",
              { id: "cancel" },
              `The heads' parts have norms that add up to ${number(total)}; their sum has the norm ${number(along)}: `,
              `${lost.toFixed(1)}% cancels or spreads out. ${opposed}`,
            )
          : element("p", {}, "The sum of what the heads add, and a bias."),
        this.vector(result, "result"),
      ]),
    );
  }

  // A strip, and the first of its numbers in digits.
  vector(values, name, parts = 1) {
    return values
      ? element("div", { class: "vector" }, this.strip(values, name, parts), element("code", {}, digits(values)))
      : null;
  }

  stage(sign, name, shape, content) {
    return element(
      "section",
      { class: "stage" },
      element("h3", {}, element("i", { class: "badge" }, sign), ` ${name} `, element("code", {}, shape)),
      ...content.filter(Boolean),
    );
  }

  arrow(text) {
    return element("p", { class: "arrow" }, element("span", { "aria-hidden": "true" }, "↓ "), text);
  }

  head(layer, head, query, at, adds, most, shared) {
    const { state } = this.app;
    const open = state.head === head;
    const role = layer.role(head);
    const strongest = layer.map ? layer.strongest(head, query, 3) : [];
    const looks = strongest
      .map(([key, weight]) => `${isolated(short(layer.keys.tokens[key], 10))} ${weight.toFixed(2)}`)
      .join(", ");
    const small = element("small", { class: "looks" }, looks);
    // (data-name is shown beside the content where there is no room for columns)
    const cell = (name, ...content) => element("span", { role: "cell", "data-name": name }, content);
    const cells = [
      cell(
        "",
        element(
          "button",
          {
            type: "button",
            id: `open-${head}`,
            "aria-expanded": String(open),
            "aria-label": `head ${head}${role ? `, ${role.role}` : ""}`,
            onclick: () => state.set({ head: open ? -1 : head }),
          },
          open ? "▾ " : "▸ ",
          String(head),
        ),
        badge(role && role.role),
      ),
      cell("q", at >= 0 ? this.strip(layer.vector("q", head, at), `q of head ${head}`) : "–"),
      cell("weights", layer.map ? this.weights(layer, head, query) : "–", small),
      cell("output", at >= 0 ? this.strip(layer.vector("output", head, at), `output of head ${head}`) : "–"),
      cell("adds", adds ? this.bar(adds.norm / most, number(adds.norm, 3)) : "–"),
      cell("cosine", adds ? this.signed(adds.cosine) : "–"),
    ];
    const row = element(
      "div",
      {
        class: "row",
        role: "row",
        "data-head": head,
        "data-norm": adds && adds.norm,
        "data-cosine": adds && adds.cosine,
      },
      cells,
    );
    return open && strongest.length ? [row, this.opened(layer, head, at, strongest, Math.floor(head / shared))] : [row];
  }

  // The strongest keys of a head: their k, their v, the weight.
  opened(layer, head, at, strongest, kv) {
    const lines = strongest.map(([key, weight]) => {
      const part = (name) => {
        const values = layer.vector(name, kv, key);
        return values
          ? element(
              "span",
              {},
              element("i", {}, name),
              this.vector(values, `${name} of ${short(layer.keys.tokens[key], 16)}`),
            )
          : null;
      };
      return element(
        "div",
        { class: "key" },
        element("b", {}, isolated(short(layer.keys.tokens[key], 16))),
        element("code", {}, `${number(weight)} × v`),
        part("k"),
        part("v"),
      );
    });
    const q = at >= 0 ? layer.vector("q", head, at) : null;
    const cell = element(
      "div",
      { role: "cell", "aria-colspan": 6 },
      q ? element("p", {}, element("code", {}, `q: ${digits(q)}`)) : null,
      lines,
    );
    return element("div", { class: "opened", role: "row" }, cell);
  }

  // A vector as a strip of colours; its numbers under the pointer.
  strip(values, name, parts = 1) {
    const top = largest(values.map(Math.abs));
    const canvas = painted(values, 1, values.length, top, { signed: true, scale: "linear" });
    const norm = normOf(values);
    canvas.className = "strip";
    canvas.setAttribute("role", "img");
    canvas.setAttribute(
      "aria-label",
      `${name}: ${values.length} numbers, norm ${number(norm, 3)}, from ${number(-top, 3)} to ${number(top, 3)}`,
    );
    canvas.addEventListener("pointermove", (event) => {
      const box = canvas.getBoundingClientRect();
      const i = clamp(Math.floor(((event.clientX - box.left) / box.width) * values.length), 0, values.length - 1);
      const part = parts > 1 ? `head ${Math.floor((i * parts) / values.length)}, ` : "";
      this.readout.textContent = `${name}[${i}] = ${number(values[i])} (${part}norm ${number(norm)})`;
    });
    return canvas;
  }

  weights(layer, head, query) {
    const [, rows, cols] = layer.map.shape;
    const i = Math.floor((query * rows) / layer.n);
    const values = Float32Array.from(range(cols), (j) => layer.cell(head, i, j).value);
    const canvas = painted(values, 1, cols, 1, { scale: this.app.state.scale });
    canvas.className = "strip weights";
    canvas.setAttribute("aria-hidden", "true");
    canvas.addEventListener("pointermove", (event) => {
      const box = canvas.getBoundingClientRect();
      const j = clamp(Math.floor(((event.clientX - box.left) / box.width) * cols), 0, cols - 1);
      const [first, last] = [Math.ceil((j * layer.m) / cols), Math.ceil(((j + 1) * layer.m) / cols)];
      const key = isolated(spoken(layer.keys, [first, last]));
      this.readout.textContent = `head ${head} → ${key}: ${number(values[j])}`;
    });
    return canvas;
  }

  bar(share, text) {
    const width = 90;
    return shape(
      "svg",
      { width: width + 46, height: 14, role: "img", "aria-label": text },
      shape("rect", { x: 0, y: 2, width: Math.max(1, width * share), height: 10, fill: "var(--line)" }),
      shape("text", { x: width * share + 4, y: 11, "font-size": 11, fill: "currentColor" }, text),
    );
  }

  signed(cosine) {
    const half = 45;
    const [x, width] = cosine < 0 ? [half + half * cosine, -half * cosine] : [half, half * cosine];
    const fill = cosine < 0 ? "var(--against)" : "var(--line)";
    return shape(
      "svg",
      { width: 2 * half + 40, height: 14, role: "img", "aria-label": number(cosine, 3) },
      shape("line", { x1: half, x2: half, y1: 0, y2: 14, stroke: "currentColor", "stroke-opacity": 0.5 }),
      shape("rect", { x, y: 2, width: Math.max(width, 0.5), height: 10, fill }),
      shape("text", { x: 2 * half + 4, y: 11, "font-size": 11, fill: "currentColor" }, cosine.toFixed(2)),
    );
  }
}

// The norm of a vector, and its first numbers.
function digits(values, count = 6) {
  const first = [...values.slice(0, count)].map((x) => number(x, 3)).join(", ");
  return `norm ${number(normOf(values), 3)} [${first}${values.length > count ? ", …" : ""}]`;
}

const normOf = (values) => Math.sqrt(values.reduce((sum, x) => sum + x * x, 0));

function joined(parts) {
  const whole = new Float32Array(parts.reduce((sum, part) => sum + part.length, 0));
  let at = 0;
  for (const part of parts) {
    whole.set(part, at);
    at += part.length;
  }
  return whole;
}
