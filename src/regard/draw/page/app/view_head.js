// Head: the map and the links of one head.

class HeadView {
  constructor(app) {
    this.app = app;
    this.node = element("section", { class: "view head", "aria-label": "Head" });
    const { state } = app;
    this.map = new MapView({
      name: "attention map",
      onhover: (found) => this.tell(found),
      onpick: (found) => state.set({ q: found.query[0], k: found.key[0] }),
      onzoom: (zoom) => {
        state.set({ zoom: zoom ? zoom.map((x) => Number(x.toFixed(3))).join(",") : "" });
        this.showLinks();
        this.app.live && this.app.live.zoomed(this);
      },
    });
    this.links = new LinksView({ onpick: (unit) => state.set({ q: this.app.layer.pooled ? unit : this.map.picture.rows[unit][0] }) });
    this.readout = element("output", { class: "readout", id: "readout", "aria-live": "polite" });
  }

  async show() {
    const { app, app: { state } } = this;
    const layer = await app.layer.ready();
    const head = app.head;
    if (app.view !== this || app.layer !== layer) return;
    if (!layer.map) {
      fill(this.node, this.title(layer, head), element("p", { class: "note" }, "Of this layer no map was kept: watch(model, keep=\"qk\") keeps what is needed."));
      return;
    }
    const slider = (name, attributes, change) => element("input", { type: "range", id: name, ...attributes, oninput: (event) => change(Number(event.target.value)) });
    const words = layer.queries.piecesOfWords || layer.keys.piecesOfWords;
    const special = layer.queries.special.size || layer.keys.special.size;
    this.said = element("span", {}, this.filters());
    const controls = element("div", { class: "controls" },
      field("Threshold", slider("threshold", { min: 0, max: 0.5, step: 0.005, value: state.threshold }, (x) => state.set({ threshold: x }))),
      field("Top", slider("top", { min: 1, max: 32, step: 1, value: state.top }, (x) => state.set({ top: x }))),
      this.said,
      special && !layer.pooled ? check("special tokens", Boolean(state.specials), (on) => state.set({ specials: Number(on), zoom: "" }), { id: "specials" }) : null,
      words && !layer.pooled ? check("whole words", Boolean(state.words), (on) => state.set({ words: Number(on), zoom: "" }), { id: "words" }) : null,
      field("Colour", select([["root", "root of weight"], ["linear", "weight"]], state.scale, (value) => state.set({ scale: value }), { id: "scale" })));
    const picture = Picture.of(layer, head, { words: Boolean(state.words) && words, specials: Boolean(state.specials) });
    this.legend = legend(picture.top, state.scale);
    const pooled = layer.pooled
      ? element("p", { class: "note" }, `Pooled: a cell is ${number(layer.n / picture.rows.length, 3)} queries by ${number(layer.m / picture.cols.length, 3)} keys, and shows the share that a query of it gives to all its keys. Exact where framed: `, this.crops(layer, head))
      : null;
    const parts = element("div", { class: "halves" },
      element("div", {}, element("div", { class: "line" }, this.readout, this.legend), this.map.node, pooled),
      element("div", {}, element("h3", {}, "Links"), this.links.node));
    fill(this.node, this.title(layer, head), controls, parts, this.details(layer, head, picture));
    const zoom = state.zoom ? state.zoom.split(",").map(Number) : null;
    this.map.show(picture, { scale: state.scale, zoom, title: layer.label(head) });
    this.tell(null);
    this.chosen();
    this.showLinks();
  }

  // Only what a slider changes.
  update(changed) {
    if (!this.map.picture) return false;
    if (changed.every((name) => name === "zoom" || name === "k")) return true;
    if (!changed.every((name) => ["threshold", "top", "q", "k"].includes(name))) return false;
    fill(this.said, this.filters());
    this.chosen();
    this.showLinks();
    return true;
  }

  filters() {
    const { state } = this.app;
    return element("small", { id: "filters" }, `at least ${number(state.threshold, 3)}, the ${state.top} strongest of each query`);
  }

  title(layer, head) {
    const { app } = this;
    const role = layer.role(head);
    const go = (step, name, sign) => element("button", { type: "button", class: "step", "aria-label": name, title: name, onclick: () => app.step(step) }, sign);
    const pick = (name, count, chosen) => field(name, select(range(count).map((i) => [i, name === "Layer" ? `${i} · ${app.run.layers[i].name}` : i]), chosen, (value) => app.go(name === "Layer" ? Number(value) : layer.index, name === "Layer" ? head : Number(value)), { id: `pick-${name.toLowerCase()}` }));
    return element("header", { class: "title" }, go(-1, "previous head ([)", "‹"), pick("Layer", app.run.layers.length, layer.index), pick("Head", layer.heads, head), go(1, "next head (])", "›"),
      element("h2", {}, badge(role && role.role), role ? ` ${role.role}` : "no role", role ? element("small", {}, ` ${number(role.score, 3)}; equal weights ${number(role.baseline, 3)}; least ${number(role.least, 3)}`) : null));
  }

