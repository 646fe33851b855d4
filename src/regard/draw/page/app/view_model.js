// Model: all heads as small maps, by layer or sorted by any measure; filtered by role and measure.

class ModelView {
  constructor(app) {
    this.app = app;
    this.node = element("section", { class: "view model", "aria-label": "Model" });
    this.watcher = new IntersectionObserver((entries) => {
      for (const entry of entries) if (entry.isIntersecting) {
        this.watcher.unobserve(entry.target);
        this.paint(entry.target);
      }
    }, { rootMargin: "300px" });
  }

  show() {
    const { app, app: { state, run } } = this;
    const measures = run.measures;
    const counts = new Map();
    for (const { layer, head } of run.heads()) {
      const role = layer.role(head);
      counts.set(role ? role.role : "", (counts.get(role ? role.role : "") || 0) + 1);
    }
    const set = (name) => (value) => state.set({ [name]: value });
    const known = measures.includes(state.by) ? state.by : "";
    const least = known ? run.layers.flatMap((layer) => layer.measures[known] || []) : [];
    const controls = element("div", { class: "controls" },
      field("Sort", select([["layer", "by layer"], ["role", "by role"], ...measures.map((name) => [name, name])], state.sort, set("sort"), { id: "sort" })),
      state.sort === "layer" ? null : check("descending", Boolean(state.down), (on) => state.set({ down: Number(on) })),
      field("Role", select([["", "all"], ...run.roles.map((role) => [role, `${role} (${counts.get(role)})`]), ["-", `none (${counts.get("") || 0})`]], state.role, set("role"), { id: "role" })),
      field("Where", select([["", "any"], ...measures.map((name) => [name, name])], state.by, (value) => state.set({ by: value, least: "" }), { id: "by" })),
      known ? field("is at least", element("input", {
        type: "number", id: "least", step: "any", value: state.least, placeholder: number(Math.min(...least)),
        min: Math.min(...least), max: Math.max(...least), onchange: (event) => state.set({ least: event.target.value }),
      })) : null);
    const heads = this.chosen();
    this.status = element("p", { class: "note", role: "status" }, `${heads.length} of ${run.heads().length} heads. A map: queries down, keys across. Choose one to look closer.`);
    const legend = element("ul", { class: "roles" }, run.roles.map((role) => element("li", {}, badge(role), `${role}`)));
    fill(this.node, controls, legend, this.status, state.sort === "layer" ? this.byLayer(heads) : this.inARow(heads));
  }

  // The heads that the filters let through, in order.
  chosen() {
    const { state, run } = this.app;
    const least = state.least === "" ? -Infinity : Number(state.least);
    const heads = run.heads().filter(({ layer, head }) => {
      const role = layer.role(head);
      if (state.role && (role ? role.role : "-") !== state.role) return false;
      return !(state.by && run.measures.includes(state.by)) || (layer.measures[state.by] && layer.measures[state.by][head] >= least);
    });
    if (state.sort === "layer") return heads;
    const key = ({ layer, head }) => (state.sort === "role" ? (layer.role(head) || { role: "~" }).role : (layer.measures[state.sort] || [])[head]);
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
      return element("div", { class: "layer" }, element("h3", { title: layer.name }, `${layer.index}${kind}`, element("small", {}, layer.name)),
        element("div", { class: "heads" }, own.map((one) => this.thumb(one))));
    });
    return element("div", { class: "layers" }, rows);
  }

  inARow(heads) {
    return element("div", { class: "heads" }, heads.map((one) => this.thumb(one)));
  }

  thumb({ layer, head }) {
    const { state } = this.app;
    const role = layer.role(head);
    const measure = state.sort in layer.measures ? state.sort : state.by in layer.measures ? state.by : "";
    const said = measure ? `${measure} ${number(layer.measures[measure][head], 3)}` : role ? role.role : "";
    const canvas = element("canvas", { class: "thumb", width: 64, height: 64, "aria-hidden": "true" });
    const link = element("a", {
      class: "head", href: state.address({ view: "head", layer: layer.index, head, zoom: "", q: -1, k: -1 }), "data-layer": layer.index, "data-head": head,
      "aria-label": `${layer.label(head)}${role ? `, ${role.role}` : ""}${measure ? `, ${said}` : ""}`, title: this.app.about(layer, head),
    }, canvas, element("span", { class: "what" }, badge(role && role.role), `${layer.index}.${head}`), element("span", { class: "said" }, said));
    if (role) link.style.setProperty("--role", roleColour(role.role));
    Object.assign(link, { layer, head, canvas });
    this.watcher.observe(link);
    return link;
  }

  async paint({ layer, head, canvas }) {
    await layer.ready();
    if (!layer.map) return;
    const [, rows, cols] = layer.map.shape;
    const values = layer.matrix(head);
    const image = painted(values, rows, cols, largest(values), { scale: this.app.state.scale });
    const context = canvas.getContext("2d");
    context.imageSmoothingEnabled = rows > 64 || cols > 64;
    context.imageSmoothingQuality = "high";
    context.drawImage(image, 0, 0, 64, 64);
  }
}

function badge(role) {
  const node = element("i", { class: "badge", "aria-hidden": "true" }, role ? roleSign(role) : "");
  if (role) node.style.background = roleColour(role);
  return node;
}
