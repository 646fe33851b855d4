// Model: all heads as small maps, by layer or sorted by any measure; filtered by role and measure.

const THUMB = 64; // cells to a side, at most

class ModelView {
  constructor(app) {
    this.app = app;
    this.node = element("section", { class: "view model", "aria-label": "Model" });
    this.watcher = new IntersectionObserver(
      (entries) => {
        for (const entry of entries)
          if (entry.isIntersecting) {
            this.watcher.unobserve(entry.target);
            this.paint(entry.target);
          }
      },
      { rootMargin: "300px" },
    );
  }

  async show() {
    const { run } = this.app;
    const turn = (this.turn = {}); // (data may arrive after those of a later choice)
    if (this.usesChange()) await this.compareRuns();
    if (this.app.view !== this || this.turn !== turn) return;
    const heads = this.chosen();
    this.watcher.disconnect();
    fill(
      this.node,
      this.controls(),
      run.roles.length ? this.legend() : null,
      element("p", { class: "note", role: "status" }, `${heads.length} of ${run.heads().length} heads. ${this.hint()}`),
      this.sorting() === "layer" ? this.byLayer(heads) : this.inARow(heads),
    );
  }

  hint() {
    if (!this.app.run.layers.some((layer) => layer.map))
      return 'No maps were kept: watch(model, keep="qkv") keeps what they need. Roles and measures are here.';
    const rests = this.app.run.layers.some((layer) => layer.rest);
    const bar = "The bar below a map is the share of the weight on the resting place. ";
    return `A map: queries down, keys across. ${rests ? bar : ""}Choose one to look closer.`;
  }

  legend() {
    return element(
      "ul",
      { class: "roles", "aria-label": "roles: what heads do beside their resting place" },
      this.app.run.roles.map((role, i) => element("li", {}, badge(role), roleTerm(role, `role-${i}`))),
    );
  }

  controls() {
    const { state, run } = this.app;
    const set = (name) => (value) => state.set({ [name]: value });
    const names = this.names();
    return element(
      "div",
      { class: "controls" },
      field(
        "Sort",
        select([["layer", "by layer"], ["role", "by role"], ...names], this.sorting(), set("sort"), { id: "sort" }),
      ),
      this.sorting() === "layer"
        ? null
        : check("descending", Boolean(state.down), (on) => state.set({ down: Number(on) }), { id: "down" }),
      field("Role", select(this.roleChoices(), state.role, set("role"), { id: "role" })),
      field(
        "Where",
        select([["", "any"], ...names], state.by, (value) => state.set({ by: value, least: "" }), { id: "by" }),
      ),
      this.bound(),
      this.versusChoice(),
      asideCheck(this.app, run.layers),
      specialsCheck(this.app, run.layers),
    );
  }

  // What heads can be sorted and filtered by, as [value, text].
  names() {
    const measures = this.app.run.measures.map((name) => [name, name]);
    return this.changes ? [...measures, ["change", "change between runs"]] : measures;
  }

  roleChoices() {
    const { run } = this.app;
    const counts = new Map();
    for (const { layer, head } of run.heads()) {
      const role = layer.role(head);
      counts.set(role ? role.role : "", (counts.get(role ? role.role : "") || 0) + 1);
    }
    return [
      ["", "all"],
      ...run.roles.map((role) => [role, `${role} (${counts.get(role)})`]),
      ["-", `none (${counts.get("") || 0})`],
    ];
  }

  // How large or small the measure of the filter has to be.
  bound() {
    const { state, run } = this.app;
    if (!this.names().some(([name]) => name === state.by)) return null;
    const values = run.heads().flatMap(({ layer, head }) => this.measured(state.by, layer, head) ?? []);
    const [low, high] = [Math.min(...values), Math.max(...values)];
    return [
      select(
        [
          ["least", "is at least"],
          ["most", "is at most"],
        ],
        state.than,
        (value) => state.set({ than: value }),
        { id: "than", "aria-label": "at least or at most" },
      ),
      element("input", {
        type: "number",
        id: "least",
        step: "any",
        value: state.least,
        placeholder: number(state.than === "most" ? high : low, 3),
        "aria-label": `${state.by}, from ${number(low, 3)} to ${number(high, 3)}`,
        onchange: (event) => state.set({ least: event.target.value }),
      }),
      element("small", {}, `${number(low, 3)} to ${number(high, 3)}`),
    ];
  }

