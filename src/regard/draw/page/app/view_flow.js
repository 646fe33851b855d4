// Flow: one token through one layer, with real shapes and numbers: one head step by step, what every head reads, and
// what they add up to.

class FlowView {
  constructor(app) {
    this.app = app;
    this.node = element("section", { class: "view flow", "aria-label": "Flow" });
    this.pointed = new Pointed();
  }

  async show() {
    const { app } = this;
    const layer = await app.layer.ready();
    if (app.view !== this || app.layer !== layer) return;
    const query = clamp(app.state.q < 0 ? this.usual(layer, app.head) : app.state.q, 0, layer.n - 1);
    const { flow } = layer;
    const at = flow && flow.output && query >= flow.first ? query - flow.first : -1;
    this.pointed.clear();
    fill(
      this.node,
      this.controls(layer, query),
      this.notes(layer, query, at).map((note) => element("p", { class: "note" }, note)),
      this.diagram(layer, query, at),
      this.pointed.node,
    );
  }

  controls(layer, query) {
    const { app } = this;
    const layers = app.run.layers.map((one) => [one.index, `${one.index} · ${one.name}`]);
    const heads = range(layer.heads).map((head) => {
      const role = layer.role(head);
      return [head, `${head}${role ? ` · ${role.role}` : ""}`];
    });
    const tokens = layer.queries.tokens.map((token, i) => [i, `${i} ${isolated(short(token, 20))}`]);
    const change = (field) => (value) => app.state.set({ [field]: Number(value) });
    return element(
      "div",
      { class: "controls" },
      field(
        "Layer",
        select(layers, layer.index, (value) => app.go(Number(value), app.head), { id: "flow-layer" }),
      ),
      field(
        "Head",
        select(heads, app.head, (value) => this.open(Number(value)), { id: "flow-head" }),
      ),
      field("Token", select(tokens, query, change("q"), { id: "flow-token" })),
    );
  }

  // What is missing, in words.
  notes(layer, query, at) {
    const { flow } = layer;
    const notes = [];
    if (!layer.map)
      notes.push(
        'Of this layer neither weights nor vectors were kept: watch(model, keep="qkv") keeps what they need. ' +
          "This is the way that its numbers went.",
      );
    else if (!flow) notes.push('Vectors were not kept: watch(model, keep="qkv") keeps them. Weights are shown.');
    else if (!flow.q) notes.push("Vectors of so long a text do not fit into one page; shapes and weights are here.");
    else if (!flow.output)
      notes.push("Of so long a text q and k fit into the page; values, outputs and results do not.");
    else if (at < 0)
      notes.push(`Vectors are here for tokens ${flow.first} to ${layer.n - 1}; of this one, its weights.`);
    if (flow && flow.width && query < (flow.added || 0))
      notes.push(`What each head adds is here for tokens ${flow.added} to ${layer.n - 1}.`);
    if (flow && !flow.width)
      notes.push("The output projection of this layer is not known by its name, so what each head adds is not known.");
    return notes;
  }

  // The query of the head's strongest link outside its resting place, among tokens whose vectors are here.
  usual(layer, head) {
    const { flow } = layer;
    const first = flow && flow.output ? flow.first : 0;
    const aside = layer.aside(head) || layer.keys.special;
    const words = range(layer.n).filter((i) => i >= first && !layer.queries.special.has(i));
    const query = this.strongestLink(layer, head, new Set(words), aside);
    if (query >= 0) return query;
    return words.length ? words[Math.floor(words.length / 2)] : first;
  }

  // The query of the strongest link of some queries to other keys than those set aside; -1 if there is none.
  strongestLink(layer, head, queries, aside) {
    let [best, most] = [-1, 0];
    const look = (query, key, weight) => {
      if (weight > most && queries.has(query) && !aside.has(key)) [best, most] = [query, weight];
    };
    if (layer.map && !layer.pooled)
      layer.matrix(head).forEach((weight, i) => look(Math.floor(i / layer.m), i % layer.m, weight));
    else if (layer.links) layer.strongestOfAll(head, 256).forEach((link) => look(...link));
    return best;
  }

