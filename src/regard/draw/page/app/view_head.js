// Head: the map and the links of one head.

class HeadView {
  constructor(app) {
    this.app = app;
    this.node = element("section", { class: "view head", "aria-label": "Head" });
    const { state } = app;
    this.map = new MapView({
      name: "attention map",
      id: "map",
      onhover: (cell) => this.showReadout(cell),
      onpick: ({ tokens: [q, k] }) => state.set({ q, k }),
      ondrop: () => state.set({ q: -1, k: -1 }),
      onzoom: (zoom) => {
        state.set({ zoom: zoom ? zoom.join(",") : "" });
        this.later();
        this.app.live && this.app.live.zoomed(this);
      },
    });
    this.links = new LinksView({
      onpick: (unit) =>
        state.set(unit < 0 ? { q: -1, k: -1 } : { q: this.app.layer.pooled ? unit : this.map.picture.rows[unit][0] }),
    });
    this.over = new OverImage();
    this.readout = element("output", { class: "readout", id: "readout", "aria-live": "polite" });
  }

  async show() {
    const {
      app,
      app: { state },
    } = this;
    const layer = await app.layer.ready();
    const head = app.head;
    if (app.view !== this || app.layer !== layer) return;
    if (!layer.map) {
      fill(
        this.node,
        this.title(layer, head),
        element("p", { class: "note" }, 'Of this layer no map was kept: watch(model, keep="qk") keeps what it needs.'),
        this.details(layer, head, null),
      );
      return;
    }
    const words = layer.queries.piecesOfWords || layer.keys.piecesOfWords;
    const picture = Picture.of(layer, head, {
      words: Boolean(state.words) && words,
      specials: Boolean(state.specials),
      aside: Boolean(state.aside),
    });
    const overImage = OverImage.fits(layer);
    if (overImage) await this.over.show(layer, head, state.scale);
    if (app.view !== this || app.layer !== layer || app.head !== head) return;
    const controls = this.controls(layer, words);
    this.legend = legend(picture.top, state.scale, false, scaleNote(picture));
    const parts = element(
      "div",
      { class: "halves" },
      element(
        "div",
        {},
        element("div", { class: "line" }, this.readout, this.legend),
        this.map.node,
        layer.pooled ? this.pooled(layer, head, picture) : null,
        picture.aside ? this.without(layer, picture) : null,
      ),
      element("div", {}, overImage ? this.over.node : null, element("h3", {}, "Links"), this.links.node),
    );
    fill(
      this.node,
      this.title(layer, head),
      this.told(layer, head),
      controls,
      parts,
      this.details(layer, head, picture),
    );
    const zoom = state.zoom ? state.zoom.split(",").map(Number) : null;
    this.map.show(picture, { scale: state.scale, zoom, title: layer.label(head) });
    this.chosen();
    this.showLinks();
  }

  // What the story says of the head in this text, and a way to its numbers.
  told(layer, head) {
    const { run, state } = this.app;
    const card = run.story && run.story.cards.find((one) => one.layer === layer.index && one.head === head);
    if (!card && !layer.flow) return null;
    return element(
      "p",
      { class: "onward" },
      card ? element("span", {}, "In this text: ", sentenceParts(card.sentence)) : null,
      layer.flow ? element("a", state.link({ view: "flow", layer: layer.index, head }), "Follow its numbers") : null,
    );
  }

  controls(layer, words) {
    const { state } = this.app;
    const slider = (name, attributes, change) =>
      element("input", {
        type: "range",
        id: name,
        ...attributes,
        oninput: (event) => change(Number(event.target.value)),
      });
    const colours = [
      ["root", "root of weight"],
      ["linear", "weight"],
    ];
    this.filterText = element("span", {}, this.filters());
    return element(
      "div",
      { class: "controls" },
      field(
        "Threshold",
        slider("threshold", { min: 0, max: 0.5, step: 0.005, value: state.threshold }, (x) =>
          state.set({ threshold: x }),
        ),
      ),
      field(
        "Top",
        slider("most", { min: 1, max: 32, step: 1, value: state.top }, (x) => state.set({ top: x })),
      ),
      this.filterText,
      asideCheck(this.app, [layer]),
      specialsCheck(this.app, [layer]),
      words && !layer.pooled
        ? check("whole words", Boolean(state.words), (on) => state.set({ words: Number(on), zoom: "" }), {
            id: "words",
          })
        : null,
      field(
        "Colour",
        select(colours, state.scale, (value) => state.set({ scale: value }), { id: "scale" }),
      ),
    );
  }

  // Which keys were set aside, and what became of the others.
  without(layer, picture) {
    const keys = [...picture.aside.keys].sort((a, b) => a - b);
    const names = keys.slice(0, 12).map((key) => isolated(short(layer.keys.tokens[key], 20)));
    const more = keys.length > 12 ? ` and ${keys.length - 12} more` : "";
    return element(
      "p",
      { class: "note", id: "without" },
      `Set aside: ${names.join(", ")}${more}. Each query's other weights are divided by what is left of it.`,
    );
  }

