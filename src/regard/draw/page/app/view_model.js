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

  show() {
    const {
      app,
      app: { state, run },
    } = this;
    const measures = run.measures;
    const counts = new Map();
    for (const { layer, head } of run.heads()) {
      const role = layer.role(head);
      counts.set(role ? role.role : "", (counts.get(role ? role.role : "") || 0) + 1);
    }
    const set = (name) => (value) => state.set({ [name]: value });
    const known = measures.includes(state.by) ? state.by : "";
    const values = known ? run.all(known) : [];
    const ends = [Math.min(...values), Math.max(...values)];
    const controls = element(
      "div",
      { class: "controls" },
      field(
        "Sort",
        select(
          [["layer", "by layer"], ["role", "by role"], ...measures.map((name) => [name, name])],
          this.sorting(),
          set("sort"),
          { id: "sort" },
        ),
      ),
      this.sorting() === "layer"
        ? null
        : check("descending", Boolean(state.down), (on) => state.set({ down: Number(on) }), { id: "down" }),
      field(
        "Role",
        select(
          [
            ["", "all"],
            ...run.roles.map((role) => [role, `${role} (${counts.get(role)})`]),
            ["-", `none (${counts.get("") || 0})`],
          ],
          state.role,
          set("role"),
          { id: "role" },
        ),
      ),
      field(
        "Where",
        select(
          [["", "any"], ...measures.map((name) => [name, name])],
          state.by,
          (value) => state.set({ by: value, least: "" }),
          { id: "by" },
        ),
      ),
      known
        ? select(
            [
              ["least", "is at least"],
              ["most", "is at most"],
            ],
            state.than,
            set("than"),
            { id: "than", "aria-label": "at least or at most" },
          )
        : null,
      known
        ? element("input", {
            type: "number",
            id: "least",
            step: "any",
            value: state.least,
            placeholder: number(ends[state.than === "most" ? 1 : 0], 3),
            "aria-label": `${known}, from ${number(ends[0], 3)} to ${number(ends[1], 3)}`,
            onchange: (event) => state.set({ least: event.target.value }),
          })
        : null,
      known ? element("small", {}, `${number(ends[0], 3)} to ${number(ends[1], 3)}`) : null,
    );
    const heads = this.chosen();
    const maps = run.layers.some((layer) => layer.map);
    const said = maps
      ? "A map: queries down, keys across. Choose one to look closer."
      : 'No maps were kept: watch(model, keep="qkv") keeps what they need. Roles and measures are here.';
    const status = element(
      "p",
      { class: "note", role: "status" },
      `${heads.length} of ${run.heads().length} heads. ${said}`,
    );
    const legend = element(
      "ul",
      { class: "roles", "aria-label": "roles" },
      run.roles.map((role) => element("li", {}, badge(role), role)),
    );
    this.watcher.disconnect();
    fill(
      this.node,
      controls,
      run.roles.length ? legend : null,
      status,
      this.sorting() === "layer" ? this.byLayer(heads) : this.inARow(heads),
    );
  }

  // By layer, by role, or by a measure that is there.
  sorting() {
    const { state, run } = this.app;
    return state.sort === "role" || run.measures.includes(state.sort) ? state.sort : "layer";
  }

  // The heads that the filters let through, in order.
  chosen() {
    const { state, run } = this.app;
    const bound = state.least === "" ? NaN : Number(state.least);
    const passes = (value) =>
      value !== undefined && (Number.isNaN(bound) || (state.than === "most" ? value <= bound : value >= bound));
    const heads = run.heads().filter(({ layer, head }) => {
      const role = layer.role(head);
      if (state.role && (role ? role.role : "-") !== state.role) return false;
      return !run.measures.includes(state.by) || passes(layer.measured(state.by, head));
    });
    const sort = this.sorting();
    if (sort === "layer") return heads;
    const key = ({ layer, head }) => (sort === "role" ? (layer.role(head) || {}).role : layer.measured(sort, head));
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

  // As many to a row as a layer has, if they can be seen at that size.
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
    const measure = [this.sorting(), state.by].find((name) => layer.measured(name, head) !== undefined);
    const value = measure ? number(layer.measured(measure, head), 3) : "";
    const said = measure ? value : role ? role.role : "";
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
        ...state.link({ view: "head", layer: layer.index, head, zoom: "", q: -1, k: -1 }),
        "aria-label": `${layer.label(head)}${measure ? `, ${measure} ${value}` : ""}`,
        title: this.app.about(layer, head),
      },
      canvas,
      element("span", { class: "what" }, badge(role && role.role), `${layer.index}.${head}`),
      element("span", { class: "said" }, said),
    );
    if (role) link.style.setProperty("--role", roleColour(role.role));
    Object.assign(link, { layer, head, canvas });
    if (canvas) this.watcher.observe(link);
    return link;
  }

  async paint(link) {
    const { layer, head, canvas } = link;
    link.painted = true;
    await layer.ready();
    const [, n, m] = layer.map.shape;
    const { values, rows, cols } = reduced(layer.matrix(head), n, m, THUMB);
    const image = painted(values, rows, cols, largest(values), { scale: this.app.state.scale });
    Object.assign(canvas, { width: cols, height: rows });
    canvas.getContext("2d").drawImage(image, 0, 0);
  }

  // Those that are out of sight, too.
  async complete() {
    const links = [...this.node.querySelectorAll("a.head")].filter((link) => link.canvas && !link.painted);
    await Promise.all(links.map((link) => this.paint(link)));
  }
}

function badge(role) {
  const node = element("i", { class: "badge", "aria-hidden": "true" }, role ? roleSign(role) : "");
  if (role) Object.assign(node.style, { background: roleColour(role), color: inkOn(roleColour(role)) });
  return node;
}