  // Show the steps of a head; a second time, hide them.
  open(head) {
    const { app } = this;
    const opened = app.state.steps && app.head === head;
    app.state.set({ layer: app.layer.index, head, steps: opened ? 0 : 1 });
  }

  diagram(layer, query, at) {
    const sum = new FlowSum(this, layer, query, at);
    const residual = sum.residual();
    return element(
      "div",
      { class: "diagram" },
      this.input(layer, query, at),
      flowArrow(...this.projections(layer)),
      this.steps(layer, query),
      this.heads(layer, query, sum.adds),
      ...this.concatenation(layer, at),
      ...this.result(layer, sum),
      residual ? flowArrow(`input + result: ${dims(layer.n, layer.flow.width)}`) : null,
      residual ? flowStage("6", "What it adds to the residual stream", "x + result", residual) : null,
    );
  }

  input(layer, query, at) {
    const input = at >= 0 ? layer.vector("input", at) : null;
    const token = isolated(short(layer.queries.tokens[query], 20));
    const width = this.inputWidth(layer);
    return flowStage(
      "1",
      "Input",
      `x ${dims(layer.n, width)}`,
      element(
        "p",
        {},
        "The token ",
        element("b", {}, token),
        ` (number ${query}) as it enters the layer: one of ${layer.n} rows.`,
      ),
      vectorLine(this.pointed, input, "x"),
    );
  }

  inputWidth(layer) {
    const { flow } = layer;
    return (flow && ((flow.input && flow.input.shape[1]) || flow.width)) || "W";
  }

  // The letters of the sizes, or the sizes where they are known.
  sizes(layer) {
    const { flow, heads: h, n, m } = layer;
    return flow
      ? { h, n, m, g: flow.kv_heads, d: flow.head_dim, e: flow.value_dim, he: h * flow.value_dim, w: flow.width || "W" }
      : { h, n, m, g: "G", d: "D", e: "E", he: "H·E", w: "W" };
  }

  projections(layer) {
    const { h, n, m, g, d, e } = this.sizes(layer);
    const width = this.inputWidth(layer);
    const cross = layer.kind === "cross";
    const every = cross ? "every token y of the other text" : "every token y";
    const from = cross ? "y" : `y ${dims(m, width)}`;
    const shared = layer.flow ? h / g : 1;
    const scores = layer.flow && layer.flow.scores;
    return [
      `q = x W_q: ${dims(n, width)} → ${dims(h, n, d)}`,
      `k = y W_k of ${every}: ${from} → ${dims(g, m, d)}`,
      `v = y W_v of ${every}: ${from} → ${dims(g, m, e)}`,
      shared > 1 ? `${shared} heads share each k and v` : null,
      scores && scores.rotary ? "q and k are shown after their rotation by position (rotary)" : null,
    ].filter(Boolean);
  }

  // One head, step by step; without vectors, its strongest keys.
  steps(layer, query) {
    const { app } = this;
    const { n, m, d, e } = this.sizes(layer);
    const { head } = app;
    const open = Boolean(app.state.steps);
    const role = layer.role(head);
    const toggle = element(
      "button",
      { type: "button", id: "flow-toggle", "aria-expanded": String(open), onclick: () => this.open(head) },
      open ? "Hide the steps" : "Show the steps",
    );
    const about = element("p", {}, role ? `${role.role}: ${role.words}. ` : "", toggle);
    const missing = Scores.missing(layer, query);
    const content = () => {
      if (!missing) return new FlowSteps(this, layer, head, query).node;
      return element(
        "div",
        { class: "opened" },
        element("p", { class: "note" }, missing),
        this.strongest(layer, head, query),
      );
    };
    return flowStage(
      "2",
      `Head ${head}, step by step`,
      `softmax(q kᵀ · scale) v: ${dims(n, d)} · ${dims(d, m)} → ${dims(n, m)}; · ${dims(m, e)} → ${dims(n, e)}`,
      about,
      open ? content() : null,
    );
  }