  crops(layer, head) {
    const { rows, cols } = { rows: layer.map.shape[1], cols: layer.map.shape[2] };
    const buttons = layer.crops.filter((crop) => crop.head === head).map((crop) => {
      const [, tall, wide] = crop.shape;
      const zoom = [crop.row / layer.n, (crop.row + tall) / layer.n, crop.col / layer.m, (crop.col + wide) / layer.m].map((x, i) => x * (i < 2 ? rows : cols));
      return element("button", { type: "button", class: "crop", onclick: () => this.map.zoomTo(zoom) }, `${crop.row}–${crop.row + tall - 1} → ${crop.col}–${crop.col + wide - 1}`);
    });
    return element("span", {}, buttons.length ? buttons : "nowhere");
  }

  // The units of the chosen token, marked in the map.
  chosen() {
    const { state } = this.app;
    const { picture } = this.map;
    const unit = (groups, token) => groups.findIndex(([first, last]) => first <= token && token < last);
    const [i, j] = [unit(picture.rows, state.q), unit(picture.cols, state.k)];
    this.map.cursor = i >= 0 && j >= 0 ? [i, j] : null;
    this.map.drawMark();
    return i;
  }

  showLinks() {
    const { state } = this.app;
    const { picture } = this.map;
    const chosen = picture.layer.pooled ? state.q : picture.rows.findIndex(([first, last]) => first <= state.q && state.q < last);
    this.links.show(picture, { threshold: state.threshold, top: state.top, chosen, window: this.map.window });
  }

  tell(found) {
    const { layer } = this.map.picture;
    const out = this.readout;
    if (!found) {
      fill(out, "Point at a cell.");
      for (const name of ["value", "step", "query", "key"]) delete out.dataset[name];
      return;
    }
    const [q, k] = [spoken(layer.queries, found.query), spoken(layer.keys, found.key)];
    fill(out, element("b", {}, isolated(q)), " → ", element("b", {}, isolated(k)), ` ${number(found.value)} `, element("small", {}, `± ${number(found.step, 2)}${found.pooled ? ", pooled" : ""}`));
    Object.assign(out.dataset, { value: found.value, step: found.step, query: found.query.join("-"), key: found.key.join("-") });
  }

  // What is known of the head in numbers; the strongest links as a table, for those who do not see the map.
  details(layer, head, picture) {
    const rows = Object.entries(layer.measures).map(([name, values]) => {
      const even = layer.baseline && layer.baseline[name];
      return element("tr", {}, element("th", { scope: "row" }, name), element("td", {}, number(values[head])), element("td", {}, even === undefined ? "" : number(even)));
    });
    const measures = element("table", { class: "plain" }, element("caption", {}, "Measures"), element("thead", {}, element("tr", {}, element("th", { scope: "col" }, ""), element("th", { scope: "col" }, "this head"), element("th", { scope: "col" }, "equal weights"))), element("tbody", {}, rows));
    const strongest = picture.largest(12).map(([i, j, value]) => element("tr", {}, element("td", {}, isolated(short(picture.rows[i][2], 20))), element("td", {}, isolated(short(picture.cols[j][2], 20))), element("td", {}, number(value))));
    const links = element("table", { class: "plain", id: "strongest" }, element("caption", {}, "Strongest links"), element("thead", {}, element("tr", {}, ["query", "key", "weight"].map((name) => element("th", { scope: "col" }, name)))), element("tbody", {}, strongest));
    return element("div", { class: "details" }, measures, layer.offsets ? this.profile(layer, head) : null, links);
  }

  // The mass by relative position.
  profile(layer, head) {
    const { before, mass } = layer.offsets;
    const own = mass[head];
    const [bar, height] = [16, 90];
    const bars = own.map((x, i) => shape("g", {},
      shape("rect", { x: i * bar + 1, y: height - x * height, width: bar - 2, height: x * height, fill: "var(--line)" }, shape("title", {}, `${i - before}: ${number(x, 3)}`)),
      (i - before) % 4 ? null : shape("text", { x: i * bar + bar / 2, y: height + 13, "text-anchor": "middle", "font-size": 10, fill: "currentColor" }, i > before ? `+${i - before}` : `${i - before}`)));
    const rest = Math.max(0, 1 - own.reduce((a, b) => a + b, 0));
    return element("figure", {}, element("figcaption", {}, "Mass by relative position"),
      shape("svg", { width: own.length * bar, height: height + 18, role: "img", "aria-label": own.map((x, i) => `${i - before}: ${number(x, 2)}`).join(", ") }, shape("line", { x1: 0, x2: own.length * bar, y1: height + 0.5, y2: height + 0.5, stroke: "currentColor", "stroke-opacity": 0.4 }), bars),
      element("small", {}, `farther away: ${number(rest, 3)}`));
  }
}