  // With three runs and more: which of them to compare with.
  versusChoice() {
    const { data, run, state } = this.app;
    if (!this.usesChange() || data.runs.length < 3) return null;
    const others = data.runs.filter((one) => one !== run).map((one) => [one.number, short(one.name, 40)]);
    return field(
      "Change from",
      select(others, this.other().number, (value) => state.set({ versus: Number(value) }), { id: "versus" }),
    );
  }

  // Whether the page has several runs, so that heads can be compared between them.
  get changes() {
    const { data, run } = this.app;
    return data.runs.length > 1 && !run.measures.includes("change");
  }

  usesChange() {
    const { state } = this.app;
    return this.changes && [state.sort, state.by].includes("change");
  }

  // The run to compare with: the one that was chosen, else the first other one.
  other() {
    const { data, run, state } = this.app;
    const wanted = data.runs[state.versus];
    return wanted && wanted !== run ? wanted : data.runs[run.number ? 0 : 1];
  }

  // How much each head changes between the two runs; kept until other runs are chosen.
  async compareRuns() {
    const [run, other] = [this.app.run, this.other()];
    if (this.compared && this.compared.run === run && this.compared.other === other) return;
    await Promise.all([...run.layers, ...other.layers].map((layer) => layer.ready()));
    const values = run.layers.map((layer) => {
      const twin = other.layers[layer.index];
      return range(layer.heads).map((head) => movedWeight(layer, twin, head));
    });
    this.compared = { run, other, values };
  }

  // A measure of a head, or how much it changes between runs; undefined if it is not known.
  measured(name, layer, head) {
    if (name !== "change" || !this.changes) return layer.measured(name, head);
    return this.compared && this.compared.run === this.app.run ? this.compared.values[layer.index][head] : undefined;
  }

  // What heads are sorted by: the layer, the role, or a measure that exists.
  sorting() {
    const { state } = this.app;
    return state.sort === "role" || this.names().some(([name]) => name === state.sort) ? state.sort : "layer";
  }

  // The heads that pass the filters, in order.
  chosen() {
    const { state, run } = this.app;
    const bound = state.least === "" ? NaN : Number(state.least);
    const passes = (value) =>
      value !== undefined && (Number.isNaN(bound) || (state.than === "most" ? value <= bound : value >= bound));
    const filters = this.names().some(([name]) => name === state.by);
    const heads = run.heads().filter(({ layer, head }) => {
      const role = layer.role(head);
      if (state.role && (role ? role.role : "-") !== state.role) return false;
      return !filters || passes(this.measured(state.by, layer, head));
    });
    const sort = this.sorting();
    if (sort === "layer") return heads;
    const key = ({ layer, head }) =>
      sort === "role" ? (layer.role(head) || {}).role : this.measured(sort, layer, head);
    const sign = state.down ? -1 : 1;
    return heads.sort((a, b) => {
      const [x, y] = [key(a), key(b)];
      if (x === undefined || y === undefined) return (x === undefined) - (y === undefined);
      return x < y ? -sign : x > y ? sign : 0;
    });
  }

  byLayer(heads) {
    const rows = this.app.run.layers.map((layer) => {
      const own = heads.filter((one) => one.layer === layer);
      if (!own.length) return null;
      const kind = layer.kind === "cross" ? " · cross" : "";
      return element(
        "div",
        { class: "layer" },
        element("h3", { title: layer.name }, `${layer.index}${kind}`, element("small", {}, layer.name)),
        this.grid(own, layer.heads),
      );
    });
    return element("div", { class: "layers" }, rows);
  }

  inARow(heads) {
    return this.grid(heads, Math.max(...this.app.run.layers.map((layer) => layer.heads)));
  }

  // As many maps in a row as a layer has heads, unless they would be too small.
  grid(heads, wide) {
    const node = element(
      "div",
      { class: "heads" },
      heads.map((one) => this.thumb(one)),
    );
    node.style.setProperty("--heads", wide);
    return node;
  }