  // Links are redrawn when the map has stopped moving: hundreds of elements in every frame would be slow.
  later() {
    clearTimeout(this.waiting);
    this.waiting = setTimeout(() => this.showLinks(), 60);
  }

  // Redraw only what changed, where that is enough.
  update(changed) {
    if (!this.map.picture || this.map.picture.layer !== this.app.layer) return false;
    if (changed.every((name) => name === "zoom" || name === "k")) return true;
    if (!changed.every((name) => ["threshold", "top", "q", "k"].includes(name))) return false;
    fill(this.filterText, this.filters());
    this.chosen();
    this.showLinks();
    return true;
  }

  filters() {
    const { state } = this.app;
    return element(
      "small",
      { id: "filters" },
      `at least ${number(state.threshold, 3)}, the ${state.top} strongest of each query`,
    );
  }

  title(layer, head) {
    const { app } = this;
    const role = layer.role(head);
    const go = (step, name, sign) =>
      element(
        "button",
        {
          type: "button",
          class: "step",
          id: step < 0 ? "previous" : "next",
          "aria-label": name,
          title: name,
          onclick: () => app.step(step),
        },
        sign,
      );
    const pick = (name, count, chosen) =>
      field(
        name,
        select(
          range(count).map((i) => [i, name === "Layer" ? `${i} · ${app.run.layers[i].name}` : i]),
          chosen,
          (value) => app.go(name === "Layer" ? Number(value) : layer.index, name === "Layer" ? head : Number(value)),
          { id: `pick-${name.toLowerCase()}` },
        ),
      );
    return element(
      "header",
      { class: "title" },
      element("span", { class: "steps" }, go(-1, "previous head ([)", "‹"), go(1, "next head (])", "›")),
      pick("Layer", app.run.layers.length, layer.index),
      pick("Head", layer.heads, head),
      element("h2", {}, badge(role && role.role), this.role(layer, head)),
      element("p", { class: "rests", id: "rests" }, restWords(layer, head)),
    );
  }

  // The role with its explanation, what it rests on, and other roles.
  role(layer, head) {
    const role = layer.role(head);
    if (!role && layer.kind === "cross") return "cross attention";
    if (!role) return explainedTerm("no role", NO_ROLE, "the-role");
    const also = role.also.flatMap((name, i) => [i ? ", " : "; also ", roleTerm(name, `also-${i}`)]);
    return [roleTerm(role.role, "the-role"), element("small", {}, ` ${role.words}`, also)];
  }

  pooled(layer, head, picture) {
    const [tall, wide] = [layer.n / picture.rows.length, layer.m / picture.cols.length];
    const cell = `${number(tall, 3)} queries by ${number(wide, 3)} keys`;
    return element(
      "p",
      { class: "note", id: "pooled" },
      `Pooled: a cell is ${cell}, and shows the share that a query of it gives to all its keys. `,
      "Zoom in until tokens come to sight: weights that were kept stand there by themselves, ",
      "coloured from 0 to the largest of them. All were kept where framed: ",
      this.crops(layer, head),
    );
  }

  crops(layer, head) {
    const { rows, cols } = { rows: layer.map.shape[1], cols: layer.map.shape[2] };
    const buttons = layer.crops
      .filter((crop) => crop.head === head)
      .map((crop) => {
        const [, tall, wide] = crop.shape;
        const zoom = [
          crop.row / layer.n,
          (crop.row + tall) / layer.n,
          crop.col / layer.m,
          (crop.col + wide) / layer.m,
        ].map((x, i) => x * (i < 2 ? rows : cols));
        return element(
          "button",
          { type: "button", class: "crop", id: `crop-${crop.row}-${crop.col}`, onclick: () => this.map.zoomTo(zoom) },
          `${crop.row}–${crop.row + tall - 1} → ${crop.col}–${crop.col + wide - 1}`,
        );
      });
    return element("span", {}, buttons.length ? buttons : "nowhere");
  }

  // The units of the chosen token, marked in the map.
  chosen() {
    const { state } = this.app;
    const { picture } = this.map;
    const unit = (groups, token) => groups.findIndex(([first, last]) => first <= token && token < last);
    const [i, j] = [unit(picture.rows, state.q), unit(picture.cols, state.k)];
    const { layer } = picture;
    // (in a pooled map the beginning of the token: its middle may lie in the next cell)
    const place = (at, token, count, cells) => (layer.pooled ? ((token + 1e-4) * cells) / count : at + 0.5);
    this.map.cursor =
      i >= 0 && j >= 0
        ? [place(i, state.q, layer.n, picture.rows.length), place(j, state.k, layer.m, picture.cols.length)]
        : null;
    this.map.drawMark();
    this.map.hover(this.map.cursor);
  }