  strongest(layer, head, query) {
    if (!layer.map) return null;
    const links = layer.strongest(head, query, 8);
    if (!links.length) return null;
    return element(
      "ul",
      { class: "strongest" },
      links.map(([key, weight]) =>
        element("li", {}, element("b", {}, isolated(short(layer.keys.tokens[key], 16))), ` ${number(weight)}`),
      ),
    );
  }

  heads(layer, query, adds) {
    const { h, m, d, e } = this.sizes(layer);
    const most = Math.max(...adds.map((one) => (one ? one.norm : 0)), 1e-9);
    const titles = ["head", `q (${d})`, `weights (${m})`, `output (${e})`, "adds, norm", "cosine with the sum"];
    return flowStage(
      "3",
      "Every head does the same",
      `${h} heads: softmax(q kᵀ · scale) v`,
      element(
        "div",
        { class: "rows", role: "table", "aria-label": "heads" },
        element(
          "div",
          { class: "row top", role: "row" },
          titles.map((name) => element("span", { role: "columnheader" }, name)),
        ),
        range(h).map((head) => this.head(layer, head, query, adds[head], most)),
      ),
    );
  }

  head(layer, head, query, adds, most) {
    const { app, pointed } = this;
    const open = Boolean(app.state.steps) && app.head === head;
    const role = layer.role(head);
    const looks = (layer.map ? layer.strongest(head, query, 3) : [])
      .map(([key, weight]) => `${isolated(short(layer.keys.tokens[key], 10))} ${weight.toFixed(2)}`)
      .join(", ");
    const button = element(
      "button",
      {
        type: "button",
        id: `open-${head}`,
        "aria-expanded": String(open),
        "aria-label": `head ${head}${role ? `, ${role.role}` : ""}`,
        onclick: () => this.open(head),
      },
      open ? "▾ " : "▸ ",
      String(head),
    );
    const vector = (name) => {
      const piece = layer.flow && layer.flow[name];
      const row = piece ? query - (layer.n - piece.shape[1]) : -1; // (of a long text the last tokens are here)
      return row >= 0 ? vectorStrip(pointed, layer.vector(name, head, row), `${name} of head ${head}`) : "–";
    };
    // (data-name is shown beside the content where there is no room for columns)
    const cell = (name, ...content) => element("span", { role: "cell", "data-name": name }, content);
    return element(
      "div",
      {
        class: app.head === head ? "row of-chosen" : "row",
        role: "row",
        "data-head": head,
        "data-norm": adds && adds.norm,
        "data-cosine": adds && adds.cosine,
      },
      cell("", button, badge(role && role.role)),
      cell("q", vector("q")),
      cell(
        "weights",
        layer.map ? weightStrip(pointed, layer, head, query, app.state.scale) : "–",
        element("small", { class: "looks" }, looks),
      ),
      cell("output", vector("output")),
      cell("adds", adds ? shareBar(adds.norm / most, number(adds.norm, 3)) : "–"),
      cell("cosine", adds ? signedBar(adds.cosine, adds.cosine.toFixed(2)) : "–"),
    );
  }

  concatenation(layer, at) {
    const { h, n, e, he } = this.sizes(layer);
    const gated = layer.flow && layer.flow.gated;
    const values = at >= 0 ? joined(range(h).map((head) => layer.vector("output", head, at))) : null;
    return [
      flowArrow(`concatenation: ${dims(h, n, e)} → ${dims(n, he)}`),
      flowStage(
        "4",
        "Concatenation",
        dims(n, he),
        element("p", {}, "The heads' outputs, one after another."),
        vectorLine(this.pointed, values, "concatenation", h),
        gated ? element("p", { class: "note" }, "A gate or a norm changes them before the output projection.") : null,
      ),
    ];
  }

  result(layer, sum) {
    const { n, he, w } = this.sizes(layer);
    const bias = layer.flow && layer.flow.bias ? ` + bias ${dims(w)}` : "";
    return [
      flowArrow(`output projection W_o: ${dims(n, he)} · ${dims(he, w)}${bias} → ${dims(n, w)}`),
      flowStage("5", "Result", dims(n, w), sum.node),
    ];
  }
}