  thumb({ layer, head }) {
    const { state } = this.app;
    const role = layer.role(head);
    const measure = [this.sorting(), state.by].find((name) => this.measured(name, layer, head) !== undefined);
    const value = measure ? number(this.measured(measure, layer, head), 3) : "";
    const rests = layer.rests(head);
    const resting = rests === undefined ? "" : `, rests ${rests.toFixed(2)}`;
    const canvas = layer.map
      ? element("canvas", { class: "thumb", width: THUMB, height: THUMB, "aria-hidden": "true" })
      : null;
    const link = element(
      "a",
      {
        class: "head",
        id: `head-${layer.index}.${head}`,
        "data-layer": layer.index,
        "data-head": head,
        "data-change": measure === "change" ? this.measured(measure, layer, head) : null,
        ...state.link({ view: "head", layer: layer.index, head, zoom: "", q: -1, k: -1 }),
        "aria-label": `${layer.label(head)}${resting}${measure ? `, ${measure} ${value}` : ""}`,
        title: [this.app.about(layer, head), restWords(layer, head)].filter(Boolean).join("\n"),
      },
      canvas,
      restBar(layer, head),
      element("span", { class: "what" }, badge(role && role.role), `${layer.index}.${head}`),
      element("span", { class: "caption" }, measure ? value : role ? role.role : ""),
    );
    if (role) link.style.setProperty("--role", roleColour(role.role));
    Object.assign(link, { layer, head, canvas });
    if (canvas) this.watcher.observe(link);
    return link;
  }

  async paint(link) {
    const { layer, head, canvas } = link;
    const { scale, aside, specials } = this.app.state;
    link.painted = true;
    await layer.ready();
    const picture = Picture.of(layer, head, { aside: Boolean(aside), specials: Boolean(specials) });
    const { values, rows, cols } = reduced(picture.values, picture.rows.length, picture.cols.length, THUMB);
    const image = painted(values, rows, cols, colourTop(values, cols), { scale });
    Object.assign(canvas, { width: cols, height: rows });
    canvas.getContext("2d").drawImage(image, 0, 0);
  }

  // Also those that are out of sight.
  async complete() {
    const links = [...this.node.querySelectorAll("a.head")].filter((link) => link.canvas && !link.painted);
    await Promise.all(links.map((link) => this.paint(link)));
  }
}

// How much of the weight of a query lies on other keys in another layer's map of the same size, on average: half the sum
// of differences (the total variation distance). Undefined where it cannot be told.
function movedWeight(layer, twin, head) {
  if (!layer.map || !twin || !twin.map || String(layer.map.shape) !== String(twin.map.shape)) return undefined;
  const [a, b] = [layer.matrix(head), twin.matrix(head)];
  let total = 0;
  for (let i = 0; i < a.length; i++) total += Math.abs(a[i] - b[i]);
  const moved = total / 2 / Math.max(layer.map.shape[1], 1);
  return Number.isFinite(moved) ? moved : undefined;
}

// A thin bar: the share of the weight on the resting place.
function restBar(layer, head) {
  const share = layer.rests(head);
  if (share === undefined) return null;
  const filled = element("i", { class: "share" });
  filled.style.width = `${100 * share}%`;
  return element("span", { class: "rest", "data-rest": share, "aria-hidden": "true" }, filled);
}

const RESTING_PLACES = {
  first: "mostly the first token",
  separator: "mostly special tokens",
  sink: "mostly another token",
};

// How much of a head's weight is on its resting place, and how much of its output comes from there; "" if that is unknown.
function restWords(layer, head) {
  const [share, place] = [layer.rests(head), layer.rest && layer.rest.place[head]];
  if (share === undefined) return "";
  const output = layer.rest.output[head] ?? null;
  const adds = output === null ? "" : `, and makes ${output.toFixed(2)} of its output`;
  const where = place ? `, ${RESTING_PLACES[place] || place},` : "";
  return `Its resting place${where} takes ${share.toFixed(2)} of its weight${adds}.`;
}

// Switches that several views have; null where they would change nothing.
function asideCheck({ state }, layers) {
  const rests = (layer) => layer.map && !layer.pooled && layer.rest && layer.rest.keys;
  if (!layers.some(rests)) return null;
  const change = (on) => state.set({ aside: Number(on) });
  return check("set the resting place aside", Boolean(state.aside), change, { id: "aside" });
}

function specialsCheck({ state }, layers) {
  const special = (layer) => layer.map && !layer.pooled && (layer.queries.special.size || layer.keys.special.size);
  if (!layers.some(special)) return null;
  const change = (on) => state.set({ specials: Number(on), zoom: "" });
  return check("special tokens", Boolean(state.specials), change, { id: "specials" });
}

function badge(role) {
  const node = element("i", { class: "badge", "aria-hidden": "true" }, role ? roleSign(role) : "");
  if (role) Object.assign(node.style, { background: roleColour(role), color: inkOn(roleColour(role)) });
  return node;
}