  showLinks() {
    const { state } = this.app;
    const { picture } = this.map;
    const chosen = picture.layer.pooled
      ? state.q
      : picture.rows.findIndex(([first, last]) => first <= state.q && state.q < last);
    this.links.show(picture, { threshold: state.threshold, top: state.top, chosen, window: this.map.window });
  }

  showReadout(cell) {
    const { layer } = this.map.picture;
    const out = this.readout;
    if (this.over.layer === layer) this.over.mark(cell ? cell.query[0] : this.app.state.q);
    if (!cell) {
      fill(out, "Point at a cell.");
      out.classList.add("note");
      for (const name of ["value", "step", "query", "key"]) delete out.dataset[name];
      return;
    }
    out.classList.remove("note");
    const [q, k] = [spoken(layer.queries, cell.query), spoken(layer.keys, cell.key)];
    const hidden = this.app.run.causal && layer.kind === "self" && layer.n === layer.m && cell.key[0] >= cell.query[1];
    fill(
      out,
      element("b", {}, isolated(q)),
      " → ",
      element("b", {}, isolated(k)),
      ` ${number(cell.value)} `,
      element("small", {}, hidden ? "hidden by the mask" : `± ${number(cell.step, 2)}${cell.pooled ? ", pooled" : ""}`),
    );
    Object.assign(out.dataset, {
      value: cell.value,
      step: cell.step,
      query: cell.query.join("-"),
      key: cell.key.join("-"),
    });
  }

  // [query, key, weight] with labels: of a pooled map the links that were kept, else its cells.
  strongest(layer, head, picture) {
    const named = (text, i) => (text.tokens[i] === String(i) ? `${i}` : `${i} ${text.tokens[i]}`);
    if (layer.pooled && layer.links)
      return layer
        .strongestOfAll(head, 12)
        .map(([q, k, value]) => [named(layer.queries, q), named(layer.keys, k), value]);
    return picture.largest(12).map(([i, j, value]) => [picture.rows[i][2], picture.cols[j][2], value]);
  }

  // The measures of the head, and its strongest links as a table, also for screen readers.
  details(layer, head, picture) {
    const names = Object.keys(layer.measures);
    const own = names.map((name) => layer.measured(name, head) ?? NaN);
    const even = names.map((name) => (layer.baseline ? layer.baseline[name] : undefined));
    const shown = evenDigits([...own, ...even]);
    const measures = plainTable(
      "Measures",
      ["", "this head", "equal weights"],
      names.map((name, i) => [
        measureTerm(name, `measure-${i}`),
        shown(own[i]),
        even[i] === undefined ? "" : shown(even[i]),
      ]),
      { numbers: 2 },
    );
    const strongest = picture ? this.strongest(layer, head, picture) : [];
    const weight = evenDigits(strongest.map(([, , value]) => value));
    const links = plainTable(
      "Strongest links",
      ["query", "key", "weight"],
      strongest.map(([query, key, value]) => [isolated(short(query, 20)), isolated(short(key, 20)), weight(value)]),
      { numbers: 1, id: "strongest" },
    );
    return element(
      "div",
      { class: "details" },
      measures,
      layer.offsets ? this.profile(layer, head) : null,
      picture ? links : null,
      effectPanel(this.app, layer.index, head),
    );
  }

  // The attention by relative position, as bars.
  profile(layer, head) {
    const { before, mass } = layer.offsets;
    const own = mass[head];
    const [bar, height, above] = [16, 90, 16];
    const top = Math.max(largest(own), 1e-9);
    const sign = (i) => (i > before ? `+${i - before}` : i < before ? `−${before - i}` : "0");
    const words = { x: bar / 2, "text-anchor": "middle", "font-size": 10, fill: "currentColor" };
    const bars = own.map((x, i) =>
      shape(
        "g",
        { transform: `translate(${i * bar} ${above})` },
        shape(
          "rect",
          { x: 1, y: height - (x / top) * height, width: bar - 2, height: (x / top) * height, fill: "var(--line)" },
          shape("title", {}, `${sign(i)}: ${number(x, 3)}`),
        ),
        x === top ? shape("text", { ...words, y: -4 }, number(x, 2)) : null,
        (i - before) % 4 ? null : shape("text", { ...words, y: height + 13 }, sign(i)),
      ),
    );
    const rest = Math.max(0, 1 - own.reduce((a, b) => a + b, 0));
    const floor = shape("line", {
      x1: 0,
      x2: own.length * bar,
      y1: above + height + 0.5,
      y2: above + height + 0.5,
      stroke: "currentColor",
      "stroke-opacity": 0.4,
    });
    return element(
      "figure",
      {},
      element("figcaption", {}, "Mass by relative position"),
      shape(
        "svg",
        {
          class: "profile",
          width: own.length * bar,
          height: above + height + 18,
          role: "img",
          "aria-label": own.map((x, i) => `${sign(i)}: ${number(x, 2)}`).join(", "),
        },
        floor,
        bars,
      ),
      element("small", {}, `farther away: ${number(rest, 3)}`),
    );
  }
}
